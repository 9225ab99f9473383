"""Gradients through conversions of format, and through the operator."""

import pytest
import torch
from conftest import assert_same
from reorder_cases import lay_out, reorder

import torch_blocked as tb
from torch_blocked import equivalents, library

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
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, equivalents.blocked_to_plain(weights, (2, 20, 3), (1, 16)).float())
    x.grad = None
    x.to(dtype, tb.nCw16c).to_dense().float().sum().backward()
    assert type(x.grad) is torch.Tensor and x.grad.dtype == torch.float32 and torch.equal(x.grad, torch.ones_like(x))


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
