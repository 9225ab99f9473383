"""Memory descriptors against a slow reference, against PyTorch's own strided tensors, and against tables of facts."""

import copy
import itertools
import math
import pickle
import types

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_blocked.memory_desc import INT64_MAX, Blocking, MemoryDesc, parse_tag, tag_name

f32, s8 = torch.float32, torch.int8
property_test = settings(max_examples=100, deadline=None, derandomize=True, database=None)


# ---- The slow reference: loops over the rules, nothing shared with the code under test


def slow_tag(dims, order, blocks):
    """padded_dims and strides of a tag."""
    block = [1] * len(dims)
    for axis, size in blocks:
        block[axis] *= size
    padded = list(dims)
    for d in range(len(dims)):
        while padded[d] % block[d]:
            padded[d] += 1
    stride = math.prod(block)
    strides = [None] * len(dims)
    for d in order[::-1]:
        strides[d] = stride
        if padded[d] // block[d] != 0:
            stride *= padded[d] // block[d]
    return tuple(padded), tuple(strides)


def slow_off_v(index, strides, blocks, offset0=0):
    pos, off, bs = list(index), offset0, 1
    for i in range(len(blocks) - 1, -1, -1):
        d, size = blocks[i]
        off += (pos[d] % size) * bs
        pos[d] = pos[d] // size
        bs *= size
    for d in range(len(pos)):
        off += pos[d] * strides[d]
    return off


def slow_nbytes(padded, strides, blocks, itemsize):
    if 0 in padded:
        return 0
    largest = 0
    for d in range(len(padded)):
        n = padded[d]
        for axis, size in blocks:
            n = n // size if axis == d else n
        largest = max(largest, n * (1 if n == 1 else strides[d]))
    if largest == 1 and blocks:
        largest = math.prod(size for _, size in blocks)
    return largest * itemsize


def indices(dims):
    return itertools.product(*map(range, dims))


def addresses(desc):
    """The offset of every element, in row-major order of its logical index."""
    return [desc.offset(index) for index in indices(desc.dims)]


def canonical(order, blocks):
    """A tag spelled by hand."""
    blocked = {axis for axis, _ in blocks}
    outer = "".join(chr(ord("A" if d in blocked else "a") + d) for d in order)
    return outer + "".join(f"{size}{chr(ord('a') + axis)}" for axis, size in blocks)


@st.composite
def layouts(draw, min_dim=0, max_ndim=4):
    """(dims, order, blocks): a small tensor and the content of a tag."""
    ndim = draw(st.integers(1, max_ndim))
    dims = tuple(draw(st.integers(min_dim, 5)) for _ in range(ndim))
    order = tuple(draw(st.permutations(range(ndim))))
    block = st.tuples(st.integers(0, ndim - 1), st.integers(2, 4))
    return dims, order, tuple(draw(st.lists(block, max_size=3)))


