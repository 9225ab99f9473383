"""`BlockedTensor` from bytes that are there, and views of its own: never a copy, right or refused."""

import functools
import math

import pytest
import torch
from conftest import assert_same, one_line
from tensor_cases import SIZE, TAGS, same_memory
from torch.autograd import forward_ad

import torch_blocked as tb
from torch_blocked.reorder import to_dense

# ---- from_physical


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("size", [SIZE, (16, 30, 1, 1), (0, 5, 2, 2)], ids=str)
def test_from_physical(tag, size):
    expected = torch.randn(size)
    data = expected.to(tb.format(tag)).physical.clone()
    for given in (size, list(size), torch.Size(size)):
        y = tb.from_physical(data, given, tb.format(tag))
        assert type(y) is tb.BlockedTensor and y.shape == size
        assert y.physical.data_ptr() == data.data_ptr()
        assert_same(y, expected)
        assert y.is_contiguous(memory_format=tb.format(tag))


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_from_physical_of_dtypes_that_atens_count_nonzero_refuses(dtype):
    data = torch.ones(1, 20, 3, 3).to(dtype).to(tb.nChw16c).physical
    assert tb.from_physical(data, (1, 20, 3, 3), tb.nChw16c).physical.data_ptr() == data.data_ptr()
    dirty = data.clone()
    dirty.view(torch.uint8)[0, -1, 0, 0, -1] = 1
    with pytest.raises(ValueError, match="1 elements of the padding"):
        tb.from_physical(dirty, (1, 20, 3, 3), tb.nChw16c)


def test_from_physical_with_gaps():
    whole = torch.randn(2, 6, 2, 10, 16)
    y = tb.from_physical(whole[:, 1:4, :, ::2], (2, 48, 2, 5), tb.nChw16c)
    assert_same(y, whole[:, 1:4, :, ::2].permute(0, 1, 4, 2, 3).reshape(2, 48, 2, 5))
    y.zero_()
    assert whole[:, 1:4, :, ::2].count_nonzero() == 0 and whole.count_nonzero() == whole.numel() - y.numel()


def test_from_physical_of_the_fastest_format(isa):
    block = 16 if isa == "avx512" else 8
    y = tb.from_physical(torch.ones(2, 1, 3, block), (2, block, 3), tb.blocked)
    assert y.blocking == ((1, block),)


def test_from_physical_does_not_require_grad():
    data = torch.ones(2, 1, 3, 3, 16, requires_grad=True)
    y = tb.from_physical(data, (2, 16, 3, 3), tb.nChw16c)
    assert not y.requires_grad and not y.physical.requires_grad
    y.requires_grad_().sum().backward()
    assert y.grad is not None and data.grad is None and data.requires_grad


def dirty(channel, value=1.0):
    data = torch.zeros(3, 2, 2, 4, 16)
    data[1, 1, 1, 2, channel - 16] = value
    return data


zeros = functools.partial(torch.zeros, 3, 2, 2, 4, 16)

BAD_PHYSICAL = {
    # name: (data, size, format, error)
    "fewer blocks": (lambda: torch.zeros(3, 1, 2, 4, 16), SIZE, "nChw16c", ValueError),
    "more blocks": (lambda: torch.zeros(3, 3, 2, 4, 16), SIZE, "nChw16c", ValueError),
    "another block": (lambda: torch.zeros(3, 2, 2, 4, 8), SIZE, "nChw16c", ValueError),
    "the logical shape": (lambda: torch.zeros(SIZE), SIZE, "nChw16c", ValueError),
    "memory order of axes": (lambda: torch.zeros(2, 2, 4, 3, 16), SIZE, "Chwn16c", ValueError),
    "another order": (lambda: zeros(), SIZE, "Chwn16c", ValueError),
    "transposed": (lambda: torch.zeros(3, 2, 4, 2, 16).transpose(2, 3), SIZE, "nChw16c", ValueError),
    "inner block not innermost": (lambda: torch.zeros(3, 2, 2, 16, 4).transpose(3, 4), SIZE, "nChw16c", ValueError),
    "inner block with gaps": (lambda: torch.zeros(3, 2, 2, 4, 32)[..., ::2], SIZE, "nChw16c", ValueError),
    "inner block expanded": (lambda: torch.zeros(3, 2, 2, 4, 1).expand(3, 2, 2, 4, 16), SIZE, "nChw16c", ValueError),
    "last channel of padding": (lambda: dirty(31), SIZE, "nChw16c", ValueError),
    "first channel of padding": (lambda: dirty(21), SIZE, "nChw16c", ValueError),
    "NaN in the padding": (lambda: dirty(25, math.nan), SIZE, "nChw16c", ValueError),
    "a blocked tensor": (lambda: torch.zeros(SIZE).to(tb.nChw16c), SIZE, "nChw16c", TypeError),
    "an array": (lambda: zeros().numpy(), SIZE, "nChw16c", TypeError),
    "nothing": (lambda: None, SIZE, "nChw16c", TypeError),
    "a plain format": (lambda: torch.zeros(SIZE), SIZE, "nchw", TypeError),
    "no size": (lambda: zeros(), None, "nChw16c", TypeError),
    "a size that is one number": (lambda: zeros(), 3, "nChw16c", TypeError),
    "a negative size": (lambda: zeros(), (3, -21, 2, 4), "nChw16c", (TypeError, ValueError)),
    "a fractional size": (lambda: zeros(), (3, 21.0, 2, 4), "nChw16c", TypeError),
    "a size of another rank": (lambda: zeros(), (3, 21, 2), "nChw16c", ValueError),
    "a huge size": (lambda: zeros(), (3, 2**63, 2, 4), "nChw16c", ValueError),
    "sparse": (lambda: zeros().to_sparse(), SIZE, "nChw16c", (TypeError, ValueError, RuntimeError)),
}


