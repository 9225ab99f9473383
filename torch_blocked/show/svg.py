"""The SVG picture: the same parts as the text, drawn. All text is monospaced, so that its width is known."""

from __future__ import annotations

import colorsys
import textwrap
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from torch_blocked.show import words
from torch_blocked.show.layout import MAX_GAP, Cell, Gap, Layout, Plane, width_of

WIDTH, MARGIN = 800, 20
GLYPH = 0.61  # the width of a monospaced character, as a part of the font's size
NUMBER, CAPTION, TITLE = 10, 12, 13  # sizes of fonts, in pixels
ROW = 16  # the height of a cell
COLUMN = 17  # the width of a cell of the table

STYLE = """
text { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 10px; fill: #222; }
.title { font-size: 13px; font-weight: bold; } .caption { font-size: 12px; } .number, .header { text-anchor: middle; }
.label, .header { fill: #555; } .right { text-anchor: end; }
.element, .padding, .gap { stroke: #fff; stroke-width: 1; }
.padding { fill: url(#hatch); } .gap { fill: #fff; stroke: #aaa; stroke-dasharray: 2 2; }
.path { fill: none; stroke: #222; stroke-width: 1.1; stroke-linejoin: round; }
.jump { fill: none; stroke: #c22; stroke-width: 0.8; stroke-dasharray: 3 2; }
.axis { stroke: #bbb; } .mark { stroke: #222; stroke-width: 1.2; }
"""

HATCH = """<defs>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect class="hatch" width="5" height="5" fill="#eee"/><path d="M0 0V5" stroke="#aaa" stroke-width="2"/></pattern>
</defs>"""


@dataclass
class Canvas:
    """What is drawn so far, and down to where."""

    layout: Layout
    y: float = MARGIN
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "label") -> None:
        """`text` with its baseline at y; nothing where it is empty."""
        if text:
            self.shapes.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def paragraph(self, text: str, kind: str = "caption", size: int = CAPTION) -> None:
        """`text` from margin to margin, in as many lines as it takes."""
        columns = int((WIDTH - 2 * MARGIN) / (GLYPH * size))
        for line in textwrap.wrap(text, columns, break_on_hyphens=False):
            self.y += size + 4
            self.text(MARGIN, self.y, line, kind)

    def box(self, x: float, y: float, width: float, item: Cell | Gap, text: str = "") -> None:
        """A cell or a gap, `text` in its middle."""
        kind, fill, title = "gap", "", f"gap of {item.length}" if isinstance(item, Gap) else ""
        if isinstance(item, Cell):
            kind = "padding" if item.padding else "element"
            fill = "" if item.padding else f' fill="{color(self.layout, item)}"'
            title = f"{self.layout.index_name(item.index)} at {item.offset}{', padding' * item.padding}"
        self.shapes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}"{fill}>'
            f"<title>{title}</title></rect>"
        )
        self.text(x + width / 2, y + ROW - 4.5, text, "number")


def color(layout: Layout, cell: Cell) -> str:
    """From blue at the first element to red at the last one drawn, darker and lighter from one run to the next."""
    part = (cell.offset - layout.desc.offset0) / max(1, layout.end - layout.desc.offset0)
    red, green, blue = colorsys.hls_to_rgb(0.6 - 0.6 * part, (0.86, 0.76)[layout.run_number(cell.index) % 2], 0.75)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def draw(layout: Layout) -> str:
    """The whole document."""
    canvas = Canvas(layout)
    first, *rest = words.title(layout)
    canvas.paragraph(first, "title", TITLE)
    for line in rest:
        canvas.paragraph(line)
    for part in () if layout.empty else (planes, order, strip, strides):
        canvas.y += 14
        canvas.shapes.append(f'<g class="{part.__name__}">')
        part(canvas)
        canvas.shapes.append("</g>")
    height = canvas.y + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(first)}">'
    background = f'<rect class="background" width="{WIDTH}" height="{height:.0f}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", HATCH, background, *canvas.shapes, "</svg>", ""])


def planes(canvas: Canvas) -> None:
    """(a): the planes in rows."""
    layout = canvas.layout
    canvas.paragraph(words.planes(layout) + f" Hatched: {words.PADDING}." * layout.padded)
    drawn = layout.planes()
    cell = GLYPH * NUMBER * layout.digits + 3
    longest = max(len(plane.name) for plane in drawn)
    width = max(cell * len(drawn[0].rows[0]), GLYPH * NUMBER * longest) + 8
    name = ROW * (longest > 0)
    top = canvas.y + 6
    for group in layout.groups(int((WIDTH - 2 * MARGIN + 8) / width)):
        for place, number in enumerate(group):
            canvas.text(MARGIN + place * width, top + name - 4, drawn[number].name)
            _plane(canvas, MARGIN + place * width, top + name, cell, drawn[number])
        top += name + len(drawn[0].rows) * ROW + 6
    canvas.y = top


def _plane(canvas: Canvas, left: float, top: float, width: float, plane: Plane) -> None:
    for y, row in enumerate(plane.rows):
        for x, cell in enumerate(row):
            canvas.box(left + x * width, top + y * ROW, width, cell, str(cell.offset))


