"""Formats as objects, which format suits which shape on which CPU, and every way of handing one to PyTorch."""

import copy
import inspect
import pickle

import pytest
import torch
from conftest import assert_same, one_line

import torch_blocked as tb
from torch_blocked import formats

SIZE = (2, 20, 3, 4)


def assert_format(y, x, tag):
    """`y` is blocked, holds the values of `x`, and its bytes lie as the tag says."""
    assert type(y) is tb.BlockedTensor
    assert y.format == tb.format(tag)
    assert y.memory_desc.matches(tag)
    assert_same(y, x, rtol=0, atol=0)


# ---- The objects


@pytest.mark.parametrize("tag", formats.CONSTANTS)
def test_constant_is_its_tag(tag):
    fmt = getattr(tb, tag)
    assert fmt == tb.format(tag) and fmt.tag == tag and fmt.ndim == len(fmt.order)
    assert tag in tb.__all__
    assert repr(fmt) == f"torch_blocked.{tag}"


EQUAL = (
    "nChw16c aBcd16b",
    "nchw NCHW abcd oihw",
    "nhwc NHWC acdb ohwi",
    "chwn bcda",
    "OIhw16i16o ABcd16b16a",
    "gOIhw4i16o4i aBCde4c16b4c",
    "NCHW4 nChw4c aBcd4b",
    "NCHW32 nChw32c",
    "NCHW64 nChw64c",
    "CHWN4 Chwn4c Bcda4b",
    "nCw16c aBc16b",
    "A16a",
    "OIhw4i16o4i",
    "OIhw16o16i",
    "nhwC16c",
)


@pytest.mark.parametrize("spellings", EQUAL)
def test_equal_however_spelled(spellings):
    first, *others = map(tb.format, spellings.split())
    for other in others:
        assert first == other and hash(first) == hash(other) and len({first, other}) == 1
        assert (first != other) is False


def test_unequal():
    fmts = [tb.format(spellings.split()[0]) for spellings in EQUAL]
    assert len(set(fmts)) == len(fmts)
    assert all(a != b for i, a in enumerate(fmts) for b in fmts[:i])


@pytest.mark.parametrize("other", ["nChw16c", None, 16, tb.blocked, ((1, 16),), torch.channels_last], ids=repr)
def test_unequal_to_what_is_no_format(other):
    assert tb.nChw16c != other and other != tb.nChw16c


@pytest.mark.parametrize("spellings", EQUAL)
def test_copies_and_repr(spellings):
    for tag in spellings.split():
        fmt = tb.format(tag)
        for twin in (pickle.loads(pickle.dumps(fmt)), copy.copy(fmt), copy.deepcopy(fmt)):
            assert type(twin) is tb.Format and twin == fmt and twin.tag == tag and hash(twin) == hash(fmt)
        assert eval(repr(fmt), {"torch_blocked": tb}) == fmt


def test_blocked_is_one_object():
    assert repr(tb.blocked) == "torch_blocked.blocked"
    for twin in (pickle.loads(pickle.dumps(tb.blocked)), copy.copy(tb.blocked), copy.deepcopy(tb.blocked)):
        assert twin is tb.blocked


@pytest.mark.parametrize(
    ("tag", "order", "blocking"),
    [
        ("nchw", (0, 1, 2, 3), ()),
        ("nhwc", (0, 2, 3, 1), ()),
        ("chwn", (1, 2, 3, 0), ()),
        ("nChw16c", (0, 1, 2, 3), ((1, 16),)),
        ("CHWN4", (1, 2, 3, 0), ((1, 4),)),
        ("Ohwi16o", (0, 2, 3, 1), ((0, 16),)),
        ("OIhw4i16o4i", (0, 1, 2, 3), ((1, 4), (0, 16), (1, 4))),
    ],
)
def test_what_a_format_says(tag, order, blocking):
    fmt = tb.format(tag)
    assert fmt.order == order and fmt.blocking == blocking and fmt.is_plain == (not blocking)


