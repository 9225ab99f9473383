"""The words of a picture, the same in text and in SVG: the title, and a caption for each part."""

from __future__ import annotations

from torch_blocked.show.layout import MAX_CELLS, MAX_MARKS, Layout

PADDING = "padding, always zero"


def title(layout: Layout) -> list[str]:
    """What the descriptor is: sizes, dtype, bytes, padding, strides."""
    desc = layout.desc
    sizes = zip(layout.letters, desc.dims, desc.padded_dims, strict=True)
    padded = [f"{letter} {n} to {padded}" for letter, n, padded in sizes if n < padded]
    start = [f"element (0, ...) at {desc.offset0}"] if desc.offset0 else []
    facts = [f"{layout.name} of {'x'.join(map(str, desc.dims))}", str(desc.dtype).removeprefix("torch.")]
    facts += [f"{desc.nbytes} bytes", *[f"padded: {', '.join(padded)}"] * bool(padded), *start]
    facts += ["no elements"] * layout.empty
    return [
        "; ".join(facts),
        "strides: " + ", ".join(f"{letter} {layout.stride(d)}" for d, letter in enumerate(layout.letters)),
    ]


def planes(layout: Layout) -> str:
    """The caption of the logical tensor."""
    rows, columns = layout.plane_axes
    right = f"{layout.letters[columns]} (right)"
    shape = f"each plane is {layout.letters[rows]} (down) x {right}" if rows is not None else right
    return f"(a) The logical tensor: {shape}; the numbers are positions in memory. {layout.left_out}".strip()


def order(layout: Layout) -> str:
    """The caption of the order in memory."""
    axis = layout.table().axis
    where = "all axes" if axis is None else f"{layout.letters[axis]} downwards, the other axes"
    same = " Drawn: the same elements." if layout.left_out else ""
    return f"(b) The order in memory: {where} to the right.{same}"


def strip(layout: Layout) -> str:
    """The caption of the memory strip."""
    fastest = layout.letters[layout.fastest]
    drawn, total = min(MAX_CELLS, layout.positions), layout.positions
    rest = f"Drawn: the first {drawn} of {total} elements, {total - drawn} left out." if drawn < total else ""
    shared = [letter for d, letter in enumerate(layout.letters) if layout.shared(d)]
    same = f"Stride 0 along {', '.join(shared)}: a position holds several elements." if shared else ""
    gaps = "Dashes: positions without an element." if layout.gaps else ""
    words = f"(c) Memory, position {layout.desc.offset0} to {layout.last}: the numbers are indices along {fastest}."
    return " ".join(filter(None, [words, gaps, same, rest]))


def marks(layout: Layout) -> str:
    """The caption of the strides."""
    cut = [
        f"{MAX_MARKS} of {n} along {letter}"
        for n, letter in zip(layout.desc.padded_dims, layout.letters, strict=True)
        if n > MAX_MARKS
    ]
    left_out = f" Drawn: the first {', '.join(cut)}." if cut else ""
    return f"Strides, to scale: where the elements along one axis lie, all other indices 0.{left_out}"
