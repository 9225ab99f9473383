"""The text picture: the planes, the table in memory order and the memory strip in characters."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from torch_blocked.show import words
from torch_blocked.show.layout import MAX_GAP, Cell, Gap, Layout, Plane

WIDTH = 112  # characters in a line; more only where one number needs them


def draw(layout: Layout) -> str:
    """The whole picture, without a newline at its end."""
    lines = ["\n".join(line for text in words.title(layout) for line in wrap(text))]
    parts: tuple[tuple[Callable, Callable], ...] = ((words.planes, planes), (words.order, order), (words.strip, strip))
    for caption, body in () if layout.empty else parts:
        marked = f"{caption(layout)} *: {words.PADDING}." if layout.padded else caption(layout)
        lines.append("\n".join([*wrap(marked), "", *body(layout)]))
    return "\n\n".join(lines)


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def number(value: int, padding: bool, width: int) -> str:
    return (f"*{value}" if padding else str(value)).rjust(width)


def planes(layout: Layout) -> list[str]:
    """The planes side by side, as many as fit, a new line for each new first index."""
    width = layout.digits + 1 + layout.padded
    drawn = [_plane(plane, width) for plane in layout.planes()]
    lines = []
    for group in layout.groups(WIDTH // (len(drawn[0][0]) + 2)):
        rows = zip(*(drawn[i] for i in group), strict=True)
        lines += ["  ".join(row).rstrip() for row in rows] + [""]
    return lines[:-1]


def _plane(plane: Plane, width: int) -> list[str]:
    rows = ["".join(number(cell.offset, cell.padding, width) for cell in row) for row in plane.rows]
    return [line.ljust(max(len(rows[0]), len(plane.name) + 1)) for line in [f" {plane.name}"] * bool(plane.name) + rows]


def order(layout: Layout) -> list[str]:
    """The table in bands of columns, each with the indices above it."""
    table, width = layout.table(), layout.digits + 1 + layout.padded
    margin = "" if table.axis is None else layout.letters[table.axis]
    labels = [f"{margin}{row[0].index[table.axis]}" if margin else "" for row in table.rows]
    left = max(map(len, [*labels, "x"]))
    lines = []
    per_band = max(1, (WIDTH - left) // width)
    for start in range(0, len(table.rows[0]), per_band):
        band = slice(start, start + per_band)
        for d in table.others:
            numbers = "".join(str(cell.index[d]).rjust(width) for cell in table.rows[0][band])
            lines.append(f"{layout.letters[d].rjust(left)}{numbers}")
        lines.append("-" * (left + width * len(table.rows[0][band])))
        for label, row in zip(labels, table.rows, strict=True):
            lines.append(label.rjust(left) + "".join(number(c.offset, c.padding, width) for c in row[band]))
        lines.append("")
    return lines[:-1]


def strip(layout: Layout) -> list[str]:
    """Memory from its start, a line a row: the position, then each element's index along the fastest axis."""
    width = layout.strip_digits + layout.padded
    return [_strip_row(layout, row, width) for row in layout.strip(32 if width < 3 else 16)]


def _strip_row(layout: Layout, row: list[Cell | Gap], width: int) -> str:
    items = []
    for item in row:
        if isinstance(item, Cell):
            items.append(number(item.index[layout.fastest], item.padding, width))
        else:
            items += [f"[gap {item.length}]"] if item.length > MAX_GAP else ["-".rjust(width)] * item.length
    first = next(item for item in row if isinstance(item, Cell))
    return f"{row[0].offset:>{layout.digits}} | {' '.join(items)} | from {layout.index_name(first.index)}"
