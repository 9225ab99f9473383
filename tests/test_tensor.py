"""`BlockedTensor` as an object: its bytes, views of them, copies, pickles, printing, and its life as a parameter."""

import concurrent.futures
import copy
import functools
import io
import itertools
import json
import math
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_same, padding_is_zero
from torch import nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense

TAGS = "nChw16c nChw8c Chwn4c nhwC16c OIhw16i16o OIhw4i16o4i Ohwi16o ABCd3b2a2b5c".split()
SIZE = (3, 21, 2, 4)


@pytest.fixture
def x():
    return torch.randn(SIZE)


def one_line(error):
    return 0 < len(str(error.value)) < 500 and "\n" not in str(error.value)


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- What it is


@pytest.mark.parametrize("tag", TAGS)
def test_looks_like_the_plain_tensor(x, tag):
    y = x.to(tb.format(tag))
    assert isinstance(y, torch.Tensor) and y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
    assert (y.dim(), y.numel(), y.layout, y.stride()) == (x.dim(), x.numel(), x.layout, x.stride())
    assert y.is_floating_point() and not y.requires_grad and y.is_leaf and len(y) == 3
    assert y.format == tb.format(tag) and y.blocking == tb.format(tag).blocking
    assert type(y.physical) is torch.Tensor and not y.physical.requires_grad
    assert tuple(y.physical.shape) == y.blocking.physical_shape(SIZE)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_descriptor_finds_each_element(x, tag, dtype):
    y = (x * 100).to(dtype).to(tb.format(tag))
    desc = y.memory_desc
    assert desc == tb.MemoryDesc(SIZE, dtype, tag) == tb.MemoryDesc.of(y) and desc.matches(tag)
    assert desc.nbytes == y.physical.untyped_storage().nbytes()
    memory = torch.empty(0, dtype=dtype).set_(y.physical.untyped_storage())
    dense = y.to_dense()
    for _ in range(200):
        index = tuple(random.randrange(n) for n in SIZE)
        assert memory[desc.offset(index)] == dense[index]
    inside = {desc.offset(index) for index in itertools.product(*map(range, SIZE))}
    assert all(memory[i] == 0 for i in set(range(len(memory))) - inside)