@pytest.mark.parametrize("name", BAD_PHYSICAL)
def test_from_physical_refuses(name):
    make, size, tag, kind = BAD_PHYSICAL[name]
    data = make()
    before = to_dense(data).clone() if isinstance(data, torch.Tensor) else data
    with pytest.raises(kind) as error:
        tb.from_physical(data, size, tb.format(tag))
    assert one_line(error)
    if isinstance(data, torch.Tensor) and data.layout == torch.strided:
        torch.testing.assert_close(to_dense(data), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", ["nChw16c", None, 16, torch.channels_last, tb.Blocking(((1, 16),))], ids=repr)
def test_from_physical_of_no_format(fmt):
    with pytest.raises(TypeError) as error:
        tb.from_physical(zeros(), SIZE, fmt)
    assert one_line(error) and "from_physical" in str(error.value)


def test_from_physical_checks_blocks_split_twice():
    data = torch.randn(16, 16, 1, 1).to(tb.OIhw4i16o4i).physical
    assert_same(
        tb.from_physical(data, (16, 16, 1, 1), tb.OIhw4i16o4i), data.permute(5, 4, 6, 2, 3, 0, 1).reshape(16, 16, 1, 1)
    )
    for size in ((16, 15, 1, 1), (16, 12, 1, 1), (15, 16, 1, 1)):
        with pytest.raises(ValueError, match="padding"):
            tb.from_physical(data, size, tb.OIhw4i16o4i)


# ---- Views


def nhwc(*size):
    return torch.randn(size).to(memory_format=torch.channels_last)


VIEWS = {
    # name: (a plain tensor, a format that its bytes lie in)
    "NHWC of one block": (lambda: nhwc(2, 16, 3, 4), "nChw16c"),
    "NHWC of one block of 8": (lambda: nhwc(2, 8, 3, 4), "nChw8c"),
    "H = W = 1": (lambda: torch.randn(2, 48, 1, 1), "nChw16c"),
    "a matrix": (lambda: torch.randn(5, 64), "nC16c"),
    "a vector": (lambda: torch.randn(64), "A16a"),
    "HWIO of one block": (lambda: torch.randn(3, 3, 5, 16).permute(3, 2, 0, 1), "hwiO16o"),
    "HWIO as OHWI": (lambda: torch.randn(3, 3, 5, 16).permute(3, 2, 0, 1), "Ohwi16o"),
    "expanded image": (lambda: torch.randn(2, 1, 1, 16).expand(2, 3, 4, 16).permute(0, 3, 1, 2), "nChw16c"),
    "images with gaps": (lambda: nhwc(4, 16, 3, 8)[::2, :, :, 1:5], "nChw16c"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_blocked_and_back(name):
    make, tag = VIEWS[name]
    x = make()
    y = tb.view_blocked(x, tb.format(tag))
    assert type(y) is tb.BlockedTensor and y.blocking == tb.format(tag).blocking
    assert y.physical.data_ptr() == x.data_ptr() and same_memory(y.physical, x)
    assert_same(y, x.clone(), rtol=0, atol=0)
    with tb.count() as counts:
        z = tb.view_strided(y)
    assert (counts.left, counts.reorders.total()) == (1, 0)
    assert type(z) is torch.Tensor and z.data_ptr() == x.data_ptr() and z.shape == x.shape
    assert torch.equal(z, x)
    if 0 in x.stride():  # cannot be written to
        return
    y.add_(1)  # a write shows in all of them
    assert torch.equal(z, x) and torch.equal(y.to_dense(), x)
    x.mul_(3)
    z.sub_(2)
    assert torch.equal(z, x) and torch.equal(y.to_dense(), x)
    y.physical.zero_()
    assert not x.count_nonzero()


NO_VIEWS = {
    "NCHW": (lambda: torch.randn(2, 16, 3, 4), "nChw16c"),
    "NHWC of two blocks": (lambda: nhwc(2, 32, 3, 4), "nChw16c"),
    "padding": (lambda: nhwc(2, 15, 3, 4), "nChw16c"),
    "padding, H = W = 1": (lambda: torch.randn(2, 40, 1, 1), "nChw16c"),
    "expanded channels": (lambda: torch.randn(2, 1, 3, 4).expand(2, 16, 3, 4), "nChw16c"),
    "every other channel": (lambda: torch.randn(2, 3, 4, 32)[..., ::2].permute(0, 3, 1, 2), "nChw16c"),
    "another order": (lambda: nhwc(2, 16, 3, 4), "Chwn16c"),
    "transposed": (lambda: nhwc(2, 16, 3, 4).transpose(2, 3), "nChw16c"),
    "split twice": (lambda: torch.randn(16, 16, 1, 1), "OIhw4i16o4i"),
}


@pytest.mark.parametrize("name", NO_VIEWS)
def test_view_blocked_refuses(name):
    make, tag = NO_VIEWS[name]
    x = make()
    with pytest.raises(ValueError, match=r"x\.to\(fmt\)") as error:
        tb.view_blocked(x, tb.format(tag))
    assert one_line(error)
    assert_same(x.to(tb.format(tag)), x)


BAD_VIEWS = {
    "no tensor": (lambda: 3, tb.nChw16c, TypeError),
    "a blocked tensor": (lambda: nhwc(2, 16, 3, 4).to(tb.nChw16c), tb.nChw8c, TypeError),
    "a plain format": (lambda: nhwc(2, 16, 3, 4), tb.nchw, TypeError),
    "a tag": (lambda: nhwc(2, 16, 3, 4), "nChw16c", TypeError),
    "no format": (lambda: nhwc(2, 16, 3, 4), None, TypeError),
    "no axes": (lambda: torch.tensor(3.0), tb.blocked, (TypeError, ValueError)),
    "sparse": (lambda: torch.randn(2, 16, 1, 1).to_sparse(), tb.nChw16c, (TypeError, ValueError, RuntimeError)),
    "another rank": (lambda: torch.randn(2, 16, 3), tb.nChw16c, ValueError),
}


@pytest.mark.parametrize("name", BAD_VIEWS)
def test_view_blocked_of_bad_arguments(name):
    make, fmt, kind = BAD_VIEWS[name]
    with pytest.raises(kind) as error:
        tb.view_blocked(make(), fmt)
    assert one_line(error)


@pytest.mark.parametrize("function", ["view_blocked", "from_physical"])
def test_rank_error_tells_the_size(function):
    x = torch.zeros(2, 16, 7)
    arguments = (x, tb.nChw16c) if function == "view_blocked" else (x, (2, 16, 7), tb.nChw16c)
    with pytest.raises(ValueError, match=r"\(2, 16, 7\)"):
        getattr(tb, function)(*arguments)


def test_view_blocked_of_an_empty_tensor():
    """No bytes lie anywhere else."""
    for size in ((0, 16, 3, 3), (2, 16, 0, 3)):
        y = tb.view_blocked(torch.empty(size), tb.nChw16c)
        assert y.shape == size and tb.view_strided(y).shape == size


STRIDED_VIEWS = {
    # name: (size, format): whether one set of strides can say it
    "one block": ((2, 16, 3, 4), "nChw16c", True),
    "one block, padded": ((2, 5, 3, 4), "nChw16c", True),
    "H = W = 1": ((2, 40, 1, 1), "nChw16c", True),
    "a vector": ((37,), "A16a", True),
    "weights of one block": ((16, 5, 3, 3), "Ohwi16o", True),
    "two blocks": ((2, 17, 3, 4), "nChw16c", False),
    "two blocks, nhwC16c": ((2, 32, 3, 4), "nhwC16c", True),
    "split twice": ((16, 16, 1, 1), "OIhw4i16o4i", False),
    "split twice, one inner block in use": ((16, 16, 1, 1), "OIhw16i16o", True),
}


@pytest.mark.parametrize("name", STRIDED_VIEWS)
def test_view_strided(name):
    size, tag, can = STRIDED_VIEWS[name]
    x = torch.randn(size)
    y = x.to(tb.format(tag))
    if not can:
        with pytest.raises(ValueError, match="to_dense") as error:
            tb.view_strided(y)
        assert one_line(error)
        return
    with tb.count() as counts:
        z = tb.view_strided(y)
    assert (counts.left, counts.reorders.total()) == (1, 0)
    assert type(z) is torch.Tensor and z.data_ptr() == y.physical.data_ptr() and torch.equal(z, x)
    z.mul_(2)
    assert_same(y, x * 2)


def test_view_strided_of_others(x):
    assert tb.view_strided(x) is x
    with pytest.raises(TypeError) as error:
        tb.view_strided(None)
    assert one_line(error)


def test_views_are_differentiable():
    x = nhwc(2, 16, 3, 4).requires_grad_()
    weights = torch.randn(x.shape)
    y = tb.view_blocked(x, tb.nChw16c)
    assert y.requires_grad and not y.physical.requires_grad
    (tb.view_strided(y * 2) * weights).sum().backward()
    assert type(x.grad) is torch.Tensor
    torch.testing.assert_close(x.grad, 2 * weights)
    y = torch.randn(2, 16, 3, 4).to(tb.nChw16c).requires_grad_()
    (tb.view_strided(y) * weights).sum().backward()
    assert_same(y.grad, weights)


def forward_mode(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


DERIVATIVES = {"forward_ad": forward_mode, "jvp": lambda f, x, tangent: torch.func.jvp(f, (x,), (tangent,))[1]}


@pytest.mark.filterwarnings("ignore:(aten|prims)")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("tangent", ["nchw", "nhwc", "nChw16c", "nChw8c"])
def test_views_are_differentiable_forward(derivative, tangent):
    x, t = nhwc(2, 16, 3, 4), torch.randn(2, 16, 3, 4)
    given = t.to(tb.format(tangent))
    found = DERIVATIVES[derivative](lambda x: tb.view_blocked(x, tb.nChw16c) ** 2, x, given)
    assert_same(found.to_dense(), 2 * x * t)
    found = DERIVATIVES[derivative](lambda y: tb.view_strided(y) ** 2, x.to(tb.nChw16c), given)
    assert_same(found.to_dense(), 2 * x * t)


@pytest.mark.parametrize("write_to", ["view_blocked", "view_strided"])
def test_writing_to_a_view_is_right_or_refused(write_to):
    """As `x.view(...).mul_(3)` does: the gradient knows of it, or nothing is written."""
    a = torch.randn(2, 16, 1, 1, requires_grad=True)
    base = a * 2 if write_to == "view_blocked" else (a * 2).to(tb.nChw16c)
    view = tb.view_blocked(base, tb.nChw16c) if write_to == "view_blocked" else tb.view_strided(base)
    try:
        view.mul_(3)
    except RuntimeError:
        assert_same(base.detach(), 2 * a.detach())
        return
    assert_same(base.detach(), 6 * a.detach())
    base.sum().backward()
    assert_same(a.grad, torch.full_like(a, 6))


def test_writing_to_a_view_of_a_leaf_is_refused():
    leaf = torch.randn(2, 16, 1, 1, requires_grad=True)
    with pytest.raises(RuntimeError):
        tb.view_blocked(leaf, tb.nChw16c).mul_(3)


def test_writing_through_a_detached_tensor_is_noticed():
    y = torch.randn(SIZE).to(tb.nChw16c).requires_grad_()
    z = y.square().sum()
    y.detach().mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize("size", [(0, 16, 3, 3), (2, 16, 0, 3), (2, 0, 3, 3)], ids=str)
def test_empty_tensors_of_given_bytes_are_read(size):
    """Whose strides are no format's."""
    physical = torch.empty(tb.nChw16c.blocking.physical_shape(size)).transpose(2, 3).contiguous().transpose(2, 3)
    for y in (tb.view_blocked(torch.empty(size), tb.nChw16c), tb.from_physical(physical, size, tb.nChw16c)):
        assert y.to_dense().shape == y.to(tb.nChw8c).shape == y.numpy().shape == size
        assert y.memory_desc.dims == size and torch.relu(y).shape == size


@pytest.mark.parametrize("part", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conj", "neg"])
def test_lazy_values_have_no_bytes_to_share(part):
    x = part(torch.randn(2, 16, 3, 4, dtype=torch.complex64).to(memory_format=torch.channels_last))
    assert x.is_conj() or x.is_neg()
    with pytest.raises(TypeError, match="resolve_") as error:
        tb.view_blocked(x, tb.nChw16c)
    one_line(error)
    with pytest.raises(TypeError, match="resolve_"):
        tb.from_physical(x.permute(0, 2, 3, 1).unsqueeze(1), (2, 16, 3, 4), tb.nChw16c)


def test_bytes_that_are_not_there_have_no_padding_to_check():
    y = torch.zeros(2, 20, 3, 3).to(tb.nChw16c).to("meta")
    assert tb.from_physical(y.physical, y.shape, y.format).device.type == "meta"
