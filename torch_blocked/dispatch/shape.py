"""Shape: views of the physical tensor where the bytes allow, plain tensors where they do not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import infer_size

from torch_blocked import counting, reorder
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import shifted
from torch_blocked.dispatch.registry import register
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor, merge_axes

aten = torch.ops.aten


def as_plain(x: BlockedTensor) -> Tensor:
    """The plain tensor: the same bytes where one set of strides can say them, else a reorder."""
    plain = merge_axes(x)
    if plain is None:
        return reorder.to_plain(x)
    counting.record_left()
    return plain


@register(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(func: OpOverload, x: BlockedTensor, size: list[int]) -> Tensor:
    """Another shape: plain. No copy where the bytes are those of a plain tensor, as after global pooling."""
    size = infer_size(size, x.numel())
    if tuple(size) == tuple(x.shape):
        return BlockedTensor(x._physical, x._blocking, x.shape)
    plain = merge_axes(x)
    if plain is not None and plain.is_contiguous():
        counting.record_left()
        return plain.view(size)
    return reorder.to_plain(x).view(size)


@register(aten.permute.default)
def permute(func: OpOverload, x: BlockedTensor, dims: list[int]) -> BlockedTensor:
    """Axes in another order: a view of the same bytes, the blocking's axes renumbered."""
    ndim = x.dim()
    dims = [d % ndim for d in dims]
    if sorted(dims) != list(range(ndim)):
        return fallback(func, x, dims)
    physical = x._physical.permute([*dims, *range(ndim, ndim + len(x._blocking))])
    blocking = shifted(x._blocking, {d: i for i, d in enumerate(dims)})
    return BlockedTensor(physical, blocking, tuple(x.size(d) for d in dims))


@register(aten.transpose.int)
def transpose(func: OpOverload, x: BlockedTensor, dim0: int, dim1: int) -> BlockedTensor:
    """Two axes swapped: a view."""
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(aten.permute.default, x, dims)


@register(aten.t.default)
def t(func: OpOverload, x: BlockedTensor) -> BlockedTensor:
    """The transpose of a matrix: a view."""
    return x if x.dim() < 2 else transpose(aten.transpose.int, x, 0, 1)


@register(aten.slice.Tensor)
def slice_(
    func: OpOverload, x: BlockedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A range of one axis: a view along axes that are not blocked, and at block borders."""
    dim = dim % x.dim()
    begin, stop, step = slice(start, end, step).indices(x.size(dim))
    stop = max(begin, stop)
    block = x._blocking.block(dim)
    if block == 1:
        physical = func(x._physical, dim, begin, stop, step)
        return BlockedTensor(physical, x._blocking, _resized(x, dim, physical.size(dim)))
    ends_a_block = stop % block == 0 or stop == x.size(dim)
    if step != 1 or begin % block or not ends_a_block or begin == stop:
        return fallback(func, x, dim, start, end, step)
    physical = func(x._physical, dim, begin // block, -(-stop // block), 1)
    return BlockedTensor(physical, x._blocking, _resized(x, dim, stop - begin))


def _resized(x: BlockedTensor, dim: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:dim], n, *x.shape[dim + 1 :])


@register(aten.split.Tensor)
def split(func: OpOverload, x: BlockedTensor, split_size: int, dim: int = 0) -> list[Tensor]:
    """Equal parts of one axis (`chunk` too)."""
    n = x.size(dim)
    if split_size <= 0 or n == 0:
        return fallback(func, x, split_size, dim)
    return _parts(func, x, [min(split_size, n - at) for at in range(0, n, split_size)], dim, split_size)


@register(aten.split_with_sizes.default)
def split_with_sizes(func: OpOverload, x: BlockedTensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    """Parts of one axis."""
    if sum(sizes) != x.size(dim) or min(sizes, default=0) < 0:
        return fallback(func, x, sizes, dim)
    return _parts(func, x, sizes, dim, sizes)


def _parts(func: OpOverload, x: BlockedTensor, sizes: list[int], dim: int, argument: object) -> list[Tensor]:
    """Views where every part begins at a block border; else all are plain."""
    block = x._blocking.block(dim % x.dim())
    if block > 1 and (any(n % block for n in sizes[:-1]) or 0 in sizes):
        return fallback(func, x, argument, dim)
    parts, at = [], 0
    for n in sizes:
        parts.append(slice_(aten.slice.Tensor, x, dim, at, at + n))
        at += n
    return parts


@register(aten.cat.default)
def cat(func: OpOverload, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Joined along any axis; along a blocked one, where all but the last are whole blocks."""
    first = next(x for x in tensors if isinstance(x, BlockedTensor))
    joined = [x for x in tensors if not (x.dim() == 1 and x.size(0) == 0)]  # PyTorch passes over these
    blocking, ndim = first._blocking, first.dim()
    block = blocking.block(dim % ndim)
    fits = all(x.dim() == ndim and x.dtype == first.dtype for x in joined)
    if not fits or (block > 1 and any(x.size(dim) % block or x.size(dim) == 0 for x in joined[:-1])):
        return fallback(func, tensors, dim)
    dim = dim % ndim
    physical = func([reorder.to_blocking(x, blocking) for x in joined], dim)
    return BlockedTensor(physical, blocking, _resized(first, dim, sum(x.size(dim) for x in joined)))


@register(aten.unsqueeze.default)
def unsqueeze(func: OpOverload, x: BlockedTensor, dim: int) -> BlockedTensor:
    """A new axis of one: a view."""
    dim = dim % (x.dim() + 1)
    blocking = shifted(x._blocking, {d: d + (d >= dim) for d in range(x.dim())})
    return BlockedTensor(func(x._physical, dim), blocking, (*x.shape[:dim], 1, *x.shape[dim:]))


@register(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def squeeze(func: OpOverload, x: BlockedTensor, dim: int | list[int] | None = None) -> Tensor:
    """Axes of one removed: a view, plain where a blocked axis goes or two or fewer are left."""
    wanted = range(x.dim()) if dim is None else [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    gone = [d for d in wanted if x.size(d) == 1]
    kept = [d for d in range(x.dim()) if d not in gone]
    if len(kept) <= 2 or any(d in x._blocking.axes for d in gone):
        return as_plain(x).view([x.size(d) for d in kept])
    physical = x._physical
    for d in reversed(gone):
        physical = physical.squeeze(d)
    blocking: Blocking = shifted(x._blocking, {d: i for i, d in enumerate(kept)})
    return BlockedTensor(physical, blocking, tuple(x.size(d) for d in kept))
