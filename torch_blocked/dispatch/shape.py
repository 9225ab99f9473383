"""Shape: views of the physical tensor where the bytes allow, plain tensors where they do not."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim, infer_size

from torch_blocked import counting, reorder
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import agree_outside, block_range, resized, shifted
from torch_blocked.dispatch.registry import register
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor, merged

aten = torch.ops.aten


def as_plain(x: BlockedTensor) -> Tensor:
    """The plain tensor: the same bytes where one set of strides can say them, else a reorder."""
    plain = merged(x)
    if plain is None:
        return reorder.to_plain(x)
    counting.record_left()
    return plain


def plain_if_small(x: BlockedTensor) -> Tensor:
    """`x`, but plain where it has two axes or fewer: what follows is seldom a convolution."""
    return x if x.dim() > 2 else as_plain(x).contiguous()


@register(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(func: OpOverload, x: BlockedTensor, size: list[int]) -> Tensor:
    """Another shape: blocked where only axes of one come or go, else plain.

    No copy where the bytes are those of a plain tensor, as after global pooling.
    """
    size = infer_size(size, x.numel())
    if tuple(size) == tuple(x.shape):
        return BlockedTensor(x._physical, x._blocking, x.shape)
    if _regroups(x, size):
        physical = x._physical.view(size[0], size[1] // x._physical.size(-1), *x._physical.shape[2:])
        return BlockedTensor(physical, x._blocking, size)
    same = _view_with_ones(x, size) if len(size) > 2 else None
    if same is not None:
        return same
    plain = merged(x)
    if plain is not None and plain.is_contiguous():
        counting.record_left()
        return plain.view(size)
    return reorder.to_plain(x).view(size)


def _regroups(x: BlockedTensor, size: list[int]) -> bool:
    """Whether `size` only moves whole blocks of channels between images, as instance_norm does."""
    if len(x._blocking) != 1 or x._blocking.axes != (1,) or len(size) != x.dim() or tuple(size[2:]) != x.shape[2:]:
        return False
    block, outer = x._physical.size(-1), x._physical
    merges = outer.stride(0) == outer.size(1) * outer.stride(1) or 1 in outer.shape[:2]
    return merges and x.size(1) % block == 0 and size[1] % block == 0 and x.numel() > 0


def _view_with_ones(x: BlockedTensor, size: list[int]) -> BlockedTensor | None:
    """`x` in a size that differs from its own by axes of one that are not blocked; None of any other."""
    outer, mapping, at = [1] * len(size), {}, 0
    for d, n in enumerate(x.shape):
        if n == 1 and x._blocking.block(d) == 1:
            continue
        while n != 1 and at < len(size) and size[at] == 1:
            at += 1
        if at == len(size) or size[at] != n:
            return None
        outer[at], mapping[d], at = x._physical.size(d), at, at + 1
    if any(n != 1 for n in size[at:]):
        return None
    physical = x._physical.view([*outer, *x._blocking.inner_blks])
    return BlockedTensor(physical, shifted(x._blocking, mapping), tuple(size))


@register(aten.permute.default)
def permute(func: OpOverload, x: BlockedTensor, dims: list[int]) -> BlockedTensor:
    """Axes in another order: a view of the same bytes, the blocking's axes renumbered."""
    ndim = x.dim()
    dims = [canonicalize_dim(ndim, d) for d in dims]
    if sorted(dims) != list(range(ndim)):
        return fallback(func, x, dims)  # PyTorch says what is wrong
    physical = x._physical.permute([*dims, *range(ndim, ndim + len(x._blocking))])
    blocking = shifted(x._blocking, {d: i for i, d in enumerate(dims)})
    return BlockedTensor(physical, blocking, tuple(x.size(d) for d in dims))


@register(aten.transpose.int)
def transpose(func: OpOverload, x: BlockedTensor, dim0: int, dim1: int) -> BlockedTensor:
    """Two axes swapped: a view."""
    dims = list(range(x.dim()))
    dim0, dim1 = canonicalize_dim(x.dim(), dim0), canonicalize_dim(x.dim(), dim1)
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(aten.permute.default, x, dims)


