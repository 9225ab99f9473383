"""Reductions: the same reduction of the physical tensor, over the outer dim and the inner blocks of each axis.

What is left of a blocked tensor stays blocked; without a blocked axis, and of two axes or fewer, it is plain. Where a
reduced axis is padded, the padding is first filled with what changes no answer: zero for a sum, -inf for a maximum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim

from torch_blocked import library
from torch_blocked.dispatch.channels import has_kernel as has_channel_kernel
from torch_blocked.dispatch.channels import reduce_channels
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import (
    accurate,
    bound,
    clear_padding,
    fill_padding,
    over_dims,
    physical_dims,
    shifted,
)
from torch_blocked.dispatch.pooling import global_average, global_maximum, global_sum, has_kernel
from torch_blocked.dispatch.registry import register
from torch_blocked.dispatch.shape import as_plain, plain_if_small
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

# (x, the reduced axes, keywords of the operator) -> the reduced physical tensor or tensors, all dims kept.
Reducer = Callable[..., object]


# ---- The numbers that change no answer


def lowest(dtype: torch.dtype) -> float | int | bool:
    """What no element is below."""
    return False if dtype == torch.bool else -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """What no element is above."""
    return True if dtype == torch.bool else math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _minus_infinity(dtype: torch.dtype) -> float:
    return -math.inf


# ---- Reducers


def _filled(op: Callable[..., object], neutral: Callable[[torch.dtype], object] | None = None) -> Reducer:
    """The reducer of an operator to which `neutral(dtype)`, zero if None, makes no difference."""

    def reducer(x: BlockedTensor, axes: list[int], **kwargs: object) -> object:
        physical = x._physical if neutral is None else fill_padding(x, axes, neutral(x.dtype))
        return over_dims(op, physical, physical_dims(x, axes), **kwargs)

    return reducer


def _count(x: BlockedTensor, axes: list[int]) -> int:
    return math.prod(x.size(a) for a in axes)


def _is_padded(x: BlockedTensor, axes: list[int]) -> bool:
    return any(x.size(a) % x._blocking.block(a) for a in axes)


def _mean(x: BlockedTensor, axes: list[int], dtype: torch.dtype | None = None) -> Tensor:
    dims, dtype = physical_dims(x, axes), dtype or x.dtype
    if not _is_padded(x, axes) or not (dtype.is_floating_point or dtype.is_complex):  # ATen refuses integers
        return over_dims(aten.mean.dim, x._physical, dims, dtype=dtype)
    total = over_dims(aten.sum.dim_IntList, x._physical, dims, dtype=accurate(dtype))
    return (total / _count(x, axes)).to(dtype)


def _moments(x: BlockedTensor, axes: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    """The variance and the mean of a padded tensor, in double precision as ATen's: squares overflow sooner than roots.

    In two passes, as the zeros of the padding are as far from the mean as any value.
    """
    dims, count = physical_dims(x, axes), _count(x, axes)
    physical = x._physical.to(torch.complex128 if x.is_complex() else torch.float64)
    mean = over_dims(aten.sum.dim_IntList, physical, dims) / count
    centred = clear_padding((physical - mean).abs(), x._blocking, x.shape)
    freedom = max(count - (1 if correction is None else correction), 0)
    return over_dims(aten.sum.dim_IntList, centred.square_(), dims) / freedom, mean


def _variance_and_mean(x: BlockedTensor, axes: list[int], correction: float | None = None) -> tuple[Tensor, Tensor]:
    if not _is_padded(x, axes):
        return over_dims(aten.var_mean.correction, x._physical, physical_dims(x, axes), correction=correction)
    variance, mean = _moments(x, axes, correction)
    return variance.to(x.dtype.to_real()), mean.to(x.dtype)


def _variance(x: BlockedTensor, axes: list[int], correction: float | None = None) -> Tensor:
    """By itself: ATen has a parallel loop for that of a whole tensor, and none for both."""
    if _is_padded(x, axes):
        return _variance_and_mean(x, axes, correction)[0]
    return over_dims(aten.var.correction, x._physical, physical_dims(x, axes), correction=correction)


def _deviation_and_mean(x: BlockedTensor, axes: list[int], correction: float | None = None) -> tuple[Tensor, Tensor]:
    if not _is_padded(x, axes):
        return over_dims(aten.std_mean.correction, x._physical, physical_dims(x, axes), correction=correction)
    variance, mean = _moments(x, axes, correction)
    return variance.sqrt_().to(x.dtype.to_real()), mean.to(x.dtype)


def _deviation(x: BlockedTensor, axes: list[int], correction: float | None = None) -> Tensor:
    if _is_padded(x, axes):
        return _deviation_and_mean(x, axes, correction)[0]
    return over_dims(aten.std.correction, x._physical, physical_dims(x, axes), correction=correction)


def _vector_norm(x: BlockedTensor, axes: list[int], ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """Zero is neutral, but to norms of negative order, where the least element counts most."""
    dims = physical_dims(x, axes)
    # ATen's own is up to fifty times slower where the last dim is kept.
    if ord == 2 and not x.is_complex() and dims[-1] != x._physical.dim() - 1:
        dtype = dtype or x.dtype
        squares = x._physical.to(accurate(dtype)).square()
        return over_dims(aten.sum.dim_IntList, squares, dims).sqrt_().to(dtype)
    physical = fill_padding(x, axes, math.inf) if ord < 0 else x._physical
    return over_dims(aten.linalg_vector_norm.default, physical, dims, ord=ord, dtype=dtype)


def _norm(x: BlockedTensor, axes: list[int], p: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _vector_norm(x, axes, 2 if p is None else p, dtype)


def _prod(physical: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (physical.dtype if physical.is_floating_point() or physical.is_complex() else torch.int64)
    for d in dim:
        physical = aten.prod.dim_int(physical, d, keepdim, dtype=accurate(dtype))
    return physical.to(dtype)


def _count_nonzero(physical: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return physical.ne(0).sum(dim, keepdim)


def _nansum(x: BlockedTensor, axes: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """In half precision ATen's rounds after each axis."""
    physical, dims, dtype = x._physical, physical_dims(x, axes), dtype or x.dtype
    if accurate(dtype) == dtype:
        return over_dims(aten.nansum.default, physical, dims, dtype=dtype if dtype.is_floating_point else None)
    return over_dims(aten.nansum.default, physical, dims, dtype=accurate(dtype)).to(dtype)


