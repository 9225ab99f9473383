"""Formats: what `x.to(...)` and `model.to(...)` take.

A `Format` is a format tag with PyTorch's `.to` protocol. PyTorch passes any argument that defines
``__torch_function__`` on to it, so ``x.to(fmt)``, ``x.to(memory_format=fmt)``, ``torch.empty(..., memory_format=fmt)``
and
``module.to(fmt)`` all arrive in `Format.__torch_function__`, without a change to PyTorch. What is done with a tensor
then is decided in reorder.py, which fills `METHODS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torch_blocked import library
from torch_blocked.memory_desc import MAX_NDIMS, Blocking, Tag, parse_tag, tag_name

# Name of a torch function that received a format -> handler(fmt, func, args, kwargs), the format taken out of both.
METHODS: dict[str, Callable] = {}


class FormatLike:
    """An object that PyTorch's functions accept where they expect a memory format."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = dict(kwargs or {})
        formats = [a for a in (*args, *kwargs.values()) if isinstance(a, FormatLike)]
        handler = METHODS.get(func.__name__)
        if handler is None or len(formats) != 1:
            raise TypeError(
                f"{func.__name__} got {', '.join(map(repr, formats))}: one format is taken by {', '.join(METHODS)}"
            )
        rest = tuple(a for a in args if a is not formats[0])
        kwargs = {k: v for k, v in kwargs.items() if v is not formats[0]}
        return handler(formats[0], func, rest, kwargs)

    def __fx_create_arg__(self, tracer: torch.fx.Tracer) -> torch.fx.Node:
        # In a graph of torch.fx arguments are plain values: a call makes the format from those.
        maker, arguments = self._made_by()
        return tracer.create_node("call_function", maker, arguments, {})

    def _made_by(self) -> tuple[Callable, tuple]:
        return type(self), ()

    def resolve(self, size: torch.Size) -> Format | None:
        """The format of a tensor of this logical size; None where the tensor stays as it is."""
        raise NotImplementedError

    def for_module(self) -> FormatLike:
        """What `Module.to` applies to each parameter and buffer of 4 or 5 dims."""
        raise NotImplementedError


class Format(FormatLike):
    """One memory format: the order of the outer axes in memory and the inner blocks. Made by `format(tag)`.

    Equal formats mean the same bytes, however they are spelled: ``format("nChw16c") == format("aBcd16b")``.

    Attributes: ``tag`` (as given), ``order`` (outer axes from outermost to innermost), ``blocking``, ``ndim``.
    """

    __slots__ = ("blocking", "ndim", "order", "tag")

    def __init__(self, tag: str, order: tuple[int, ...], blocking: Blocking) -> None:
        self.tag, self.order, self.blocking, self.ndim = tag, order, blocking, len(order)

    def __repr__(self) -> str:
        return f"torch_blocked.{self.tag}" if self.tag in _CONSTANTS else f"torch_blocked.format({self.tag!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Format):
            return NotImplemented
        return self.order == other.order and self.blocking == other.blocking

    def __hash__(self) -> int:
        return hash((self.order, self.blocking))

    def _made_by(self) -> tuple[Callable, tuple]:
        return format, (self.tag,)

    __reduce__ = _made_by

    @property
    def is_plain(self) -> bool:
        """Whether there are no inner blocks: a tensor of this format is an ordinary strided one."""
        return not self.blocking

    def resolve(self, size: torch.Size) -> Format:
        """This format. ValueError for a size of another rank."""
        if len(size) != self.ndim:
            raise ValueError(
                f"format {self.tag} has {self.ndim} axes, the tensor has {len(size)}: size {tuple(size)}; "
                f"use a tag of {len(size)} letters, or torch_blocked.blocked, which fits every rank"
            )
        return self

    def for_module(self) -> FormatLike:
        of_images = self.ndim in (3, 4, 5) and self.blocking.axes == (1,) and len(self.blocking) == 1
        channels = self.blocking.block(1) if of_images else None
        return WeightFormat(channels) if channels else ParameterFormat(self)


