"""What handlers share: operands laid out for the physical tensor, its dims reduced, and the padding kept zero."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import reorder
from torch_blocked.memory_desc import Blocking
from torch_blocked.physical import padding_of, same_size
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def clear_padding(physical: Tensor, blocking: Blocking, size: torch.Size) -> Tensor:
    """Zeroes the padding of a physical tensor of logical size `size` and returns it."""
    for part in padding_of(physical, blocking, size):
        part.zero_()
    return physical


def fill_padding(x: BlockedTensor, axes: list[int], value: object) -> Tensor:
    """The physical tensor with `value` in its padding, a copy, where one of `axes` is padded; as it is elsewhere."""
    if not any(x.size(a) % x._blocking.block(a) for a in axes):
        return x._physical
    physical = x._physical.clone()
    for part in padding_of(physical, x._blocking, x.shape):
        part.fill_(value)
    return physical


def physical_dims(x: BlockedTensor, axes: list[int]) -> list[int]:
    """The dims of the physical tensor that hold the axes: theirs, and their inner blocks."""
    return [*axes, *(x.dim() + i for i, a in enumerate(x._blocking.inner_idxs) if a in axes)]


def accurate(dtype: torch.dtype) -> torch.dtype:
    """What ATen accumulates elements of this dtype in, in float32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Over several axes the same as over one after another.
_IN_TURN = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}
_WORTH_TURNS = 1 << 15  # elements: of fewer, more calls cost more than they save


def over_dims(op: OpOverload, physical: Tensor, dims: list[int], **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """`op` of a physical tensor over `dims`, which are kept with one element.

    ATen's loops over one dim are several times faster, and most so where what is kept lies side by side. So dims that
    follow each other in memory are one, and where they are not the last, the operators of `_IN_TURN` take one dim after
    another, outer ones first. Traced, one operator fuses better; in half precision each of several would round.
    """
    first, last = dims[0], dims[-1]
    neighbours = len(dims) == last - first + 1 > 1
    merge = neighbours and all(physical.stride(d) == physical.size(d + 1) * physical.stride(d + 1) for d in dims[:-1])
    one_run = len(dims) == 1 or (merge and last == physical.dim() - 1)
    in_turn = op in _IN_TURN and not one_run and type(physical) is Tensor and physical.numel() >= _WORTH_TURNS
    dtype = kwargs.get("dtype") or physical.dtype
    if in_turn and accurate(dtype) == dtype:
        for d in [d for d in dims if physical.size(d) > 1] or dims[:1]:
            physical = op(physical, [d], True, **kwargs)
        return physical
    if not merge:
        return op(physical, dim=dims, keepdim=True, **kwargs)
    reduced = op(physical.flatten(first, last), dim=[first], keepdim=True, **kwargs)
    kept = (1,) * len(dims)
    if isinstance(reduced, Tensor):
        return reduced.unflatten(first, kept)
    return tuple(part.unflatten(first, kept) for part in reduced)


def bound(func: OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments by name, without those left out."""
    return dict(zip(_names(func), args, strict=False)) | kwargs


@functools.cache
def _names(func: OpOverload) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments)


def broadcasts_to(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a tensor of this shape is one of shape `whole` by broadcasting."""
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(whole), strict=False))


def is_expanded(x: Tensor, axis: int) -> bool:
    """Whether a plain tensor's elements along an axis are one in memory, as after ``expand``; False for traced ones."""
    strided = type(x) is Tensor and x.layout is torch.strided and axis >= 0
    return strided and x.size(axis) > 1 and x.stride(axis) == 0


def operand(x: object, blocking: Blocking, size: torch.Size) -> object:
    """An argument of a pointwise operator, laid out to broadcast against the physical tensor of `size` and `blocking`.

    Scalars and tensors of no dims pass. Along a blocked axis a tensor of one element broadcasts over the outer dim and
    the inner blocks; any other is brought to the blocking.
    """
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    blocked = isinstance(x, BlockedTensor)
    if blocked and x._blocking == blocking and same_size(x.shape, size):
        return x._physical
    ndim = len(size)
    shift = ndim - x.dim()
    axes = [a - shift for a in blocking.axes]  # of x; negative where it has no such dim
    for a in axes:
        x = x.narrow(a, 0, 1) if is_expanded(x, a) else x
    kept = [a for a in axes if a >= 0 and x.size(a) == size[a + shift]]
    own = Blocking(tuple((a - shift, b) for a, b in blocking if a - shift in kept))
    if own:
        physical = reorder.to_blocking(x, own)
    else:
        physical = reorder.to_plain(x)
    # Leading dims of one, and inner blocks of one for the axes that broadcast.
    shape = [1] * shift + list(physical.shape[: x.dim()])
    inner = iter(physical.shape[x.dim() :])
    shape += [next(inner) if a - shift in kept else 1 for a, _ in blocking]
    return physical.reshape(shape)


def are_alike(args: tuple) -> bool:
    """Whether the first argument and all tensors among the others are blocked alike and of one size."""
    first = args[0]
    if not isinstance(first, BlockedTensor):
        return False
    blocking, size = first._blocking, first.shape
    for x in args[1:]:
        if isinstance(x, Tensor) and not (
            isinstance(x, BlockedTensor) and x._blocking == blocking and (x is first or same_size(x.shape, size))
        ):
            return False
    return True


def lead(args: tuple) -> BlockedTensor:
    """The argument whose blocking the answer takes: the first blocked one of the highest rank."""
    best = None
    for x in args:
        if isinstance(x, BlockedTensor) and (best is None or x.dim() > best.dim()):
            best = x
    return best


def shifted(blocking: Blocking, mapping: dict[int, int]) -> Blocking:
    """The blocking with its axes renumbered."""
    return Blocking(tuple((mapping[axis], block) for axis, block in blocking))


def resized(x: Tensor, axis: int, n: int) -> tuple[int, ...]:
    """The size of `x` with `n` along one axis."""
    return (*x.shape[:axis], n, *x.shape[axis + 1 :])


def agree_outside(axis: int, tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have as many axes and, but along this one, the same sizes, symbolic ones too."""
    first = tensors[0]
    return all(x.dim() == first.dim() and resized(x, axis, 0) == resized(first, axis, 0) for x in tensors)


def block_range(
    n: int, block: int, start: int | None, end: int | None, step: int
) -> tuple[int | None, int | None] | None:
    """The range start:end:step of `n` indices as one of blocks; None where it is empty or cuts one."""
    if block == 1:
        return start, end
    begin, stop, _ = slice(start, end).indices(n)
    if step != 1 or begin >= stop or begin % block or (stop % block and stop != n):
        return None
    return begin // block, -(-stop // block)
