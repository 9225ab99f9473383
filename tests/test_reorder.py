"""Reorders: the operator between all formats, from each kind of strided tensor, and in ATen operations."""

import inspect
import itertools
import math

import pytest
import torch
from reorder_cases import TAGS, assert_lies_as, flat, lay_out, memory, physical_shape, reorder, same_bits
from torch._subclasses import FakeTensorMode

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.reorder import to_dense

SIZES = {
    1: [(1,), (16,), (37,)],
    2: [(3, 53), (16, 16), (1, 1)],
    3: [(2, 20, 7), (17, 1, 3)],
    4: [(3, 17, 2, 5), (18, 70, 1, 2), (16, 16, 3, 1), (1, 1, 4, 9)],
    5: [(2, 5, 17, 3, 2), (17, 3, 2, 1, 4)],
    6: [(2, 17, 1, 3, 2, 5)],
}
FROM = [(rank, size, tag) for rank in TAGS for size in SIZES[rank] for tag in TAGS[rank].split()]


@pytest.mark.parametrize(("rank", "size", "src_tag"), FROM, ids=lambda v: str(v).replace(" ", ""))
def test_from_each_format_to_each(isa, rank, size, src_tag):
    x = torch.randn(size)
    src = lay_out(x, src_tag, padding=math.nan)  # src's padding is not looked at
    for dst_tag in TAGS[rank].split():
        poison = reorder(torch.full_like(src, math.nan), size, src_tag, dst_tag)  # its memory is dst's next
        del poison
        assert_lies_as(reorder(src, size, src_tag, dst_tag), dst_tag, x)
    assert same_bits(memory(src), memory(lay_out(x, src_tag, padding=math.nan))), "src was written to"


def sliced(size):
    """With gaps and an offset, NaN all around."""
    whole = torch.full([2 * n + 3 for n in size], math.nan)
    part = whole[tuple(slice(1, 1 + 2 * n, 2) for n in size)]
    return part.copy_(torch.randn(size))


def overlapping(size):
    return torch.randn(sum(size)).as_strided(size, (1,) * len(size))


STRIDED = {
    "contiguous": lambda size: torch.randn(size),
    "reversed": lambda size: torch.randn(size[::-1]).permute(*range(len(size))[::-1]),
    "channels last": lambda size: torch.randn(size[0], *size[2:], size[1]).movedim(-1, 1),
    "chwn": lambda size: torch.randn(*size[1:], size[0]).movedim(-1, 0),
    "sliced": sliced,
    "sliced channels": lambda size: torch.randn(size[0], size[1] + 5, *size[2:])[:, 3:-2],
    "sliced rows": lambda size: torch.randn(*size[:-1], size[-1] + 4)[..., 2:-2],
    "offset": lambda size: torch.randn(2, *size)[1],
    "expanded batch": lambda size: torch.randn(1, *size[1:]).expand(size),
    "expanded channels": lambda size: torch.randn(size[0], 1, *size[2:]).expand(size),
    "expanded image": lambda size: torch.randn(*size[:2], *[1] * (len(size) - 2)).expand(size),
    "expanded rows": lambda size: torch.randn(*size[:-2], 1, size[-1]).expand(size),
    "expanded columns": lambda size: torch.randn(*size[:-1], 1).expand(size),
    "expanded all": lambda size: torch.randn([1] * len(size)).expand(size),
    "overlapping": overlapping,
}


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize(
    "size",
    [(3, 17, 2, 5), (33, 70, 1, 3), (17, 1, 5, 3), (4, 24, 3, 5), (2, 19, 4), (17, 21), (9, 16), (2, 18, 2, 3, 3)],
    ids=str,
)
def test_from_each_kind_of_strided_tensor(isa, kind, size):
    x = STRIDED[kind](size)
    values = x.clone(memory_format=torch.contiguous_format)
    plain = "abcdef"[: len(size)]
    for tag in TAGS[len(size)].split():
        assert_lies_as(reorder(x, size, plain, tag), tag, values)
    for tag in ("abcdef"[: len(size)], *TAGS[len(size)].split()):
        y = x.to(tb.format(tag))
        if y is x:  # in the format already, whatever the strides of axes of one
            assert tb.MemoryDesc.of(x).matches(tag)
        else:
            assert_lies_as(y.physical if type(y) is tb.BlockedTensor else y, tag, values)
    assert torch.equal(x, values)


