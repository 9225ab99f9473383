"""Reorders: plain ↔ blocked ↔ blocked, differentiable both ways, and what `.to(fmt)` does.

Here a reorder is counted and its implementation chosen: the C++ operator on an eager CPU tensor, ATen operations on
other devices and under tracing (equivalents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from torch_blocked import _python, counting, equivalents
from torch_blocked.deferred import expose
from torch_blocked.dispatch import registry
from torch_blocked.formats import METHODS, Format, FormatLike, format_of, plain_format
from torch_blocked.memory_desc import Blocking
from torch_blocked.physical import inner_is_dense, lies_in_order, split_axes
from torch_blocked.tensor import (
    BlockedTensor,
    Function,
    check_blocked_format,
    check_is_resolved,
    check_tensor,
    followed,
)

_EAGER = (Tensor, torch.nn.Parameter)


def reorder_physical(
    src: Tensor, size: torch.Size, src_blocking: Blocking, order: tuple[int, ...], blocking: Blocking
) -> Tensor:
    """The physical tensor of another format of the same logical tensor; always a copy, never differentiable."""
    start = perf_counter()
    if type(src) in _EAGER and src.device.type == "cpu" and src.layout is torch.strided and not src.is_quantized:
        dst = _python.reorder(src, size, src_blocking, order, blocking)
    else:
        check_strided(src)
        dst = equivalents.reorder_aten(src, size, sum(src_blocking, ()), order, sum(blocking, ()))
    counting.record_reorder(src_blocking, blocking, src, dst, perf_counter() - start)
    return dst


def check_strided(x: Tensor) -> None:
    if x.layout != torch.strided:
        raise RuntimeError(f"blocked formats hold dense tensors, got layout {x.layout}: call .to_dense() first")


def to_plain(x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """The plain tensor of a blocked one, strides in `order` (row-major if None), below autograd; plain ones pass."""
    if not isinstance(x, BlockedTensor):
        return x
    return reorder_physical(x._physical, x.shape, x._blocking, order or tuple(range(x.dim())), _PLAIN)


def copy_to_format(x: Tensor, fmt: Format) -> Tensor:
    """A copy of `x` in a format, below autograd."""
    if isinstance(x, BlockedTensor):
        physical = reorder_physical(followed(x), x.shape, x._blocking, fmt.order, fmt.blocking)
    else:
        physical = reorder_physical(x.detach(), x.shape, _PLAIN, fmt.order, fmt.blocking)
    return BlockedTensor(physical, fmt.blocking, x.shape) if fmt.blocking else physical


def to_blocking(x: Tensor, blocking: Blocking) -> Tensor:
    """The physical tensor of `x` with this blocking, whatever the order of its outer axes, below autograd."""
    if isinstance(x, BlockedTensor):
        if x._blocking == blocking:
            return x._physical
        return reorder_physical(x._physical, x.shape, x._blocking, tuple(range(x.dim())), blocking)
    return reorder_physical(x, x.shape, _PLAIN, tuple(range(x.dim())), blocking)


def is_in_format(x: Tensor, fmt: Format) -> bool:
    """Whether the bytes of `x` lie as the format says: dense, in its order, with its blocks."""
    blocked = isinstance(x, BlockedTensor)
    physical = followed(x) if blocked else x
    if (x._blocking if blocked else _PLAIN) != fmt.blocking:
        return False
    if physical.numel() == 0:
        return True
    expected = fmt.blocking.inner_numel
    for d in reversed(fmt.order):
        if physical.size(d) != 1 and physical.stride(d) != expected:
            return False
        expected *= physical.size(d)
    return True


_PLAIN = Blocking()


# ---- Autograd


class ToFormat(Function):
    """A copy in another format; the gradient comes back as it arrives, plain for a plain input."""

    @staticmethod
    def forward(x: Tensor, order: tuple[int, ...], blocks: tuple[tuple[int, int], ...]) -> Tensor:
        return copy_to_format(x, format_of(order, blocks))

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        x, *ctx.format = inputs
        ctx.was_blocked = isinstance(x, BlockedTensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:  # noqa: ANN001
        return (grad if ctx.was_blocked else to_dense(grad)), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:  # noqa: ANN001
        return ToFormat.apply(tangent, *ctx.format)

    @staticmethod
    def vmap(info, in_dims: tuple, x: Tensor, order: tuple, blocks: tuple) -> tuple[Tensor, int]:  # noqa: ANN001
        order = (0, *(axis + 1 for axis in order))  # the axis of the examples comes first, not blocked
        blocks = tuple((axis + 1, size) for axis, size in blocks)
        return ToFormat.apply(x.movedim(in_dims[0], 0), order, blocks), 0


class ViewBlocked(Function):
    """`view_blocked`: the same bytes under a blocking."""

    @staticmethod
    def forward(x: Tensor, blocking: Blocking) -> Tensor:
        physical = split_axes(x.detach(), blocking)
        expose(physical)
        # An alias, so that autograd knows a view and refuses to write to it where the gradient would not notice.
        return torch.ops.aten.alias(BlockedTensor(physical, blocking, x.shape))

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        ctx.blocking = inputs[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:  # noqa: ANN001
        return to_dense(grad), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:  # noqa: ANN001
        return tangent.to(format_of(tuple(range(tangent.dim())), ctx.blocking))


def _reorder_to(x: Tensor, order: tuple[int, ...], blocks: tuple[tuple[int, int], ...], copy: bool) -> Tensor:
    """`ToFormat`; in graphs that PyTorch traces of a program, an operator, whose inside is not looked at."""
    if torch.compiler.is_compiling():
        return torch.ops.torch_blocked.to_format(x, order, sum(blocks, ()), copy)
    if torch._C._get_tracing_state() is not None:
        refuse_jit()
    elif counting.is_heard():
        return counting.timed(_reorder_eagerly, x, order, blocks, copy)
    return _reorder_eagerly(x, order, blocks, copy)


def refuse_jit() -> None:
    raise RuntimeError("torch.jit.trace cannot follow blocked tensors: use torch.export.export, or trace a plain model")


def _reorder_eagerly(x: Tensor, order: tuple[int, ...], blocks: tuple[tuple[int, int], ...], copy: bool) -> Tensor:
    registry.level()  # the bytes are read below the dispatcher
    if not copy and is_in_format(x, format_of(order, blocks)):
        return x
    return ToFormat.apply(x, order, blocks)


def _to_format(x: Tensor, order: Sequence[int], blocking: Sequence[int], copy: bool) -> Tensor:
    return _reorder_eagerly(x, tuple(order), tuple(equivalents.pairs(blocking)), copy)


def convert_format(x: Tensor, fmt: FormatLike, copy: bool = False) -> Tensor:
    """`x` in a format; `x` itself if it is in it and no copy is asked for. Differentiable.

    Raises: ValueError for a format of another rank, RuntimeError for a layout that has no strides.
    """
    if x.layout == torch._mkldnn:
        x = x.to_dense()
    check_strided(x)
    resolved = fmt.resolve(x.shape)
    if resolved is None:
        return x.clone() if copy else x
    return _reorder_to(x, resolved.order, tuple(resolved.blocking), copy)


def to_dense(y: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """The plain tensor of a blocked one, straight to a memory format's strides. Differentiable; plain ones pass."""
    if not isinstance(y, BlockedTensor):
        return y
    return _reorder_to(y, plain_format(y.dim(), memory_format).order, (), True)


