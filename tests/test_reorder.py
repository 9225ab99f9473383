"""Reorders: the operator against addresses computed by `MemoryDesc.offset`, then all that is built on it."""

import functools
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import assert_same
from torch._subclasses import FakeTensorMode

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.reorder import to_dense

nan = torch.nan
f32 = torch.float32


# ---- The oracle: a buffer, and the address of each element in it


@functools.cache
def desc_of(tag, size):
    return tb.MemoryDesc(size, f32, tag)


@functools.cache
def addresses(tag, size):
    """The place in memory of each element, in row-major order."""
    desc = desc_of(tag, size)
    return torch.tensor([desc.offset(i) for i in itertools.product(*map(range, size))], dtype=torch.int64)


def physical_shape(tag, size):
    return tb.format(tag).blocking.physical_shape(size)


def physical_strides(tag, size):
    inner = tb.format(tag).blocking.inner_blks
    return desc_of(tag, size).strides + tuple(math.prod(inner[i + 1 :]) for i in range(len(inner)))


def lay_out(x, tag, padding=0):
    """The physical tensor of a contiguous one, written element by element; `padding` lies between."""
    size = tuple(x.shape)
    buffer = torch.full((math.prod(physical_shape(tag, size)),), padding, dtype=x.dtype)
    buffer[addresses(tag, size)] = x.flatten()
    return buffer.as_strided(physical_shape(tag, size), physical_strides(tag, size))


def memory(physical):
    """All elements of a dense tensor, in the order of their addresses."""
    return physical.as_strided((physical.numel(),), (1,))


def bits(x):
    """The bytes of a tensor, so that NaNs and exotic dtypes compare."""
    return x.contiguous().flatten().view(torch.uint8)


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def flat(tag):
    """The blocking of a tag as the operators take it."""
    return list(sum(tb.format(tag).blocking, ()))


def reorder(src, size, src_tag, dst_tag, dtype=None, op=library.reorder_op):
    return op(src, size, flat(src_tag), tb.format(dst_tag).order, flat(dst_tag), dtype)


def assert_lies_as(physical, tag, x):
    """`physical` is x in the format of a tag: shape, strides, values, zeros in the padding."""
    size = tuple(x.shape)
    assert type(physical) is torch.Tensor
    assert tuple(physical.shape) == physical_shape(tag, size)
    assert physical.stride() == physical_strides(tag, size)
    assert same_bits(memory(physical), memory(lay_out(x, tag))), f"wrong values or padding in {tag}, size {size}"


# ---- The operator

TAGS = {
    1: "a A16a A4a A2a3a",
    2: "ab ba aB16b Ab8a AB4b8a BA3a5b",
    3: "ncw nwc cwn nCw16c nCw8c Cwn4c OIw8i16o2i",
    4: "nchw nhwc chwn hwio nChw4c nChw8c nChw16c nChw64c Chwn4c nhwC16c OIhw16i16o OIhw8i16o2i OIhw4i16o4i Ohwi16o "
    "Oihw8o hwIO4i3o ABCd3b2a2b5c aBCD2d3c2b2d",
    5: "ncdhw ndhwc nCdhw8c nCdhw16c goihw gOIhw4i16o4i Goihw16g aBcDe2d3b",
    6: "abcdef fedcba aBcdef16b AbCdeF2f3a2c",
}
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
    src = lay_out(x, src_tag, padding=nan)  # src's padding is not looked at
    for dst_tag in TAGS[rank].split():
        poison = reorder(torch.full_like(src, nan), size, src_tag, dst_tag)  # its memory is dst's next
        del poison
        assert_lies_as(reorder(src, size, src_tag, dst_tag), dst_tag, x)
    assert same_bits(memory(src), memory(lay_out(x, src_tag, padding=nan))), "src was written to"


def sliced(size):
    """With gaps and an offset, NaN all around."""
    whole = torch.full([2 * n + 3 for n in size], nan)
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
    "expanded all": lambda size: torch.randn([1] * len(size)).expand(size),
    "overlapping": overlapping,
}


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("size", [(3, 17, 2, 5), (33, 70, 1, 3), (2, 19, 4), (17, 21), (2, 18, 2, 3, 3)], ids=str)
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


