"""Along one axis, which is kept: softmax, cumulative sums and products, sorting.

Along an axis that is not blocked the same operator on the physical tensor. Over a blocked one, first within the blocks
and then over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim

from torch_blocked import library, reorder
from torch_blocked.dispatch.channels import has_kernel
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import (
    accurate,
    bound,
    clear_padding,
    fill_padding,
    lead,
    over_dims,
    physical_dims,
    shifted,
)
from torch_blocked.dispatch.registry import register
from torch_blocked.dispatch.shape import plain_if_small
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

# Over blocks these fall back.
WITHOUT_BLOCKS = [
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
]


# ---- Over a blocked axis: (x, its number, keywords of the operator) -> the physical tensor


def _exponentials(x: BlockedTensor, axis: int) -> tuple[Tensor, Tensor]:
    """x less its greatest element, and the sum of the exponentials, in float32 at least."""
    dims = physical_dims(x, [axis])
    physical = fill_padding(x, [axis], -math.inf).to(accurate(x.dtype))
    below = physical - over_dims(aten.amax.default, physical, dims)
    return below, over_dims(aten.sum.dim_IntList, below.exp(), dims)


def _softmax(x: BlockedTensor, axis: int, half_to_float: bool) -> Tensor:
    below, total = _exponentials(x, axis)
    return below.exp_().div_(total).to(x.dtype)


def _log_softmax(x: BlockedTensor, axis: int, half_to_float: bool) -> Tensor:
    below, total = _exponentials(x, axis)
    return below.sub_(total.log_()).to(x.dtype)


def _cumulative(op: OpOverload, combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Within the innermost blocks; then each takes up what those before it come to."""

    def cumulative(x: BlockedTensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        outer, *inner = physical_dims(x, [axis])
        dtype = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
        # ATen sums up float32 in float64, where no prefix overflows that a later element brings back.
        result = op(x._physical, inner[-1], dtype=torch.float64 if dtype is torch.float32 else accurate(dtype))
        for d in [*reversed(inner[:-1]), outer]:
            last = result
            for i in inner:
                last = last.narrow(i, last.size(i) - 1, 1) if i > d or d == outer else last
            before = op(last, d).narrow(d, 0, result.size(d) - 1)
            combine(result.narrow(d, 1, result.size(d) - 1), before)
        return result.to(dtype)

    return cumulative


# Whether of the logarithm.
_SOFTMAXES = {aten._softmax.default: False, aten._log_softmax.default: True}

OVER_BLOCKS: dict[OpOverload, Callable[..., Tensor]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.cumsum.default: _cumulative(aten.cumsum.default, Tensor.add_),
    aten.cumprod.default: _cumulative(aten.cumprod.default, Tensor.mul_),
}


# ---- Handlers


def _like(x: BlockedTensor, axis: int, physical: Tensor) -> Tensor:
    """The answer of this physical tensor, in which `axis` has another length or is gone."""
    blocking, size = x._blocking, [*x.shape]
    if physical.dim() < x._physical.dim():
        del size[axis]
        blocking = shifted(blocking, {d: d - (d > axis) for d in range(x.dim())})
    elif blocking.block(axis) == 1:
        size[axis] = physical.size(axis)
    return plain_if_small(BlockedTensor(clear_padding(physical, blocking, tuple(size)), blocking, tuple(size)))


def _takes(x: BlockedTensor, values: dict[str, object]) -> bool:
    """Whether PyTorch does: softmax is of floats, and widens them on other devices only."""
    return "half_to_float" not in values or (x.is_floating_point() and not values["half_to_float"])


@register(*WITHOUT_BLOCKS, *OVER_BLOCKS)
def along(func: OpOverload, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    """The answers are blocked as x is."""
    values = bound(func, args, kwargs)
    x, axis = values.pop("self"), values.pop("dim", -1)
    axis = canonicalize_dim(x.dim(), axis)
    # PyTorch rounds log_softmax of half precision otherwise where the axis is the last in memory.
    if not x.numel() or (func is aten._log_softmax.default and accurate(x.dtype) != x.dtype):
        return fallback(func, *args, **kwargs)
    if func in _SOFTMAXES and axis == 1 and _takes(x, values) and has_kernel(x):
        result = library.softmax_channels_op(x._physical, x.size(1), _SOFTMAXES[func])
    elif x._blocking.block(axis) == 1:
        result = func(x._physical, dim=axis, **values)
    elif func in OVER_BLOCKS and _takes(x, values):
        result = OVER_BLOCKS[func](x, axis, **values)
    else:
        return fallback(func, *args, **kwargs)
    return _like(x, axis, result) if isinstance(result, Tensor) else tuple(_like(x, axis, part) for part in result)


def _softmax_gradient(grad: Tensor, y: Tensor, dims: list[int]) -> Tensor:
    product = grad * y
    return product.sub_(y * over_dims(aten.sum.dim_IntList, product, dims))


def _log_softmax_gradient(grad: Tensor, y: Tensor, dims: list[int]) -> Tensor:
    return grad - y.exp() * over_dims(aten.sum.dim_IntList, grad, dims)


GRADIENTS = {
    aten._softmax_backward_data.default: _softmax_gradient,
    aten._log_softmax_backward_data.default: _log_softmax_gradient,
}


@register(*GRADIENTS)
def softmax_gradient(func: OpOverload, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Of `softmax` or `log_softmax`, from its answer y."""
    first, dim = lead((y, grad)), canonicalize_dim(y.dim(), dim)
    if grad.shape != y.shape or not y.numel() or y.dtype != grad.dtype or y.dtype != input_dtype:
        return fallback(func, grad, y, dim, input_dtype)
    operands = [reorder.to_blocking(t, first._blocking) for t in (grad, y)]
    if dim == 1 and has_kernel(first):
        physical = library.softmax_channels_backward_op(
            *operands, y.size(1), func is aten._log_softmax_backward_data.default
        )
    elif first._blocking.block(dim) == 1:
        physical = func(*operands, dim, input_dtype)
    else:
        operands = [t.to(accurate(y.dtype)) for t in operands]
        physical = GRADIENTS[func](*operands, physical_dims(first, [dim])).to(y.dtype)
    return _like(first, dim, physical)
