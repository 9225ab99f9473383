"""Operators that make, copy or convert tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import _python, reorder
from torch_blocked.dispatch.fallback import assign, bump_version, fallback, run_plain
from torch_blocked.dispatch.physical import broadcasts_to, clear_padding, operand
from torch_blocked.dispatch.registry import register
from torch_blocked.formats import plain_format
from torch_blocked.physical import same_size
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _wants_plain(memory_format: torch.memory_format | None) -> bool:
    return memory_format not in (None, torch.preserve_format)


@register(aten.detach.default, aten.alias.default)
def view_of_all(func: OpOverload, x: BlockedTensor) -> BlockedTensor:
    """The same bytes under a new tensor."""
    physical = x._physical
    copied = type(physical) is Tensor and _python.is_taken_from_another(physical)
    return BlockedTensor(physical.clone() if copied else func(physical), x._blocking, x.shape)


@register(aten.clone.default)
def clone(func: OpOverload, x: BlockedTensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """A copy; an explicit memory format makes it plain, with those strides."""
    if _wants_plain(memory_format):
        return reorder.to_plain(x, plain_format(x.dim(), memory_format).order)
    return BlockedTensor(func(x._physical), x._blocking, x.shape)


@register(aten._to_copy.default)
def to_copy(
    func: OpOverload, x: BlockedTensor, *, memory_format: torch.memory_format | None = None, **kwargs: object
) -> Tensor:
    """`.to(dtype)`, `.to(device)`; an explicit memory format makes the copy plain, with those strides."""
    if _wants_plain(memory_format):
        plain = reorder.to_plain(x, plain_format(x.dim(), memory_format).order)
        unchanged = all(v is None or v is False or v == getattr(x, k, None) for k, v in kwargs.items())
        return plain if unchanged else func(plain, **kwargs)
    return BlockedTensor(func(x._physical, **kwargs), x._blocking, x.shape)


@register(aten.copy_.default)
def copy_(func: OpOverload, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Writes into `dst`, which keeps its format; `src` plain or blocked, of any dtype, broadcast."""
    if not isinstance(dst, BlockedTensor):
        return func(dst, reorder.to_plain(src), non_blocking)
    if not broadcasts_to(src.shape, dst.shape):
        return fallback(func, dst, src, non_blocking)
    if same_size(src.shape, dst.shape):
        func(dst._physical, reorder.to_blocking(src, dst._blocking), non_blocking)
    else:
        func(dst._physical, operand(src, dst._blocking, dst.shape), non_blocking)
        clear_padding(dst._physical, dst._blocking, dst.shape)
    bump_version(dst)
    return dst


@register(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def filled_like(
    func: OpOverload,
    x: BlockedTensor,
    *args: object,
    memory_format: torch.memory_format | None = None,
    **kwargs: object,
) -> Tensor:
    """A tensor of one value (or none) in the format of `x`, its padding zero."""
    if _wants_plain(memory_format) or kwargs.get("layout") not in (None, torch.strided):
        plain = torch.empty(x.shape, dtype=x.dtype, device="meta")
        kwargs = {**kwargs, "device": kwargs.get("device") or x.device, "memory_format": memory_format}
        return func(plain, *args, **kwargs)
    physical = func(x._physical, *args, **kwargs)
    return BlockedTensor(clear_padding(physical, x._blocking, x.shape), x._blocking, x.shape)


@register(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
def random_like(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor:
    """Random numbers in the format of `x`, the ones a plain tensor would get."""
    plain = func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)
    if _wants_plain(kwargs.get("memory_format")) or plain.layout != torch.strided:
        return plain
    return reorder.copy_to_format(plain, x.format)


@register(aten.native_dropout.default)
def native_dropout(func: OpOverload, x: BlockedTensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout and its mask, the ones a plain tensor would get."""
    factor, mask = func(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, train)
    y = x._physical * reorder.to_blocking(factor, x._blocking)
    mask = reorder.to_blocking(mask, x._blocking)
    return BlockedTensor(y, x._blocking, x.shape), BlockedTensor(mask, x._blocking, x.shape)


@register(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def new_plain(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor:
    """`x.new_...(size)`: another size, so nothing of the format carries over; plain."""
    return func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)


@register(aten.new_empty_strided.default)
def new_empty_strided(
    func: OpOverload, x: BlockedTensor, size: Sequence[int], stride: Sequence[int], **kwargs: object
) -> Tensor:
    """Plain, with those strides; of the autograd engine, which copies x to it for a leaf's gradient, x's format."""
    node = torch._C._current_autograd_node()
    is_gradient = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if is_gradient and device in (None, x.device) and (x.shape, x.stride()) == (torch.Size(size), tuple(stride)):
        return BlockedTensor(torch.empty_like(x._physical, dtype=dtype), x._blocking, x.shape)
    return new_plain(func, x, size, stride, **kwargs)


@register(aten.zero_.default)
def zero_(func: OpOverload, x: BlockedTensor) -> BlockedTensor:
    """All zeros, in place."""
    func(x._physical)
    bump_version(x)
    return x


@register(aten.fill_.Scalar, aten.fill_.Tensor)
def fill_(func: OpOverload, x: Tensor, value: object) -> Tensor:
    """One value, in place; the padding stays zero."""
    if not isinstance(x, BlockedTensor):
        return func(x, reorder.to_plain(value))
    func(x._physical, reorder.to_plain(value))
    clear_padding(x._physical, x._blocking, x.shape)
    bump_version(x)
    return x


@register(aten.set_.source_Tensor)
def set_(func: OpOverload, x: Tensor, source: Tensor) -> Tensor:
    """`x.set_(source)`: between blocked tensors of one format it copies; bytes of another kind cannot be taken over."""
    if isinstance(x, BlockedTensor) and isinstance(source, BlockedTensor) and same_size(x.shape, source.shape):
        assign(x, source)
        return x
    raise RuntimeError("set_ cannot change a tensor between plain and blocked: use x.copy_(source) or x.data = source")


@register(aten._local_scalar_dense.default, aten.equal.default, aten.is_same_size.default)
def answer(func: OpOverload, *args: object, **kwargs: object) -> object:
    """Operators whose answer is no tensor."""
    return run_plain(func, args, kwargs)
