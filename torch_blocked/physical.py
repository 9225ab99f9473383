"""Physical tensors, the plain ones of a blocked tensor's bytes: their order in memory, their padding, and how the axes
of a plain tensor split into blocks and merge again."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torch_blocked.memory_desc import Blocking


def same_size(a: torch.Size, b: torch.Size) -> bool:
    """Whether two sizes are equal. Of their ranks first: what is compared of symbolic ones becomes a guard."""
    return len(a) == len(b) and a == b


def lies_in_order(physical: Tensor, order: tuple[int, ...]) -> bool:
    """Whether the outer axes lie in memory as `order` says; axes of one element lie anywhere."""
    strides = [physical.stride(d) for d in order if physical.size(d) != 1]
    return all(a >= b for a, b in itertools.pairwise(strides))


def outer_order(physical: Tensor, ndim: int) -> tuple[int, ...]:
    """The outer axes from outermost to innermost in memory; the logical order wherever the strides allow it."""
    stride, size = physical.stride(), physical.shape
    told = [stride[d] for d in range(ndim) if size[d] != 1]
    if all(a >= b for a, b in itertools.pairwise(told)):
        return tuple(range(ndim))
    return tuple(sorted(range(ndim), key=lambda d: (-stride[d], size[d] <= 1)))


def inner_is_dense(physical: Tensor, blocking: Blocking) -> bool:
    expected = 1
    for size, stride in zip(reversed(physical.shape), reversed(physical.stride()[-len(blocking) :]), strict=False):
        if stride != expected:
            return False
        expected *= size
    return True


def padding_of(physical: Tensor, blocking: Blocking, size: torch.Size) -> list[Tensor]:
    """Views that cover the padding of a physical tensor of logical size `size`.

    The last block of an axis is cut at its size: all inner blocks beyond the cut are padding and, where the axis is
    split again, so is the rest of the block that the cut lies in.
    """
    parts = []
    for axis in blocking.axes:
        below, rest = blocking.block(axis), size[axis] % blocking.block(axis)
        if not rest:
            continue
        last = physical.select(axis, physical.size(axis) - 1)
        for i in (i for i, a in enumerate(blocking.inner_idxs) if a == axis):
            dim = len(size) - 1 + i  # one less: `axis` is gone
            below //= blocking.inner_blks[i]
            cut, rest = rest // below, rest % below  # not divmod: they may be symbolic
            beyond = cut + (1 if rest else 0)
            parts.append(last.narrow(dim, beyond, last.size(dim) - beyond))
            if not rest:
                break
            last = last.narrow(dim, cut, 1)
    return parts


def split_axes(x: Tensor, blocking: Blocking) -> Tensor | None:
    """The physical view of a plain tensor, each blocked axis split; None where a size is no multiple of its block."""
    size = tuple(x.shape)
    if blocking.padded(size) != size:
        return None
    if x.numel() == 0:
        return x.new_empty(blocking.physical_shape(size))  # its strides would be no format's
    stride = list(x.stride())
    inner_stride = [0] * len(blocking)
    for i in reversed(range(len(blocking))):
        axis, block = blocking[i]
        inner_stride[i] = stride[axis]
        stride[axis] *= block
    return x.as_strided(blocking.physical_shape(size), stride + inner_stride, x.storage_offset())


def merge_axes(physical: Tensor, blocking: Blocking, size: torch.Size) -> Tensor | None:
    """The plain view of a physical tensor's bytes; None where an axis' outer and inner parts do not merge."""
    ndim, stride = len(size), []
    for axis in range(ndim):
        parts = [axis] + [ndim + i for i, a in enumerate(blocking.inner_idxs) if a == axis]
        held = [p for p in parts if physical.size(p) > 1] or parts[-1:]
        for outer, inner in itertools.pairwise(held):
            if physical.stride(outer) != physical.size(inner) * physical.stride(inner):
                return None
        stride.append(physical.stride(held[-1]))
    return physical.as_strided(size, stride, physical.storage_offset())
