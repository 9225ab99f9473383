"""What moves elements along axes: flip, roll, repeat, expand, pad, gather and scatter, and the gradients of views.

Along axes that are not blocked the same operator on the physical tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim

from torch_blocked import counting, reorder
from torch_blocked.dispatch.fallback import bump_version, fallback
from torch_blocked.dispatch.physical import agree_outside, block_range, clear_padding, lead, resized, shifted
from torch_blocked.dispatch.registry import register
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _take(x: BlockedTensor, axis: int, index: Tensor) -> BlockedTensor:
    """The elements of `axis` at these indices, all in range; a blocked axis is the only one, see `_can_take`."""
    size, block = resized(x, axis, index.numel()), x._blocking.block(axis)
    if block == 1:
        return BlockedTensor(x._physical.index_select(axis, index), x._blocking, size)
    blocks = x._blocking.inner_blks
    padded = torch.nn.functional.pad(index, (0, -index.numel() % block))
    padded = padded.view(padded.numel() // block, *blocks)
    within = [padded % math.prod(blocks[i:]) // math.prod(blocks[i + 1 :]) for i in range(len(blocks))]
    # The outer dim beside the inner ones, so that ATen's indexing leaves them there.
    last = -1 - len(blocks)
    physical = x._physical.movedim(axis, last)[(..., padded // block, *within)].movedim(last, axis).contiguous()
    return BlockedTensor(clear_padding(physical, x._blocking, size), x._blocking, size)


def _can_take(x: BlockedTensor, axis: int) -> bool:
    return x._blocking.block(axis) == 1 or x._blocking.axes == (axis,)


def _range(x: BlockedTensor, axis: int) -> Tensor:
    return torch.arange(x.size(axis), device=x.device)


@register(aten.flip.default)
def flip(func: OpOverload, x: BlockedTensor, dims: list[int]) -> Tensor:
    """Axes in reverse order."""
    axes = [canonicalize_dim(x.dim(), d) for d in dims]
    if len(set(axes)) != len(axes) or not all(_can_take(x, a) for a in axes):
        return fallback(func, x, dims)
    physical = func(x._physical, [a for a in axes if x._blocking.block(a) == 1])
    y = BlockedTensor(physical, x._blocking, x.shape)
    for axis in axes:
        if x._blocking.block(axis) > 1:
            y = _take(y, axis, _range(x, axis).flip(0))
    return y


@register(aten.roll.default)
def roll(func: OpOverload, x: BlockedTensor, shifts: list[int], dims: list[int] = ()) -> Tensor:
    """Axes turned; without `dims` PyTorch turns the flattened tensor."""
    axes = [canonicalize_dim(x.dim(), d) for d in dims]
    if not axes or len(shifts) != len(axes) or not x.numel() or not all(_can_take(x, a) for a in axes):
        return fallback(func, x, shifts, dims)
    y = x
    for shift, axis in zip(shifts, axes, strict=True):
        if x._blocking.block(axis) > 1:
            y = _take(y, axis, _range(x, axis).roll(shift))
        else:
            y = BlockedTensor(func(y._physical, [shift], [axis]), x._blocking, x.shape)
    return y


@register(aten.repeat.default)
def repeat(func: OpOverload, x: BlockedTensor, repeats: list[int]) -> Tensor:
    """Copies side by side, and along new leading axes (`tile` too)."""
    new = len(repeats) - x.dim()
    repeated = [a for a in x._blocking.axes if new >= 0 and repeats[new + a] != 1]
    if new < 0 or min(repeats, default=0) < 0 or not all(_can_take(x, a) for a in repeated):
        return fallback(func, x, repeats)
    for axis in repeated:
        x = _take(x, axis, _range(x, axis).repeat(repeats[new + axis]))
    size = tuple(n * r for n, r in zip([1] * new + list(x.shape), repeats, strict=True))
    size = tuple(x.size(d - new) if d - new in repeated else n for d, n in enumerate(size))
    outer = [1 if d - new in repeated else r for d, r in enumerate(repeats)]
    physical = func(x._physical, [*outer, *[1] * len(x._blocking)])
    return BlockedTensor(physical, shifted(x._blocking, {d: d + new for d in range(x.dim())}), size)


@register(aten.expand.default)
def expand(func: OpOverload, x: BlockedTensor, size: list[int], *, implicit: bool = False) -> Tensor:
    """Axes of one repeated and new leading ones: a view, plain where a blocked axis is repeated."""
    new = len(size) - x.dim()
    wide = [n if s == -1 else s for n, s in zip([-1] * new + list(x.shape), size, strict=True)] if new >= 0 else []
    if new < 0 or any(s < 0 for s in wide) or any(n not in (1, s) for n, s in zip(x.shape, wide[new:], strict=True)):
        return fallback(func, x, size, implicit=implicit)  # PyTorch says what is wrong
    repeated = [a for a in x._blocking.axes if wide[new + a] != x.size(a)]
    if not repeated:
        # A blocked axis keeps its physical size, one that is not has the logical size.
        outer = [-1 if d in x._blocking.axes else wide[new + d] for d in range(x.dim())]
        physical = func(x._physical, [*wide[:new], *outer, *[-1] * len(x._blocking)])
        return BlockedTensor(physical, shifted(x._blocking, {d: d + new for d in range(x.dim())}), tuple(wide))
    if len(x._blocking) > 1:
        return fallback(func, x, size, implicit=implicit)
    counting.record_left()
    return func(x._physical.select(-1, 0), wide)


# ---- Padding


@register(aten.constant_pad_nd.default)
def constant_pad(func: OpOverload, x: BlockedTensor, pad: list[int], value: float = 0) -> Tensor:
    """Along any axis, a negative number cuts; along a blocked one zeros at its end."""
    ndim, blocking = x.dim(), x._blocking
    if len(pad) % 2 or len(pad) > 2 * ndim:
        return fallback(func, x, pad, value)  # PyTorch says what is wrong
    before, after = [0] * ndim, [0] * ndim
    for i in range(len(pad) // 2):
        before[ndim - 1 - i], after[ndim - 1 - i] = pad[2 * i], pad[2 * i + 1]
    size = tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True))
    if any(n < 0 for n in size) or any(before[a] or (after[a] > 0 and value) for a in blocking.axes):
        return fallback(func, x, pad, value)
    for a in blocking.axes:
        after[a] = blocking.outer(size)[a] - x._physical.size(a)
    physical_pad = [0, 0] * len(blocking) + [n for d in reversed(range(ndim)) for n in (before[d], after[d])]
    physical = func(x._physical, physical_pad, value)
    return BlockedTensor(clear_padding(physical, blocking, size), blocking, size)


def _reflected(n: int, before: int, after: int) -> Tensor | None:
    i = torch.arange(-before, n + after)
    return n - 1 - (n - 1 - i.abs()).abs() if max(before, after) < n else None


def _replicated(n: int, before: int, after: int) -> Tensor | None:
    return torch.arange(-before, n + after).clamp(0, n - 1) if n else None


# (length, elements before, elements after) -> the indices along a padded axis; None where PyTorch refuses.
_PADDED = {"reflection": _reflected, "replication": _replicated}


def _padded_axes(func: OpOverload, size: list[int], padding: list[int], blocking: Blocking) -> list | None:
    """Each padded axis and the indices along it; None where PyTorch says what is wrong, or an axis is blocked."""
    name, spatial = func._schema.name.removeprefix("aten::").partition("_pad")[::2]
    spatial, ndim = int(spatial[0]), len(size)
    if ndim not in (spatial + 1, spatial + 2) or len(padding) != 2 * spatial or min(padding) < 0 or 0 in size:
        return None
    axes = [(ndim - 1 - i, _PADDED[name](size[ndim - 1 - i], *padding[2 * i : 2 * i + 2])) for i in range(spatial)]
    return None if any(index is None or blocking.block(axis) > 1 for axis, index in axes) else axes


_PADS = [getattr(aten, f"{mode}_pad{d}d") for mode in _PADDED for d in (1, 2, 3)]
_PAD_GRADIENTS = [getattr(aten, f"{mode}_pad{d}d_backward") for mode in _PADDED for d in (1, 2, 3)]


@register(*(packet.default for packet in _PADS))
def pad_from_itself(func: OpOverload, x: BlockedTensor, padding: list[int]) -> Tensor:
    """Reflected at the borders, or these repeated: over axes that are not blocked."""
    axes = _padded_axes(func, x.shape, padding, x._blocking)
    if axes is None or x.dtype == torch.bool:
        return fallback(func, x, padding)
    for axis, index in axes:
        x = _take(x, axis, index.to(x.device))
    return x


@register(*(packet.default for packet in _PAD_GRADIENTS))
def pad_from_itself_backward(func: OpOverload, grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """Each element's gradient is the sum of its copies'."""
    blocking = lead((x, grad))._blocking
    axes = _padded_axes(func, x.shape, padding, blocking) if x.dim() == grad.dim() else None
    if axes is None or any(grad.size(axis) != index.numel() for axis, index in axes):
        return fallback(func, grad, x, padding)
    physical = reorder.to_blocking(grad, blocking)
    for axis, index in axes:
        zeros = physical.new_zeros(resized(physical, axis, x.size(axis)))
        physical = zeros.index_add_(axis, index.to(x.device), physical)
    return BlockedTensor(physical, blocking, x.shape)


# ---- Indices


def _is_index(index: Tensor) -> bool:
    return index.dim() == 1 and index.dtype in (torch.int64, torch.int32)


@register(aten.index_select.default)
def index_select(func: OpOverload, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Along an axis that is not blocked."""
    axis, index = canonicalize_dim(x.dim(), dim), reorder.to_plain(index)
    if not isinstance(x, BlockedTensor):
        return func(x, dim, index)
    if not _is_index(index) or x._blocking.block(axis) > 1:
        return fallback(func, x, dim, index)
    return _take(x, axis, index)


