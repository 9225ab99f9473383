"""Format tags and blockings: every spelling of a format, and what is none."""

import copy
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from memory_desc_cases import canonical, layouts, property_test, refused
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_blocked.memory_desc import INT64_MAX, Blocking, parse_tag, tag_name

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
