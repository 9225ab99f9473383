"""`show`: from what the user names, a tensor or a format, to a `Picture`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from torch_blocked.formats import FormatLike, plain_format
from torch_blocked.memory_desc import Dims, MemoryDesc, _show, parse_tag, tag_name
from torch_blocked.show import svg, text
from torch_blocked.show.layout import Layout

Shown = MemoryDesc | torch.Tensor | FormatLike | torch.memory_format | str | Dims


@dataclass(frozen=True, repr=False)
class Picture:
    """What `show` returns: ``str()`` is the text picture, `svg` the SVG, `save` writes either; notebooks show the SVG.

    Attributes: ``desc``, the memory descriptor that is drawn; ``layout``, which of its elements, and where they lie.
    """

    layout: Layout

    @property
    def desc(self) -> MemoryDesc:
        return self.layout.desc

    def __str__(self) -> str:
        return text.draw(self.layout)

    __repr__ = __str__

    @cached_property
    def svg(self) -> str:
        """The picture as an SVG document, 800 pixels wide."""
        return svg.draw(self.layout)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG to a path that ends in .svg, the text to one in .txt. ValueError for another suffix."""
        drawn = {".svg": lambda: self.svg, ".txt": lambda: f"{self}\n"}.get(Path(path).suffix)
        if drawn is None:
            raise ValueError(f"a picture is saved as .svg or .txt, got {_show(str(path))}")
        Path(path).write_text(drawn(), encoding="utf-8")


def show(what: Shown, dims: Dims | None = None) -> Picture:
    """A picture of how a tensor lies in memory: the pictures of oneDNN's guide "Understanding memory formats".

    Three parts: (a) the logical tensor, a plane of the last two axes for each index of the others (H x W for each
    n and c), each element with its offset in memory; (b) the elements in the order of memory, as a path; (c) memory
    itself, a strip of positions with its gaps, and the strides. Padding is shaded (text: ``*``). Every offset is
    `MemoryDesc.offset`'s, in elements. More than 640 elements, padding included, are not all drawn: the picture says
    which are, and how many it leaves out.

    Args:
        what: a `MemoryDesc`, a tensor, plain or blocked, of any strides (its values are not read), or a format: one of
            torch_blocked, a tag such as ``"nChw8c"``, a ``torch.memory_format``, or strides, a tuple in elements.
        dims: the logical size, 1 to 12 ints >= 0, where `what` is a format; not given otherwise.

    Returns:
        A `Picture`: print it, ``.save("x.svg")`` or ``.save("x.txt")``, or leave it at the end of a notebook's cell.
        The bytes that it gives are those of float32 where `what` is a format.

    Raises:
        TypeError: `what` is none of these; dims missing, superfluous or no tuple of ints (symbolic sizes are none).
        RuntimeError: a ``torch.memory_format`` of another rank than dims, as in PyTorch.
        ValueError: a malformed tag, one of another rank than dims; overlapping strides; sizes beyond int64; a
            descriptor of format kind "any" or "zero"; a tensor without axes, nested or not strided; a blocked one
            inside `torch.func`'s transforms.

    Example:
        >>> print(tb.show("nChw8c", dims=(2, 17, 5, 4)))  # doctest: +SKIP
    """
    if isinstance(what, (MemoryDesc, torch.Tensor)):
        if dims is not None:
            raise TypeError(f"dims are those of the {type(what).__name__}: expected none, got {_show(dims)}")
        return Picture(_layout(what if isinstance(what, MemoryDesc) else MemoryDesc.of(what)))
    if not isinstance(what, (FormatLike, torch.memory_format, str, tuple, list)):
        raise TypeError(f"expected a MemoryDesc, a tensor, a format, a format tag or strides, got {_show(what)}")
    if dims is None:
        raise TypeError(f"a format is shown for a size: expected dims=(2, 17, 5, 4) or the like beside {_show(what)}")
    MemoryDesc(dims)  # refuses what are no sizes
    if isinstance(what, (tuple, list)):
        return Picture(_layout(MemoryDesc(dims, torch.float32, tuple(what))))
    if isinstance(what, str):
        return Picture(_layout(MemoryDesc(dims, torch.float32, what), what))
    if isinstance(what, torch.memory_format):
        return Picture(_layout(MemoryDesc(dims, torch.float32, plain_format(len(dims), what).tag)))
    resolved = what.resolve(torch.Size(dims))
    tag = resolved and resolved.tag  # None where such a tensor stays plain
    return Picture(_layout(MemoryDesc(dims, torch.float32, tag), tag))


def _layout(desc: MemoryDesc, tag: str | None = None) -> Layout:
    """The layout of `desc`, its axes and its format named as in `tag`, or as activations or blocked weights are."""
    if desc.format_kind != "blocked":
        raise ValueError(f"only a descriptor with a format and at least one axis can be shown, got {desc!r}")
    if tag is not None:
        outer = re.match("[A-Za-z]+", tag)[0].lower()
        return Layout(desc, "".join(outer[place] for place in _inverse(parse_tag(tag).order)), tag)
    spelling = "weights" if desc.blocking.block(0) > 1 else "activation"
    letters = tag_name(tuple(range(desc.ndim)), (), spelling)
    if desc.tag is not None:
        return Layout(desc, letters, tag_name(*parse_tag(desc.tag), spelling))
    order = sorted(range(desc.ndim), key=lambda d: -desc.strides[d])
    return Layout(desc, letters, f"strided {tag_name(tuple(order), desc.blocking, spelling)}")


def _inverse(order: Dims) -> list[int]:
    """Where each axis stands in `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