def _only_index(x: Tensor, indices: list[Tensor | None]) -> tuple[int, Tensor] | None:
    """The axis and the list of indices or bools along it, where that is all there is."""
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    fits = len(indices) <= x.dim() and len(given) == 1 and given[0][1].dim() == 1
    return (given[0][0], reorder.to_plain(given[0][1])) if fits else None


@register(aten.index.Tensor)
def index(func: OpOverload, x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """One list of indices, or of bools, along an axis that is not blocked."""
    given = _only_index(x, indices) if isinstance(x, BlockedTensor) else None
    if given is None or x._blocking.block(given[0]) > 1:
        return fallback(func, x, indices)
    axis, values = given
    physical = func(x._physical, [*[None] * axis, values])
    return BlockedTensor(physical, x._blocking, resized(x, axis, physical.size(axis)))


@register(aten.index_add.default, aten.index_copy.default)
def index_add(func: OpOverload, x: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: object) -> Tensor:
    """Along an axis that is not blocked; the answer is blocked as the first blocked argument."""
    first, axis = lead((x, source, index)), canonicalize_dim(x.dim(), dim)
    index = reorder.to_plain(index)
    if not _is_index(index) or not _fit_outside(axis, (x, source), first):
        return fallback(func, x, dim, index, source, **kwargs)
    blocking = first._blocking
    physical = func(reorder.to_blocking(x, blocking), axis, index, reorder.to_blocking(source, blocking), **kwargs)
    if kwargs:  # an infinite factor makes NaN of zero
        clear_padding(physical, blocking, x.shape)
    return BlockedTensor(physical, blocking, x.shape)


@register(aten.index_add_.default, aten.index_copy_.default)
def index_add_(func: OpOverload, x: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: object) -> Tensor:
    """In place; x keeps its format."""
    index, axis = reorder.to_plain(index), canonicalize_dim(x.dim(), dim)
    if not isinstance(x, BlockedTensor):
        return func(x, dim, index, reorder.to_plain(source), **kwargs)
    if not _is_index(index) or not _fit_outside(axis, (x, source), x):
        return fallback(func, x, dim, index, source, **kwargs)
    func(x._physical, axis, index, reorder.to_blocking(source, x._blocking), **kwargs)
    if kwargs:
        clear_padding(x._physical, x._blocking, x.shape)
    bump_version(x)
    return x


@register(aten.index_put.default)
def index_put(
    func: OpOverload, x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """As `index`, of values as large as what is written to."""
    given, first = _only_index(x, indices), lead((x, values))
    if given is None or first is None or given[1].dtype == torch.bool:
        return fallback(func, x, indices, values, accumulate)
    (axis, at), blocking = given, first._blocking
    if not _fit_outside(axis, (x, values), first) or values.size(axis) != at.numel():
        return fallback(func, x, indices, values, accumulate)
    operands = reorder.to_blocking(x, blocking), [*[None] * axis, at], reorder.to_blocking(values, blocking)
    return BlockedTensor(func(*operands, accumulate), blocking, x.shape)


def _fit_outside(axis: int, tensors: tuple[Tensor, ...], first: BlockedTensor) -> bool:
    """Whether the tensors are of one size but along `axis`, which is not blocked."""
    return first._blocking.block(axis) == 1 and agree_outside(axis, (first, *tensors))


@register(
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
def gather(func: OpOverload, x: Tensor, dim: int, index: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Along an axis that is not blocked, where the index is as large as the tensors along all others."""
    tensors = tuple(t for t in (x, index, *args) if isinstance(t, Tensor))
    first, axis = lead(tensors), canonicalize_dim(x.dim(), dim)
    if index.dtype != torch.int64 or not _fit_outside(axis, tensors, first):
        return fallback(func, x, dim, index, *args, **kwargs)
    blocking = first._blocking
    rest = [reorder.to_blocking(a, blocking) if isinstance(a, Tensor) else a for a in args]
    physical = func(reorder.to_blocking(x, blocking), axis, reorder.to_blocking(index, blocking), *rest, **kwargs)
    size = index.shape if func is aten.gather.default else x.shape
    return BlockedTensor(clear_padding(physical, blocking, size), blocking, size)


# ---- Triangles


@register(aten.tril.default, aten.triu.default)
def triangle(func: OpOverload, x: BlockedTensor, diagonal: int = 0) -> Tensor:
    """Of matrices over the last two axes, neither blocked."""
    ndim = x.dim()
    if ndim < 2 or max(x._blocking.axes) > ndim - 3:
        return fallback(func, x, diagonal)
    gone = ~func(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), diagonal)
    physical = x._physical.masked_fill(gone[(..., *[None] * len(x._blocking))], 0)
    return BlockedTensor(physical, x._blocking, x.shape)


# ---- Gradients of views: zeros, but for the gradient in its place


def _zeros_around(
    grad: BlockedTensor, blocking: Blocking, size: list[int], place: Callable[[Tensor], Tensor]
) -> Tensor:
    physical = grad._physical.new_zeros(blocking.physical_shape(tuple(size)))
    place(physical).copy_(grad._physical)
    return BlockedTensor(physical, blocking, tuple(size))


@register(aten.select_backward.default)
def select_backward(func: OpOverload, grad: BlockedTensor, input_sizes: list[int], dim: int, index: int) -> Tensor:
    """Of `select` along an axis that is not blocked; along a blocked one the gradient is plain."""
    axis = canonicalize_dim(len(input_sizes), dim)
    if (*input_sizes[:axis], *input_sizes[axis + 1 :]) != grad.shape:
        return fallback(func, grad, input_sizes, dim, index)  # PyTorch says what is wrong
    blocking = shifted(grad._blocking, {d: d + (d >= axis) for d in range(grad.dim())})
    return _zeros_around(grad, blocking, input_sizes, lambda physical: physical.select(axis, index))


@register(aten.slice_backward.default)
def slice_backward(
    func: OpOverload, grad: BlockedTensor, input_sizes: list[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """Of `slice` along an axis that is not blocked, or at block borders."""
    axis = canonicalize_dim(len(input_sizes), dim)
    whole = torch.empty(input_sizes, device="meta")
    within = block_range(input_sizes[axis], grad._blocking.block(axis), start, end, step)
    if within is None or aten.slice.Tensor(whole, axis, start, end, step).shape != grad.shape:
        return fallback(func, grad, input_sizes, dim, start, end, step)
    return _zeros_around(
        grad, grad._blocking, input_sizes, lambda physical: aten.slice.Tensor(physical, axis, *within, step)
    )


@register(aten.diagonal_backward.default)
def diagonal_backward(
    func: OpOverload, grad: BlockedTensor, input_sizes: list[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    """Of `diagonal` over two axes that are not blocked."""
    ndim = len(input_sizes)
    axes = [canonicalize_dim(ndim, d) for d in (dim1, dim2)]
    kept = [d for d in range(ndim) if d not in axes]
    if grad.dim() - 1 in grad._blocking.axes or [input_sizes[d] for d in kept] != list(grad.shape[:-1]):
        return fallback(func, grad, input_sizes, offset, dim1, dim2)
    blocking = shifted(grad._blocking, dict(enumerate(kept)))

    def place(physical: Tensor) -> Tensor:
        return physical.diagonal(offset, *axes).movedim(-1, ndim - 2)

    return _zeros_around(grad, blocking, input_sizes, place)
