"""Memory descriptors against a slow reference, against PyTorch's own strided tensors, and against tables of facts."""

import copy
import itertools
import math
import pickle
import types

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from memory_desc_cases import (
    addresses,
    canonical,
    f32,
    indices,
    layouts,
    property_test,
    refused,
    s8,
    slow_nbytes,
    slow_off_v,
    slow_tag,
)

import torch_blocked as tb
from torch_blocked.memory_desc import INT64_MAX, Blocking, MemoryDesc, parse_tag

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
    [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1)), ((3, 2, 0), (2, 1, 1))],
)
def test_row_major(dims, strides):
    assert MemoryDesc(dims).strides == strides
    if dims:
        assert MemoryDesc(dims) == MemoryDesc(dims, f32, "abcde"[: len(dims)]) == MemoryDesc.of(torch.empty(dims))


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_of_a_nested_tensor(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for call in (MemoryDesc.of, tb.show):
        with pytest.raises(ValueError, match="a nested one") as error:
            call(nested)
        assert "\n" not in str(error.value)


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