def refused(kind, given_text, call, *args, **kwargs):
    """Checks that a call is refused with one line that shows what was given; returns the line."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message and "\n" not in message
    assert given_text in message
    return message


# ---- Format tags

SPELLINGS = [
    ("nc", "ab"),
    ("cn", "ba"),
    ("ncw", "abc"),
    ("nwc", "acb"),
    ("nCw16c", "aBc16b"),
    ("nchw", "abcd"),
    ("nhwc", "acdb"),
    ("chwn", "bcda"),
    ("nChw8c", "aBcd8b"),
    ("NChw16n16c", "ABcd16a16b"),
    ("Chwn4c", "Bcda4b"),
    ("ncdhw", "abcde"),
    ("ndhwc", "acdeb"),
    ("nCdhw16c", "aBcde16b"),
    ("oi", "ab"),
    ("io", "ba"),
    ("oiw", "abc"),
    ("wio", "cba"),
    ("OIw16i16o", "ABc16b16a"),
    ("oihw", "abcd"),
    ("hwio", "cdba"),
    ("iohw", "bacd"),
    ("OIhw16i16o", "ABcd16b16a"),
    ("OIhw4i16o4i", "ABcd4b16a4b"),
    ("Ohwi16o", "Acdb16a"),
    ("dhwio", "cdeba"),
    ("goiw", "abcd"),
    ("goihw", "abcde"),
    ("hwigo", "decab"),
    ("gOIhw4i16o4i", "aBCde4c16b4c"),
    ("Goihw16g", "Abcde16a"),
    ("dhwigo", "defcab"),
    ("tnc", "abc"),
    ("ntc", "bac"),
    ("ldnc", "abcd"),
    ("ldigo", "abcde"),
    ("ldgoi", "abdec"),
    ("ldoi", "abdc"),
    ("ldOI32o4i", "abDC32d4c"),
    ("x", "a"),
    ("NCHW", "abcd"),
    ("NHWC", "acdb"),
    ("NCHW4", "aBcd4b"),
    ("NCHW32", "aBcd32b"),
    ("NCHW64", "aBcd64b"),
    ("CHWN4", "Bcda4b"),
    ("Ba3b2a", None),
    ("BA3b2a", "BA3b2a"),
    ("abcdefghijkl", "abcdefghijkl"),
    ("A16a", "A16a"),
]


@pytest.mark.parametrize(("tag", "same"), [row for row in SPELLINGS if row[1]])
def test_spellings_of_one_format(tag, same):
    assert parse_tag(tag) == parse_tag(same)
    assert parse_tag(tag, len(parse_tag(same).order)) == parse_tag(same)
    assert tag_name(*parse_tag(tag)) == same


@pytest.mark.parametrize(
    ("tag", "order", "blocking"),
    [
        ("nchw", (0, 1, 2, 3), ()),
        ("chwn", (1, 2, 3, 0), ()),
        ("nChw16c", (0, 1, 2, 3), ((1, 16),)),
        ("OIhw4i16o4i", (0, 1, 2, 3), ((1, 4), (0, 16), (1, 4))),
        ("BA3b2a", (1, 0), ((1, 3), (0, 2))),
        ("CHWN4", (1, 2, 3, 0), ((1, 4),)),
        ("ldgoi", (0, 1, 3, 4, 2), ()),
    ],
)
def test_parse_tag(tag, order, blocking):
    parsed = parse_tag(tag)
    assert (parsed.order, parsed.blocking) == (order, blocking)
    assert isinstance(parsed.blocking, Blocking)


@property_test
@given(layouts())
def test_parse_tag_inverts_tag_name(layout):
    _, order, blocks = layout
    assert tag_name(order, blocks) == canonical(order, blocks)
    for spelling in "canonical", "activation", "weights":
        assert parse_tag(tag_name(order, blocks, spelling), len(order)) == (order, blocks)


@pytest.mark.parametrize(
    ("order", "blocking", "activation", "weights"),
    [
        ((0,), ((0, 16),), "A16a", "A16a"),
        ((0, 1), ((1, 8),), "nC8c", "aB8b"),
        ((0, 2, 1), (), "nwc", "owi"),
        ((0, 1, 2, 3), ((1, 16),), "nChw16c", "oIhw16i"),
        ((0, 1, 2, 3), ((1, 4), (0, 16), (1, 4)), "NChw4c16n4c", "OIhw4i16o4i"),
        ((0, 2, 3, 4, 1), (), "ndhwc", "odhwi"),
        ((5, 4, 3, 2, 1, 0), (), "fedcba", "fedcba"),
    ],
)
def test_tag_name_spellings(order, blocking, activation, weights):
    assert tag_name(order, Blocking(blocking), "activation") == activation
    assert tag_name(order, Blocking(blocking), spelling="weights") == weights


BAD_TAGS = [
    # tag, what the tag should have been
    ("nChw", "nChw16c or nchw"),
    ("nchw16c", "nChw16c or nchw"),
    ("nChw0c", "nChw16c or nchw"),
    ("nChw1c", "nChw16c or nchw"),
    ("nChw08c", "nChw8c or nchw"),
    ("nCChw16c", "nChw16c or nchw"),
    ("nChw16C", "nChw16c or nchw"),
    ("nChw8", "nChw8c or nchw"),
    ("nChw16c ", "nChw16c or nchw"),
    ("n-c-h-w", "nchw"),
    ("nchh", None),
    ("NCDHW", "ncdhw"),
    ("aBcd16x", "aBcd16b or abcd"),
    ("aBcd8x", "aBcd8b or abcd"),
    ("aabc", "abc"),
    ("aBcd16b8x", "aBcd16b8b or abcd"),
    ("nChw2", "nChw2c or nchw"),
    ("nCHw", "nchw"),
    ("nCHw16x", "nchw"),
    ("x" * 10000, "x"),
    ("oihw16i16o", "OIhw16i16o or oihw"),
    ("abd", None),
    ("nchx", None),
    ("ngchw", None),
    ("abcdefghijklm", None),
    ("", None),
    ("16c", None),
    ("16cnhw", None),
    ("nChw16c\n", "nChw16c or nchw"),
    ("aBcd" + "9" * 5000 + "b", None),
    ("aBcd9999999999999999999b", "abcd"),
    ("aBcd4294967296b4294967296b", "abcd"),
    ("A" + "2a" * 13, None),
    ("any", None),
    ("nchẃ", None),
    ("nChw\u0661\u0666c", None),  # digits, but not ASCII
]


@pytest.mark.parametrize(("tag", "meant"), BAD_TAGS)
def test_bad_tags(tag, meant):
    message = refused(ValueError, repr(tag)[:77], parse_tag, tag)
    if meant is not None:
        assert f"did you mean {meant}?" in message
    assert len(message) < 300
    for guess in message.partition("did you mean ")[2].rstrip("?").split(" or "):
        assert not guess or parse_tag(guess)


WRONG_RANKS = [
    ("nchw", 3, "ncw"),
    ("nchw", 5, "ncdhw"),
    ("nhwc", 5, "ndhwc"),
    ("nc", 4, "nchw"),
    ("nchw", 2, "nc"),
    ("nCw16c", 4, "nChw16c"),
    ("OIhw4i16o4i", 5, "OIdhw4i16o4i"),
    ("goihw", 4, "goiw"),
    ("NCHW32", 3, "nCw32c"),
    ("abcd", 3, "abc"),
    ("acdb", 5, "acdeb"),
    ("aBcd16b", 5, "aBcde16b"),
    ("nchw", 12, None),
    ("ldnc", 3, None),
    ("nchw", 0, None),
]


@pytest.mark.parametrize(("tag", "ndim", "meant"), WRONG_RANKS)
def test_tag_of_another_rank(tag, ndim, meant):
    message = refused(ValueError, repr(tag), parse_tag, tag, ndim)
    assert f"expected {ndim}" in message
    assert message.partition("did you mean ")[2] == (f"{meant}?" if meant else "")


@property_test
@given(st.text() | st.text("abcdABCDnhwNHWoiOI0123468", max_size=9), st.none() | st.integers(0, 6))
@example("nChw16c", 4)
def test_any_string_is_a_tag_or_refused_in_one_line(tag, ndim):
    try:
        order, blocking = parse_tag(tag, ndim)
    except ValueError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("format tag")
    else:
        assert ndim in (None, len(order))
        assert parse_tag(tag_name(order, blocking)) == (order, blocking)


@pytest.mark.parametrize(
    ("tag", "ndim"), [(None, 4), (["nchw"], 4), (4, 4), (b"nchw", 4), ("nchw", 4.0), ("nchw", True)]
)
def test_parse_tag_wants_a_str_and_an_int(tag, ndim):
    parse_tag("nchw", 4)  # a cached answer must not be mistaken for that of 4.0
    refused(TypeError, repr(ndim if tag == "nchw" else tag), parse_tag, tag, ndim)


@pytest.mark.parametrize(
    ("kind", "shown", "args"),
    [
        (ValueError, "(0, 0)", ((0, 0), ())),
        (ValueError, "()", ((), ())),
        (ValueError, "(1, 2)", ((1, 2), ())),
        (ValueError, "((2, 4),)", ((0, 1), ((2, 4),))),
        (ValueError, "'german'", ((0, 1), (), "german")),
        (ValueError, "['x']", ((0, 1), (), ["x"])),
        (TypeError, "'ab'", ("ab", ())),
        (TypeError, "None", ((0, 1), None)),
    ],
)
def test_tag_name_refusals(kind, shown, args):
    refused(kind, shown, tag_name, *args)


# ---- Blocking

BLOCKINGS = [
    # blocking, size, padded, outer
    ((), (2, 17, 3), (2, 17, 3), (2, 17, 3)),
    (((1, 16),), (2, 17, 3), (2, 32, 3), (2, 2, 3)),
    (((1, 16),), (0, 16, 0), (0, 16, 0), (0, 1, 0)),
    (((1, 16),), (1, 0), (1, 0), (1, 0)),
    (((1, 4), (0, 16), (1, 4)), (17, 17, 3, 3), (32, 32, 3, 3), (2, 2, 3, 3)),
    (((1, 3), (0, 2)), (3, 4), (4, 6), (2, 2)),
]


@pytest.mark.parametrize(("blocks", "size", "padded", "outer"), BLOCKINGS)
def test_blocking_sizes(blocks, size, padded, outer):
    blocking = Blocking(blocks)
    assert blocking.padded(size) == padded
    assert blocking.outer(size) == outer
    assert blocking.physical_shape(size) == outer + tuple(n for _, n in blocks)
    assert blocking.blocks(len(size)) == tuple(map(blocking.block, range(len(size))))


def test_blocking_attributes():
    blocking = Blocking([[1, 4], [0, 16], [1, 4]])
    assert blocking.inner_blks == (4, 16, 4)
    assert blocking.inner_idxs == (1, 0, 1)
    assert blocking.inner_numel == 256
    assert blocking.axes == (0, 1)
    assert [blocking.block(d) for d in range(3)] == [16, 16, 1]
    assert (Blocking().inner_blks, Blocking().inner_numel, Blocking().axes) == ((), 1, ())


def test_the_largest_blockings():
    assert Blocking(((11, INT64_MAX),)).inner_numel == INT64_MAX
    assert Blocking(((0, 2),) * 12).block(0) == 2**12


def test_blocking_is_the_plain_tuple():
    blocking, plain = Blocking([(1, 16)]), ((1, 16),)
    assert blocking == plain
    assert hash(blocking) == hash(plain)
    assert {plain: "found"}[blocking] == "found"
    assert list(blocking) == [(1, 16)]
    assert not Blocking()
    assert Blocking(blocking) is blocking


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_blocking_survives_copies(duplicate):
    blocking = duplicate(Blocking(((1, 4), (0, 16))))
    assert isinstance(blocking, Blocking)
    assert (blocking, blocking.inner_numel, blocking.block(1)) == (((1, 4), (0, 16)), 64, 4)


def test_blocking_is_immutable():
    blocking = Blocking(((1, 16),))
    with pytest.raises(AttributeError, match="inner_blks"):
        blocking.inner_blks = (8,)
    with pytest.raises(AttributeError, match="axes"):
        del blocking.axes
    assert (blocking.inner_blks, blocking.axes) == ((16,), (1,))


def test_blocking_sizes_may_be_symbolic():
    mode, blocking = FakeTensorMode(shape_env=ShapeEnv()), Blocking(((1, 16),))
    size = mode.from_tensor(torch.empty(2, 17, 5), static_shapes=False).size()
    symbolic = blocking.outer(size) + blocking.padded(size)
    assert [type(n) for n in symbolic] == [torch.SymInt] * 6
    assert not mode.shape_env.guards, "no size may be specialised"
    assert tuple(map(int, symbolic)) == (2, 2, 5, 2, 32, 5)


@pytest.mark.parametrize(
    ("kind", "shown", "blocks"),
    [
        (TypeError, "16", 16),
        (TypeError, "None", None),
        (TypeError, "'1b'", "1b"),
        (TypeError, "got 1", (1, 16)),
        (TypeError, "16.0", ((1, 16.0),)),
        (TypeError, "True", ((True, 16),)),
        (TypeError, "[16]", ((1, [16]),)),
        (ValueError, "(1, 16, 2)", ((1, 16, 2),)),
        (ValueError, "-1", ((-1, 16),)),
        (ValueError, "12", ((12, 16),)),
        (ValueError, "0", ((1, 0),)),
        (ValueError, "got 1", ((1, 1),)),
        (ValueError, str(2**63), ((1, 2**63),)),
        (ValueError, "unprintable int", ((1, 10**5000),)),
        (ValueError, str(2**32), ((0, 2**32), (1, 2**32))),
        (ValueError, "(0, 2)", ((0, 2),) * 13),
    ],
)
def test_blocking_refusals(kind, shown, blocks):
    refused(kind, shown, Blocking, blocks)


def test_blocking_of_more_axes_than_there_are():
    assert Blocking(((1, 16),)).blocks(2) == (1, 16)
    refused(ValueError, "got 1", Blocking(((1, 16),)).blocks, 1)
    refused(ValueError, "got 1", Blocking(((1, 16),)).padded, (5,))


# ---- Descriptors by tag

# The four formats of oneDNN's guide to memory formats, as address formulas.
N, C, H, W = 2, 16, 5, 4
GUIDE = {
    "nchw": lambda n, c, h, w: n * C * H * W + c * H * W + h * W + w,
    "nhwc": lambda n, c, h, w: n * H * W * C + h * W * C + w * C + c,
    "chwn": lambda n, c, h, w: c * H * W * N + h * W * N + w * N + n,
    "nChw8c": lambda n, c, h, w: n * C * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8,
}


@pytest.mark.parametrize("tag", GUIDE)
def test_guide_formulas(tag):
    desc = MemoryDesc((N, C, H, W), f32, tag)
    assert addresses(desc) == [GUIDE[tag](*index) for index in indices(desc.dims)]
    assert desc.nbytes == N * C * H * W * 4


TAG_FACTS = [
    # dims, dtype, tag, padded dims, strides, nbytes
    ((2, 16, 5, 4), f32, "nchw", (2, 16, 5, 4), (320, 20, 4, 1), 2560),
    ((2, 16, 5, 4), f32, "nhwc", (2, 16, 5, 4), (320, 1, 64, 16), 2560),
    ((2, 16, 5, 4), f32, "chwn", (2, 16, 5, 4), (1, 40, 8, 2), 2560),
    ((2, 16, 5, 4), f32, "nChw8c", (2, 16, 5, 4), (320, 160, 32, 8), 2560),
    ((2, 17, 5, 4), f32, "nChw8c", (2, 24, 5, 4), (480, 160, 32, 8), 3840),
    ((2, 17, 5, 4), s8, "nChw8c", (2, 24, 5, 4), (480, 160, 32, 8), 960),
    ((17, 3, 2, 2), f32, "OIhw4i16o4i", (32, 16, 2, 2), (1024, 1024, 512, 256), 8192),
    ((8, 4, 3, 2), s8, "CHWN4", (8, 4, 3, 2), (4, 192, 64, 32), 192),
    ((3,), f32, "A16a", (16,), (16,), 64),
    # A zero stays zero, leaves the strides outside it alone, and makes the size 0.
    ((2, 0, 5), f32, "abc", (2, 0, 5), (5, 5, 1), 0),
    ((2, 3, 0), f32, "abc", (2, 3, 0), (3, 1, 1), 0),
    ((2, 0, 5, 4), f32, "nChw8c", (2, 0, 5, 4), (160, 160, 32, 8), 0),
]


@pytest.mark.parametrize(("dims", "dtype", "tag", "padded", "strides", "nbytes"), TAG_FACTS)
def test_fields_by_tag(dims, dtype, tag, padded, strides, nbytes):
    desc = MemoryDesc(dims, dtype, tag, offset0=7)
    assert (desc.dims, desc.dtype, desc.padded_dims, desc.strides) == (dims, dtype, padded, strides)
    assert (desc.nbytes, desc.offset0, desc.ndim, desc.format_kind) == (nbytes, 7, len(dims), "blocked")
    assert desc.blocking == tuple(zip(desc.inner_idxs, desc.inner_blks, strict=True)) == parse_tag(tag).blocking
    assert desc.inner_nblks == len(desc.blocking)


@property_test
@given(layouts(), st.integers(0, 9))
def test_against_the_slow_reference(layout, offset0):
    dims, order, blocks = layout
    desc = MemoryDesc(dims, f32, canonical(order, blocks), offset0=offset0)
    padded, strides = slow_tag(dims, order, blocks)
    assert (desc.padded_dims, desc.strides) == (padded, strides)
    assert desc.nbytes == slow_nbytes(padded, strides, blocks, 4)
    for index in itertools.islice(indices(padded), 500):
        assert desc.offset(index) == slow_off_v(index, strides, blocks, offset0)


@property_test
@given(layouts(min_dim=1, max_ndim=3))
def test_padded_box_fills_memory_exactly_once(layout):
    dims, order, blocks = layout
    desc = MemoryDesc(dims, s8, canonical(order, blocks))
    assume(desc.nbytes < 5000)
    assert sorted(desc.offset(index) for index in indices(desc.padded_dims)) == list(range(desc.nbytes))


@property_test
@given(layouts(min_dim=1))
def test_physical_tensor(layout):
    """Each element of a physical tensor that holds its own position lies where the descriptor says."""
    dims, order, blocks = layout
    tag, ndim = canonical(order, blocks), len(dims)
    desc = MemoryDesc(dims, torch.int64, tag)
    assume(desc.nbytes < 40000)
    memory = torch.arange(desc.nbytes // 8)
    inner_strides = torch.empty(desc.inner_blks).stride()
    shape = desc.blocking.physical_shape(dims)
    physical = memory.as_strided(shape, desc.strides + inner_strides)
    assert MemoryDesc.from_physical(dims, torch.int64, blocks, physical.stride()) == desc
    # The logical tensor: each outer dim followed by its inner blocks, merged.
    grouped = [d for axis in range(ndim) for d in (axis, *(ndim + i for i, (a, _) in enumerate(blocks) if a == axis))]
    logical = physical.permute(grouped).reshape(desc.padded_dims)
    for index in indices(dims):
        assert logical[index] == desc.offset(index)


@pytest.mark.parametrize("index", [(0, 24, 0, 0), (2, 0, 0, 0), (0, 0, 0, 10**30)])
def test_offset_beyond_the_padding(index):
    desc = MemoryDesc((2, 17, 5, 4), f32, "nChw8c")
    assert desc.offset((1, 23, 4, 3)) == 959
    with pytest.raises((IndexError, ValueError), match=str(max(index))):
        desc.offset(index)


@pytest.mark.parametrize(
    ("kind", "shown", "index"),
    [
        (ValueError, "-1", (0, -1, 0)),
        (ValueError, "(0, 0)", (0, 0)),
        (IndexError, "(0, 3, 0)", (0, 3, 0)),
        (TypeError, "1.0", (0, 1.0, 0)),
        (TypeError, "True", (0, True, 0)),
        (TypeError, "[0]", (0, [0], 0)),
        (TypeError, "0", 0),
        (TypeError, "None", None),
    ],
)
def test_offset_refusals(kind, shown, index):
    refused(kind, shown, MemoryDesc((2, 3, 4)).offset, index)


# ---- Descriptors by strides

STRIDE_FACTS = [
    # dims, strides, nbytes of f32
    ((4, 3), (10, 1), 160),  # not "last element + 1", which would be 132
    ((4, 3), (3, 1), 48),
    ((4, 3), (1, 4), 48),
    ((2, 3), (6, 2), 48),
    ((1, 3), (100, 1), 12),
    ((1, 1), (7, 7), 4),
    ((4, 3), (0, 1), 12),
    ((4, 3), (1, 0), 16),
    ((2, 1, 3), (3, 1, 1), 24),
    ((0, 3), (1, 1), 0),
]


@pytest.mark.parametrize(("dims", "strides", "nbytes"), STRIDE_FACTS)
def test_fields_by_strides(dims, strides, nbytes):
    desc = MemoryDesc(dims, f32, list(strides))
    assert (desc.strides, desc.padded_dims, desc.blocking, desc.nbytes) == (strides, dims, (), nbytes)
    assert addresses(desc) == [slow_off_v(index, strides, ()) for index in indices(dims)]


@pytest.mark.parametrize(
    ("dims", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (0, 4, 1)), ((3, 2, 0), (0, 0, 1))],
)
def test_row_major(dims, strides):
    assert MemoryDesc(dims).strides == strides


@pytest.mark.parametrize(
    ("dims", "strides"),
    [((2, 3), (1, 1)), ((2, 3), (2, 1)), ((2, 3), (3, 2)), ((3, 1, 3), (2, 9, 1)), ((2, 2), (1, 1))],
)
def test_overlapping_strides(dims, strides):
    refused(ValueError, str(strides), MemoryDesc, dims, f32, strides)


# ---- No format, no tensor


def test_any():
    desc = MemoryDesc((2, 17), s8, "any")
    assert (desc.dims, desc.padded_dims, desc.dtype, desc.format_kind) == ((2, 17), (2, 17), s8, "any")
    assert (desc.strides, desc.blocking, desc.nbytes, desc.tag) == ((), (), 0, "any")
    assert desc.matches("any")
    assert not desc.matches("ab")
    assert desc.permute_axes((1, 0)) == MemoryDesc((17, 2), s8, "any")
    assert desc.reshape((34, 1)) == MemoryDesc((34, 1), s8, "any")
    assert desc != MemoryDesc((2, 17), s8)


ZEROS = {
    "no dims": MemoryDesc(()),
    "no dims, by strides": MemoryDesc((), s8, ()),
    "no dims, by tag": MemoryDesc((), f32, "nChw16c"),
    "any": MemoryDesc((), f32, "any"),
    "undef": MemoryDesc((2, 3), s8, "undef"),
}


@pytest.mark.parametrize("desc", ZEROS.values(), ids=ZEROS)
def test_the_zero_descriptor(desc):
    assert (desc.ndim, desc.dims, desc.padded_dims, desc.strides, desc.blocking) == (0, (), (), (), ())
    assert (desc.dtype, desc.nbytes, desc.format_kind, desc.tag) == (None, 0, "zero", "undef")
    assert desc == MemoryDesc(())
    assert hash(desc) == hash(MemoryDesc(()))
    assert desc.matches("undef")
    assert not desc.matches("any")


@pytest.mark.parametrize("desc", [MemoryDesc((2, 3), f32, "any"), MemoryDesc(())], ids=["any", "zero"])
def test_what_needs_a_format(desc):
    shape = desc.dims
    for call, args in (desc.offset, [shape]), (desc.submemory, [shape, shape]):
        refused(ValueError, repr(desc), call, *args)
    if desc.format_kind == "zero":
        refused(ValueError, repr(desc), desc.reshape, (1,))
        refused(ValueError, repr(desc), desc.permute_axes, ())


# ---- Refusals of the constructors

HUGE = 2**40

OVERFLOWS = [
    ((HUGE, HUGE), s8, None),
    ((HUGE, HUGE), s8, "any"),
    ((HUGE, 0, HUGE), s8, "abc"),
    ((INT64_MAX,), s8, "A16a"),  # padding
    ((INT64_MAX,), f32, None),  # bytes
    ((2,), s8, (INT64_MAX,)),
    ((2, 2), f32, (2**61, 1)),
]


@pytest.mark.parametrize(("dims", "dtype", "layout"), OVERFLOWS)
def test_int64_overflow(dims, dtype, layout):
    assert "2**63 - 1" in refused(ValueError, str(dims[0]), MemoryDesc, dims, dtype, layout)


@pytest.mark.parametrize(
    ("dims", "dtype", "layout"),
    [
        ((INT64_MAX,), s8, None),
        ((INT64_MAX // 16 * 16 - 3,), s8, "A16a"),
        ((2**31, 2**31), s8, "ba"),
        ((0, INT64_MAX), f32, None),
        ((1, 1), f32, (INT64_MAX, INT64_MAX)),
    ],
)
def test_the_largest_sizes(dims, dtype, layout):
    desc = MemoryDesc(dims, dtype, layout)
    padded = Blocking(parse_tag(layout).blocking if isinstance(layout, str) else ()).padded(dims)
    assert desc.nbytes == (0 if 0 in dims else math.prod(padded) * dtype.itemsize)


def test_largest_offset0():
    assert MemoryDesc((2,), s8, offset0=INT64_MAX - 2).offset((1,)) == INT64_MAX - 1
    refused(ValueError, str(INT64_MAX - 1), MemoryDesc, (2,), s8, offset0=INT64_MAX - 1)


@pytest.mark.parametrize(
    ("kind", "shown", "args"),
    [
        (TypeError, "None", [None]),
        (TypeError, "4", [4]),
        (TypeError, "'nchw'", ["nchw"]),
        (TypeError, "2.0", [(2.0, 3)]),
        (TypeError, "True", [(True, 3)]),
        (TypeError, "(2,)", [((2,), 3)]),
        (TypeError, "[2]", [[[2], 3]]),
        (TypeError, "None", [(2, None)]),
        (TypeError, "tensor([1., 1.])", [torch.ones(2)]),
        (TypeError, "tensor([[1., 1.], [1., 1.]])", [torch.ones(2, 2)]),
        (TypeError, "{", [{2, 3}]),
        (ValueError, "-1", [(2, -1)]),
        (ValueError, str(2**63), [(2**63,)]),
        (ValueError, "unprintable int", [(10**5000,)]),
        (ValueError, "at most 12 values, got 13", [(1,) * 13]),
        (TypeError, "'float32'", [(2, 3), "float32"]),
        (TypeError, "None", [(2, 3), None]),
        (TypeError, "class 'float'", [(2, 3), float]),
        (TypeError, "'float32'", [(2, 3), "float32", "any"]),
        (TypeError, "strides or None, got 3.5", [(2, 3), f32, 3.5]),
        (TypeError, "1.0", [(2, 3), f32, (3, 1.0)]),
        (TypeError, "'1'", [(2, 3), f32, (3, "1")]),
        (TypeError, "torch.channels_last", [(2, 3, 4, 5), f32, torch.channels_last]),
        (ValueError, "-3", [(2, 3), f32, (-3, 1)]),
        (ValueError, "exactly 2 values, got 3: (3, 1, 1)", [(2, 3), f32, (3, 1, 1)]),
        (ValueError, "()", [(2, 3), f32, ()]),
        (ValueError, "'nchw'", [(2, 3), f32, "nchw"]),
        (ValueError, "'aBb'", [(2, 3), f32, "aBb"]),
        (ValueError, "'aBb'", [(), f32, "aBb"]),
    ],
)
def test_constructor_refusals(kind, shown, args):
    refused(kind, shown, MemoryDesc, *args)


@pytest.mark.parametrize(
    ("kind", "shown", "offset0"), [(TypeError, "1.0", 1.0), (TypeError, "None", None), (ValueError, "-1", -1)]
)
def test_offset0_refusals(kind, shown, offset0):
    refused(kind, shown, MemoryDesc, (2, 3), offset0=offset0)
    refused(kind, shown, MemoryDesc.from_physical, (2, 3), f32, (), (3, 1), offset0)


@pytest.mark.parametrize("args", [((2, 3), f32, "any"), ((),)])
def test_offset0_needs_a_format(args):
    refused(ValueError, "got 5", MemoryDesc, *args, offset0=5)


@pytest.mark.parametrize(
    ("kind", "shown", "args"),
    [
        (ValueError, "()", [(), f32, (), ()]),
        (ValueError, "(3, 1)", [(2, 16), f32, ((1, 8),), (3, 1)]),
        (ValueError, "(16, 8, 2)", [(2, 16), f32, ((1, 8),), (16, 8, 2)]),
        (ValueError, "(16, 16, 1, 4)", [(4, 4), f32, ((0, 4), (1, 4)), (16, 16, 1, 4)]),
        (ValueError, "(16, 4)", [(2, 16), f32, ((1, 8),), (16, 4, 1)]),  # blocks of 8 overlap
        (ValueError, "-16", [(2, 16), f32, ((1, 8),), (-16, 8, 1)]),
        (ValueError, "1", [(16,), f32, ((1, 8),), (8, 1)]),
        (TypeError, "None", [(2, 16), f32, ((1, 8),), None]),
        (TypeError, "8.0", [(2, 16), f32, ((1, 8),), (16, 8.0, 1)]),
        (TypeError, "'nChw8c'", [(2, 16), f32, "nChw8c", (16, 8, 1)]),
        (TypeError, "'f32'", [(2, 16), "f32", ((1, 8),), (16, 8, 1)]),
    ],
)
def test_from_physical_refusals(kind, shown, args):
    refused(kind, shown, MemoryDesc.from_physical, *args)


# ---- Equality, matches, tag

EQUAL = [
    (((2, 1, 5, 4), f32, "nchw"), ((2, 1, 5, 4), f32, "nhwc")),
    (((2, 3, 1, 1), f32, "nchw"), ((2, 3, 1, 1), f32, "nhwc")),
    (((2, 3, 5, 4), f32, "nchw"), ((2, 3, 5, 4), f32, "abcd")),
    (((2, 3, 5, 4), f32, "nchw"), ((2, 3, 5, 4),)),
    (((1, 3), f32, (99, 1)), ((1, 3), f32, (0, 1))),
    (((2, 17), f32, "nC16c"), ((2, 17), f32, "aB16b")),
]

UNEQUAL = [
    (((2, 3, 5, 4), f32, "nchw"), ((2, 3, 5, 4), f32, "nhwc")),
    (((2, 3), f32), ((2, 3), torch.int32)),
    (((2, 3), f32), ((3, 2), f32)),
    (((2, 3), f32), ((2, 3, 1), f32)),
    (((2, 16), f32, "nC16c"), ((2, 16), f32, "nC8c")),
    (((2, 16), f32, "nC16c"), ((2, 16), f32, "nc")),
    (((32, 32), f32, "AB4a8b"), ((32, 32), f32, "AB8b4a")),
    # A padded 1 is not a 1, so its stride counts.
    (((2, 1, 3), f32, "aBc4b"), ((2, 1, 3), f32, "Bac4b")),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal(one, other):
    assert MemoryDesc(*one) == MemoryDesc(*other)
    assert hash(MemoryDesc(*one)) == hash(MemoryDesc(*other))


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_unequal(one, other):
    assert MemoryDesc(*one) != MemoryDesc(*other)


def test_unequal_offset0_and_foreign_types():
    assert MemoryDesc((2, 3)) != MemoryDesc((2, 3), offset0=1)
    assert MemoryDesc((2, 3)) != (2, 3)
    assert MemoryDesc((2, 3)) != None  # noqa: E711


TAG_OF = [
    # arguments, tag
    (((2, 3, 5, 4), f32, "nhwc"), "acdb"),
    (((2, 3, 5, 4), f32, "chwn"), "bcda"),
    (((2, 17, 5, 4), f32, "nChw16c"), "aBcd16b"),
    (((2, 32, 5, 4), f32, "NCHW32"), "aBcd32b"),
    (((40, 40), f32, "BA3b2a"), "BA3b2a"),
    (((1, 1, 1), f32, (5, 7, 9)), "abc"),
    (((2, 1, 5, 4), f32, "nhwc"), "abcd"),
    (((1, 3, 5, 4), f32, "nhwc"), "acdb"),
    (((2, 16, 5, 4), f32, "nhwC16c"), "aBcd16b"),
    (((2, 0, 3), f32), "abc"),
    (((4, 3), f32, (10, 1)), None),
    (((4, 3), f32, (0, 1)), None),
    (((4,), f32, (2,)), None),
]


@pytest.mark.parametrize(("args", "tag"), TAG_OF)
def test_tag(args, tag):
    desc = MemoryDesc(*args, offset0=3)
    assert desc.tag == tag
    assert tag is None or desc.matches(tag)


@property_test
@given(layouts())
def test_tag_puts_every_element_in_the_same_place(layout):
    dims, order, blocks = layout
    desc = MemoryDesc(dims, f32, canonical(order, blocks))
    again = MemoryDesc(dims, f32, desc.tag)
    assert addresses(again) == addresses(desc)
    assert again.nbytes == desc.nbytes
    assert desc.matches(canonical(order, blocks))


@pytest.mark.parametrize(
    ("tag", "expected"),
    [("nChw16c", True), ("aBcd16b", True), ("nhwC16c", False), ("nchw", False), ("nChw8c", False), ("nCw16c", False)],
)
def test_matches(tag, expected):
    assert MemoryDesc((2, 17, 5, 4), f32, "nChw16c", offset0=3).matches(tag) is expected


def test_matches_looks_at_addresses_only():
    assert MemoryDesc((2, 16, 5, 4), f32, "nChw16c").matches("nhwC16c")  # one block of channels
    assert MemoryDesc((2, 1, 5, 4), f32, "nhwc").matches("nchw")
    assert MemoryDesc((2, 0, 5), f32).matches("cab")
    assert not MemoryDesc((4, 3), f32, (10, 1)).matches("ab")
    assert not MemoryDesc((2, 3)).matches("nchw")
    assert not MemoryDesc((2, 3, 1, 1)).matches("nc")
    assert not MemoryDesc((32, 32), f32, "AB4a8b").matches("AB8b4a")


def test_matches_refuses_what_is_no_tag():
    refused(ValueError, "'nChw'", MemoryDesc((2, 3, 4, 5)).matches, "nChw")
    refused(TypeError, "None", MemoryDesc((2, 3, 4, 5)).matches, None)


# ---- submemory


@property_test
@given(layouts(), st.data())
def test_submemory_is_the_same_memory(layout, data):
    dims, order, blocks = layout
    parent = MemoryDesc(dims, f32, canonical(order, blocks), offset0=5)
    block = parent.blocking.blocks(len(dims))
    starts = [data.draw(st.integers(0, n // b)) * b for n, b in zip(dims, block, strict=True)]
    widths = [
        data.draw(st.sampled_from([*range(0, n - start + 1, b), n - start]))
        for n, b, start in zip(dims, block, starts, strict=True)
    ]
    part = parent.submemory(widths, starts)
    assert part.dims == tuple(widths)
    assert (part.dtype, part.blocking, part.strides) == (parent.dtype, parent.blocking, parent.strides)
    for index in itertools.islice(indices(part.padded_dims), 300):
        shifted = tuple(i + start for i, start in zip(index, starts, strict=True))
        assert part.offset(index) == parent.offset(shifted)


def test_submemory_of_a_plain_tensor_is_a_slice():
    x = torch.empty(4, 5, 6).permute(2, 0, 1)
    assert MemoryDesc.of(x).submemory((2, 3, 1), (3, 1, 4)) == MemoryDesc.of(x[3:5, 1:4, 4:5])


def test_submemory_keeps_the_padding_at_the_right_border():
    parent = MemoryDesc((2, 40, 3), f32, "aBc16b")
    part = parent.submemory((1, 8, 3), (1, 32, 0))
    assert (part.padded_dims, part.offset0) == ((1, 16, 3), 1 * 144 + 2 * 48)
    assert parent.submemory((2, 32, 3), (0, 0, 0)).padded_dims == (2, 32, 3)


@pytest.mark.parametrize(
    ("kind", "shown", "dims", "offsets"),
    [
        (ValueError, "dims 16, offset 8 cuts a block", (2, 16, 3), (0, 8, 0)),
        (ValueError, "dims 32, offset 8 cuts a block", (2, 32, 3), (0, 8, 0)),
        (ValueError, "dims 20, offset 0 cuts a block", (2, 20, 3), (0, 0, 0)),
        (ValueError, "dims 8, offset 16 cuts a block", (2, 8, 3), (0, 16, 0)),  # thin
        (ValueError, "dims 3, offset 0 goes past", (3, 16, 3), (0, 0, 0)),
        (ValueError, "dims 0, offset 48 goes past", (2, 0, 3), (0, 48, 0)),
        (ValueError, "-1", (2, 16, 3), (-1, 0, 0)),
        (ValueError, "-16", (2, -16, 3), (0, 0, 0)),
        (ValueError, "(2, 16)", (2, 16), (0, 0, 0)),
        (ValueError, "(0, 0)", (2, 16, 3), (0, 0)),
        (TypeError, "16.0", (2, 16.0, 3), (0, 0, 0)),
        (TypeError, "None", None, (0, 0, 0)),
        (TypeError, "None", (2, 16, 3), None),
    ],
)
def test_submemory_refusals(kind, shown, dims, offsets):
    refused(kind, shown, MemoryDesc((2, 40, 3), f32, "aBc16b").submemory, dims, offsets)


# ---- permute_axes


@property_test
@given(layouts(), st.randoms(use_true_random=False))
def test_permute_axes_renames_them(layout, random):
    dims, order, blocks = layout
    perm = list(range(len(dims)))
    random.shuffle(perm)
    desc = MemoryDesc(dims, f32, canonical(order, blocks), offset0=2)
    renamed = desc.permute_axes(perm)
    assert renamed == MemoryDesc(
        renamed.dims,
        f32,
        canonical([perm[d] for d in order], [(perm[axis], size) for axis, size in blocks]),
        offset0=2,
    )
    for index in itertools.islice(indices(desc.padded_dims), 300):
        moved = [None] * len(dims)
        for d, i in enumerate(index):
            moved[perm[d]] = i
        assert renamed.offset(moved) == desc.offset(index)


def test_permute_axes_is_the_inverse_of_torch_permute():
    x = torch.empty(2, 3, 4, 5)
    assert MemoryDesc.of(x.permute(2, 0, 3, 1)).permute_axes((2, 0, 3, 1)) == MemoryDesc.of(x)
    assert MemoryDesc((2, 3, 4)).permute_axes((1, 2, 0)).dims == (4, 2, 3)


@pytest.mark.parametrize(
    ("kind", "shown", "perm"),
    [
        (ValueError, "(0, 0, 1)", (0, 0, 1)),
        (ValueError, "(0, 1)", (0, 1)),
        (ValueError, "(1, 2, 3)", (1, 2, 3)),
        (ValueError, "-1", (0, 1, -1)),
        (TypeError, "1.0", (0, 1.0, 2)),
        (TypeError, "None", None),
    ],
)
def test_permute_axes_refusals(kind, shown, perm):
    refused(kind, shown, MemoryDesc((2, 3, 4)).permute_axes, perm)


# ---- reshape

RESHAPES = [
    # dims, layout, new dims, new strides, new blocking
    ((2, 3, 4), None, (6, 4), (4, 1), ()),
    ((2, 3, 4), None, (2, 12), (12, 1), ()),
    ((24,), None, (2, 3, 4), (12, 4, 1), ()),
    ((4, 6), None, (3, 8), (8, 1), ()),
    ((2, 3, 4), (100, 8, 2), (2, 12), (100, 2), ()),
    ((4, 3), "ba", (2, 2, 3), (2, 1, 4), ()),
    ((2, 1, 3), (3, 50, 1), (6,), (1,), ()),
    ((2, 3), None, (1, 2, 1, 3, 1), (6, 3, 3, 1, 1), ()),
    ((1, 1, 1), None, (1,), (1,), ()),
    ((3, 4), (0, 0), (12,), (0,), ()),
    ((2, 17, 5, 4), "nChw8c", (2, 17, 20), (480, 160, 8), ((1, 8),)),
    ((2, 17, 20), "aBc8b", (2, 17, 5, 4), (480, 160, 32, 8), ((1, 8),)),
    ((2, 3, 17), "abC8c", (6, 17), (24, 8), ((1, 8),)),
    ((2, 17, 5), "aBc8b", (2, 1, 17, 5), (120, 120, 40, 8), ((2, 8),)),
    ((2, 17), "aB8b", (1, 2, 17, 1), (48, 24, 8, 8), ((2, 8),)),
    ((1, 17, 5), "aBc8b", (17, 5), (40, 8), ((0, 8),)),
    ((2, 1, 5), "aBc8b", (2, 1, 5, 1), (40, 40, 8, 8), ((1, 8),)),  # a thin axis stays where it is
    ((3, 0), None, (3, 0), (0, 1), ()),
    ((2, 3, 0), "abc", (6, 0), (1, 1), ()),
    ((0, 4), None, (0, 2, 2), (4, 2, 1), ()),
]


@pytest.mark.parametrize(("dims", "layout", "new", "strides", "blocking"), RESHAPES)
def test_reshape(dims, layout, new, strides, blocking):
    desc = MemoryDesc(dims, f32, layout, offset0=3)
    reshaped = desc.reshape(new)
    assert (reshaped.dims, reshaped.strides, reshaped.blocking) == (new, strides, blocking)
    assert (reshaped.dtype, reshaped.offset0, reshaped.nbytes) == (f32, 3, desc.nbytes)
    assert addresses(reshaped) == addresses(desc)


BAD_RESHAPES = [
    # dims, layout, new dims
    ((2, 3), None, (2, 4)),
    ((2, 3), None, (5, 2, 3)),
    ((2, 3), None, ()),
    ((1,), None, ()),
    ((2, 0), None, (2, 3)),
    ((0, 0), "ab", (0,)),
    ((0, 3), (10, 1), (3, 0)),
    ((4, 3), (10, 1), (12,)),  # a gap
    ((4, 3), "ba", (12,)),  # out of order
    ((4, 3), (10, 1), (2, 6)),
    ((2, 17, 5, 4), "nChw8c", (34, 5, 4)),  # merges a blocked and padded axis
    ((2, 16, 5, 4), "nChw8c", (2, 80, 4)),
    ((2, 16, 5, 4), "nChw8c", (2, 4, 4, 5, 4)),  # splits one
    ((16, 3), "Ab8a", (2, 8, 3)),
    ((2, 1, 5), "aBc8b", (2, 5)),  # drops a thin axis
    ((2, 1, 5), "aBc8b", (10,)),
    ((1, 5), "Ab8a", (5,)),
    ((5, 1), "aB8b", (5,)),
    ((5, 1), "aB8b", (1, 5)),  # would drop it on the right and add another on the left
]


@pytest.mark.parametrize(("dims", "layout", "new"), BAD_RESHAPES)
def test_reshape_refusals(dims, layout, new):
    message = refused(ValueError, f"to {new}", MemoryDesc(dims, f32, layout).reshape, new)
    assert str(dims) in message


@pytest.mark.parametrize(
    ("kind", "shown", "new"), [(ValueError, "-1", (-1,)), (TypeError, "6", 6), (TypeError, "6.0", (6.0,))]
)
def test_reshape_wants_dims(kind, shown, new):
    refused(kind, shown, MemoryDesc((2, 3)).reshape, new)


@property_test
@given(layouts(min_dim=1), st.data())
def test_reshape_of_plain_tensors_is_view(layout, data):
    """Possible exactly where `Tensor.view` is, and with the same answer."""
    dims, order, _ = layout
    x = torch.empty([dims[d] for d in order]).permute([order.index(d) for d in range(len(dims))])
    if data.draw(st.booleans()):
        x = x[..., : data.draw(st.integers(1, dims[-1]))]  # a gap
    new, rest = [], x.numel()
    for _ in range(data.draw(st.integers(0, 4))):
        new.append(data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= new[-1]
    new.append(rest)
    try:
        expected = MemoryDesc.of(x.view(new))
    except RuntimeError:
        refused(ValueError, f"to {tuple(new)}", MemoryDesc.of(x).reshape, new)
    else:
        assert MemoryDesc.of(x).reshape(new) == expected


@property_test
@given(layouts(min_dim=1), st.data())
def test_reshape_is_right_or_refused(layout, data):
    dims, order, blocks = layout
    desc = MemoryDesc(dims, f32, canonical(order, blocks))
    assume(math.prod(dims) < 300)
    assert desc.reshape(dims) == desc
    new = list(dims)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(new) - 1))
        match data.draw(st.sampled_from(["add", "merge", "drop"])):
            case "add":
                new.insert(at, 1)
            case "merge":
                new[at : at + 2] = [math.prod(new[at : at + 2])]
            case "drop" if new[at] == 1 and len(new) > 1:
                del new[at]
    try:
        reshaped = desc.reshape(new)
    except ValueError as error:
        assert str(tuple(new)) in str(error)
        assert new != list(dims)
    else:
        assert addresses(reshaped) == addresses(desc)
        assert reshaped.nbytes == desc.nbytes
        assert math.prod(reshaped.padded_dims) == math.prod(desc.padded_dims)


@property_test
@given(layouts(), st.data())
def test_added_ones_can_be_dropped_again(layout, data):
    dims, order, blocks = layout
    desc = MemoryDesc(dims, f32, canonical(order, blocks))
    ones = list(dims)
    at = data.draw(st.integers(0, len(dims)))
    ones.insert(at, 1)
    # A 1 beside a thin axis cannot be told from it: then adding it may rename the thin axis.
    assume(not any(n == 1 != padded for n, padded in zip(dims, desc.padded_dims, strict=True)))
    assert desc.reshape(ones).reshape(dims) == desc


# ---- of

TENSORS = {
    "contiguous": (torch.empty(2, 3, 4, 5), "nchw"),
    "channels_last": (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), "acdb"),
    "channels_last_3d": (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "acdeb"),
    "transposed": (torch.empty(2, 3).t(), "ba"),
    "one axis": (torch.empty(5), "a"),
    "empty": (torch.empty(0, 3), "ab"),
    "empty inside": (torch.empty(2, 0, 3), "abc"),
    "bool": (torch.empty(2, 3, dtype=torch.bool), "ab"),
    "meta": (torch.empty(2, 3, device="meta"), "ab"),
    "parameter": (torch.nn.Parameter(torch.empty(2, 3)), "ab"),
}


@pytest.mark.parametrize(("tensor", "tag"), TENSORS.values(), ids=TENSORS)
def test_of_dense_tensors(tensor, tag):
    desc = MemoryDesc.of(tensor)
    assert (desc.dims, desc.strides, desc.dtype) == (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    assert desc == MemoryDesc(tuple(tensor.shape), tensor.dtype, tag)
    assert desc.matches(tag)
    assert desc.nbytes == tensor.nbytes


def test_of_a_slice_has_its_gaps_and_its_offset():
    desc = MemoryDesc.of(torch.empty(4, 6)[1:, 2:4])
    assert desc == MemoryDesc((3, 2), f32, (6, 1), offset0=8)
    assert desc.tag is None


def test_of_an_expanded_tensor():
    desc = MemoryDesc.of(torch.empty(3, 1).expand(3, 4))
    assert (desc.dims, desc.strides, desc.nbytes) == ((3, 4), (1, 0), 12)
    assert desc.offset((2, 3)) == desc.offset((2, 0)) == 2


def test_of_a_tensor_with_a_descriptor_of_its_own():
    desc = MemoryDesc((2, 17), f32, "nC16c")
    assert MemoryDesc.of(types.SimpleNamespace(memory_desc=desc)) is desc


@pytest.mark.parametrize(
    ("kind", "shown", "tensor"),
    [
        (ValueError, "tensor.reshape(1)", torch.tensor(1.0)),
        (ValueError, "torch.sparse_coo", torch.ones(2, 2).to_sparse()),
        (ValueError, "(1, 1)", torch.ones(5).unfold(0, 3, 1)),
        (TypeError, "(2, 3)", (2, 3)),
        (TypeError, "None", None),
        (TypeError, "memory_desc=5", types.SimpleNamespace(memory_desc=5)),
    ],
)
def test_of_refusals(kind, shown, tensor):
    refused(kind, shown, MemoryDesc.of, tensor)


def test_from_physical_of_a_single_block():
    """The strides of a physical dim of size 1 are arbitrary in PyTorch."""
    desc = MemoryDesc.from_physical((2, 3, 5), f32, Blocking(((1, 16),)), (80, 7, 16, 1))
    assert desc.matches("aBc16b")
    assert addresses(desc) == addresses(MemoryDesc((2, 3, 5), f32, "aBc16b"))


# ---- The object

DESCS = {
    "plain": MemoryDesc((2, 3), s8, (5, 1), offset0=2),
    "blocked": MemoryDesc((2, 17, 5, 4), f32, "nChw8c"),
    "any": MemoryDesc((2, 3), f32, "any"),
    "zero": MemoryDesc(()),
}


@pytest.mark.parametrize("desc", DESCS.values(), ids=DESCS)
def test_copies_are_equal(desc):
    for duplicate in copy.copy(desc), copy.deepcopy(desc), pickle.loads(pickle.dumps(desc)):
        assert duplicate == desc
        assert hash(duplicate) == hash(desc)
        assert (duplicate.strides, duplicate.nbytes, duplicate.tag) == (desc.strides, desc.nbytes, desc.tag)


@pytest.mark.parametrize("name", ["dims", "strides", "nbytes", "offset0", "colour"])
def test_descriptors_are_immutable(name):
    desc = MemoryDesc((2, 3))
    before = hash(desc)
    with pytest.raises(AttributeError):
        setattr(desc, name, 1)
    with pytest.raises(AttributeError):
        delattr(desc, name)
    assert hash(desc) == before
    assert not hasattr(desc, "colour")


def test_repr():
    assert repr(MemoryDesc((2, 17, 5, 4), f32, "nChw8c")) == (
        "MemoryDesc(dims=(2, 17, 5, 4), padded_dims=(2, 24, 5, 4), strides=(480, 160, 32, 8), blocking=((1, 8),), "
        "dtype=torch.float32)"
    )
    assert repr(DESCS["plain"]) == (
        "MemoryDesc(dims=(2, 3), padded_dims=(2, 3), strides=(5, 1), dtype=torch.int8, offset0=2)"
    )
    assert repr(DESCS["any"]) == "MemoryDesc((2, 3), torch.float32, 'any')"
    assert repr(DESCS["zero"]) == "MemoryDesc(())"