@pytest.fixture
def guarded():
    """Outputs lie between guard bytes; afterwards none may have been written."""
    library.guard_outputs(True)
    yield
    assert library.guard_outputs(False) == 0, "bytes outside an output were written"


def assert_reordered(x, src_tag, dst_tag):
    src = equivalents.plain_to_blocked(x, tb.format(src_tag).order, flat(src_tag))
    dst = reorder(src, tuple(x.shape), src_tag, dst_tag)
    expected = equivalents.plain_to_blocked(x, tb.format(dst_tag).order, flat(dst_tag))
    assert same_bits(dst, expected) and dst.stride() == expected.stride()


# Long enough for whole vectors of pixels: rows that are a vector, a part of one, and that end in the middle of one.
PIXELS = [(2, 16, 8, 16), (1, 8, 1, 67), (2, 3, 7, 19), (1, 21, 7, 19), (3, 40, 16, 16), (1, 64, 7, 7)]
PIXELS += [(2, 3, 8, 16), (1, 3, 1, 17), (1, 48, 3, 5), (2, 32, 1, 9), (1, 2048, 3, 7)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, f32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", PIXELS, ids=str)
def test_blocks_of_each_width(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    for tag in "nhwc nChw4c nChw8c nChw16c nChw32c".split():
        assert_reordered(x, "nchw", tag)
        assert_reordered(x, tag, "nchw")
        assert_reordered(x, "nhwc", tag)
        assert_reordered(x, tag, "nhwc")


# Too large for the caches: dst is written past them. Rows that begin within a cache line, and that do not.
STREAMED = [((2, 64, 208, 208), f32), ((3, 67, 155, 155), f32), ((40, 19, 151, 151), torch.uint8)]
STREAMED += [((3, 35, 210, 208), torch.float64), ((5, 48, 208, 208), torch.float16)]
STREAMED += [((12, 3, 300, 301), f32), ((16, 3, 300, 300), torch.uint8)]  # a few channels, padded


@pytest.mark.parametrize(("size", "dtype"), STREAMED, ids=str)
def test_larger_than_the_caches(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    pairs = "nchw nChw16c, nChw16c nchw, nhwc nChw16c, nChw16c nhwc, nchw nChw8c, nhwc nchw, nchw nhwc"
    for pair in pairs.split(", "):
        assert_reordered(x, *pair.split())


# Inner blocks of two axes: the columns end within a vector, lie alone, or form pairs that both sides keep together.
WEIGHTS = [(64, 64, 3, 3), (33, 70, 3, 3), (48, 64, 1, 1), (16, 32, 1, 5), (17, 2, 7, 7)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, f32, torch.float64], ids=str)
@pytest.mark.parametrize("size", WEIGHTS, ids=str)
def test_weights(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    for tag in "OIhw4i16o4i OIhw8i16o2i OIhw16i16o OIhw8i8o Ohwi16o Oihw16o".split():
        for plain in ("oihw", "ohwi"):
            assert_reordered(x, plain, tag)
            assert_reordered(x, tag, plain)
        assert_reordered(x, tag, "OIhw8i16o2i")


LARGE = [
    ((8, 64, 28, 28), "nchw", "nChw16c"),
    ((8, 64, 28, 28), "nChw16c", "nchw"),
    ((8, 67, 28, 28), "nhwc", "nChw8c"),
    ((8, 67, 28, 28), "nChw8c", "nhwc"),
    ((8, 67, 28, 28), "chwn", "nChw16c"),
    ((130, 67, 3, 3), "oihw", "OIhw16i16o"),
    ((130, 67, 3, 3), "OIhw16i16o", "oihw"),
    ((130, 67, 3, 3), "OIhw4i16o4i", "OIhw8i16o2i"),
    ((2, 3, 128, 128), "nchw", "nChw16c"),
    ((257, 1031), "ab", "BA16b4a"),
]


@pytest.mark.parametrize(("size", "src_tag", "dst_tag"), LARGE, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_with_threads(size, src_tag, dst_tag, threads):
    x = torch.randn(size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        src = equivalents.plain_to_blocked(x, tb.format(src_tag).order, flat(src_tag))
        dst = reorder(src, size, src_tag, dst_tag)
    finally:
        torch.set_num_threads(before)
    expected = equivalents.plain_to_blocked(x, tb.format(dst_tag).order, flat(dst_tag))
    assert torch.equal(dst, expected) and dst.stride() == expected.stride()


@pytest.mark.parametrize("size", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (0, 0, 0, 0), (2, 17, 3, 0)], ids=str)
def test_zero_size(isa, size):
    for src_tag, dst_tag in itertools.product(TAGS[4].split(), repeat=2):
        src = torch.empty(physical_shape(src_tag, size))
        dst = reorder(src, size, src_tag, dst_tag)
        assert tuple(dst.shape) == physical_shape(dst_tag, size) and dst.dtype == f32
        y = torch.empty(size).to(tb.format(src_tag)).to(tb.format(dst_tag))
        assert tuple(y.shape) == size and tb.MemoryDesc.of(y).matches(dst_tag)
        assert type(to_dense(y)) is torch.Tensor and tuple(to_dense(y).shape) == size


def test_no_axes():
    for x in (torch.tensor(3.0), torch.tensor(7, dtype=torch.int8)):
        dst = library.reorder_op(x, [], [], [], [])
        assert dst.shape == () and dst == x and dst.data_ptr() != x.data_ptr()
    assert library.reorder_op(torch.tensor(2.5), [], [], [], [], torch.int32) == 2


# ---- Dtypes


def can_be_copied(dtype):
    try:
        torch.zeros(2, 3, dtype=dtype).t().clone(memory_format=torch.contiguous_format)
    except (RuntimeError, NotImplementedError):
        return False
    return True


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and can_be_copied(d)}, key=str)


def random_bits(size, dtype):
    if dtype == torch.bool:
        return torch.randint(0, 2, size).to(torch.bool)
    return torch.randint(0, 256, (math.prod(size) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(size)


def test_dtypes_are_all_there():
    names = "float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
    names += " complex64 complex128 float8_e4m3fn float8_e5m2"
    assert {getattr(torch, name) for name in names.split()} <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype(isa, dtype):
    size = (3, 19, 2, 5)
    x = random_bits(size, dtype)
    for tag in TAGS[4].split():
        physical = reorder(x, size, "nchw", tag)
        n = physical.numel()
        # The same moves on numbers that name the elements: 0 is the padding.
        names = memory(lay_out(torch.arange(1, 1 + x.numel()).view(size), tag))
        element = torch.zeros(1 + x.numel(), dtype.itemsize, dtype=torch.uint8)
        element[1:] = bits(x).view(-1, dtype.itemsize)
        assert torch.equal(bits(memory(physical)).view(n, -1), element[names])
        y = x.to(tb.format(tag))
        assert y.dtype == dtype and same_bits(to_dense(y), x)
        assert same_bits(reorder(physical, size, tag, "nchw"), x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("lazy", ["conj", "imag of conj", "neg view"])
def test_lazy_conjugates_and_negatives(dtype, lazy):
    x = torch.randn(2, 19, 3, 2, dtype=dtype)
    x = {"conj": x.conj(), "imag of conj": x.conj().imag, "neg view": x._neg_view()}[lazy]
    y = x.to(tb.nChw16c)
    assert_same(y, x.resolve_conj().resolve_neg(), rtol=0, atol=0)
    assert not y.physical.is_conj() and not y.physical.is_neg()


# ---- Conversion of dtypes by the operator

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float64, f32, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 0.51, nan, math.inf, -math.inf, 1e-30]
SPECIAL += [
    s * (2.0**b + d) for s in (1, -1) for b in (7, 8, 15, 16, 31, 32, 63, 64, 100) for d in (-1, -0.5, 0, 0.5, 1)
]


def nearest_even_saturated(value, dtype):
    if math.isnan(value):
        return 0
    info = torch.iinfo(dtype)
    if math.isinf(value):
        return info.max if value > 0 else info.min
    return min(max(round(value), info.min), info.max)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_floating_point_to_integer(source, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(source)
    expected = torch.tensor([nearest_even_saturated(v, dtype) for v in x.tolist()], dtype=dtype)
    for op in (library.reorder_op, equivalents.reorder_aten):
        for tag in ("a", "A16a"):
            dst = reorder(x, (len(x),), "a", tag, dtype, op)
            assert dst.dtype == dtype
            assert dst.flatten()[: len(x)].tolist() == expected.tolist()
            assert not dst.flatten()[len(x) :].tolist().count(1)


OTHER_PAIRS = [
    (src, dst)
    for src in [*FLOATS, *INTEGERS[:5], torch.bool, torch.complex64]
    for dst in [*FLOATS, *INTEGERS[:5], torch.bool, torch.complex64]
    if not (src.is_floating_point and dst in INTEGERS)
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("source", "dtype"), OTHER_PAIRS, ids=str)
def test_other_pairs_convert_as_in_pytorch(source, dtype):
    x = random_bits((2, 19, 3), torch.int16).to(source)
    if source.is_floating_point or source.is_complex:
        x = x / 7 + 0.1
    for op in (library.reorder_op, equivalents.reorder_aten):
        dst = reorder(x, tuple(x.shape), "ncw", "nCw16c", dtype, op)
        assert dst.dtype == dtype
        expected = equivalents.plain_to_blocked(x.to(dtype), (0, 1, 2), (1, 16))
        assert torch.equal(dst, expected) and dst.stride() == expected.stride()


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


def conv_case(x, src_tag, weight, wei_tag, *, groups=1, block=16, **options):
    """Arguments of `torch_blocked::convolution` from plain tensors."""
    src = reorder(x, tuple(x.shape), "abcde"[: x.dim()], src_tag)
    wei = reorder(weight, tuple(weight.shape), "abcde"[: weight.dim()], wei_tag)
    given = dict(bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1]) | options
    first = [given.pop(k) for k in ("bias", "stride", "padding", "dilation")]
    return [src, flat(src_tag), wei, list(weight.shape), flat(wei_tag), *first, groups, block], given


def conv_cases():
    r = torch.randn
    vectors = dict(bias=r(20), scale=r(20), shift=r(20))
    yield "blocked", conv_case(r(2, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", bias=r(20))
    yield "first", conv_case(r(2, 3, 5, 6), "nchw", r(20, 3, 3, 3), "Ohwi16o", stride=[2, 1], padding=[1, 2])
    yield "depthwise", conv_case(r(2, 20, 5, 6), "nChw16c", r(20, 1, 3, 3), "Oihw16o", groups=20, padding=[1, 1])
    yield "grouped", conv_case(r(1, 32, 5, 6), "nChw8c", r(16, 16, 1, 1), "OIhw8i8o", groups=2, block=8)
    yield "plain weight", conv_case(r(1, 17, 7, 6), "nChw16c", r(20, 17, 3, 2), "oihw", dilation=[2, 1])
    post_ops = dict(residual=r(2, 2, 3, 4, 16), activation="relu")
    post_ops["residual"][:, 1, ..., 4:] = 0
    yield "post-ops", conv_case(r(2, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", **vectors, **post_ops)
    yield "relu6", conv_case(r(0, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", activation="relu6")

    yield "one dim", conv_case(r(2, 17, 9), "nCw16c", r(20, 17, 3), "oiw", stride=[2], padding=[1], dilation=[1])
    window = dict(stride=[1, 2, 1], padding=[1, 0, 1], dilation=[1, 1, 1])
    yield "three dims", conv_case(r(1, 17, 3, 5, 4), "nCdhw16c", r(20, 17, 3, 3, 3), "OIdhw16i16o", **window)


def transposed_cases():
    r = torch.randn
    for name, x, tag, w, wei_tag, window in (
        ("blocked", r(2, 17, 5, 6), "nChw8c", r(17, 20, 4, 4), "OIhw16i16o", ([2, 2], [1, 1], [0, 0], [1, 1], 1)),
        ("uneven", r(1, 17, 5, 6), "nChw8c", r(17, 20, 3, 2), "Ohwi8o", ([1, 3], [1, 0], [0, 2], [1, 2], 1)),
        ("one dim", r(2, 17, 9), "nCw8c", r(17, 20, 3), "oiw", ([2], [1], [1], [1], 1)),
        ("groups", r(2, 20, 3, 4), "nChw8c", r(20, 2, 3, 3), "oihw", ([2, 1], [1, 1], [1, 0], [1, 1], 10)),
    ):
        src = reorder(x, tuple(x.shape), "abcd"[: x.dim()], tag)
        wei = reorder(w, tuple(w.shape), "abcd"[: w.dim()], wei_tag)
        yield name, ([src, flat(tag), wei, w.shape, flat(wei_tag), r(20), *window, 8], {})


def batch_norm_cases():
    r = torch.randn
    yield (
        "affine",
        ([reorder(r(2, 20, 3, 4), (2, 20, 3, 4), "nchw", "nChw16c"), r(20), r(20), r(20), r(20) ** 2, 1e-5], {}),
    )
    yield "plain", ([reorder(r(2, 20, 5), (2, 20, 5), "ncw", "nCw8c"), None, None, r(20), r(20) ** 2 + 1, 1e-3], {})


def reorder_cases():
    r = torch.randn
    yield "to blocked", ([r(2, 17, 3, 4), (2, 17, 3, 4), [], [0, 1, 2, 3], [1, 16]], {})
    yield "to plain", ([r(2, 2, 3, 4, 16), (2, 17, 3, 4), [1, 16], [0, 2, 3, 1], []], {})
    yield "split twice", ([r(18, 17, 3, 3), (18, 17, 3, 3), [], [0, 1, 2, 3], [1, 4, 0, 16, 1, 4]], {})
    yield "dtype", ([r(2, 17, 3), (2, 17, 3), [], [2, 1, 0], [1, 8]], dict(dtype=torch.float64))
    yield "strided", ([r(2, 17, 3, 4).transpose(1, 3), (2, 4, 3, 17), [], [0, 1, 2, 3], [3, 8]], {})
    yield "empty", ([r(0, 17), (0, 17), [], [1, 0], [1, 8]], {})


OPERATORS = {
    "reorder": reorder_cases,
    "convolution": conv_cases,
    "convolution_transpose": transposed_cases,
    "batch_norm": batch_norm_cases,
}
OPERATOR_CASES = [(name, case) for name, cases in OPERATORS.items() for case, _ in cases()]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize(("name", "case"), OPERATOR_CASES)
def test_opcheck(name, case, requires_grad):
    args, kwargs = dict(OPERATORS[name]())[case]
    if requires_grad:
        args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_leaf else a for a in args]
        kwargs = {k: v.requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    torch.library.opcheck(getattr(torch.ops.torch_blocked, name).default, args, kwargs)


@pytest.mark.parametrize(("name", "case"), OPERATOR_CASES)
def test_fake_operator_has_the_real_shape_and_strides(name, case):
    args, kwargs = dict(OPERATORS[name]())[case]
    op = getattr(torch.ops.torch_blocked, name)
    real = op(*args, **kwargs)
    with FakeTensorMode() as mode:

        def fake(value):
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        shape_only = op(*map(fake, args), **{k: fake(v) for k, v in kwargs.items()})
    assert (shape_only.shape, shape_only.stride(), shape_only.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(("name", "case"), [c for c in OPERATOR_CASES if c[0] != "reorder"])
def test_operator_against_aten_operations(isa, name, case):
    args, kwargs = dict(OPERATORS[name]())[case]
    actual = getattr(torch.ops.torch_blocked, name)(*args, **kwargs)
    expected = getattr(equivalents, f"{name}_aten")(*args, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert actual.stride() == expected.stride()


def test_vectors_with_gaps():
    """Bias, scale and shift, the statistics: any strides."""
    for name, case in (("convolution", "post-ops"), ("batch_norm", "affine")):
        args, kwargs = dict(OPERATORS[name]())[case]
        op = getattr(torch.ops.torch_blocked, name)
        expected = op(*args, **kwargs)

        def gaps(v):
            is_vector = isinstance(v, torch.Tensor) and v.dim() == 1
            return torch.stack([v, torch.full_like(v, nan)], 1)[:, 0] if is_vector else v

        actual = op(*map(gaps, args), **{k: gaps(v) for k, v in kwargs.items()})
        assert torch.equal(actual, expected)


# ---- Gradients

PAIRS = [("nchw", "nChw4c"), ("nhwc", "OIhw4i16o4i"), ("nChw4c", "chwn"), ("nChw4c", "Ohwi16o"), ("Chwn4c", "nChw8c")]
SMALL = (2, 5, 2, 2)


def random(*size):
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


ROUND_TRIPS = {
    "to_dense": lambda x: x.to(tb.nChw4c).to_dense(),
    "to(dtype, fmt)": lambda x: x.to(torch.complex128, tb.nChw4c).to_dense().real,
    "channels_last": lambda x: x.to(tb.OIhw4i16o4i).to(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(memory_format=tb.nChw4c).contiguous(),
    "contiguous(channels_last)": lambda x: x.to(tb.nChw4c).contiguous(memory_format=torch.channels_last),
    "chwn": lambda x: x.to(tb.nChw8c).to(tb.chwn),
    "clone": lambda x: x.clone(memory_format=tb.format("Chwn4c")).clone(memory_format=torch.contiguous_format),
    "blocked to blocked": lambda x: x.to(tb.nChw4c).to(tb.OIhw4i16o4i).to(tb.nhwc),
    "used while blocked": lambda x: (x.to(tb.nChw4c).square() * 3).to_dense(),
    "used in both formats": lambda x: (x.to(tb.nChw4c) * x.to(tb.nChw8c) * x).to_dense(),
    "views": lambda x: tb.view_strided(tb.view_blocked(x.mean((2, 3), keepdim=True)[:, :4].contiguous(), tb.nChw4c)),
    "view of a blocked tensor": lambda x: tb.view_strided(x.to(tb.nChw8c)),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_gradients(name):
    x = random(*SMALL)
    assert torch.autograd.gradcheck(ROUND_TRIPS[name], x)
    assert torch.autograd.gradgradcheck(ROUND_TRIPS[name], x)


@pytest.mark.parametrize("name", [n for n in ROUND_TRIPS if n != "used in both formats"])
def test_gradient_of_a_plain_tensor_is_plain(name):
    x = random(*SMALL)
    ROUND_TRIPS[name](x).sum().backward()
    assert type(x.grad) is torch.Tensor


@pytest.mark.parametrize("op", [library.reorder_op, equivalents.reorder_aten], ids=["operator", "aten"])
@pytest.mark.parametrize(("src_tag", "dst_tag"), PAIRS)
def test_gradients_of_the_operator(op, src_tag, dst_tag):
    src = lay_out(torch.randn(SMALL, dtype=torch.float64), src_tag).clone().requires_grad_()

    def function(src):
        return reorder(src, SMALL, src_tag, dst_tag, op=op)

    assert torch.autograd.gradcheck(function, src)
    assert torch.autograd.gradgradcheck(function, src)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradient_through_a_dtype(dtype):
    x = torch.randn(2, 20, 3, requires_grad=True)
    weights = torch.randn(2, 2, 3, 16).to(dtype)
    reorder(x, (2, 20, 3), "ncw", "nCw16c", dtype).backward(weights)
    assert x.grad.dtype == f32
    torch.testing.assert_close(x.grad, equivalents.blocked_to_plain(weights, (2, 20, 3), (1, 16)).float())
    x.grad = None
    x.to(dtype, tb.nCw16c).to_dense().float().sum().backward()
    assert type(x.grad) is torch.Tensor and x.grad.dtype == f32 and torch.equal(x.grad, torch.ones_like(x))


def test_integers_have_no_gradient():
    x = torch.randn(2, 20, 3, requires_grad=True)
    assert not reorder(x, (2, 20, 3), "ncw", "nCw16c", torch.int32).requires_grad


@pytest.mark.parametrize("tag", ["nChw16c", "nChw8c", "Chwn4c"])
def test_gradient_of_a_blocked_leaf(tag):
    y = torch.randn(2, 20, 3, 3).to(tb.format(tag)).requires_grad_()
    weights = torch.randn(2, 20, 3, 3)
    (y.to_dense() * weights).sum().backward()
    assert_same(y.grad, weights)
    (y.to(tb.nhwc) * weights).sum().backward()
    (y.to(tb.OIhw4i16o4i).to_dense() * weights).sum().backward()
    assert_same(y.grad, 3 * weights)


def test_inference_mode_and_no_grad():
    x = torch.randn(2, 20, 3, 3, requires_grad=True)
    with torch.no_grad():
        assert not x.to(tb.nChw16c).requires_grad
    with torch.inference_mode():
        y = x.to(tb.nChw16c)
        assert y.is_inference() and not y.requires_grad
        assert_same(y, x.detach())
    assert x.to(tb.nChw16c).requires_grad and not x.detach().to(tb.nChw16c).requires_grad


def test_jacobian_of_torch_func():
    x = torch.randn(2, 5, 2, 2)
    grad = torch.func.grad(lambda x: (x.to(tb.nChw4c).to_dense() ** 2).sum())(x)
    torch.testing.assert_close(grad, 2 * x)


# ---- Bad arguments of the operators

X = "torch.zeros(2, 20, 3, 3)"
SIZE, ORDER = "(2, 20, 3, 3)", "[0, 1, 2, 3]"
BIG, HUGE = 2**40, 2**62
SRC, WEI, BN = "torch.zeros(1, 1, 5, 5, 16)", "torch.zeros(1, 1, 3, 3, 16, 16)", "torch.zeros(2, 2, 3, 3, 16)"


def bad_conv(src=SRC, src_blocking="[1, 16]", weight=WEI, size="[16, 16, 3, 3]", blocking="[1, 16, 0, 16]", **options):
    given = dict(bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, block=16) | options
    rest = ", ".join(f"{k}={v}" for k, v in given.items())
    return f"convolution({src}, {src_blocking}, {weight}, {size}, {blocking}, {rest})"


BAD_CALLS = [
    # the logical size is not src's
    f"reorder({X}, (2, 20, 3), [], [0, 1, 2], [])",
    f"reorder({X}, (2, 20, 3, 4), [], {ORDER}, [])",
    f"reorder({X}, (2, 20, 3, -3), [], {ORDER}, [])",
    f"reorder({X}, (-2, 20, 3, -3), [], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), (2, 33, 3, 3), [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), (2, 16, 3, 3), [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), {SIZE}, [1, 8], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 32)[..., ::2], {SIZE}, [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 1).expand(2, 2, 3, 3, 16), {SIZE}, [1, 16], {ORDER}, [])",
    "reorder(torch.tensor(1.0), [], [0, 16], [], [])",
    "reorder(torch.tensor(1.0), [], [], [], [0, 16])",
    "reorder(torch.zeros([1] * 13), [1] * 13, [], list(range(13)), [])",
    f"reorder({X}, ({HUGE}, 20, 3, 3), [], {ORDER}, [])",
    # the order is no permutation
    f"reorder({X}, {SIZE}, [], [0, 1, 2], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 2], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 4], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, -1], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 3, 4], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, {HUGE}], [])",
    # no blocking
    f"reorder({X}, {SIZE}, [], {ORDER}, [1])",
    f"reorder({X}, {SIZE}, [1], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, 0])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, -16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [4, 16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [-1, 16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, 2] * 13)",
    # more than there is memory, or int64
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {HUGE}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, {2**20}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, 8])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [0, {2**20}, 1, {2**20}, 2, {2**20}, 3, {2**20}])",
    f"reorder({X}, {SIZE}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, {2**20}], {ORDER}, [])",
    f"reorder(torch.zeros(1).expand({HUGE}), ({HUGE},), [], [0], [])",
    f"reorder(torch.zeros(1, dtype=torch.int8).expand({2**63 - 1}), ({2**63 - 1},), [], [0], [0, 16])",
    f"reorder(torch.zeros(1, 1).expand({BIG}, {BIG}), ({BIG}, {BIG}), [], [0, 1], [])",
    f"reorder(torch.zeros(1).expand({BIG}), ({BIG},), [], [0], [0, {2**20}])",
    # types
    f"reorder(None, {SIZE}, [], {ORDER}, [])",
    f"reorder({X}, None, [], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [], 'float32')",
    f"reorder({X}, {SIZE}, [], {ORDER}, [], torch.quint8)",
    f"reorder({X}.to_sparse(), {SIZE}, [], {ORDER}, [])",
    # convolution
    bad_conv(stride=[0, 1]),
    bad_conv(stride=[1]),
    bad_conv(stride=[-1, 1]),
    bad_conv(stride=[HUGE, 1]),
    bad_conv(padding=[-1, 0]),
    bad_conv(padding=[HUGE, 0]),
    bad_conv(padding=[2**24 - 1, 2**24 - 1]),
    bad_conv(dilation=[0, 1]),
    bad_conv(dilation=[HUGE, 1]),
    bad_conv(dilation=[2**24 - 1, 1]),
    bad_conv(groups=0),
    bad_conv(groups=-1),
    bad_conv(groups=2),
    bad_conv(groups=3),
    bad_conv(groups=HUGE),
    bad_conv(block=0),
    bad_conv(block=-16),
    bad_conv(block=HUGE),
    bad_conv(size="[16, 16, 3]"),
    bad_conv(size="[16, 16, 3, 3, 3]"),
    bad_conv(size="[17, 16, 3, 3]"),
    bad_conv(size="[16, 17, 3, 3]"),
    bad_conv(size="[0, 16, 3, 3]"),
    bad_conv(size="[16, -16, 3, 3]"),
    bad_conv(size=f"[16, {HUGE}, 3, 3]"),
    bad_conv(size=f"[16, {HUGE}, 3, 3]", groups=16),
    bad_conv(size=f"[{HUGE}, 16, 3, 3]"),
    bad_conv(src_blocking="[]"),
    bad_conv(src_blocking="[1]"),
    bad_conv(src_blocking="[2, 16]"),
    bad_conv(blocking="[]"),
    bad_conv(blocking="[0, 16]"),
    bad_conv(blocking=f"[1, {2**20}] * 4"),
    bad_conv(src="torch.zeros(1, 1, 2, 2, 16)"),
    bad_conv(src="torch.zeros(1, 1, 0, 5, 16)"),
    bad_conv(src="torch.zeros(1, 1, 5, 5)"),
    bad_conv(src="torch.zeros(5)"),
    bad_conv(src=f"{SRC}.double()"),
    bad_conv(src=f"{SRC}.to_sparse()"),
    bad_conv(weight=f"{WEI}.double()"),
    bad_conv(weight=f"{WEI}[..., ::2]"),
    bad_conv(bias="torch.zeros(15)"),
    bad_conv(bias="torch.zeros(1, 16)"),
    bad_conv(bias="torch.zeros(16).double()"),
    bad_conv(scale="torch.zeros(15)"),
    bad_conv(shift="torch.zeros(17)"),
    bad_conv(residual="torch.zeros(1, 1, 3, 3, 8)"),
    bad_conv(residual="torch.zeros(1, 16, 3, 3)"),
    bad_conv(residual="torch.zeros(1, 1, 3, 3, 16).double()"),
    bad_conv(activation="'tanh'"),
    bad_conv(activation="None"),
    # batch_norm
    f"batch_norm({BN}, None, None, torch.zeros(20), torch.ones(21), 1e-5)",
    f"batch_norm({BN}, torch.zeros(19), None, torch.zeros(20), torch.ones(20), 1e-5)",
    f"batch_norm({BN}, None, torch.zeros(20).double(), torch.zeros(20), torch.ones(20), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(20), torch.tensor(1.0), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(33), torch.ones(33), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(16), torch.ones(16), 1e-5)",
    f"batch_norm({BN}.double(), None, None, torch.zeros(20), torch.ones(20), 1e-5)",
    "batch_norm(torch.zeros(2, 2), None, None, torch.zeros(2), torch.ones(2), 1e-5)",
    "batch_norm(torch.tensor(1.0), None, None, torch.zeros(1), torch.ones(1), 1e-5)",
    "batch_norm(torch.zeros(2, 2, 3, 3, 0), None, None, torch.zeros(0), torch.ones(0), 1e-5)",
    f"batch_norm({BN[:-5]}1), None, None, torch.zeros(1).expand({2**63 - 1}), torch.ones(1), 1e-5)",
]

# Each call in a process of its own, made from one that has loaded the library: a crash is an answer too.
CALLER = """
import json, os, sys, torch, torch_blocked
names = vars(torch.ops.torch_blocked) | {n: getattr(torch.ops.torch_blocked, n) for n in sys.argv[2].split()}
for call in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            eval(call, names | {"torch": torch})
            answer = ["nothing", ""]
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = [kinds, str(error)]
        print(json.dumps(answer), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(["crash", f"status {status}"]))
"""


@functools.cache
def answers():
    command = [sys.executable, "-W", "ignore", "-c", CALLER, json.dumps(BAD_CALLS), " ".join(OPERATORS)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    return dict(zip(BAD_CALLS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_arguments(call):
    kinds, text = answers()[call]
    assert {"ValueError", "TypeError", "RuntimeError"} & set(kinds), f"{kinds}: {text}"
    told_by_pytorch = "Could not run" in text or "Expected a value of type" in text or "no tensor arguments" in text
    assert told_by_pytorch or ("\n" not in text and 0 < len(text) < 500), text
