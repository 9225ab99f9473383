"""What follows from a descriptor: its tag, equality, submemory, other axes and dims."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from memory_desc_cases import addresses, canonical, f32, indices, layouts, property_test, refused

from torch_blocked.memory_desc import MemoryDesc

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
    ((3, 0), None, (3, 0), (1, 1), ()),
    ((2, 3, 0), "abc", (6, 0), (1, 1), ()),
    ((0, 4), None, (0, 2, 2), (4, 2, 1), ()),
    ((2, 0), None, (0,), (1,), ()),
    ((2, 0), "nc", (1, 1, 0), (1, 1, 1), ()),
    ((0, 0), "ab", (0,), (1,), ()),
    ((0, 3), (10, 1), (0, 3), (10, 1), ()),
    ((0, 3), (10, 1), (3, 0), (1, 1), ()),
    ((2, 0, 17), "abC8c", (0, 17), (24, 8), ((1, 8),)),
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
    ((2, 0, 5), "aBc8b", (2, 5, 0)),  # a blocked axis of no elements stays one
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


def shapes(max_ndim):
    return [dims for ndim in range(1, max_ndim + 1) for dims in itertools.product(range(4), repeat=ndim)]


def test_reshape_of_empty_tensors_is_view():
    """Any shape of no elements, with the strides that `Tensor.view` answers."""
    empty = [dims for dims in shapes(3) if 0 in dims]
    for dims in empty:
        for x in (torch.empty(dims), torch.empty(dims[::-1]).permute(*reversed(range(len(dims))))):
            for new in empty:
                assert MemoryDesc.of(x).reshape(new) == MemoryDesc.of(x.view(new)), (x.stride(), dims, new)


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
    assume(blocks or 0 not in dims)  # `Tensor.view` of no elements forgets the order of the axes, too
    assert desc.reshape(ones).reshape(dims) == desc


def test_strides_of_no_elements_stay_numbers_of_64_bits():
    with pytest.raises(ValueError, match="a stride would be beyond"):
        MemoryDesc.from_physical((2, 0, 8), f32, ((2, 8),), (2**63 - 1, 1, 8, 1)).reshape((1, 2, 0, 8))