class BlockedFormat(FormatLike):
    """`torch_blocked.blocked`: the fastest format for this CPU, oneDNN's ``format_tag::any``.

    A tensor gets channels in blocks of 16 on AVX-512, of 8 elsewhere (``nChw16c``, ``nCw16c``, ``nC16c`` ...; one axis:
    ``A16a``). A module's 4-D and 5-D parameters and buffers get the format of convolution weights: `weight_format`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "torch_blocked.blocked"

    def __reduce__(self) -> str:
        return "blocked"

    def resolve(self, size: torch.Size) -> Format | None:
        return activation_format(len(size), library.isa_block()) if len(size) else None

    def for_module(self) -> FormatLike:
        return WeightFormat(None)


class WeightFormat(FormatLike):
    """`module.to(blocked)`: each tensor gets `weight_format` of its size. `block` None: the CPU's own."""

    __slots__ = ("block",)

    def __init__(self, block: int | None) -> None:
        self.block = block

    def resolve(self, size: torch.Size) -> Format | None:
        return weight_format(size, self.block or library.isa_block())


class ParameterFormat(FormatLike):
    """`module.to(fmt)` of a format that is not one of activations: tensors of its rank get it, others stay."""

    __slots__ = ("fmt",)

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt

    def resolve(self, size: torch.Size) -> Format | None:
        return self.fmt if len(size) == self.fmt.ndim else None


def format(tag: str) -> Format:
    """The format of a tag, oneDNN's grammar: ``nChw16c``, ``aBcd16b``, ``OIhw4i16o4i``, ``chwn``, ``NCHW32`` ...

    ValueError for a tag that is malformed, with the nearest right one where it can be guessed.
    """
    parsed: Tag = parse_tag(tag)
    return Format(tag, parsed.order, parsed.blocking)


@functools.lru_cache(maxsize=1024)
def format_of(order: tuple[int, ...], blocks: tuple[tuple[int, int], ...]) -> Format:
    """The format of an order and a blocking, named as weights where the first axis is blocked."""
    blocking = Blocking(blocks)
    return Format(tag_name(order, blocking, "weights" if blocking.block(0) > 1 else "activation"), order, blocking)


def activation_format(ndim: int, block: int) -> Format:
    """Channels (axis 1; of a vector axis 0) in blocks of `block`, the outer axes in logical order."""
    made = _ACTIVATIONS.get((ndim, block))
    return made if made is not None else format_of(tuple(range(ndim)), ((min(1, ndim - 1), block),))


def weight_format(size: torch.Size, block: int) -> Format | None:
    """The format of convolution weights of logical size (oc, ic / groups, kd, kh, kw), from the shape alone.

    One to three spatial dims. One input channel a group (depthwise): ``Oihw16o``; fewer than a block: ``Ohwi16o``,
    whose taps run over real channels only; else ``OIhw16i16o``. None for other ranks.
    """
    ndim = len(size)
    if ndim not in (3, 4, 5):
        return None
    if size[1] == 1:
        order, blocks = tuple(range(ndim)), ((0, block),)
    elif size[1] < block:
        order, blocks = (0, *range(2, ndim), 1), ((0, block),)
    else:
        order, blocks = tuple(range(ndim)), ((1, block), (0, block))
    return format_of(order, blocks)


def plain_format(ndim: int, memory_format: torch.memory_format | None) -> Format:
    """The plain format of a PyTorch memory format. RuntimeError for a rank it does not have, as in PyTorch."""
    if memory_format in _CHANNELS_LAST:
        tag, expected = _CHANNELS_LAST[memory_format]
        if ndim != expected:
            raise RuntimeError(f"required rank {expected} tensor to use {memory_format} format, got rank {ndim}")
        return format(tag)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise TypeError(f"a memory format is a torch.memory_format or a format of torch_blocked, got {memory_format!r}")
    return Format("abcdefghijkl"[:ndim], tuple(range(ndim)), Blocking())


_CHANNELS_LAST = {torch.channels_last: ("acdb", 4), torch.channels_last_3d: ("acdeb", 5)}

# Made on import, so that torch.compile finds them and need not trace how a format is made.
_ACTIVATIONS = {
    (n, b): format_of(tuple(range(n)), ((min(1, n - 1), b),)) for n in range(1, MAX_NDIMS + 1) for b in (8, 16)
}

blocked = BlockedFormat()

# The formats with a name of their own in torch_blocked; any other tag goes through format().
_CONSTANTS = """
    nchw nhwc chwn nCw8c nCw16c nChw4c nChw8c nChw16c nChw32c nChw64c nCdhw8c nCdhw16c oihw hwio OIhw8i8o OIhw16i16o
    OIhw8o8i OIhw16o16i OIhw8i16o2i OIhw4i16o4i Ohwi8o Ohwi16o Oihw8o Oihw16o
""".split()
CONSTANTS = {tag: format(tag) for tag in _CONSTANTS}