def _one(dtype: torch.dtype) -> int:
    return 1


def _aminmax(x: BlockedTensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    return _amin(x, axes), _amax(x, axes)


_amax = _filled(aten.amax.default, lowest)
_amin = _filled(aten.amin.default, highest)
_sum = _filled(aten.sum.dim_IntList)
_product, _nonzeros = _filled(_prod, _one), _filled(_count_nonzero)
_all, _any = _filled(aten.all.dims, _one), _filled(aten.any.dims)

REDUCERS: dict[OpOverload, Reducer] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.nansum.default: _nansum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.amax.default: _amax,
    aten.max.default: _amax,
    aten.amin.default: _amin,
    aten.min.default: _amin,
    aten.aminmax.default: _aminmax,
    aten.all.default: _all,
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.prod.default: _product,
    aten.prod.dim_int: _product,
    aten.count_nonzero.default: _nonzeros,
    aten.count_nonzero.dim_IntList: _nonzeros,
    aten.logsumexp.default: _filled(aten.logsumexp.default, _minus_infinity),
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.std_mean.correction: _deviation_and_mean,
}

_OF_IMAGES = {
    aten.mean.dim: global_average,
    aten.sum.dim_IntList: global_sum,
    aten.amax.default: global_maximum,
}
# To all others an empty list of axes means all.
_OVER_NOTHING = {aten.all.dims, aten.any.dims, aten.logsumexp.default}
_OF_INTEGERS = {_sum, _mean, _nansum, _product, _nonzeros, _all, _any, _amax, _amin, _aminmax}
_OF_COMPLEX = {_sum, _mean, _product, _nonzeros, _all, _any, _vector_norm, _norm}


# ---- Handlers


def _axes(x: BlockedTensor, dim: int | Sequence[int] | None) -> list[int]:
    """The reduced axes in their order, by default all; none where PyTorch says what is wrong."""
    given = [dim] if isinstance(dim, int) else dim or range(x.dim())
    axes = sorted(canonicalize_dim(x.dim(), d) for d in given)
    return axes if len(set(axes)) == len(axes) else []


@functools.cache
def _blocking_of(blocking: Blocking, axes: tuple[int, ...], kept: tuple[int, ...]) -> Blocking:
    """What is left of a blocking without the reduced axes, where the `kept` ones are counted anew."""
    left = Blocking(tuple((a, b) for a, b in blocking if a not in axes))
    return shifted(left, {d: i for i, d in enumerate(kept)}) if left else left


