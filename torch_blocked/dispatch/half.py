"""Half precision by the float32 kernels: arguments widened, what is answered rounded once, as PyTorch's kernels do."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.fallback import written_arguments
from torch_blocked.dispatch.registry import Handler
from torch_blocked.physical import same_size
from torch_blocked.tensor import BlockedTensor

HALF = (torch.bfloat16, torch.float16)


def in_float32(*, mixed: bool = False) -> Callable[[Handler], Handler]:
    """Makes a handler of float32 tensors one of half precision ones too.

    The first argument is in one of `HALF`, and so are all other tensors of floats; or, where `mixed`, those of other
    shapes than the first (weight, bias, statistics) are all float32. The first answer is as the first argument, the
    others as the tensors of other shapes. Of any other mixture the handler is called as it is.
    """

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        def widened(func: OpOverload, *args: object, **kwargs: object) -> object:
            half = args[0].dtype
            if half not in HALF:
                return handler(func, *args, **kwargs)
            floats = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            others = _dtype_of_others(floats, mixed)
            if others is None:
                return handler(func, *args, **kwargs)
            wide = {id(x): convert(x, torch.float32) for x in floats}
            answer = handler(
                func, *(wide.get(id(x), x) for x in args), **{name: wide.get(id(x), x) for name, x in kwargs.items()}
            )
            for x in written_arguments(func, args, kwargs):
                if x is not None and x.dtype is half:
                    x.copy_(wide[id(x)])
            if not isinstance(answer, tuple):
                return convert(answer, half)
            return tuple(convert(a, others if i else half) for i, a in enumerate(answer))

        return widened

    return decorate


def _dtype_of_others(floats: list[Tensor], mixed: bool) -> torch.dtype | None:
    """Of those that are not as the first one; None where PyTorch refuses the mixture."""
    half, shape = floats[0].dtype, floats[0].shape
    if all(x.dtype is half for x in floats):
        return half
    fits = mixed and all(x.dtype is (half if same_size(x.shape, shape) else torch.float32) for x in floats)
    return torch.float32 if fits else None


def convert(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor of floats in `dtype`, below autograd; others pass."""
    if x is None or x.dtype is dtype or not x.is_floating_point():
        return x
    if isinstance(x, BlockedTensor):
        return BlockedTensor(x._physical.to(dtype), x._blocking, x.shape)
    return x.to(dtype)