@pytest.mark.parametrize(
    "tag", ["", "nChw", "nChw16", "nchw16c", "nChw16x", "nChw0c", "nChw16c ", "nnhw", "n-c", "any"]
)
def test_malformed_tag(tag):
    with pytest.raises(ValueError) as error:
        tb.format(tag)
    assert one_line(error)


@pytest.mark.parametrize("tag", [None, 4, b"nchw", tb.nChw16c, ["nchw"]], ids=repr)
def test_tag_that_is_no_string(tag):
    with pytest.raises(TypeError) as error:
        tb.format(tag)
    assert one_line(error)


# ---- The fastest format for this CPU


@pytest.mark.parametrize(
    ("size", "tag"),
    [
        ((20,), "A{b}a"),
        ((1,), "A{b}a"),
        ((2, 20), "nC{b}c"),
        ((2, 20, 5), "nCw{b}c"),
        ((2, 20, 3, 4), "nChw{b}c"),
        ((2, 1, 3, 4), "nChw{b}c"),
        ((0, 20, 3, 4), "nChw{b}c"),
        ((2, 0, 3, 4), "nChw{b}c"),
        ((2, 20, 2, 3, 4), "nCdhw{b}c"),
        ((2, 20, 2, 3, 4, 2), "aBcdef{b}b"),
        ((1, 17, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2), "aBcdefghijkl{b}b"),
    ],
    ids=str,
)
def test_activation_format(isa, size, tag):
    x = torch.randn(size)
    y = x.to(tb.blocked)
    assert_format(y, x, tag.format(b=16 if isa == "avx512" else 8))
    assert y.is_contiguous(memory_format=tb.blocked) and y.to(tb.blocked) is y


def test_a_tensor_of_no_axes_stays(isa):
    x = torch.tensor(3.0)
    assert x.to(tb.blocked) is x and not x.is_contiguous(memory_format=tb.blocked)
    y = x.to(tb.blocked, copy=True)
    assert type(y) is torch.Tensor and y is not x and y == x and y.data_ptr() != x.data_ptr()


WEIGHTS = [
    # (oc, ic / groups, kh, kw), on AVX-512, elsewhere
    ((64, 64, 3, 3), "OIhw16i16o", "OIhw8i8o"),
    ((17, 16, 1, 1), "OIhw16i16o", "OIhw8i8o"),
    ((1, 33, 3, 3), "OIhw16i16o", "OIhw8i8o"),
    ((20, 15, 3, 3), "Ohwi16o", "OIhw8i8o"),
    ((20, 8, 3, 3), "Ohwi16o", "OIhw8i8o"),
    ((20, 7, 3, 3), "Ohwi16o", "Ohwi8o"),
    ((64, 3, 7, 7), "Ohwi16o", "Ohwi8o"),
    ((20, 2, 1, 3), "Ohwi16o", "Ohwi8o"),
    ((20, 1, 3, 3), "Oihw16o", "Oihw8o"),
    ((1, 1, 1, 1), "Oihw16o", "Oihw8o"),
    ((17, 16, 3, 3, 3), "OIdhw16i16o", "OIdhw8i8o"),
    ((20, 3, 3, 3, 3), "Odhwi16o", "Odhwi8o"),
    ((20, 1, 3, 3, 3), "Oidhw16o", "Oidhw8o"),
]


@pytest.mark.parametrize(("size", "wide", "narrow"), WEIGHTS, ids=str)
def test_weight_format(isa, size, wide, narrow):
    tag = wide if isa == "avx512" else narrow
    conv = (torch.nn.Conv2d if len(size) == 4 else torch.nn.Conv3d)(size[1], size[0], size[2:])
    weight = conv.weight.detach().clone()
    assert_format(conv.to(tb.blocked).weight, weight, tag)
    assert formats.weight_format(torch.Size(size), 16) == tb.format(wide)
    assert formats.weight_format(torch.Size(size), 8) == tb.format(narrow)