def order(canvas: Canvas) -> None:
    """(b): the table, and the path of memory through it."""
    layout = canvas.layout
    path = "The line goes from each position to the next one drawn; red and dashed where it jumps."
    canvas.paragraph(f"{words.order(layout)} {path}")
    canvas.y += 6
    table = layout.table()
    width = max(COLUMN, GLYPH * NUMBER * max(len(str(kept[-1])) for kept in layout.kept) + 3)
    margin = MARGIN + GLYPH * NUMBER * (2 + len(str(layout.kept[table.axis or 0][-1])))
    columns = len(table.rows[0])
    bands = -(-columns // int((WIDTH - MARGIN - margin) / width))
    per_band = -(-columns // bands)
    for start in range(0, columns, per_band):
        centers = _band(canvas, margin, width, [row[start : start + per_band] for row in table.rows])
        _path(canvas, centers)
        canvas.y += 8


def _band(canvas: Canvas, margin: float, width: float, rows: list[list[Cell]]) -> dict[Cell, tuple[float, float]]:
    """Draws some columns of the table with the indices above and beside them; the center of each cell."""
    layout, table, centers = canvas.layout, canvas.layout.table(), {}
    for d in table.others:
        canvas.y += ROW - 3
        canvas.text(margin - 5, canvas.y, layout.letters[d], "label right")
        for x, cell in enumerate(rows[0]):
            canvas.text(margin + (x + 0.5) * width, canvas.y, str(cell.index[d]), "header")
    canvas.y += 4
    for row in rows:
        if table.axis is not None:
            name = layout.index_name((row[0].index[table.axis],), (table.axis,))
            canvas.text(margin - 5, canvas.y + ROW - 4, name, "label right")
        for x, cell in enumerate(row):
            canvas.box(margin + x * width, canvas.y, width, cell)
            centers[cell] = margin + (x + 0.5) * width, canvas.y + ROW / 2
        canvas.y += ROW
    return centers


def _path(canvas: Canvas, centers: dict[Cell, tuple[float, float]]) -> None:
    """The line through the elements of a band in the order of memory."""
    steps, jumps, before = [], [], None
    for cell in canvas.layout.drawn:
        if before in centers and cell in centers:
            lines = steps if cell.offset - before.offset <= 1 else jumps
            (x, y), (to_x, to_y) = centers[before], centers[cell]
            lines.append(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}")
        before = cell
    for kind, lines in (("jump", jumps), ("path", steps)):
        if lines:
            canvas.shapes.append(f'<path class="{kind}" d="{"".join(lines)}"/>')
    for cell, fill in ((canvas.layout.drawn[0], "#222"), (canvas.layout.drawn[-1], "#fff")):
        if cell in centers:
            x, y = centers[cell]
            canvas.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="#222"/>')


def strip(canvas: Canvas) -> None:
    """(c): the positions of memory, one after the other, in rows."""
    layout = canvas.layout
    canvas.paragraph(words.strip(layout))
    canvas.y += 6
    left = MARGIN + GLYPH * NUMBER * layout.digits + 6
    width = GLYPH * NUMBER * max(layout.strip_digits, 2) + 3
    for row in layout.strip(32 if layout.strip_digits < 3 else 24):
        x = left
        canvas.text(left - 5, canvas.y + ROW - 4, str(row[0].offset), "label right")
        for item in row:
            room = width * width_of(item)
            canvas.box(x, canvas.y, room, item, _strip_text(layout, item, int(room / (GLYPH * NUMBER))))
            x += room
        first = next(item for item in row if isinstance(item, Cell))
        name = f"from {layout.index_name(first.index)}"
        room = int((WIDTH - MARGIN - x - 8) / (GLYPH * NUMBER))
        canvas.text(x + 8, canvas.y + ROW - 4, name if len(name) <= room else f"{name[: room - 1]}…" * (room > 1))
        canvas.y += ROW + 2


def _strip_text(layout: Layout, item: Cell | Gap, room: int) -> str:
    """The index of a cell, the length of a gap, rounded where only that fits into `room` characters."""
    if isinstance(item, Cell):
        return str(item.index[layout.fastest])
    if item.length <= MAX_GAP:  # drawn at its length
        return ""
    texts = (f"gap {item.length}", str(item.length), f"≈{item.length:.1e}")
    return next((text for text in texts if len(text) <= room), "")


def strides(canvas: Canvas) -> None:
    """The elements along each axis as ticks on a line that is all of memory."""
    layout, left, length = canvas.layout, MARGIN + 20, 500
    canvas.y += 6
    canvas.paragraph(words.marks(layout))
    start = layout.desc.offset0
    scale = length / max(1, layout.last - start)
    for axis, letter in enumerate(layout.letters):
        y, free = canvas.y + 26, 0.0
        canvas.text(MARGIN, y, letter)
        canvas.shapes.append(f'<path class="axis" d="M{left} {y}H{left + length}"/>')
        ticks = []
        for i, position in enumerate(layout.marks(axis)):
            x = left + (position - start) * scale
            ticks.append(f"M{x:.1f} {y}v-7")
            if x - GLYPH * NUMBER * len(str(i)) / 2 >= free:
                canvas.text(x, y - 9, str(i), "header")
                free = x + GLYPH * NUMBER * (len(str(i)) / 2 + 1)
        canvas.shapes.append(f'<path class="mark" d="{"".join(ticks)}"/>')
        canvas.text(left + length + 10, y, f"stride {layout.stride(axis)}")
        canvas.y += 26
