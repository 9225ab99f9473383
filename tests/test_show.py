"""Pictures of descriptors: what is drawn is what `MemoryDesc.offset` says, and nothing lies over anything else."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_blocked as tb
from torch_blocked import Blocking, MemoryDesc
from torch_blocked.__main__ import main
from torch_blocked.show import layout as layout_module

ROOT = Path(__file__).parent.parent
f32 = torch.float32

PICTURES = {
    "nchw": lambda: tb.show("nchw", dims=(2, 16, 5, 4)),
    "nhwc": lambda: tb.show(tb.nhwc, dims=(2, 16, 5, 4)),
    "chwn": lambda: tb.show("chwn", (2, 16, 5, 4)),
    "gap": lambda: tb.show((1000, 60, 6, 1), (2, 3, 5, 4)),
    "gap of one": lambda: tb.show(torch.empty(2, 3, 8)[..., ::2]),
    "nChw8c": lambda: tb.show("nChw8c", (2, 16, 5, 4)),
    "padded": lambda: tb.show("nChw8c", (2, 17, 5, 4)),
    "padded, whole": lambda: tb.show("nChw8c", (1, 17, 5, 4)),
    "NCHW4": lambda: tb.show("NCHW4", (2, 7, 5, 4)),
    "CHWN4": lambda: tb.show("CHWN4", (2, 7, 5, 4)),
    "OIhw4i16o4i": lambda: tb.show("OIhw4i16o4i", (16, 16, 1, 2)),
    "weights, padded": lambda: tb.show("gOIhw4o4i", (2, 5, 3, 1, 3)),
    "weights, large": lambda: tb.show("OIhw16i16o", (20, 40, 3, 3)),
    "three blocked axes": lambda: tb.show("ABC2a3b2c", (3, 4, 5)),
    "depthwise": lambda: tb.show(torch.empty(20, 1, 3, 3).to(tb.Oihw16o)),
    "blocked tensor": lambda: tb.show(torch.empty(1, 5, 3, 2).to(tb.nChw4c)),
    "view": lambda: tb.show(torch.empty(2, 24, 3, 2).to(tb.nChw8c)[1:, 8:]),
    "submemory": lambda: tb.show(MemoryDesc((2, 24, 5, 4), f32, "nChw8c").submemory((1, 16, 2, 2), (1, 8, 3, 1))),
    "one axis": lambda: tb.show("A16a", (250,)),
    "one element": lambda: tb.show("a", (1,)),
    "two axes": lambda: tb.show(torch.empty(3, 5).t()),
    "wide": lambda: tb.show("nchw", (1, 3, 2, 100)),
    "high": lambda: tb.show("ab", (600, 1)),
    "expanded": lambda: tb.show(torch.empty(1, 4, 1).expand(3, 4, 2)),
    "expanded blocks": lambda: tb.show(MemoryDesc.from_physical((2, 20, 3), f32, Blocking(((1, 8),)), (24, 0, 8, 1))),
    "all expanded": lambda: tb.show(torch.empty(1, 1).expand(3, 4)),
    "twelve axes": lambda: tb.show(MemoryDesc((2, 1, 1, 2, 1, 2, 1, 1, 2, 1, 1, 3), torch.int8)),
    "offset0": lambda: tb.show(MemoryDesc((3, 4), f32, (10**15, 10**12), offset0=2**60)),
    "large": lambda: tb.show("nChw16c", (64, 259, 224, 224)),
    "large nhwc": lambda: tb.show(torch.channels_last, (8, 300, 56, 56)),
    "large blocks": lambda: tb.show("ABcd64a64b", (100, 100, 3, 3)),
    "largest": lambda: tb.show(MemoryDesc((2**30, 2**30), torch.int8)),
    "empty": lambda: tb.show("nChw8c", (0, 3, 2, 2)),
}


@pytest.fixture(params=PICTURES)
def picture(request):
    return PICTURES[request.param]()


# ---- reading an SVG back

SVG = "{http://www.w3.org/2000/svg}"
CELLS = ("element", "padding", "gap")


def parse(picture):
    return ElementTree.fromstring(picture.svg)


def part(picture, name):
    return next((g for g in parse(picture).iter(f"{SVG}g") if g.get("class") == name), ElementTree.Element("g"))


def cells(element):
    """(class, what its title says, the text drawn on it) of each cell in the order of the document."""
    found, children = [], list(element)
    for shape, after in itertools.zip_longest(children, children[1:]):
        if shape.tag == f"{SVG}rect" and shape.get("class") in CELLS:
            drawn = after.text if after is not None and after.get("class") == "number" else ""
            found.append((shape.get("class"), shape.find(f"{SVG}title").text, drawn))
    return found


def index_of(title):
    return tuple(map(int, re.findall(r"[a-z](\d+)", title.split(" at ")[0])))


def boxes(root):
    return [
        tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") in CELLS
    ]


def text_box(text):
    """Left, top, right and bottom of a text in the widest monospaced font."""
    size = {"title": 13, "caption": 12}.get(text.get("class"), 10)
    width, x, y = 0.61 * size * len(text.text), float(text.get("x")), float(text.get("y"))
    left = {"number": x - width / 2, "header": x - width / 2, "label right": x - width}.get(text.get("class"), x)
    return left, y - 0.8 * size, left + width, y + 0.25 * size


# ---- the SVG


def test_texts_lie_inside(picture):
    root = parse(picture)
    left, top, width, height = map(float, root.get("viewBox").split())
    assert (left, top, width) == (0, 0, 800)
    texts = list(root.iter(f"{SVG}text"))
    assert len(texts) >= 2
    for text in texts:
        x, y, right, bottom = text_box(text)
        assert x >= 0 and y >= 0 and right <= width and bottom <= height, text.text
    for x, y, w, h in boxes(root):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def assert_apart(found):
    """That no two (left, top, right, bottom, ...) overlap, but for roundings."""
    found = sorted(found)
    for i, (_, top, right, bottom, *what) in enumerate(found):
        for other in found[i + 1 :]:
            if other[0] >= right - 0.2:
                break
            assert other[1] >= bottom - 0.2 or other[3] <= top + 0.2, (what, other)


def test_cells_do_not_overlap(picture):
    assert_apart((x, y, x + w, y + h) for x, y, w, h in boxes(parse(picture)))


def test_texts_do_not_overlap(picture):
    assert_apart((*text_box(text), text.text) for text in parse(picture).iter(f"{SVG}text"))


def test_texts_lie_on_no_foreign_cell(picture):
    root = parse(picture)
    labels = [text_box(text) for text in root.iter(f"{SVG}text") if text.get("class") != "number"]
    x, y, w, h = np.array(boxes(root)).reshape(-1, 4).T
    for left, top, right, bottom in labels:
        beside = (right <= x + 0.2) | (x + w <= left + 0.2) | (bottom <= y + 0.2) | (y + h <= top + 0.2)
        assert beside.all()


@pytest.mark.parametrize("name", ["planes", "order"])
def test_cells_are_what_the_descriptor_says(picture, name):
    desc, found = picture.desc, cells(part(picture, name))
    seen = [index_of(title) for _, title, _ in found]
    assert len(set(seen)) == len(seen)
    assert set(seen) == (set(itertools.product(*picture.layout.kept)) if 0 not in desc.dims else set())
    for (kind, title, drawn), index in zip(found, seen, strict=True):
        padding = any(i >= n for i, n in zip(index, desc.dims, strict=True))
        assert kind == ("padding" if padding else "element")
        assert title.split(" at ")[1] == f"{desc.offset(index)}{', padding' * padding}"
        assert drawn == (str(desc.offset(index)) if name == "planes" else "")


def test_columns_are_in_the_order_of_memory(picture):
    root = part(picture, "order")
    rows = {}
    for rect in root.iter(f"{SVG}rect"):
        rows.setdefault(rect.get("y"), []).append(picture.desc.offset(index_of(rect.find(f"{SVG}title").text)))
    assert bool(rows) != picture.layout.empty
    assert list(rows.values())[:1] == [sorted(row) for row in rows.values()][:1]


def test_path_has_a_line_for_each_step():
    picture = tb.show("nChw4c", (1, 8, 3, 2))
    steps, jumps = (
        "".join(p.get("d") for p in part(picture, "order").iter(f"{SVG}path") if p.get("class") == kind)
        for kind in ("path", "jump")
    )
    assert steps.count("M") == 8 * 3 * 2 - 1 and not jumps
    steps, jumps = (
        "".join(p.get("d") for p in part(PICTURES["gap"](), "order").iter(f"{SVG}path") if p.get("class") == kind)
        for kind in ("path", "jump")
    )
    assert steps.count("M") == 2 * 3 * 5 * 3 and jumps.count("M") == 2 * 3 * 5 - 1


def test_strip_is_memory_from_its_start(picture):
    desc, position = picture.desc, picture.desc.offset0
    found = cells(part(picture, "strip"))
    for kind, title, drawn in found:
        if kind == "gap":
            length = int(re.fullmatch(r"gap of (\d+)", title)[1])
            assert length > 0 and (length <= 4 or re.search(r"\d", drawn))
            position += length
            continue
        index = index_of(title)
        assert desc.offset(index) == position and drawn == str(index[picture.layout.fastest])
        assert kind == ("padding" if any(i >= n for i, n in zip(index, desc.dims, strict=True)) else "element")
        position += 1
    elements = picture.layout.positions
    assert sum(kind != "gap" for kind, _, _ in found) == min(elements, layout_module.MAX_CELLS)
    if 0 < elements <= layout_module.MAX_CELLS:
        assert position == 1 + desc.offset(tuple(n - 1 for n in desc.padded_dims))


POSITIONS = {"nchw": 640, "padded": 960, "gap": 120, "expanded": 4, "expanded blocks": 48, "all expanded": 1}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions(name):
    assert PICTURES[name]().layout.positions == POSITIONS[name]


# ---- what is left out


def count_left_out(text):
    return [tuple(map(int, match)) for match in re.findall(r"(\d+) of (\d+) elements[^;]*?, (\d+) left out", text)]


def test_left_out_is_said(picture):
    flat = " ".join(str(picture).split())
    drawn, total = len(cells(part(picture, "planes"))), math.prod(picture.desc.padded_dims)
    positions = picture.layout.positions
    expected = [(drawn, total, total - drawn)] * (drawn < total)
    expected += [(640, positions, positions - 640)] * (positions > 640)
    assert count_left_out(flat) == expected
    svg = " ".join(text.text for text in parse(picture).iter(f"{SVG}text"))
    assert count_left_out(svg) == expected
    assert drawn == total if total <= 640 else 64 < drawn <= 640
    for letter, kept, n in zip(picture.layout.letters, picture.layout.kept, picture.desc.padded_dims, strict=True):
        assert (f"{len(kept)} of {n} along {letter}" in flat) == (len(kept) < n)


def test_padding_of_a_large_tensor_is_not_left_out():
    for name in ("padded", "large"):
        assert "padding" in {kind for kind, _, _ in cells(part(PICTURES[name](), "planes"))}


# ---- the text


def test_text(picture):
    text = str(picture)
    assert text.isascii() and not any(line != line.rstrip() for line in text.splitlines())
    if picture.layout.empty:
        assert text.splitlines()[0].endswith("; no elements") and len(text.splitlines()) == 2
        return
    if picture.layout.digits < 10:
        assert max(map(len, text.splitlines())) <= 130
    _, planes, order, _ = re.split(r"^\([abc]\)", text, flags=re.MULTILINE)
    numbers = sorted(("*" if cell.padding else "") + str(cell.offset) for cell in picture.layout.drawn)
    lines = [line for line in planes.splitlines()[1:] if not re.search("[a-zA-Z]", line)]
    assert sorted(" ".join(lines).split()) == numbers
    axis = picture.layout.table().axis
    if axis is not None:
        letter = picture.layout.letters[axis]
        rows = re.findall(rf"^ *{letter}\d+ (.*)", order, flags=re.MULTILINE)
        assert sorted(" ".join(rows).split()) == numbers


SMALL = """\
nChw2c of 1x3x2x2; float32; 64 bytes; padded: c 3 to 4
strides: n 16, c 8 a block of 2, h 4, w 2