def _answer(x: BlockedTensor, physical: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    """From the reduced physical tensor, all dims kept. A value a channel of all images is plain, as parameters are."""
    ndim, blocking = x.dim(), x._blocking
    inner = [ndim + i for i, a in enumerate(blocking.inner_idxs) if a in axes]
    physical = physical.squeeze([*inner, *([] if keepdim else axes)])
    kept = tuple(d for d in range(ndim) if keepdim or d not in axes)
    left = _blocking_of(blocking, tuple(axes), kept)
    if not left:
        return physical
    size = tuple(1 if d in axes else x.size(d) for d in kept)
    answer = BlockedTensor(clear_padding(physical, left, size), left, size)
    return as_plain(answer).contiguous() if 0 in axes and len(axes) == ndim - 1 else plain_if_small(answer)


@register(*REDUCERS)
def reduce(func: OpOverload, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """Over any axes, all by default."""
    values = bound(func, args, kwargs)
    x, dim, keepdim = values.pop("self"), values.pop("dim", None), values.pop("keepdim", False)
    reducer, axes = REDUCERS[func], [] if dim == [] and func in _OVER_NOTHING else _axes(x, dim)
    fits = x.is_floating_point() or reducer in (_OF_COMPLEX if x.is_complex() else _OF_INTEGERS)
    if not axes or not x.numel() or not fits:
        return fallback(func, *args, **kwargs)
    pixels = reduce_channels(func, x, axes, values)
    if pixels is not None:
        if isinstance(pixels, Tensor):
            return pixels.unsqueeze(1) if keepdim else pixels
        return tuple(part.unsqueeze(1) if keepdim else part for part in pixels)
    # A sum that is traced fuses with what makes its summands.
    kernel = _OF_IMAGES.get(func) if func is aten.mean.dim or type(x._physical) is Tensor else None
    left = axes
    if kernel and axes in ([2, 3], [0, 2, 3]) and not values and has_kernel(x):
        x, left = kernel(x), axes[:-2]
    reduced = reducer(x, left, **values) if left else x._physical
    if isinstance(reduced, Tensor):
        return _answer(x, reduced, axes, keepdim)
    return tuple(_answer(x, part, axes, keepdim) for part in reduced)


# Which of them, and what the padding is filled with.
ARGUMENTS_OF_EXTREMES = {
    aten.max.dim: (aten.max.dim, lowest),
    aten.argmax.default: (aten.max.dim, lowest),
    aten.min.dim: (aten.min.dim, highest),
    aten.argmin.default: (aten.min.dim, highest),
}


@register(*ARGUMENTS_OF_EXTREMES)
def reduce_to_index(func: OpOverload, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    """The extreme and where it is first, over one axis; over all, its index in the row-major plain tensor."""
    values = bound(func, args, kwargs)
    x, dim, keepdim = values["self"], values.get("dim"), values.get("keepdim", False)
    op, neutral = ARGUMENTS_OF_EXTREMES[func]
    axes, answers_both = _axes(x, dim), func is op
    if not x.numel() or not axes or x.is_complex() or (x.dtype == torch.bool and not answers_both):
        return fallback(func, *args, **kwargs)
    if axes == [1] and has_channel_kernel(x):
        found = library.find_channel_op(x._physical, x.size(1), neutral is highest)
        extreme, index = (part.unsqueeze(1) for part in found) if keepdim else found
        return (extreme, index) if answers_both else index
    extreme, index = fill_padding(x, axes, neutral(x.dtype)), None
    for d, stride in _digits(x, axes):
        extreme, at = op(extreme, d, True)
        index = at * stride if index is None else index.gather(d, at) + at * stride
    index = _answer(x, index, axes, keepdim)
    return (_answer(x, extreme, axes, keepdim), index) if answers_both else index


def _digits(x: BlockedTensor, axes: list[int]) -> list[tuple[int, int]]:
    """The physical dims of the axes with what a step along each adds to the row-major index, least first.

    The first extreme along one, then along the next, is the first of all in row-major order.
    """
    digits, step = [], 1
    for axis in reversed(axes):
        below = step
        for i in reversed(range(len(x._blocking))):
            if x._blocking.inner_idxs[i] == axis:
                digits.append((x.dim() + i, below))
                below *= x._blocking.inner_blks[i]
        digits.append((axis, below))
        step *= x.size(axis)
    return digits
