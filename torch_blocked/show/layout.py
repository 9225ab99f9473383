"""What a picture of a memory descriptor shows, before it is drawn: which elements, in which order, where.

Every position comes from `MemoryDesc.offset`. Nothing here knows of lines or pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_blocked.memory_desc import Dims, MemoryDesc

MAX_CELLS = 640  # elements drawn, padding included: two images of 16 channels of 5x4, as in oneDNN's guide
MAX_CUT = 32  # along one axis, where not all are drawn
MAX_MARKS = 640  # ticks along one axis, in the picture of the strides
MAX_ROW = 112  # characters in a row of a plane
MAX_GAP = 4  # longer gaps are drawn this wide, with their length


class Cell(NamedTuple):
    """One element, or one of padding."""

    index: Dims  # the logical index; beyond dims where it is padding
    offset: int
    padding: bool


class Gap(NamedTuple):
    """Positions that hold no element."""

    offset: int  # of the first one
    length: int


def width_of(item: Cell | Gap) -> int:
    """The width in the memory strip, in cells."""
    return min(item.length, MAX_GAP) if isinstance(item, Gap) else 1


def _in_order(index: dict[int, int]) -> Dims:
    return tuple(index[d] for d in range(len(index)))


class Plane(NamedTuple):
    """The elements that share all indices but two: H x W of one (n, c)."""

    name: str  # the shared indices, and of a part of a plane its columns
    rows: list[list[Cell]]


class Table(NamedTuple):
    """All elements: one axis downwards, all others to the right, in the order of memory."""

    axis: int | None  # the one downwards; None for a tensor of one axis, which is one row
    others: list[int]  # the axes to the right, but those of size 1
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Layout:
    """The drawn part of a descriptor with blocked format (plain ones included) and at least one axis.

    Attributes: `desc`; `letters`, the name of each axis; `name`, what the format is called.
    """

    desc: MemoryDesc
    letters: str
    name: str

    # ---- what is drawn

    @cached_property
    def kept(self) -> tuple[Dims, ...]:
        """The indices of each axis that are drawn, of its padded size. All, or as many as MAX_CELLS allows.

        The outermost axes in memory are cut first, between blocks. A cut axis with padding keeps its last block.
        """
        desc, sizes = self.desc, list(self.desc.padded_dims)
        if math.prod(sizes) > MAX_CELLS:
            sizes = [min(n, MAX_CUT) for n in sizes]
            columns = self.plane_axes[1]
            sizes[columns] = min(sizes[columns], self.plane_columns)
        blocks = desc.blocking.blocks(desc.ndim)
        padded = [n < padded for n, padded in zip(desc.dims, desc.padded_dims, strict=True)]
        two_if_padded = [b + b * p for b, p in zip(blocks, padded, strict=True)]
        for least in (two_if_padded, blocks, (1,) * desc.ndim):  # the next only where too much is left
            for d in sorted(range(desc.ndim), key=lambda d: -desc.strides[d]):
                volume = math.prod(sizes)
                if volume > MAX_CELLS:
                    fit = MAX_CELLS * sizes[d] // volume
                    sizes[d] = min(sizes[d], max(fit // blocks[d] * blocks[d], least[d]))
        return tuple(map(self._indices, range(desc.ndim), sizes))

    def _indices(self, axis: int, count: int) -> Dims:
        n, padded, block = self.desc.dims[axis], self.desc.padded_dims[axis], self.desc.blocking.block(axis)
        tail = block if count < padded and n < padded and count > block else 0
        return (*range(count - tail), *range(padded - tail, padded))

    @cached_property
    def drawn(self) -> list[Cell]:
        """The drawn elements, padding included, by ascending offset."""
        return sorted(map(self.cell, itertools.product(*self.kept)), key=lambda cell: (cell.offset, cell.index))

    def cell(self, index: Dims) -> Cell:
        padding = any(i >= n for i, n in zip(index, self.desc.dims, strict=True))
        return Cell(index, self.desc.offset(index), padding)

    @property
    def empty(self) -> bool:
        """Whether there is no element."""
        return 0 in self.desc.dims

    @cached_property
    def digits(self) -> int:
        """The length of the largest offset that is drawn."""
        return len(str(self.end))

    @cached_property
    def end(self) -> int:
        """The largest offset that is drawn, in the planes or in the strip."""
        return max(self.drawn[-1].offset, *(cell.offset for cell in self.memory))

    def index_name(self, index: Dims, axes: Sequence[int] | None = None) -> str:
        """An index with its letters, ``n0 c3 h0 w1``; `axes` says whose it is, if not all axes'."""
        return " ".join(self.index_names(index, range(self.desc.ndim) if axes is None else axes))

    def index_names(self, index: Dims, axes: Sequence[int]) -> list[str]:
        return [f"{self.letters[d]}{i}" for d, i in zip(axes, index, strict=True)]

    @property
    def left_out(self) -> str:
        """What the planes and the table leave out, in words; empty if nothing."""
        whole = self.desc.padded_dims
        cut = [
            f"{len(kept)} of {n} along {letter}"
            for kept, n, letter in zip(self.kept, whole, self.letters, strict=True)
            if len(kept) < n
        ]
        if not cut:
            return ""
        total, drawn, padding = math.prod(whole), len(self.drawn), ", padding included" * self.padded
        return f"Drawn: {', '.join(cut)}; {drawn} of {total} elements{padding}, {total - drawn} left out."

    # ---- the planes

    @property
    def plane_axes(self) -> tuple[int | None, int]:
        """The axes downwards and to the right: the two blocked ones, of weights; else the last two, or the only one."""
        axes, ndim = self.desc.blocking.axes, self.desc.ndim
        return axes if len(axes) == 2 else (ndim - 2 if ndim > 1 else None, ndim - 1)

    @property
    def plane_columns(self) -> int:
        """How many columns of a plane fit side by side, in whole blocks if one fits."""
        fit, block = MAX_ROW // (len(str(self.last)) + 1 + self.padded), self.desc.blocking.block(self.plane_axes[1])
        return max(1, fit // block * block or fit)

    @property
    def leading(self) -> list[int]:
        """The other axes: a plane for each of their indices."""
        return [d for d in range(self.desc.ndim) if d not in self.plane_axes]

    def planes(self) -> list[Plane]:
        """The drawn elements as planes, wide ones in parts; a tensor of one axis is one plane of one row."""
        rows, columns = self.plane_axes
        starts = range(0, len(self.kept[columns]), self.plane_columns)
        parts = [self.kept[columns][start : start + self.plane_columns] for start in starts]
        planes = []
        for shared in itertools.product(*(self.kept[d] for d in self.leading)):
            index = dict(zip(self.leading, shared, strict=True))
            tops = [index] if rows is None else [index | {rows: i} for i in self.kept[rows]]
            for part in parts:
                cells = [[self.cell(_in_order(top | {columns: i})) for i in part] for top in tops]
                where = [f"{self.letters[columns]}{part[0]}-{part[-1]}"] * (len(parts) > 1)
                planes.append(Plane(" ".join([*self.index_names(shared, self.leading), *where]), cells))
        return planes

    def groups(self, fit: int) -> list[range]:
        """The numbers of the planes in each row of a picture, where `fit` of them fit side by side.

        A row starts where the last of their axes does, or one of its blocks.
        """
        parts = -(-len(self.kept[self.plane_axes[1]]) // self.plane_columns)
        counts = [*(len(self.kept[d]) for d in self.leading), *([parts] if parts > 1 else [])] or [1]
        total, n, fit = math.prod(counts), counts[-1], max(fit, 1)
        if n <= fit:  # several together in a row
            per_row, unit = fit // n * n, total
        else:  # several rows for each
            block = self.desc.blocking.block(self.leading[-1]) if parts == 1 else 1
            block = block if block > 1 else n
            divisor = max(d for d in range(1, fit + 1) if block % d == 0)
            per_row, unit = fit // block * block or (divisor if 2 * divisor > fit else fit), n
        return [
            range(start, min(start + per_row, first + unit))
            for first in range(0, total, unit)
            for start in range(first, first + unit, per_row)
        ]

    # ---- the table in memory order

    def table(self) -> Table:
        """The drawn elements, the first blocked axis (else the channels) downwards."""
        ndim, channels = self.desc.ndim, int(self.desc.ndim > 2)
        longer = (d for d in range(channels, ndim - 1) if self.desc.dims[d] > 1)
        axis = None if ndim == 1 else min(self.desc.blocking.inner_idxs, default=next(longer, channels))
        others = [d for d in range(ndim) if d != axis and self.desc.padded_dims[d] > 1]
        columns = sorted(
            itertools.product(*(kept[:1] if d == axis else kept for d, kept in enumerate(self.kept))),
            key=lambda index: (self.desc.offset(index), index),
        )
        rows = [columns]
        if axis is not None:
            rows = [[(*index[:axis], i, *index[axis + 1 :]) for index in columns] for i in self.kept[axis]]
        return Table(axis, others, [list(map(self.cell, row)) for row in rows])

    # ---- the memory strip

    @property
    def fastest(self) -> int:
        """The axis along which neighbours in memory differ."""
        desc = self.desc
        if desc.blocking:
            return desc.blocking.inner_idxs[-1]
        outer = [d for d in range(desc.ndim) if desc.dims[d] > 1 and desc.strides[d]]
        return min(outer, key=desc.strides.__getitem__, default=desc.ndim - 1)

    @property
    def run(self) -> int:
        """The number of elements after which memory starts anew: an inner block; of a plain format the fastest axis."""
        return self.desc.blocking.inner_numel if self.desc.blocking else self.desc.dims[self.fastest]

    @cached_property
    def memory(self) -> list[Cell]:
        """The first MAX_CELLS elements by ascending offset; of elements at one position (stride 0) the first."""
        desc, digits = self.desc, self.memory_shape
        axes = sorted(range(desc.ndim), key=lambda d: -desc.strides[d])
        # No digit passes the limit among so many elements, and `product` holds its ranges in memory.
        places = itertools.product(*(range(min(digits[d], MAX_CELLS)) for d in [*axes, *range(desc.ndim, len(digits))]))
        return [self._cell_at(axes, place) for place in itertools.islice(places, MAX_CELLS)]

    @property
    def memory_shape(self) -> Dims:
        """The number of different positions along each outer axis, then the inner blocks."""
        outer = self.desc.blocking.outer(self.desc.dims)
        return (*(1 if self.shared(d) else n for d, n in enumerate(outer)), *self.desc.inner_blks)

    def _cell_at(self, axes: list[int], place: Dims) -> Cell:
        """The element of the outer indices along `axes`, which lead `place`, and of the inner ones, which follow."""
        index = [0] * len(axes)
        for axis, outer in zip(axes, place[: len(axes)], strict=True):
            index[axis] = outer
        for (axis, size), inner in zip(self.desc.blocking, place[len(axes) :], strict=True):
            index[axis] = index[axis] * size + inner
        return self.cell(tuple(index))

    def strip(self, per_row: int) -> list[list[Cell | Gap]]:
        """The first MAX_CELLS elements and the gaps between them, in rows `per_row` wide that start where runs do."""
        rows, filled, expected = [[]], 0, self.desc.offset0
        for i, cell in enumerate(self.memory):
            items = [Gap(expected, cell.offset - expected), cell] if cell.offset > expected else [cell]
            width = sum(map(width_of, items))
            rest_of_run = min(self.run, per_row) - 1 if i % self.run == 0 else 0
            if filled and filled + width + rest_of_run > per_row:
                rows.append([])
                filled = 0
            rows[-1] += items
            filled, expected = filled + width, cell.offset + 1
        return rows

    @property
    def positions(self) -> int:
        """The number of positions that hold an element."""
        return math.prod(self.memory_shape)

    @property
    def padded(self) -> bool:
        """Whether there is padding."""
        return self.desc.dims != self.desc.padded_dims

    def shared(self, axis: int) -> bool:
        """Whether `axis` is expanded: of stride 0, so that its elements (or its blocks) lie at the same positions."""
        return self.desc.strides[axis] == 0 and self.desc.blocking.outer(self.desc.dims)[axis] > 1

    @property
    def last(self) -> int:
        """The last position that holds an element."""
        return self.desc.offset(tuple(n - 1 for n in self.desc.padded_dims))

    @property
    def gaps(self) -> bool:
        """Whether the strip has gaps."""
        return self.memory[-1].offset - self.memory[0].offset >= len(self.memory)

    @cached_property
    def strip_digits(self) -> int:
        """The length of the largest number in the strip."""
        return len(str(max(cell.index[self.fastest] for cell in self.memory)))

    def run_number(self, index: Dims) -> int:
        """A number that differs by one between neighbouring runs, along whichever axis."""
        blocking, fastest = self.desc.blocking, self.fastest
        return sum(i // blocking.block(d) for d, i in enumerate(index) if blocking or d != fastest)

    # ---- the strides

    def marks(self, axis: int) -> list[int]:
        """The positions of the first MAX_MARKS elements along `axis`, all other indices 0."""
        index = [0] * self.desc.ndim
        positions = []
        for i in range(min(self.desc.padded_dims[axis], MAX_MARKS)):
            index[axis] = i
            positions.append(self.desc.offset(tuple(index)))
        return positions

    def stride(self, axis: int) -> str:
        """The stride of `axis` in words."""
        block, stride = self.desc.blocking.block(axis), self.desc.strides[axis]
        return f"{stride} a block of {block}" if block > 1 else str(stride)
