"""`BlockedTensor` as a parameter: gradients, hooks, `.data`."""

import numpy as np
import pytest
import torch
from conftest import assert_same, one_line
from tensor_cases import SIZE, same_memory
from torch import nn

import torch_blocked as tb

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


def test_data_of_a_parameter_that_a_graph_holds(x):
    """It cannot become plain: an error that says what can be done, and nothing lost."""
    p = nn.Parameter(x.to(tb.nChw16c))
    p.grad = x.to(tb.nChw16c)
    answer = p * p
    with pytest.raises(RuntimeError, match=r"p.copy_\(value\)") as error:
        nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p])
    assert one_line(error) and p.grad is not None
    assert_same(p.detach(), x)
    answer.sum().backward()
    assert_same(p.grad, x + 2 * x)


def test_data_takes_tensors_only(x):
    for bad in (3, None, np.zeros(3)):
        with pytest.raises(TypeError):
            x.to(tb.nChw16c).data = bad


@pytest.mark.parametrize("target", [{"memory_format": torch.channels_last}, {"memory_format": tb.nchw}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_with_gradients_becomes_plain_and_of_another_dtype(dtype, target):
    model = nn.Conv2d(16, 16, 3).to(tb.blocked)
    model(torch.randn(1, 16, 5, 5)).sum().backward()
    expected = {name: (p.detach().to_dense(), p.grad.to_dense()) for name, p in model.named_parameters()}
    model.to(dtype, **target)
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter and p.dtype == p.grad.dtype == dtype
        assert_same(p.detach(), expected[name][0].to(dtype))
        assert_same(p.grad, expected[name][1].to(dtype))


def test_plain_values_that_would_part_a_tensor_from_its_gradient():
    p = nn.Parameter(torch.randn(2, 16, 3, 3).to(tb.nChw16c))
    p.grad = torch.zeros(2, 16, 3, 3)
    with pytest.raises(RuntimeError, match="gradient of size") as error:
        p.data = torch.zeros(2, 5)
    one_line(error)
    assert isinstance(p, tb.BlockedTensor) and p.grad.shape == p.shape
    a = torch.randn(2, 16, 3, 3, requires_grad=True)
    y = a.to(tb.nChw16c) * 2
    with pytest.raises(RuntimeError, match="its gradient would stop") as error:
        y.data = torch.zeros(2, 16, 3, 3)
    one_line(error)
    y.sum().backward()
    assert bool((a.grad == 2).all())