PARTS = {
    "batch": lambda y: y[1:],
    "rows": lambda y: y[:, :, 1:2],
    "columns": lambda y: y[..., ::2],
    "blocks": lambda y: y[:, 16:],
    "permuted": lambda y: y.permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_descriptor_of_a_part(name):
    x = torch.randn(3, 37, 2, 4)
    part, expected = PARTS[name](x.to(tb.nChw16c)), PARTS[name](x)
    assert type(part) is tb.BlockedTensor
    desc, physical = part.memory_desc, part.physical
    assert desc.dims == tuple(expected.shape) and desc.offset0 == physical.storage_offset()
    memory = torch.empty(0).set_(physical.untyped_storage())
    for index in itertools.product(*map(range, expected.shape)):
        assert memory[desc.offset(index)] == expected[index]
    assert_same(part, expected)


def test_descriptor_of_plain_tensors(x):
    of = tb.MemoryDesc.of
    assert of(x).tag == "abcd" and of(x).matches("nchw") and of(x).offset0 == 0
    assert of(x.to(memory_format=torch.channels_last)).tag == "acdb"
    assert of(x.to(tb.chwn)).tag == "bcda"
    assert of(torch.randn(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d)).tag == "acdeb"
    part = torch.randn(5, 30, 2, 8)[1:4, 9:, :, ::2]
    desc = of(part)
    assert desc.dims == SIZE and desc.strides == part.stride() == (480, 16, 8, 2) and desc.offset0 == 480 + 9 * 16
    assert desc.tag is None and not desc.blocking
    memory = torch.empty(0).set_(part.untyped_storage())
    assert all(memory[desc.offset(i)] == part[i] for i in itertools.product(*map(range, SIZE)))
    assert of(x[:1].expand(SIZE)).strides == (0, 8, 4, 1)


def test_attributes_cannot_be_assigned(x):
    y = x.to(tb.nChw16c)
    for name in ("physical", "blocking", "format", "memory_desc"):
        with pytest.raises(AttributeError):
            setattr(y, name, getattr(y, name))


def test_physical_shares_memory(x):
    y = x.to(tb.nChw16c)
    y.physical[2, 1, 1, 3, 4] = 50  # channel 16 + 4
    assert y.to_dense()[2, 20, 1, 3] == 50
    y.mul_(2)
    assert y.physical[2, 1, 1, 3, 4] == 100 and padding_is_zero(y)
    assert same_memory(y.detach().physical, y.physical) and same_memory(y.data.physical, y.physical)
    assert not same_memory(y.clone().physical, y.physical)


WRITES = {
    "element": lambda x: x.__setitem__((2, 20, 1, 3), 5),
    "image": lambda x: x.__setitem__(1, 5),
    "channel": lambda x: x.__setitem__((slice(None), 20), 5),
    "channels": lambda x: x.__setitem__((slice(None), slice(3, 18)), 5),
    "block of channels": lambda x: x.__setitem__((slice(None), slice(0, 16)), torch.arange(4.0)),
    "column": lambda x: x.__setitem__((..., 2), torch.arange(3.0).view(3, 1, 1)),
    "mask": lambda x: x.__setitem__(x > 0, 5),
    "indices": lambda x: x.__setitem__((torch.tensor([0, 2]), torch.tensor([20, 3])), 5),
    "whole": lambda x: x.__setitem__(slice(None), 5),
}


WRITES_TO_VIEWS = {
    "select": lambda x: x.select(1, 20).fill_(5),
    "narrow": lambda x: x.narrow(1, 2, 3).mul_(2),
    "slice of rows": lambda x: x[:, :, 1:].add_(1),
    "unbind": lambda x: x.unbind(1)[20].zero_(),
    "permute": lambda x: x.permute(1, 0, 2, 3)[20].zero_(),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3).zero_(),
    "view": lambda x: x.view(3, -1).zero_(),
    "chunk": lambda x: x.chunk(2, 1)[1].zero_(),
}


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        *itertools.product(WRITES, ["nChw16c", "nChw8c", "OIhw4i16o4i"]),
        *itertools.product(WRITES_TO_VIEWS, ["nChw16c", "OIhw4i16o4i"]),
    ],
)
def test_writing_to_a_part_writes_to_the_whole(x, name, tag):
    y, expected = x.to(tb.format(tag)), x.clone()
    write = {**WRITES, **WRITES_TO_VIEWS}[name]
    write(expected)
    assert not torch.equal(expected, x)
    write(y)
    assert_same(y, expected)


def test_gradients_through_writes():
    """`y[index] = value`: none for what was overwritten, and the value has its own."""
    results = []
    for make in (lambda t: t * 1, lambda t: (t * 1).to(tb.nChw16c)):
        torch.manual_seed(1)
        a, b = torch.randn(SIZE, requires_grad=True), torch.randn(3, 5, 2, 4, requires_grad=True)
        y = make(a)
        y[:, 14:19] = b * 3
        y[0] += 1
        y[1:][..., 2] = 7
        (to_dense(y) ** 2).sum().backward()
        results.append((to_dense(y).detach(), a.grad, b.grad))
    for actual, expected in zip(*results[::-1], strict=True):
        assert_same(actual, expected)


def test_writing_blocked_values_into_parts(x):
    y, plain, value = x.to(tb.nChw16c), x.clone(), torch.randn(3, 5, 2, 4)
    y[:, 16:21] = value.to(tb.nChw8c)
    plain[:, 16:21] = value
    assert_same(y, plain)
    x[:, 16:21] = value.to(tb.nChw8c)
    assert torch.equal(x, plain)


def test_writing_to_a_part_of_a_leaf_is_refused(x):
    y = x.to(tb.nChw16c).requires_grad_()
    with pytest.raises(RuntimeError):
        y[0] = 1
    assert_same(y.detach(), x)
    with torch.no_grad():
        y[0] = 1
    assert y.requires_grad and y.is_leaf and (y.detach().to_dense()[0] == 1).all()