@pytest.mark.parametrize("src_tag", ["nChw16c", "OIhw4i16o4i", "Chwn4c"])
@pytest.mark.parametrize("cut", [lambda p: p[1:3], lambda p: p[:, :, 1:3], lambda p: p[:, :, :, ::2]])
def test_from_a_part_of_a_blocked_tensor(isa, src_tag, cut):
    """Gaps between the outer axes, and an offset."""
    blocking = tb.format(src_tag).blocking
    part = cut(lay_out(torch.randn(34, 35, 3, 4), src_tag))
    size = tuple(n * blocking.block(d) for d, n in enumerate(part.shape[:4]))
    x = equivalents.blocked_to_plain(part.clone(), size, flat(src_tag)).contiguous()
    for dst_tag in "nchw nhwc chwn nChw8c OIhw16i16o hwIO4i3o".split():
        assert_lies_as(reorder(part, size, src_tag, dst_tag), dst_tag, x)


@pytest.mark.parametrize("size", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (0, 0, 0, 0), (2, 17, 3, 0)], ids=str)
def test_zero_size(isa, size):
    for src_tag, dst_tag in itertools.product(TAGS[4].split(), repeat=2):
        src = torch.empty(physical_shape(src_tag, size))
        dst = reorder(src, size, src_tag, dst_tag)
        assert tuple(dst.shape) == physical_shape(dst_tag, size) and dst.dtype == torch.float32
        y = torch.empty(size).to(tb.format(src_tag)).to(tb.format(dst_tag))
        assert tuple(y.shape) == size and tb.MemoryDesc.of(y).matches(dst_tag)
        assert type(to_dense(y)) is torch.Tensor and tuple(to_dense(y).shape) == size


def test_no_axes():
    for x in (torch.tensor(3.0), torch.tensor(7, dtype=torch.int8)):
        dst = library.reorder_op(x, [], [], [], [])
        assert dst.shape == () and dst == x and dst.data_ptr() != x.data_ptr()
    assert library.reorder_op(torch.tensor(2.5), [], [], [], [], torch.int32) == 2


# ---- The same in ATen operations, and shapes alone

CASES = [
    *(((3, 17, 2, 5), a, b) for a in TAGS[4].split() for b in TAGS[4].split()),
    *(((2, 0, 2, 2), a, b) for a in ("nchw", "nChw16c", "chwn") for b in TAGS[4].split()),
    *(((1, 16, 1, 1), "nchw", b) for b in TAGS[4].split()),
    *(((37,), "a", b) for b in TAGS[1].split()),
    *(((2, 17, 1, 3, 2, 5), a, b) for a in TAGS[6].split() for b in TAGS[6].split()),
]


def test_aten_operations_do_the_same():
    for size, src_tag, dst_tag in CASES:
        src = reorder(torch.randn(size), size, "abcdef"[: len(size)], src_tag)
        for dtype in (None, torch.float64, torch.int8):
            expected = reorder(src, size, src_tag, dst_tag, dtype)
            actual = reorder(src, size, src_tag, dst_tag, dtype, equivalents.reorder_aten)
            case = (size, src_tag, dst_tag, dtype)
            assert actual.dtype == expected.dtype and torch.equal(actual, expected), case
            assert actual.stride() == expected.stride(), case


def test_fake_reorder_has_the_real_shape_and_strides():
    with FakeTensorMode() as mode:
        for size, src_tag, dst_tag in CASES:
            real = torch.empty(physical_shape(src_tag, size), device="cpu")
            for dtype in (None, torch.float64):
                fake = reorder(mode.from_tensor(real), size, src_tag, dst_tag, dtype)
                with torch.utils._python_dispatch._disable_current_modes():
                    dst = reorder(torch.zeros(physical_shape(src_tag, size)), size, src_tag, dst_tag, dtype)
                case = (size, src_tag, dst_tag)
                assert (fake.shape, fake.stride(), fake.dtype) == (dst.shape, dst.stride(), dst.dtype), case


def test_signatures_are_read_once(monkeypatch):
    """At each call `torch.autograd.Function` would, for as long as a small reorder takes."""
    x = torch.randn(1, 16, 2, 3)
    monkeypatch.setattr(inspect, "_signature_from_function", lambda *_, **__: pytest.fail("read a signature"))
    assert torch.equal(x.to(tb.nChw8c).to_dense(), x)
    assert torch.equal(tb.view_strided(x.to(tb.format("acdB16b"))), x)