# Composite: AOTAutograd, which knows blocked tensors, looks inside; Dynamo and the first graph of torch.export do not.
_library = torch.library.Library("torch_blocked", "FRAGMENT")
_library.define("to_format(Tensor x, int[] order, int[] blocking, bool copy) -> Tensor")
_library.impl("to_format", _to_format, "CompositeImplicitAutograd")
_library.define("to_dense(Tensor x) -> Tensor")
_library.impl("to_dense", to_dense, "CompositeImplicitAutograd")


def view_blocked(x: Tensor, fmt: Format) -> BlockedTensor:
    """`x` as a blocked tensor on the same memory, without a copy, where the bytes already lie so.

    They do where each blocked axis is a multiple of its block and lies innermost: NHWC of one block of channels as
    nChw16c, N×C×1×1 as nChw16c.

    Raises: ValueError where a copy would be needed: ``x.to(fmt)`` makes it.
    """
    check_tensor("view_blocked", x)
    if isinstance(x, BlockedTensor):
        raise TypeError("view_blocked takes a plain tensor, got a BlockedTensor: use x.to(fmt)")
    fmt = check_blocked_format("view_blocked", fmt, x.shape)
    if x.layout != torch.strided:
        raise TypeError(f"view_blocked takes a dense tensor, got layout {x.layout}: call .to_dense() first")
    check_is_resolved("view_blocked", x)
    physical = split_axes(x.detach(), fmt.blocking)
    matches = physical is not None and (
        x.numel() == 0 or (lies_in_order(physical, fmt.order) and inner_is_dense(physical, fmt.blocking))
    )
    if not matches:
        raise ValueError(
            f"view_blocked: size {tuple(x.shape)} with strides {x.stride()} does not lie in memory as {fmt.tag}; "
            "x.to(fmt) copies"
        )
    return ViewBlocked.apply(x, fmt.blocking)


def view_strided(y: Tensor) -> Tensor:
    """As `BlockedTensor.view_strided`; a plain tensor is returned as it is."""
    check_tensor("view_strided", y)
    return y.view_strided() if isinstance(y, BlockedTensor) else y


# ---- What PyTorch's functions do with a format


def _tensor_to(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """x.to(fmt), x.to(dtype, fmt), x.to(device, dtype, non_blocking, copy, memory_format=fmt) ..."""
    if kwargs.get("memory_format") is not None:
        raise TypeError(f"to() got two formats, {fmt} and {kwargs['memory_format']}")
    x, *others = args
    copy = kwargs.pop("copy", False)
    if any(a is not None for a in (*others, *kwargs.values())):
        x = x.to(*others, **kwargs)
    return convert_format(x, fmt, copy and x is args[0])


def _module_to(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> tuple:
    """module.to(..., fmt): as for channels_last, (device, dtype, non_blocking, memory format)."""
    device, dtype, non_blocking, other = func(*args, **kwargs) if args or kwargs else (None, None, False, None)
    if other is not None:
        raise TypeError(f"to() got two formats, {fmt} and {other}")
    return device, dtype, non_blocking, fmt.for_module()


def _contiguous(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    return convert_format(args[0], fmt)


def _is_contiguous(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> bool:
    resolved = fmt.resolve(args[0].shape)
    return resolved is not None and is_in_format(args[0], resolved)


def _clone(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    return convert_format(args[0], fmt, copy=True)


def _factory(fmt: FormatLike, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """torch.empty(..., memory_format=fmt) and kin. The padding is zero, so `empty` is written once."""
    requires_grad = kwargs.pop("requires_grad", False)
    return convert_format(func(*args, **kwargs), fmt).detach().requires_grad_(requires_grad)


METHODS.update({"to": _tensor_to, "_parse_to": _module_to, "clone": _clone})
METHODS.update({"contiguous": _contiguous, "is_contiguous": _is_contiguous})
METHODS.update(dict.fromkeys(("empty", "empty_like", "zeros_like", "ones_like", "full_like"), _factory))
METHODS.update(dict.fromkeys(("rand_like", "randn_like", "randint_like"), _factory))