@pytest.mark.parametrize("index", [3, (0, 21), (0, 0, 0, 0, 0), "a", (slice(None), torch.tensor([21]))], ids=str)
def test_writing_out_of_range(x, index):
    y = x.to(tb.nChw16c)
    with pytest.raises((IndexError, TypeError)):
        y[index] = 1
    with pytest.raises((IndexError, TypeError)):
        y[index]
    assert_same(y, x)


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
    z = tb.view_strided(y)
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
    z = tb.view_strided(y)
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


# ---- Printing


def test_repr_shows_values_format_and_padding():
    y = torch.arange(6.0).view(2, 3).to(tb.format("nC16c"))
    assert repr(y) == str(y)
    text = " ".join(repr(y).split())
    assert text.startswith("BlockedTensor([[0., 1., 2.], [3., 4., 5.]]")
    assert "nC16c" in text and "padded_dims=(2, 16)" in text and text.count("size=(2, 3)") == 1
    assert "grad" not in text


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(0, 3, 2, 2).to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2, device="meta").to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2).to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2).bool().to(tb.nChw16c),
    ],
    ids=["empty", "meta", "float", "bool"],
)
def test_repr_says_each_thing_once(y):
    text = repr(y)
    assert text.startswith("BlockedTensor(") and text.endswith(")") and text.count("(") == text.count(")")
    assert f"size={tuple(y.shape)}" in text
    for word in ("size=", "format=", "padded_dims=", "dtype=", "device="):
        assert text.replace("padded_dims", "padded").count(word.replace("padded_dims", "padded")) <= 1


def test_repr_of_dtype_and_grad(x):
    assert "dtype=torch.float64" in repr(x.to(torch.float64, tb.nChw16c))
    leaf = x.to(tb.nChw16c).requires_grad_()
    assert repr(leaf).count("requires_grad=True") == 1 and "grad_fn" not in repr(leaf)
    assert repr(leaf * 2).count("grad_fn=<") == 1 and "requires_grad" not in repr(leaf * 2)
    assert "requires_grad=True" in repr(nn.Parameter(x.to(tb.nChw16c)))


def test_repr_of_a_huge_tensor_is_short():
    assert len(repr(torch.ones(300, 700, 3, 3).to(tb.nChw16c))) < 4000


def test_format_strings(x):
    y = x.to(tb.nChw16c)
    assert f"{y}" == repr(y) and f"{y[0, 0, 0, 0]:.2f}" == f"{x[0, 0, 0, 0]:.2f}"


# ---- Copies and pickles


