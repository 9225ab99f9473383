"""What a picture of a memory descriptor shows, before it is drawn: which elements, in which order, where.

Every position comes from `MemoryDesc.offset`. Nothing here knows of characters or pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_blocked.memory_desc import Dims, MemoryDesc

MAX_CELLS = 640  # elements drawn, padding included: two images of 16 channels of 5x4, as in oneDNN's guide
MAX_ALONG_AXIS = 64
MAX_ROW = 100  # characters in a row of a plane
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


class Plane(NamedTuple):
    """The elements that share all indices but the last two: H x W of one (n, c)."""

    index: Dims  # the shared indices
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
        desc, sizes = self.desc, [min(n, MAX_ALONG_AXIS) for n in self.desc.padded_dims]
        sizes[-1] = min(sizes[-1], max(1, MAX_ROW // (self.digits + 1)))
        outermost_first = sorted(range(desc.ndim), key=lambda d: -desc.strides[d])
        for blocks in (desc.blocking.blocks(desc.ndim), (1,) * desc.ndim):  # whole blocks, or where they are too large, not
            for d in outermost_first:
                volume = math.prod(sizes)
                if volume > MAX_CELLS:
                    fit = MAX_CELLS * sizes[d] // volume // blocks[d] * blocks[d]
                    sizes[d] = min(sizes[d], max(fit, blocks[d]))
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
        """The length of the largest offset."""
        return len(str(self.last))

    def index_name(self, index: Dims, axes: Sequence[int] | None = None) -> str:
        """An index with its letters, ``n0 c3 h0 w1``; `axes` says whose, if not those of the first len(index)."""
        return " ".join(f"{self.letters[d]}{i}" for d, i in zip(axes or range(len(index)), index, strict=True))

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
        total, drawn = math.prod(whole), len(self.drawn)
        return f"Drawn: {', '.join(cut)}; {drawn} of {total} elements, {total - drawn} left out."

    # ---- the planes

    def planes(self) -> list[Plane]:
        """The drawn elements as planes of the last two axes; a tensor of one axis is one plane of one row."""
        *leading, columns = self.kept
        rows = leading.pop() if leading else None
        planes = []
        for index in itertools.product(*leading):
            tops = [index] if rows is None else [(*index, row) for row in rows]
            planes.append(Plane(index, [[self.cell((*top, column)) for column in columns] for top in tops]))
        return planes

    def groups(self, fit: int) -> list[range]:
        """The numbers of the planes in each row of a picture, where `fit` of them fit side by side.

        A row starts where the third axis from the right does, or one of its blocks.
        """
        total, n, fit = math.prod(map(len, self.kept[:-2])), len(self.kept[-3]) if self.desc.ndim > 2 else 1, max(fit, 1)
        if n <= fit:
            per_row, unit = fit // n * n, total
        else:
            block = self.desc.blocking.block(self.desc.ndim - 3)
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
        rows = [columns] if axis is None else [[(*c[:axis], i, *c[axis + 1 :]) for c in columns] for i in self.kept[axis]]
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

    def in_memory_order(self) -> Iterator[Cell]:
        """The first MAX_CELLS elements by ascending offset; of elements at one position (stride 0) the first."""
        desc, limit = self.desc, MAX_CELLS
        outer = [1 if self.shared(d) else n for d, n in enumerate(desc.blocking.outer(desc.dims))]
        axes = sorted(range(desc.ndim), key=lambda d: -desc.strides[d])
        digits = [outer[d] for d in axes] + list(desc.inner_blks)
        # No digit passes the limit within the first `limit` elements, and `product` holds its ranges in memory.
        places = itertools.product(*(range(min(n, limit)) for n in digits))
        for place in itertools.islice(places, limit):
            index = [0] * desc.ndim
            for axis, digit in zip(axes, place[: desc.ndim], strict=True):
                index[axis] = digit
            for (axis, size), digit in zip(desc.blocking, place[desc.ndim :], strict=True):
                index[axis] = index[axis] * size + digit
            yield self.cell(tuple(index))

    def strip(self, per_row: int) -> list[list[Cell | Gap]]:
        """The first MAX_CELLS elements and the gaps between them, in rows `per_row` wide that start where runs do."""
        rows, filled, expected = [[]], 0, self.desc.offset0
        for i, cell in enumerate(self.in_memory_order()):
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
        return math.prod(1 if self.shared(d) else n for d, n in enumerate(self.desc.padded_dims))

    @property
    def padded(self) -> bool:
        """Whether there is padding."""
        return self.desc.dims != self.desc.padded_dims

    def shared(self, axis: int) -> bool:
        """Whether all elements along `axis` lie at one position: an expanded axis, of stride 0."""
        return self.desc.strides[axis] == 0 and self.desc.padded_dims[axis] > 1

    @property
    def last(self) -> int:
        """The last position that holds an element."""
        return self.desc.offset(tuple(n - 1 for n in self.desc.padded_dims))

    @cached_property
    def gaps(self) -> bool:
        """Whether the strip has gaps."""
        cells = list(self.in_memory_order())
        return cells[-1].offset - cells[0].offset >= len(cells)

    @cached_property
    def strip_digits(self) -> int:
        """The length of the largest number in the strip."""
        return len(str(max(cell.index[self.fastest] for cell in self.in_memory_order())))

    def run_number(self, index: Dims) -> int:
        """A number that differs by one between neighbouring runs, along whichever axis."""
        blocking, fastest = self.desc.blocking, self.fastest
        outer = (i // blocking.block(d) for d, i in enumerate(index) if blocking or d != fastest)
        return sum(outer)

    # ---- the strides

    def marks(self, axis: int) -> list[int]:
        """The positions of the first MAX_ALONG_AXIS elements along `axis`, all other indices 0."""
        index = [0] * self.desc.ndim
        positions = []
        for index[axis] in range(min(self.desc.padded_dims[axis], MAX_ALONG_AXIS)):
            positions.append(self.desc.offset(tuple(index)))
        return positions

    def stride(self, axis: int) -> str:
        """The stride of `axis` in words."""
        block, stride = self.desc.blocking.block(axis), self.desc.strides[axis]
        return f"{stride} a block of {block}" if block > 1 else str(stride)