def test_a_format_names_the_bytes():
    """With H = W = 1 the bytes of Ohwi16o are those of Oihw16o, and either name fits."""
    y = torch.randn(20, 2, 1, 1).to(tb.Ohwi16o)
    assert y.format in (tb.Ohwi16o, tb.Oihw16o)
    assert y.to(tb.Ohwi16o) is y and y.to(tb.Oihw16o) is y and y.to(y.format) is y
    assert y.memory_desc.matches("Ohwi16o") and y.memory_desc.matches("Oihw16o")


@pytest.mark.parametrize(
    ("size", "tag"), [((17, 16, 3), "OIw16i16o"), ((20, 3, 3), "Owi16o"), ((20, 1, 3), "Oiw16o")], ids=str
)
def test_weights_of_one_dim_have_a_format_and_stay_plain_in_modules(size, tag):
    """`Module.to` gives memory formats to tensors of 4 and 5 dims only."""
    assert formats.weight_format(torch.Size(size), 16) == tb.format(tag)
    assert type(torch.nn.Conv1d(size[1], size[0], size[2]).to(tb.blocked).weight) is torch.nn.Parameter


@pytest.mark.parametrize("size", [(), (5,), (5, 4), (5, 4, 3, 3, 3, 3)], ids=str)
def test_weights_of_other_ranks_have_no_format(size):
    assert formats.weight_format(torch.Size(size), 16) is None


# ---- Every way of handing a format to PyTorch

f32, f64 = torch.float32, torch.float64