@register(aten.t.default)
def t(func: OpOverload, x: BlockedTensor) -> BlockedTensor:
    """The transpose of a matrix: a view."""
    if x.dim() > 2:
        return fallback(func, x)
    return permute(aten.permute.default, x, list(reversed(range(x.dim()))))


@register(aten.slice.Tensor)
def slice_(
    func: OpOverload, x: BlockedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A range of one axis: a view along axes that are not blocked, and at block borders."""
    dim = canonicalize_dim(x.dim(), dim)
    if step <= 0:
        return fallback(func, x, dim, start, end, step)  # PyTorch says what is wrong
    n, block = x.size(dim), x._blocking.block(dim)
    within = block_range(n, block, start, end, step)
    if within is not None:
        physical = func(x._physical, dim, *within, step)
        size = physical.size(dim) if block == 1 else len(range(n)[start:end])
        return BlockedTensor(physical, x._blocking, resized(x, dim, size))
    begin, stop, step = slice(start, end, step).indices(n)
    inside = begin < stop and begin // block == (stop - 1) // block and len(x._blocking) == 1
    return _within_block(x, dim, begin, stop, step) if inside else fallback(func, x, dim, start, end, step)


def _within_block(x: BlockedTensor, dim: int, begin: int, stop: int, step: int) -> Tensor:
    """A range of channels inside the only block: a strided view, plain."""
    block = x._blocking.block(dim)
    channels = x._physical.select(dim, begin // block)[..., begin % block : (stop - 1) % block + 1 : step]
    counting.record_left()
    return channels.movedim(-1, dim)


@register(aten.select.int)
def select(func: OpOverload, x: BlockedTensor, dim: int, index: int) -> Tensor:
    """One index of an axis: a view; plain where the axis was the only blocked one."""
    dim = canonicalize_dim(x.dim(), dim)
    n, block = x.size(dim), x._blocking.block(dim)
    if not -n <= index < n:
        return fallback(func, x, dim, index)  # PyTorch says what is wrong
    physical = x._physical.select(dim, index % n // block)
    if block == 1:
        blocking = shifted(x._blocking, {d: d - (d > dim) for d in range(x.dim())})
        return BlockedTensor(physical, blocking, (*x.shape[:dim], *x.shape[dim + 1 :]))
    if x._blocking.axes != (dim,):
        return fallback(func, x, dim, index)
    for b in x._blocking.inner_blks:  # the first of the inner dims left
        block //= b
        physical = physical.select(x.dim() - 1, index % n // block % b)
    counting.record_left()
    return physical


@register(aten.split.Tensor)
def split(func: OpOverload, x: BlockedTensor, split_size: int, dim: int = 0) -> list[Tensor]:
    """Equal parts of one axis (`chunk` too)."""
    n = x.size(dim)
    if split_size <= 0 or n == 0:
        return fallback(func, x, split_size, dim)
    return _parts(x, [min(split_size, n - at) for at in range(0, n, split_size)], dim)


@register(aten.split_with_sizes.default)
def split_with_sizes(func: OpOverload, x: BlockedTensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    """Parts of one axis."""
    if sum(sizes) != x.size(dim) or min(sizes, default=0) < 0:
        return fallback(func, x, sizes, dim)
    return _parts(x, sizes, dim)


def _parts(x: BlockedTensor, sizes: list[int], dim: int) -> list[Tensor]:
    """Views, blocked, where every part begins at a block border; else plain, a copy where a part crosses one."""
    dim = canonicalize_dim(x.dim(), dim)
    ends = list(itertools.accumulate(sizes))
    return [slice_(aten.slice.Tensor, x, dim, end - n, end) for n, end in zip(sizes, ends, strict=True)]


@register(aten.unbind.int)
def unbind(func: OpOverload, x: BlockedTensor, dim: int = 0) -> list[Tensor]:
    """Every index of an axis: views."""
    dim = canonicalize_dim(x.dim(), dim)
    return [select(aten.select.int, x, dim, i) for i in range(x.size(dim))]


@register(aten.cat.default)
def cat(func: OpOverload, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Joined along any axis; along a blocked one, where all but the last are whole blocks."""
    first = next(x for x in tensors if isinstance(x, BlockedTensor))
    joined = [x for x in tensors if not (x.dim() == 1 and x.size(0) == 0)]  # PyTorch passes over these
    blocking, dim = first._blocking, canonicalize_dim(first.dim(), dim)
    alike = all(x.dtype == first.dtype for x in tensors)  # an empty vector's dtype counts
    fits = joined and alike and agree_outside(dim, [first, *joined])
    block = blocking.block(dim)
    if not fits or (block > 1 and any(x.size(dim) % block or x.size(dim) == 0 for x in joined[:-1])):
        return fallback(func, tensors, dim)
    physical = func([reorder.to_blocking(x, blocking) for x in joined], dim)
    return BlockedTensor(physical, blocking, resized(first, dim, sum(x.size(dim) for x in joined)))


@register(aten.stack.default)
def stack(func: OpOverload, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Joined along a new axis."""
    if any(x.shape != tensors[0].shape or x.dtype != tensors[0].dtype for x in tensors):
        return fallback(func, tensors, dim)
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@register(aten.unsqueeze.default)
def unsqueeze(func: OpOverload, x: BlockedTensor, dim: int) -> BlockedTensor:
    """A new axis of one: a view."""
    dim = canonicalize_dim(x.dim() + 1, dim)
    blocking = shifted(x._blocking, {d: d + (d >= dim) for d in range(x.dim())})
    return BlockedTensor(func(x._physical, dim), blocking, (*x.shape[:dim], 1, *x.shape[dim:]))


@register(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def squeeze(func: OpOverload, x: BlockedTensor, dim: int | list[int] | None = None) -> Tensor:
    """Axes of one removed: a view, plain where two or fewer are left and one set of strides can say them."""
    gone = _axes_of_one(x, dim)
    kept = [d for d in range(x.dim()) if d not in gone]
    plain = merged(x) if len(kept) <= 2 else None
    if plain is not None:
        counting.record_left()
        return plain.view([x.size(d) for d in kept])
    return squeeze_blocked(func, x, dim)


def _axes_of_one(x: BlockedTensor, dim: int | list[int] | None) -> list[int]:
    """Those that `squeeze` removes. RuntimeError, as of plain tensors, if one is named twice."""
    given = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    wanted = [canonicalize_dim(x.dim(), d) for d in given]
    if len(set(wanted)) != len(wanted):
        raise RuntimeError(f"squeeze: an axis appears multiple times in the list of dims {dim}")
    return [d for d in wanted if x.size(d) == 1]


def squeeze_blocked(func: OpOverload, x: BlockedTensor, dim: int | list[int] | None = None) -> Tensor:
    """Axes of one removed: a view, plain only where a blocked axis is among them."""
    gone = _axes_of_one(x, dim)
    kept = [d for d in range(x.dim()) if d not in gone]
    if any(d in x._blocking.axes for d in gone):
        axis = x._blocking.axes[0]
        if len(x._blocking) > 1:
            return fallback(func, x, *([] if dim is None else [dim]))
        others = [d - (d > axis) for d in gone if d != axis]
        return select(aten.select.int, x, axis, 0).squeeze(others)
    physical = x._physical
    for d in reversed(gone):
        physical = physical.squeeze(d)
    blocking: Blocking = shifted(x._blocking, {d: i for i, d in enumerate(kept)})
    return BlockedTensor(physical, blocking, tuple(x.size(d) for d in kept))


@register(aten.diagonal.default)
def diagonal(func: OpOverload, x: BlockedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal of two axes, neither blocked, as a new last axis: a view."""
    ndim, axes = x.dim(), [canonicalize_dim(x.dim(), d) for d in (dim1, dim2)]
    if axes[0] == axes[1] or any(d in x._blocking.axes for d in axes):
        return fallback(func, x, offset, dim1, dim2)
    physical = func(x._physical, offset, *axes).movedim(-1, ndim - 2)
    kept = [d for d in range(ndim) if d not in axes]
    size = (*(x.size(d) for d in kept), physical.size(ndim - 2))
    return BlockedTensor(physical, shifted(x._blocking, {d: i for i, d in enumerate(kept)}), size)