(a) The logical tensor: each plane is h (down) x w (right); the numbers are positions in memory. *: padding,
  always zero.

 n0 c0     n0 c1     n0 c2     n0 c3
   0   2     1   3     8  10    *9 *11
   4   6     5   7    12  14   *13 *15

(b) The order in memory: c downwards, the other axes to the right. *: padding, always zero.

 h   0   0   1   1
 w   0   1   0   1
------------------
c0   0   2   4   6
c1   1   3   5   7
c2   8  10  12  14
c3  *9 *11 *13 *15

(c) Memory, position 0 to 15: the numbers are indices along c. *: padding, always zero.

 0 |  0  1  0  1  0  1  0  1  2 *3  2 *3  2 *3  2 *3 | from n0 c0 h0 w0"""


def test_text_of_a_small_tensor():
    assert str(tb.show("nChw2c", (1, 3, 2, 2))) == SMALL


def test_text_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"## Look at the bytes.*?```\n(\(a\).*?)```", readme, flags=re.DOTALL)[1]
    picture = tb.show("nChw4c", dims=(1, 6, 2, 2))
    assert shown in str(picture)
    assert (ROOT / "docs" / "nChw4c.svg").read_text() == picture.svg


# ---- positions in real memory


@pytest.mark.parametrize("fmt", ["nChw8c", "Chwn4c", "ABcd4b8a2b"])
def test_positions_are_those_of_the_bytes(fmt):
    x = torch.arange(1.0, 1 + 2 * 17 * 3 * 2).reshape(2, 17, 3, 2)
    b = x.to(tb.format(fmt))
    memory = torch.as_strided(b.physical, (b.physical.numel(),), (1,))
    for _, title, drawn in cells(part(tb.show(b), "planes")):
        index = index_of(title)
        inside = all(i < n for i, n in zip(index, x.shape, strict=True))
        assert memory[int(drawn)] == (x[index] if inside else 0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_descriptor(data):
    dims = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    order = data.draw(st.permutations(range(len(dims))))
    stride, strides = 1, [0] * len(dims)
    for d in order:
        strides[d] = 0 if data.draw(st.integers(0, 5)) == 0 else stride
        stride *= dims[d] if strides[d] else 1
        stride += data.draw(st.integers(0, 9))
    picture = tb.show(MemoryDesc(dims, f32, tuple(strides), offset0=data.draw(st.integers(0, 99))))
    for check in CHECKS:
        check(picture)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_tag(data):
    letters = "abcde"[: data.draw(st.integers(1, 5))]
    dims = tuple(data.draw(st.integers(1, 9)) for _ in letters)
    pairs = data.draw(st.lists(st.tuples(st.integers(2, 4), st.sampled_from(letters)), max_size=3))
    blocked = {letter for _, letter in pairs}
    outer = "".join(c.upper() if c in blocked else c for c in data.draw(st.permutations(letters)))
    picture = tb.show(outer + "".join(f"{size}{letter}" for size, letter in pairs), dims)
    for check in CHECKS:
        check(picture)


CHECKS = (
    test_texts_lie_inside,
    test_cells_do_not_overlap,
    test_texts_do_not_overlap,
    lambda picture: test_cells_are_what_the_descriptor_says(picture, "planes"),
    lambda picture: test_cells_are_what_the_descriptor_says(picture, "order"),
    test_strip_is_memory_from_its_start,
    test_left_out_is_said,
    test_text,
)


# ---- names


NAMES = {
    "nchw": lambda: tb.show(torch.empty(2, 3, 4, 5)),
    "nhwc": lambda: tb.show(torch.channels_last, (2, 3, 4, 5)),
    "aBcd8b": lambda: tb.show("aBcd8b", (2, 3, 4, 5)),
    "nChw8c": lambda: tb.show(tb.nChw8c, (2, 3, 4, 5)),
    "OIhw8i8o": lambda: tb.show(MemoryDesc((8, 8, 2, 3), f32, "ABcd8b8a")),
    "strided nchw": lambda: tb.show(torch.empty(2, 3, 4, 5)[..., :4]),
    "CHWN4": lambda: tb.show("CHWN4", (2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_title_names_the_format(name):
    assert str(NAMES[name]()).startswith(f"{name} of ")


def test_the_letters_are_those_of_the_tag():
    assert "strides: n 1, c 60, h 12, w 3" not in str(tb.show("chwn", (2, 3, 4, 5)))
    assert "strides: n 1, c 40, h 10, w 2" in str(tb.show("chwn", (2, 3, 4, 5)))
    assert "strides: o 1, i 2, h 30, w 6" in str(tb.show("hwio", (2, 3, 4, 5)))


def test_blocked_is_the_format_of_this_cpu():
    assert tb.show(tb.blocked, (1, 17, 2, 2)).desc == torch.empty(1, 17, 2, 2).to(tb.blocked).memory_desc


# ---- the object and its errors


def test_save(tmp_path):
    picture = tb.show("nchw", (1, 2, 2, 2))
    picture.save(tmp_path / "a.svg")
    picture.save(str(tmp_path / "a.txt"))
    assert (tmp_path / "a.svg").read_text("utf-8") == picture.svg == picture._repr_svg_()
    assert (tmp_path / "a.txt").read_text("utf-8") == f"{picture}\n" and repr(picture) == str(picture)
    with pytest.raises(ValueError, match=r"saved as \.svg or \.txt, got .*a\.pdf") as raised:
        picture.save(tmp_path / "a.pdf")
    assert "\n" not in str(raised.value) and not (tmp_path / "a.pdf").exists()


ERRORS = {
    "no dims": (TypeError, "expected dims=", lambda: tb.show("nchw")),
    "dims of a tensor": (TypeError, "expected none", lambda: tb.show(torch.empty(2), (2,))),
    "dims of a descriptor": (TypeError, "expected none", lambda: tb.show(MemoryDesc((2,)), (2,))),
    "another thing": (TypeError, "a tensor, a format", lambda: tb.show(3.0, (2,))),
    "dims of floats": (TypeError, "must be an int", lambda: tb.show("nchw", (1.0, 2, 3, 4))),
    "dims a number": (TypeError, "tuple of ints", lambda: tb.show("a", 5)),
    "negative": (ValueError, "must lie in", lambda: tb.show("ab", (1, -2))),
    "thirteen axes": (ValueError, "at most 12", lambda: tb.show(tb.blocked, (1,) * 13)),
    "malformed": (ValueError, "did you mean", lambda: tb.show("nChw8", (1, 2, 3, 4))),
    "rank": (ValueError, "has 4 axes, expected 3", lambda: tb.show("nchw", (1, 2, 3))),
    "rank of a format": (ValueError, "has 4 axes", lambda: tb.show(tb.nchw, (1, 2, 3))),
    "rank of channels_last": (RuntimeError, "required rank 4", lambda: tb.show(torch.channels_last, (1, 2, 3))),
    "overlap": (ValueError, "overlap", lambda: tb.show((1, 1), (2, 2))),
    "too few strides": (ValueError, "exactly 2", lambda: tb.show((1,), (2, 2))),
    "any": (ValueError, "can be shown", lambda: tb.show("any", (2, 2))),
    "zero": (ValueError, "can be shown", lambda: tb.show(MemoryDesc(()))),
    "no axes": (ValueError, "can be shown", lambda: tb.show(tb.blocked, ())),
    "0-dim": (ValueError, "at least one axis", lambda: tb.show(torch.tensor(1.0))),
    "sparse": (ValueError, "strided", lambda: tb.show(torch.eye(2).to_sparse())),
    "int64": (ValueError, r"2\*\*63", lambda: tb.show("ab", (2**40, 2**40))),
    "overlapping tensor": (ValueError, "overlap", lambda: tb.show(torch.empty(4).as_strided((2, 2), (1, 1)))),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    error, message, call = ERRORS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


# ---- the command line


def test_command_prints(capsys):
    main(["show", "nChw2c", "1x3x2x2"])
    assert capsys.readouterr().out == f"{SMALL}\n"
    main(["show", "8,4,1", "2x2x3"])
    assert capsys.readouterr().out == f"{tb.show((8, 4, 1), (2, 2, 3))}\n"


def test_command_saves(tmp_path, capsys):
    main(["show", "nChw8c", "2x17x5x4", "-o", str(tmp_path / "out.svg")])
    assert (tmp_path / "out.svg").read_text("utf-8") == PICTURES["padded"]().svg
    assert capsys.readouterr().out == ""


def test_command_help(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["show", "--help"])
    assert raised.value.code == 0
    assert "python -m torch_blocked show nChw8c 2x17x5x4 -o" in capsys.readouterr().out


WRONG = {
    "show nChw8 1x2x3x4": "did you mean",
    "show nchw 1x2x3": "has 4 axes, expected 3",
    "show nchw 1x2x3x": "'1x2x3x' is not of the form",
    "show 1,b 1x2": "'1,b' is not of the form",
    "show 1,1 2x2": "overlap",
    "show any 2x2": "can be shown",
    "show nchw 1x1x1x99999999999999999999": "must lie in",
    "show nchw 1x2x3x4 -o picture.pdf": "saved as .svg or .txt",
    "show nchw 1x2x3x4 -o no/such/folder/a.svg": "No such file",
    "show nchw": "required: size",
}


@pytest.mark.parametrize("command", WRONG)
def test_command_errors(command, error_of):
    assert WRONG[command] in error_of(command)


# ---- the example


@pytest.mark.slow
def test_example(tmp_path):
    command = [sys.executable, "examples/understanding_formats.py", "--out", str(tmp_path / "pictures")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert "8 examples, all as the guide says" in done.stdout and "n0 c17" in done.stdout
    files = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert len(files) == 8 and "strides_with_a_gap.svg" in files
