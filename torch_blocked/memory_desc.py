"""Memory descriptors: where each element of a plain or blocked tensor lies in memory.

A blocked tensor is a strided tensor of higher rank plus the names of its inner axes. ``nChw16c`` over logical dims
(N, C, H, W) is a physical tensor of shape (N, ceil(C / 16), H, W, 16): the outer axes in logical order, then the inner
blocks. Plain formats (``nchw``, ``nhwc``) are the special case without inner blocks.

- ``Blocking``: the inner blocks alone, a tuple of (axis, size).
- ``parse_tag`` and ``tag_name``: the grammar of format tags, a name <-> (order of the outer axes, blocking).
- ``MemoryDesc``: dims, dtype, strides and blocking together. The rules are oneDNN's.

Strides and offsets count elements. Nothing here creates a tensor or reads one's data.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

Dims = tuple[int, ...]
TagOrStrides = str | Dims | None

MAX_NDIMS = 12
INT64_MAX = 2**63 - 1


def _show(value: object) -> str:
    """`value` for an error message: one line, of bounded length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign repr may fail, and so does Python's own for an int of thousands of digits
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _int(name: str, value: object, low: int = 0, high: int = INT64_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {_show(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in {low}..{high}, got {_show(value)}")
    return int(value)


def _ints(name: str, values: object, length: int | None = None) -> Dims:
    """`values` as a tuple of ints in 0..2**63 - 1, of the given length or of at most 12."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a tuple of ints such as (2, 3), got {_show(values)}")
    if len(values) != length and (length is not None or len(values) > MAX_NDIMS):
        expected = f"at most {MAX_NDIMS}" if length is None else f"exactly {length}"
        raise ValueError(f"{name} must have {expected} values, got {len(values)}: {_show(values)}")
    return tuple(_int(f"{name}[{i}]", value) for i, value in enumerate(values))


def _permutation(name: str, values: object, ndim: int | None = None) -> Dims:
    axes = _ints(name, values, ndim)
    if not axes or sorted(axes) != list(range(len(axes))):
        raise ValueError(f"{name} must hold each axis number once, as (0, 2, 3, 1) does, got {_show(axes)}")
    return axes


class Blocking(tuple):
    """The inner blocks of a format: a tuple of (axis, size), outermost block first; empty for plain formats.

    It equals and hashes as that plain tuple. An axis may be blocked more than once: ``OIhw4i16o4i`` is
    ``Blocking(((1, 4), (0, 16), (1, 4)))``. Sizes are at least 2: a block of 1 would give one layout two names.
    The logical sizes handed to `padded`, `outer` and `physical_shape` may be symbolic (`torch.SymInt`).
    """

    inner_blks: Dims  # the block sizes
    inner_idxs: Dims  # the axis of each block
    inner_numel: int  # elements in one full block: the product of inner_blks
    axes: Dims  # the blocked axes, ascending, each once

    def __new__(cls, blocks: tuple[tuple[int, int], ...] = ()) -> Blocking:
        if isinstance(blocks, cls):
            return blocks
        if not isinstance(blocks, (list, tuple)):
            raise TypeError(f"a blocking must be a tuple of (axis, size) pairs, got {_show(blocks)}")
        self = super().__new__(cls, [_ints("an inner block (axis, size)", pair, 2) for pair in blocks])
        for axis, size in self:
            _int("the axis of an inner block", axis, 0, MAX_NDIMS - 1)
            _int("the size of an inner block", size, 2)
        inner_blks, inner_idxs = tuple(size for _, size in self), tuple(axis for axis, _ in self)
        inner_numel = math.prod(inner_blks)
        if len(self) > MAX_NDIMS or inner_numel > INT64_MAX:
            raise ValueError(f"expected at most {MAX_NDIMS} inner blocks of 2**63 - 1 elements, got {_show(blocks)}")
        block_of = {axis: math.prod([size for d, size in self if d == axis]) for axis in sorted(inner_idxs)}
        vars(self).update(inner_blks=inner_blks, inner_idxs=inner_idxs, inner_numel=inner_numel)
        vars(self).update(axes=tuple(block_of), _block_of=block_of)
        return self

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(f"a Blocking is immutable: {name} cannot be set or deleted")

    __delattr__ = __setattr__

    def block(self, axis: int) -> int:
        """The product of the blocks of `axis`; 1 if it is not blocked."""
        return self._block_of.get(axis, 1)

    def blocks(self, ndim: int) -> Dims:
        """`block(axis)` for each of `ndim` axes. ValueError if a blocked axis is not among them."""
        if self and self.axes[-1] >= ndim:
            raise ValueError(f"expected more than {self.axes[-1]} axes for {self}, got {ndim}")
        return tuple(map(self.block, range(ndim)))

    def padded(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """`size` with each axis rounded up to whole blocks."""
        return tuple(n if b == 1 else -(-n // b) * b for n, b in zip(size, self.blocks(len(size)), strict=True))

    def outer(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The number of blocks along each axis; the last one may be partly padding."""
        return tuple(n if b == 1 else -(-n // b) for n, b in zip(size, self.blocks(len(size)), strict=True))

    def physical_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the physical tensor: `outer(size)`, then the inner blocks."""
        return self.outer(size) + self.inner_blks


# Format tags. A tag names the outer axes from outermost to innermost, blocked ones in upper case, then the inner blocks
# as (size, letter) pairs, outermost first. The letters a, b, c, ... are axes 0, 1, 2, ...; other letters number the
# axes in the order of the first family that has them all: ncw is n 0, c 1, w 2.

_CANONICAL = "abcdefghijkl"
_FAMILIES = ("ncdhw", "goidhw", "tnc", "ldnc", "ldigo", "x")

# MegEngine's names. The 4 of CHWN4 is an inner block of the channels too.
_ALIASES = dict(NCHW="nchw", NHWC="nhwc", NCHW4="nChw4c", NCHW32="nChw32c", NCHW64="nChw64c", CHWN4="Chwn4c")

_SPELLINGS = {"canonical": [], "activation": ["nc", "ncw", "nchw", "ncdhw"], "weights": ["oiw", "oihw", "oidhw"]}

_TAG = re.compile(r"([A-Za-z]+)((?:[0-9]{1,19}[A-Za-z])*)")
_PAIR = re.compile(r"([0-9]{1,19})([A-Za-z]?)")


class Tag(NamedTuple):
    """What a format tag says."""

    order: Dims  # the numbers of the outer axes, from outermost to innermost
    blocking: Blocking


def parse_tag(tag: str, ndim: int | None = None) -> Tag:
    """Reads any format tag of the grammar, such as ``nChw16c``, ``acdb`` or ``OIhw4i16o4i``, or a name like ``NCHW32``.

    ValueError, with the nearest right tag where one can be guessed, if it is malformed or does not have `ndim` axes.
    """
    if not isinstance(tag, str):
        raise TypeError(f"a format tag must be a str such as 'nChw16c', got {_show(tag)}")
    return _parse_tag(tag, None if ndim is None else _int("ndim", ndim))


@functools.lru_cache(maxsize=1024)
def _parse_tag(tag: str, ndim: int | None) -> Tag:
    try:
        parsed = _read_tag(tag)
    except ValueError as error:
        raise ValueError(f"format tag {_show(tag)}: {error}{_did_you_mean(_repairs(tag), ndim)}") from None
    if ndim is not None and len(parsed.order) != ndim:
        hint = _did_you_mean([_at_rank(_ALIASES.get(tag, tag), len(parsed.order), ndim)], ndim)
        raise ValueError(f"format tag {_show(tag)} has {len(parsed.order)} axes, expected {ndim}{hint}")
    return parsed


def _read_tag(tag: str) -> Tag:
    match = _TAG.fullmatch(_ALIASES.get(tag, tag))
    if match is None:
        raise ValueError("expected letters, then (size, letter) pairs, as in nchw or nChw16c")
    outer, inner = match.groups()
    axis_of = _axis_numbers(outer.lower())
    for size, letter in _PAIR.findall(inner):
        if letter not in axis_of:
            raise ValueError(f"inner block {size}{letter} must end in the lower-case letter of an outer axis")
        if size.startswith("0"):
            raise ValueError(f"inner block {size}{letter} must have a size of at least 2, without leading zeros")
    for letter in outer:
        if letter.isupper() and letter.lower() not in inner:
            raise ValueError(f"upper-case {letter} needs an inner block such as 16{letter.lower()}")
        if letter in inner:
            raise ValueError(f"axis {letter} has an inner block, so its outer letter must be {letter.upper()}")
    blocking = Blocking(tuple((axis_of[letter], int(size)) for size, letter in _PAIR.findall(inner)))
    return Tag(tuple(axis_of[letter] for letter in outer.lower()), blocking)


def _axis_numbers(letters: str) -> dict[str, int]:
    """The axis number of each of a tag's outer letters, given in lower case."""
    if len(set(letters)) < len(letters):
        raise ValueError("expected each axis once among the outer letters")
    for family in (_CANONICAL[: len(letters)], *_FAMILIES):
        if set(letters) <= set(family):
            return {letter: axis for axis, letter in enumerate(filter(letters.__contains__, family))}
    raise ValueError("expected the letters a, b, c, ... without a gap, or those of ncdhw or goidhw")


def tag_name(order: tuple[int, ...], blocking: tuple[tuple[int, int], ...], spelling: str = "canonical") -> str:
    """The format tag of an order of outer axes and a blocking; the inverse of `parse_tag`.

    `spelling` is "canonical" (``aBcd16b``), "activation" (``nChw16c``: 2 to 5 axes) or "weights" (``OIhw16i16o``: 3 to
    5 axes); other ranks are spelled canonically.
    """
    order, blocking = _permutation("order", order), Blocking(blocking)
    if not isinstance(spelling, str) or spelling not in _SPELLINGS:
        raise ValueError(f"spelling must be one of {', '.join(_SPELLINGS)}, got {_show(spelling)}")
    blocking.blocks(len(order))  # refuses a blocked axis that is not in the order
    letters = next((s for s in _SPELLINGS[spelling] if len(s) == len(order)), _CANONICAL)
    return _spell("".join(letters[d] for d in order), [(size, letters[axis]) for axis, size in blocking])


def _spell(outer: str, pairs: list[tuple[int, str]]) -> str:
    """A tag from its outer letters and (size, letter) inner blocks, upper case where blocked."""
    blocked = {letter for _, letter in pairs}
    return "".join(c.upper() if c in blocked else c for c in outer) + "".join(f"{size}{c}" for size, c in pairs)


def _did_you_mean(candidates: list[str], ndim: int | None) -> str:
    """The end of an error message: those of `candidates` that are tags, of rank `ndim`."""
    good = []
    for tag in dict.fromkeys(candidates):
        with contextlib.suppress(ValueError):
            if ndim in (None, len(_read_tag(tag).order)):
                good.append(tag)
    return f"; did you mean {' or '.join(good)}?" if good else ""


def _repairs(tag: str) -> list[str]:
    """Guesses at what a malformed tag was meant to be: first a blocked one, then a plain one."""
    text = re.sub("[^A-Za-z0-9]", "", tag[:100])
    heads = re.match("[A-Za-z]*", text)[0]
    outer = "".join(dict.fromkeys(heads.lower()))
    upper = [letter.lower() for letter in dict.fromkeys(heads) if letter.isupper()]
    pairs = []
    for size, letter in _PAIR.findall(text):
        # A block of no known axis most likely belongs to the only axis that is marked as blocked.
        axis = letter.lower() if letter and letter.lower() in outer else "".join(upper)
        if int(size) > 1:
            pairs.append((int(size), axis))
    missing = [(16, letter) for letter in upper if letter not in {axis for _, axis in pairs}]
    return [*([_spell(outer, pairs + missing)] if len(missing) < 2 else []), outer]


def _at_rank(tag: str, rank: int, ndim: int) -> str:
    """A guess at `tag` for `ndim` axes: nchw -> ncw, nCw16c -> nChw16c, acdb -> acdeb."""
    if "a" in tag.lower():
        return tag.replace(_CANONICAL[rank - 1], _CANONICAL[rank - 1 : ndim])
    spatial = re.search("d?h?w|$", tag)[0]
    return re.sub("d?h?w|$", "dhw"[max(0, 3 - (ndim - rank + len(spatial))) :], tag, count=1)


@dataclass(frozen=True, init=False, repr=False)
class MemoryDesc:
    """Dims, dtype and memory format of a tensor: immutable, hashable, comparable.

    Equal if all fields are; the stride of an axis that is 1 and unpadded does not count: nchw equals nhwc if C is 1.
    """

    dims: Dims  # logical sizes, at most 12 of them
    padded_dims: Dims  # dims rounded up to whole blocks
    strides: Dims = field(compare=False)  # in elements, between outer blocks, by logical axis; () without a format
    dtype: torch.dtype | None  # None for the zero descriptor
    blocking: Blocking  # the inner blocks, which are dense; empty for plain formats
    offset0: int  # the position of logical index (0, ..., 0), in elements
    format_kind: str  # "blocked" (plain too), "any" (dims and dtype alone, the format left open) or "zero" (no tensor)
    nbytes: int  # of the area that the strides span: padding and gaps included, offset0 not
    ndim: int
    inner_nblks: int
    inner_blks: Dims  # as in blocking
    inner_idxs: Dims
    _compared_strides: tuple[int | None, ...]

    def __init__(
        self, dims: Dims, dtype: torch.dtype = torch.float32, tag_or_strides: TagOrStrides = None, *, offset0: int = 0
    ) -> None:
        """A descriptor by format tag, by strides (in elements; gaps and 0 allowed, no overlap), or row-major (None).

        The tag "any" leaves the format open; the tag "undef" or empty dims give the zero descriptor.
        """
        dims, strides, blocking, kind = _ints("dims", dims), (), Blocking(), "blocked"
        if tag_or_strides is None:
            strides = _row_major(dims)
        elif isinstance(tag_or_strides, (list, tuple)):
            strides = _ints("strides", tag_or_strides, len(dims))
        elif not isinstance(tag_or_strides, str):
            raise TypeError(f"tag_or_strides must be a format tag, strides or None, got {_show(tag_or_strides)}")
        elif tag_or_strides in ("any", "undef"):
            kind, dims = "any", dims if tag_or_strides == "any" else ()
        else:
            tag = parse_tag(tag_or_strides, len(dims) or None)
            blocking, strides = tag.blocking, _dense_strides(tag, dims) if dims else ()
        vars(self).update(vars(self._make(dims, dtype, strides, blocking, offset0, kind)))

    @classmethod
    def from_physical(
        cls, size: Dims, dtype: torch.dtype, blocking: Blocking, physical_strides: Dims, offset0: int = 0
    ) -> MemoryDesc:
        """The descriptor of logical `size` held in a physical tensor of shape ``blocking.physical_shape(size)``.

        The first len(size) physical strides are the outer ones, in any order; the inner blocks must be dense. An empty
        size is refused: it would be the zero descriptor, which has no element, while a 0-dim tensor has one.
        """
        size, blocking = _ints("size", size), Blocking(blocking)
        if not size:
            raise ValueError("expected at least one axis, got size (): describe tensor.reshape(1) instead")
        strides = _ints("physical_strides", physical_strides, len(size) + len(blocking))
        dense = tuple(math.prod(blocking.inner_blks[i + 1 :]) for i in range(len(blocking)))
        if strides[len(size) :] != dense:
            raise ValueError(f"physical_strides must end in the inner blocks' dense {dense}, got {_show(strides)}")
        return cls._make(size, dtype, strides[: len(size)], blocking, offset0)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemoryDesc:
        """The descriptor of a blocked tensor or of a strided one, which may be expanded (stride 0) but not 0-dim.

        ValueError for a nested tensor, and for a blocked one inside `torch.func`'s transforms (``grad``, ``vmap`` ...),
        which wrap it and report row-major strides in place of its own.
        """
        desc = getattr(tensor, "memory_desc", None)
        if isinstance(desc, MemoryDesc):
            return desc
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor, got {_show(tensor)}")
        if tensor.is_nested:
            raise ValueError("expected a strided tensor, got a nested one: describe each of tensor.unbind()")
        if isinstance(getattr(_unwrapped(tensor), "memory_desc", None), MemoryDesc):
            raise ValueError("a blocked tensor inside a transform of torch.func shows no strides: describe it outside")
        if tensor.layout is not torch.strided:
            raise ValueError(f"expected a strided tensor, got layout {tensor.layout}: use tensor.to_dense()")
        return cls.from_physical(tensor.size(), tensor.dtype, Blocking(), tensor.stride(), tensor.storage_offset())

    @staticmethod
    def _make(
        dims: Dims, dtype: torch.dtype | None, strides: Dims, blocking: Blocking, offset0: int, kind: str = "blocked"
    ) -> MemoryDesc:
        if not dims:  # all zero descriptors are one
            dtype, blocking, kind = None, Blocking(), "zero"
        elif not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.float32, got {_show(dtype)}")
        padded_dims, nbytes = blocking.padded(dims), 0
        if math.prod(n for n in padded_dims if n) > INT64_MAX:
            raise ValueError(f"the product of the non-zero dims, padded, must be at most 2**63 - 1, got dims {dims}")
        if _int("offset0", offset0) and kind != "blocked":
            raise ValueError(f"offset0 must be 0 where no format is given, got {offset0}")
        if kind == "blocked":
            nbytes = _spanned(blocking.outer(dims), strides, blocking) * dtype.itemsize
            if offset0 * dtype.itemsize + nbytes > INT64_MAX:
                raise ValueError(f"bytes must end by 2**63 - 1, got dims {dims}, strides {strides}, offset0 {offset0}")
        compared = tuple(None if n == 1 else stride for n, stride in zip(padded_dims, strides, strict=False))
        self = object.__new__(MemoryDesc)
        vars(self).update(dims=dims, padded_dims=padded_dims, strides=strides, dtype=dtype, blocking=blocking)
        vars(self).update(offset0=offset0, format_kind=kind, nbytes=nbytes, ndim=len(dims), _compared_strides=compared)
        vars(self).update(inner_nblks=len(blocking), inner_blks=blocking.inner_blks, inner_idxs=blocking.inner_idxs)
        return self

    def __repr__(self) -> str:
        if self.format_kind != "blocked":
            return "MemoryDesc(())" if self.format_kind == "zero" else f"MemoryDesc({self.dims}, {self.dtype}, 'any')"
        blocked = f", blocking={tuple(self.blocking)}" if self.blocking else ""
        text = f"dims={self.dims}, padded_dims={self.padded_dims}, strides={self.strides}{blocked}, dtype={self.dtype}"
        return f"MemoryDesc({text}{f', offset0={self.offset0}' if self.offset0 else ''})"

    def offset(self, index: tuple[int, ...]) -> int:
        """The position in memory of a logical index, in elements (oneDNN's off_v). IndexError beyond padded_dims."""
        self._require("blocked")
        pos = list(_ints("index", index, self.ndim))
        if any(p >= n for p, n in zip(pos, self.padded_dims, strict=True)):
            raise IndexError(f"index must lie below padded dims {self.padded_dims}, got {_show(tuple(pos))}")
        position, inner_stride = self.offset0, 1
        for axis, size in reversed(self.blocking):
            pos[axis], inner = divmod(pos[axis], size)
            position += inner * inner_stride
            inner_stride *= size
        return position + sum(p * stride for p, stride in zip(pos, self.strides, strict=True))

    def matches(self, tag: str) -> bool:
        """Whether `tag` would put every element, padding included, where this descriptor does (offset0 aside).

        The strides of axes with a single outer block, and all strides of an empty tensor, address nothing and are
        not compared.
        """
        if tag in ("any", "undef"):
            return self.format_kind == ("any" if tag == "any" else "zero")
        parsed = parse_tag(tag)
        if self.format_kind != "blocked" or len(parsed.order) != self.ndim or parsed.blocking != self.blocking:
            return False
        outer = self.blocking.outer(self.dims)
        compared = zip(outer, self.strides, _dense_strides(parsed, self.dims), strict=True)
        return 0 in outer or all(n == 1 or mine == theirs for n, mine, theirs in compared)

    @property
    def tag(self) -> str | None:
        """A canonical tag that this descriptor matches; None if there is none, as where the strides leave gaps."""
        if self.format_kind != "blocked":
            return "any" if self.format_kind == "any" else "undef"
        outer = self.blocking.outer(self.dims)
        place = [-INT64_MAX]
        for n, stride in zip(outer, self.strides, strict=True):
            place.append(-stride if n > 1 and stride else place[-1])  # others fit anywhere: keep logical order
        name = tag_name(tuple(sorted(range(self.ndim), key=place[1:].__getitem__)), self.blocking)
        return name if self.matches(name) else None

    def submemory(self, dims: tuple[int, ...], offsets: tuple[int, ...]) -> MemoryDesc:
        """The part of size `dims` that starts at logical index `offsets`, in the same memory.

        Cuts must fall between blocks: offsets are multiples of the blocks, and so are dims unless they reach the right
        border of their axis. ValueError otherwise: an area inside a block has no descriptor.
        """
        self._require("blocked")
        dims, offsets = _ints("dims", dims, self.ndim), _ints("offsets", offsets, self.ndim)
        offset0 = self.offset0
        for d, (n, start, whole) in enumerate(zip(dims, offsets, self.dims, strict=True)):
            block, cut = self.blocking.block(d), f"submemory of axis {d}, size {whole}: dims {n}, offset {start}"
            if start + n > whole:
                raise ValueError(f"{cut} goes past the end: expected dims + offset of at most {whole}")
            if start % block or (n % block and start + n != whole):
                raise ValueError(f"{cut} cuts a block: expected multiples of {block}, or dims up to the right border")
            offset0 += start // block * self.strides[d]
        return self._make(dims, self.dtype, self.strides, self.blocking, offset0)

    def permute_axes(self, perm: tuple[int, ...]) -> MemoryDesc:
        """The same memory with axis d renamed to perm[d]: the inverse of the convention of `torch.permute`."""
        self._require("blocked", "any")
        perm = _permutation("perm", perm, self.ndim)
        source = [perm.index(d) for d in range(self.ndim)]
        dims, strides = (tuple(values[d] for d in source) if values else () for values in (self.dims, self.strides))
        blocking = Blocking(tuple((perm[axis], size) for axis, size in self.blocking))
        return self._make(dims, self.dtype, strides, blocking, self.offset0, self.format_kind)

    def reshape(self, dims: tuple[int, ...]) -> MemoryDesc:
        """The same memory with other dims of the same volume, the elements kept in row-major logical order.

        Axes are matched from the right. Unpadded 1s come and go, equal axes stay as they are, blocked or not, and other
        axes are merged or split, which needs them unblocked, dense and in order; without blocks and elements any dims
        of no elements will do. ValueError for everything else.
        """
        self._require("blocked", "any")
        dims = _ints("dims", dims)
        if not dims or math.prod(dims) != math.prod(self.dims):
            raise ValueError(f"cannot reshape {self.dims} to {dims}: expected at least one axis and the same volume")
        if self.format_kind == "any":
            return self._make(dims, self.dtype, (), self.blocking, 0, "any")
        if 0 in dims and not self.blocking:  # no element to keep in place: as `torch.Tensor.view` answers
            strides = self.strides if dims == self.dims else _row_major(dims)
            return self._make(dims, self.dtype, strides, self.blocking, self.offset0)
        todo, strides, renamed, stride = list(dims), [], {}, 1
        for rest, stride, axis in self._runs():
            while True:
                n = todo.pop() if todo else -1
                if n != rest and (n <= 0 or rest % n or (axis >= 0 and n != 1)):
                    raise ValueError(f"cannot reshape {self} to {dims}: only unblocked, dense axes can merge or split")
                strides.append(stride)
                stride *= -(-n // self.blocking.block(axis)) or 1
                if n == rest:
                    break
                rest //= n
            renamed[axis] = len(todo)
        strides += [stride] * len(todo)  # added 1s (or, if a dim is 0, anything: there is no element to address)
        if max(strides) > INT64_MAX:
            raise ValueError(f"cannot reshape {self.dims} to {dims}: a stride would be beyond 2**63 - 1")
        blocking = Blocking(tuple((renamed[axis], size) for axis, size in self.blocking))
        return self._make(dims, self.dtype, tuple(reversed(strides)), blocking, self.offset0)

    def _runs(self) -> list[tuple[int, int, int]]:
        """(size, stride, axis) of each blocked axis, of each run of unblocked dense axes (axis -1), from the right."""
        runs: list[tuple[int, int, int]] = []
        for d in reversed(range(self.ndim)):
            n, stride = self.dims[d], self.strides[d]
            if d in self.blocking.axes:
                runs.append((n, stride, d))
            elif runs and runs[-1][2] < 0 and stride == (runs[-1][0] or 1) * runs[-1][1]:
                runs[-1] = (n * runs[-1][0], runs[-1][1], -1)
            elif n != 1:
                runs.append((n, stride, -1))
        return runs

    def _require(self, *kinds: str) -> None:
        if self.format_kind not in kinds:
            raise ValueError(f"expected a descriptor with {' or '.join(kinds)} format, got {self!r}")


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the transforms of `torch.func` under way have wrapped; itself where there are none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _row_major(dims: Dims) -> Dims:
    """The strides of a contiguous tensor."""
    return _dense_strides(Tag(tuple(range(len(dims))), Blocking()), dims)


def _dense_strides(tag: Tag, dims: Dims) -> Dims:
    """The outer strides that `tag` gives to `dims`. An empty axis does not zero the strides outside it."""
    outer = tag.blocking.outer(dims)
    strides, stride = [0] * len(dims), tag.blocking.inner_numel
    for d in reversed(tag.order):
        strides[d] = stride
        stride *= outer[d] or 1
    return tuple(strides)


def _spanned(outer: Dims, strides: Dims, blocking: Blocking) -> int:
    """The number of elements that `outer` blocks span, gaps included. ValueError if they overlap.

    As in oneDNN that is the largest count * stride, so a gap after the last block counts: dims (4, 3) with strides
    (10, 1) span 40.
    """
    if 0 in outer:
        return 0
    extent = blocking.inner_numel
    for stride, n in sorted(zip(strides, outer, strict=True)):
        if stride and n > 1:
            if stride < extent:
                raise ValueError(f"strides {strides} of {outer} blocks overlap: {stride} must be at least {extent}")
            extent = stride * n
    largest = max(n if n == 1 else n * stride for n, stride in zip(outer, strides, strict=True))
    return blocking.inner_numel if largest == 1 else largest