WAYS = {
    "to(fmt)": (lambda x, fmt: x.to(fmt), f32),
    "to(memory_format=fmt)": (lambda x, fmt: x.to(memory_format=fmt), f32),
    "to(dtype, fmt)": (lambda x, fmt: x.to(f64, fmt), f64),
    "to(fmt, dtype)": (lambda x, fmt: x.to(fmt, f64), f64),
    "to(fmt, dtype=)": (lambda x, fmt: x.to(fmt, dtype=f64), f64),
    "to(dtype, memory_format=)": (lambda x, fmt: x.to(f64, memory_format=fmt), f64),
    "to(dtype, non_blocking, copy, memory_format=)": (lambda x, fmt: x.to(f64, False, True, memory_format=fmt), f64),
    "to(dtype=, memory_format=)": (lambda x, fmt: x.to(dtype=f64, memory_format=fmt), f64),
    "to(device, fmt)": (lambda x, fmt: x.to("cpu", fmt), f32),
    "to(device, dtype, memory_format=)": (lambda x, fmt: x.to("cpu", f64, memory_format=fmt), f64),
    "to(device=, dtype=, memory_format=)": (lambda x, fmt: x.to(device="cpu", dtype=f64, memory_format=fmt), f64),
    "to(other, memory_format=)": (lambda x, fmt: x.to(torch.zeros(1, dtype=f64), memory_format=fmt), f64),
    "to(fmt, copy=True)": (lambda x, fmt: x.to(fmt, copy=True), f32),
    "to(fmt, copy=False)": (lambda x, fmt: x.to(fmt, copy=False), f32),
    "to(fmt, non_blocking=True)": (lambda x, fmt: x.to(fmt, non_blocking=True), f32),
    "to(memory_format=, copy=)": (lambda x, fmt: x.to(memory_format=fmt, copy=True), f32),
    "contiguous(memory_format=)": (lambda x, fmt: x.contiguous(memory_format=fmt), f32),
    "clone(memory_format=)": (lambda x, fmt: x.clone(memory_format=fmt), f32),
    "torch.clone": (lambda x, fmt: torch.clone(x, memory_format=fmt), f32),
}
SOURCES = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "blocked": lambda x: x.to(tb.OIhw4i16o4i),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_way_to_a_blocked_format(x, way, source):
    call, dtype = WAYS[way]
    src = SOURCES[source](x)
    y = call(src, tb.nChw16c)
    assert y.dtype == dtype
    assert_format(y, x.to(dtype), "nChw16c")
    assert_same(src, x, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_way_to_a_plain_format(x, way, source):
    call, dtype = WAYS[way]
    y = call(SOURCES[source](x), tb.chwn)
    assert type(y) is torch.Tensor and y.stride() == (1, 24, 8, 2)
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_way_to_the_fastest_format(isa, x, way):
    call, dtype = WAYS[way]
    assert_format(call(x, tb.blocked), x.to(dtype), "nChw16c" if isa == "avx512" else "nChw8c")


def test_to_another_device(x):
    y = x.to("meta", tb.nChw8c)
    assert type(y) is tb.BlockedTensor and y.device.type == y.physical.device.type == "meta"
    assert y.shape == SIZE and y.physical.shape == (2, 3, 3, 4, 8)


IN_FORMAT = {
    "nchw": lambda x: x,
    "nhwc": lambda x: x.contiguous(memory_format=torch.channels_last),
    "chwn": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "nChw16c": lambda x: x.to(tb.nChw16c),
    "Chwn4c": lambda x: x.to(tb.format("CHWN4")),
    "OIhw4i16o4i": lambda x: x.to(tb.OIhw4i16o4i),
    "sliced": lambda x: torch.randn(2, 20, 3, 8)[..., ::2],
    "expanded": lambda x: torch.randn(1, 20, 3, 4).expand(SIZE),
}


@pytest.mark.parametrize("source", IN_FORMAT)
@pytest.mark.parametrize("tag", ["nchw", "nhwc", "chwn", "nChw16c", "nChw8c", "Chwn4c", "OIhw4i16o4i", "OIhw16i16o"])
def test_copies_only_where_needed(x, source, tag):
    src, fmt = IN_FORMAT[source](x), tb.format(tag)
    same = source == tag
    assert src.is_contiguous(memory_format=fmt) == same
    for y in (src.to(fmt), src.to(memory_format=fmt), src.contiguous(memory_format=fmt), src.to(f32, fmt)):
        assert (y is src) == same
        assert y.is_contiguous(memory_format=fmt)
    for y in (src.to(fmt, copy=True), src.clone(memory_format=fmt)):
        assert y is not src and y.is_contiguous(memory_format=fmt)
        before = src.clone()
        y.fill_(7)
        assert_same(src, before.to_dense() if type(before) is tb.BlockedTensor else before)


FACTORIES = {
    "empty": lambda x, **k: torch.empty(SIZE, **k).copy_(x),
    "empty(*size)": lambda x, **k: torch.empty(*SIZE, **k).copy_(x),
    "empty_like": lambda x, **k: torch.empty_like(x, **k).copy_(x),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **k: torch.full_like(x, 2.5, **k),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x, **k: torch.randint_like(x, 9, **k),
    "randint_like(low)": lambda x, **k: torch.randint_like(x, 3, 9, **k),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("options", [{}, {"dtype": f64}], ids=str)
def test_factory(x, name, options):
    torch.manual_seed(1)
    expected = FACTORIES[name](x, **options)
    torch.manual_seed(1)
    assert_format(FACTORIES[name](x, memory_format=tb.nChw16c, **options), expected, "nChw16c")
    plain = FACTORIES[name](x, memory_format=tb.chwn, **options)
    assert type(plain) is torch.Tensor and plain.stride() == (1, 24, 8, 2)


@pytest.mark.parametrize("name", ["empty", "empty(*size)"])
def test_empty_has_zero_padding(name):
    torch.full(SIZE, torch.nan).to(tb.nChw16c)  # leaves its bytes to the next tensor of this size
    y = torch.empty(SIZE, memory_format=tb.nChw16c)
    assert not y.physical[:, 1, ..., 4:].count_nonzero()


@pytest.mark.parametrize("name", ["zeros_like", "empty_like", "rand_like"])
@pytest.mark.parametrize("tag", ["nChw16c", "chwn"])
def test_factory_makes_leaves(x, name, tag):
    y = getattr(torch, name)(x, memory_format=tb.format(tag), requires_grad=True)
    assert y.requires_grad and y.is_leaf
    (y * 2).sum().backward()
    assert_same(y.grad, torch.full(SIZE, 2.0))


def test_empty_makes_leaves():
    y = torch.empty(SIZE, memory_format=tb.nChw16c, requires_grad=True)
    assert y.requires_grad and y.is_leaf


# ---- Bad uses


@pytest.mark.parametrize("tag", ["nc", "nCw16c", "nCdhw16c", "A16a", "gOIhw4i16o4i", "ncw", "aBcdef16b"])
def test_format_of_another_rank(x, tag):
    fmt = tb.format(tag)
    for source in SOURCES.values():
        for call in (
            lambda y: y.to(fmt),
            lambda y: y.to(memory_format=fmt),
            lambda y: y.contiguous(memory_format=fmt),
            lambda y: y.clone(memory_format=fmt),
            lambda y: y.is_contiguous(memory_format=fmt),
            lambda y: torch.zeros_like(y, memory_format=fmt),
            lambda y: fmt.resolve(y.shape),
        ):
            with pytest.raises(ValueError, match=rf"{tag}.*4.*\(2, 20, 3, 4\)") as error:
                call(source(x))
            assert one_line(error)
    assert "ValueError" in inspect.getdoc(fmt.resolve)  # not inherited from formats that resolve to None


def test_a_tensor_of_no_axes_has_no_format():
    with pytest.raises(ValueError) as error:
        torch.tensor(3.0).to(tb.nChw16c)
    assert one_line(error)


fmt16, fmt8 = tb.nChw16c, tb.nChw8c
BAD_USES = {
    "two formats": lambda x: x.to(fmt16, fmt8),
    "two formats, one by keyword": lambda x: x.to(fmt16, memory_format=fmt8),
    "the same format twice": lambda x: x.to(fmt16, memory_format=fmt16),
    "a format and a memory format": lambda x: x.to(fmt16, memory_format=torch.channels_last),
    "view": lambda x: x.view(fmt16),
    "float": lambda x: x.float(memory_format=fmt16),
    "cpu": lambda x: x.cpu(memory_format=fmt16),
    "torch.add": lambda x: torch.add(x, fmt16),
    "add": lambda x: x + fmt16,
    "type": lambda x: x.type(fmt16),
    "new_empty": lambda x: x.new_empty(SIZE, memory_format=fmt16),
    "torch.zeros": lambda x: torch.zeros(SIZE, memory_format=fmt16),
    "a tag": lambda x: x.to(memory_format="nChw16c"),
    "the class": lambda x: x.to(memory_format=tb.Format),
    "no memory format": lambda x: x.to(fmt16).contiguous(memory_format=3),
    "no memory format at all": lambda x: x.to(fmt16).contiguous(memory_format="nchw"),
    "bad argument beside": lambda x: x.to(fmt16, 3),
    "unknown keyword beside": lambda x: x.to(fmt16, bogus=3),
    "module, two formats": lambda x: torch.nn.Conv2d(3, 3, 3).to(fmt16, fmt8),
    "module, format and memory format": lambda x: torch.nn.Conv2d(3, 3, 3).to(fmt16, memory_format=torch.channels_last),
}
TOLD_BY_PYTORCH = ("a tag", "the class", "bad argument beside", "unknown keyword beside")


@pytest.mark.parametrize("name", BAD_USES)
def test_bad_use(x, name):
    with pytest.raises((TypeError, ValueError)) as error:
        BAD_USES[name](x)
    assert name in TOLD_BY_PYTORCH or one_line(error)


def test_sparse_has_no_format(x):
    with pytest.raises(RuntimeError, match="to_dense") as error:
        x.to_sparse().to(tb.nChw16c)
    assert one_line(error)


@pytest.mark.parametrize("way", ["to", "contiguous", "clone"])
@pytest.mark.parametrize(("size", "bad"), [(SIZE, "channels_last_3d"), ((2, 20, 3), "channels_last")], ids=str)
def test_memory_format_of_another_rank(way, size, bad):
    y = torch.randn(size).to(tb.blocked)
    with pytest.raises(RuntimeError, match="rank") as error:
        getattr(y, way)(memory_format=getattr(torch, bad))
    assert one_line(error)