def save_and_load(y, **options):
    file = io.BytesIO()
    torch.save(y, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "pickle 2": lambda y: pickle.loads(pickle.dumps(y, protocol=2)),
    "torch.save": save_and_load,
    "torch.save legacy": functools.partial(save_and_load, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("kind", ["tensor", "requires grad", "parameter", "frozen parameter", "bfloat16", "empty"])
def test_copies(x, way, tag, kind):
    x = x[:0] if kind == "empty" else x
    y = x.to(tb.format(tag))
    y = {
        "requires grad": lambda: y.requires_grad_(),
        "parameter": lambda: nn.Parameter(y),
        "frozen parameter": lambda: nn.Parameter(y, requires_grad=False),
        "bfloat16": lambda: y.bfloat16(),
    }.get(kind, lambda: y)()
    z = COPIES[way](y)
    assert type(z) is tb.BlockedTensor and z is not y
    assert isinstance(z, nn.Parameter) == ("parameter" in kind)
    assert z.requires_grad == y.requires_grad and z.is_leaf and z.dtype == y.dtype
    assert z.memory_desc == y.memory_desc and z.format == y.format
    assert_same(z.detach(), y.detach().to_dense(), rtol=0, atol=0)
    if kind != "empty":
        assert same_memory(z.physical, y.physical) == (way == "copy")


@pytest.mark.parametrize("wrap", [torch.Tensor.requires_grad_, nn.Parameter], ids=["tensor", "parameter"])
def test_deepcopy_takes_the_gradient_along_as_a_plain_one_does(x, wrap):
    plain, y = wrap(x.clone()), wrap(x.to(tb.nChw16c))
    plain.grad, y.grad = x * 2, (x * 2).to(tb.nChw8c)
    expected, z = copy.deepcopy(plain).grad, copy.deepcopy(y).grad
    assert (z is None) == (expected is None)
    if z is not None:
        assert z.format == tb.nChw8c and not same_memory(z.physical, y.grad.physical)
        assert_same(z, expected)
    y.grad = None
    assert copy.deepcopy(y).grad is None


def test_deepcopy_of_what_has_a_grad_fn(x):
    y = x.requires_grad_().to(tb.nChw16c)
    with pytest.raises(RuntimeError) as error:
        copy.deepcopy(y)
    assert one_line(error)
    assert_same(copy.deepcopy(y.detach()), x.detach())


@pytest.mark.parametrize("way", [n for n in COPIES if n != "copy"])
def test_copies_keep_what_is_shared(x, way):
    y = x.to(tb.nChw16c)
    a, b, c = COPIES[way]([y, y, y.detach()])
    assert a is b and a is not c
    if "pickle" not in way:  # PyTorch's own tensors part company there too
        assert same_memory(a.physical, c.physical)


def test_pickles_with_plain_tensors_and_parts(x):
    y = x.to(tb.nChw16c)
    loaded = save_and_load({"blocked": y, "part": y[1:], "plain": x, "list": [y]})
    assert_same(loaded["blocked"], x) or assert_same(loaded["part"], x[1:])
    assert loaded["list"][0] is loaded["blocked"] and torch.equal(loaded["plain"], x)
    assert same_memory(loaded["part"].physical, loaded["blocked"].physical)


def test_load_to_another_device(x):
    file = io.BytesIO()
    torch.save(x.to(tb.nChw16c), file)
    file.seek(0)
    y = torch.load(file, map_location="meta", weights_only=True)
    assert type(y) is tb.BlockedTensor and y.device.type == y.physical.device.type == "meta" and y.shape == SIZE


# ---- As a parameter


def test_parameter(x):
    p = nn.Parameter(x.to(tb.nChw16c))
    assert isinstance(p, nn.Parameter) and isinstance(p, tb.BlockedTensor) and p.requires_grad and p.is_leaf
    assert not isinstance(x.to(tb.nChw16c), nn.Parameter)
    assert p.format == tb.nChw16c
    for other in (p.detach(), p.data, p.clone(), p.to_dense(), p.to(tb.nChw8c), p * 2):
        assert not isinstance(other, nn.Parameter)
    assert p.to(tb.nChw16c) is p and p.float() is p and p.to("cpu") is p


def test_requires_grad_and_detach(x):
    y = x.to(tb.nChw16c)
    assert y.requires_grad_() is y and y.requires_grad and y.is_leaf
    assert not y.detach().requires_grad and same_memory(y.detach().physical, y.physical)
    assert not y.physical.requires_grad
    z = y * 2
    assert z.grad_fn is not None and not z.physical.requires_grad
    assert z.detach_() is z and z.grad_fn is None
    assert not y.requires_grad_(False).requires_grad
    with pytest.raises(RuntimeError):
        x.to(torch.int32, tb.nChw16c).requires_grad_()


def test_grad(x):
    y = x.to(tb.nChw16c).requires_grad_()
    assert y.grad is None
    (y * y).sum().backward()
    assert_same(y.grad, 2 * x)
    (y * 3).sum().backward()
    assert_same(y.grad, 2 * x + 3)
    for grad in (x.to(tb.nChw16c), x.to(tb.OIhw4i16o4i), x.clone()):
        y.grad = grad
        assert y.grad is grad
        (y * 2).sum().backward()
        assert_same(y.grad, x + 2)
    y.grad.zero_()
    assert_same(y.grad, torch.zeros(SIZE))
    plain = x.clone().requires_grad_()
    plain.grad = x.to(tb.nChw16c)
    (plain * 2).sum().backward()
    assert_same(plain.grad, x + 2)
    for bad in (torch.zeros(3, 21, 2, 5).to(tb.nChw16c), x.double().to(tb.nChw16c)):
        with pytest.raises(RuntimeError):
            y.grad = bad


def test_hooks_and_retained_gradients(x):
    y = x.to(tb.nChw16c).requires_grad_()
    z = y * 2
    z.retain_grad()
    seen = []
    y.register_hook(lambda grad: seen.append(grad) or grad * 10)
    (z * z).sum().backward()
    assert_same(z.grad, 4 * x)
    assert_same(seen[0], 8 * x)
    assert_same(y.grad, 80 * x)


# ---- .data


def test_data_of_a_blocked_tensor(x):
    for y in (x.to(tb.nChw16c).requires_grad_(), nn.Parameter(x.to(tb.nChw16c))):
        data = y.data
        assert type(data) is tb.BlockedTensor and not data.requires_grad and same_memory(data.physical, y.physical)
        data.mul_(2)
        assert_same(y.detach(), 2 * x)


@pytest.mark.parametrize("tag", ["nChw16c", "nChw8c", "OIhw4i16o4i"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_becomes_another_blocked_tensor(x, tag, dtype):
    p = nn.Parameter(x.to(tb.nChw16c))
    value = torch.randn(4, 9, 1, 2).to(dtype).to(tb.format(tag))
    same = p
    p.data = value
    assert p is same and isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf
    assert p.shape == value.shape and p.format == value.format and p.dtype == dtype
    assert same_memory(p.physical, value.physical)
    assert_same(p.detach(), value.to_dense())
    (p * 2).sum().backward()
    assert_same(p.grad, torch.full_like(value.to_dense(), 2))


@pytest.mark.parametrize("kind", ["parameter", "frozen parameter", "tensor", "requires grad"])
def test_data_becomes_plain(x, kind):
    y = x.to(tb.nChw16c)
    y = nn.Parameter(y, requires_grad=kind == "parameter") if "parameter" in kind else y
    y = y.requires_grad_() if kind == "requires grad" else y
    same, requires_grad = y, y.requires_grad
    value = torch.randn(2, 5)
    y.data = value
    assert y is same and type(y) is (nn.Parameter if "parameter" in kind else torch.Tensor)
    assert y.requires_grad == requires_grad and y.is_leaf
    assert torch.equal(y, value) and y.data_ptr() == value.data_ptr()
    assert torch.equal(y.detach() + 1, value + 1)


def test_data_becomes_plain_and_the_gradient_stays(x):
    for grad in (x.clone(), x.to(tb.nChw16c)):
        p = nn.Parameter(x.to(tb.nChw16c))
        p.grad = grad
        p.data = x.clone()
        assert p.grad is not None
        assert_same(p.grad, x)


def test_data_takes_tensors_only(x):
    for bad in (3, None, np.zeros(3)):
        with pytest.raises(TypeError):
            x.to(tb.nChw16c).data = bad


# ---- numpy


@pytest.mark.parametrize("tag", TAGS)
def test_numpy(x, tag):
    y = x.to(tb.format(tag))
    array = np.asarray(y.to_dense())
    assert array.dtype == np.float32 and array.shape == SIZE and np.array_equal(array, x.numpy())
    assert y.physical.numpy().ctypes.data == y.physical.data_ptr()


def test_numpy_of_the_blocked_tensor_is_right_or_refused(x):
    y = x.to(tb.nChw16c)
    for convert in (np.asarray, lambda y: y.numpy(), lambda y: np.array(y.tolist(), np.float32)):
        try:
            array = convert(y)
        except (RuntimeError, TypeError) as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(array, x.numpy())


# ---- None of this runs on plain tensors behind the user's back

NO_FALLBACKS = {
    "to": lambda y: y.to(tb.nChw8c).to(tb.nhwc),
    "to(dtype)": lambda y: y.double().to(torch.int8),
    "to_dense": lambda y: y.to_dense(),
    "clone": lambda y: y.clone().clone(memory_format=torch.channels_last),
    "detach": lambda y: y.detach().data,
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "torch.save": save_and_load,
    "parameter": nn.Parameter,
    "zeros_like": torch.zeros_like,
    "copy_": lambda y: y.copy_(torch.zeros(SIZE)).copy_(y),
    "data": lambda y: setattr(y, "data", y.to(tb.nChw8c)),
    "plain data": lambda y: setattr(y, "data", y.to_dense()),
    "module": lambda y: nn.Conv2d(16, 16, 3).to(tb.blocked).double().to(memory_format=torch.channels_last),
    "load_state_dict": lambda y: nn.Conv2d(16, 16, 3).to(tb.blocked).load_state_dict(nn.Conv2d(16, 16, 3).state_dict()),
    "state_dict": lambda y: nn.Conv2d(16, 16, 3).load_state_dict(nn.Conv2d(16, 16, 3).to(tb.blocked).state_dict()),
}


@pytest.mark.parametrize("name", NO_FALLBACKS)
def test_no_fallbacks(x, name):
    y = x.to(tb.nChw16c)
    with tb.fallback("error"), tb.count() as counts:
        NO_FALLBACKS[name](y)
    assert not counts.fallbacks


# ---- What could reach for the bytes that a wrapper does not have: each in a process of its own

SURVIVES = {
    "share_memory_": "z = y.share_memory_(); assert z is y; assert y.is_shared(); check(y)",
    "from_dlpack": "check(torch.from_dlpack(y))",
    "numpy from_dlpack": "check(torch.from_numpy(numpy.from_dlpack(y)))",
    "to_dlpack": "check(torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)))",
    "apply_": "z = y.apply_(lambda v: v); check(z)",
    "data_ptr": "assert y.data_ptr() == y.physical.data_ptr()",
    "plain.data = blocked": "p = x.clone(); p.data = y; check(p)",
    "parameter.data = blocked": "p = torch.nn.Parameter(x); p.data = y; check(p.detach())",
    "module.share_memory": "torch.nn.Conv2d(20, 20, 3).to(tb.blocked).share_memory()",
    "set_": "z = x.clone(); z.set_(y); check(z)",
    "as_strided": "assert torch.equal(y.as_strided((2, 3), (1, 2), 5), x.as_strided((2, 3), (1, 2), 5))",
    "resize_": "y.resize_(2, 3)",
    "storage": "y.untyped_storage().tolist()",
    "queue": "q = torch.multiprocessing.SimpleQueue(); q.put(y); check(q.get())",
}
SURVIVOR = """
import json, os, sys
import numpy, torch, torch.multiprocessing, torch_blocked as tb
tb.fallback("allow")
x = torch.randn(2, 20, 3, 3)
y = x.to(tb.nChw16c)
def check(z):
    assert torch.equal(z.to_dense() if type(z) is tb.BlockedTensor else z, x), "wrong values"
for name, code in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            exec(code)
            answer = "right"
        except (RuntimeError, TypeError, BufferError, NotImplementedError) as error:
            answer = "refused"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(f"crash, status {status}"))
"""


@functools.cache
def survivors():
    command = [sys.executable, "-W", "ignore", "-c", SURVIVOR, json.dumps(SURVIVES)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    return dict(zip(SURVIVES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", SURVIVES)
def test_reaching_for_the_bytes_is_right_or_refused(name):
    assert survivors()[name] in ("right", "refused")


# ---- Threads


def test_many_threads_at_once():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(15):
            size = [int(torch.randint(1, 40, (), generator=generator)) for _ in range(4)]
            x = torch.randn(size, generator=generator)
            y = x.to(tb.format(TAGS[(seed + i) % len(TAGS)]))
            z = y.to(tb.format(TAGS[(seed + 3 * i) % len(TAGS)]))
            if not (torch.equal(z.to_dense(), x) and padding_is_zero(z) and torch.equal((y + 1).to_dense(), x + 1)):
                return size
        return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [None] * 24


def test_backward_in_many_threads():
    x = torch.randn(4, 33, 8, 8)

    def work(scale):
        leaf = x.clone().requires_grad_()
        (leaf.to(tb.nChw16c) * scale).to_dense().sum().backward()
        return torch.equal(leaf.grad, torch.full_like(x, scale))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
