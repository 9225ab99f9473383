"""Linear layers of few images, which the backend gives to an operator of their own."""

import pytest
import torch
import torch.nn.functional as F
from backend_cases import assert_close, block, both, compiled, conv, fresh  # noqa: F401
from kernel_cases import between_nans
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ic, oc", [(1, 1), (15, 3), (16, 4), (37, 9), (257, 130)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_operator(isa, guarded, n, ic, oc, bias):
    x, w, b = torch.randn(n, ic), torch.randn(oc, ic), torch.randn(oc) if bias else None
    expected = F.linear(x.double(), w.double(), b.double() if bias else None).float()
    given = [between_nans(t) if t is not None else None for t in (x, w, b)]
    for threads in (1, 2):
        with num_threads(threads):
            torch.testing.assert_close(library.linear_op(*given), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "x, w, b",
    [
        (torch.randn(2, 7, 5), torch.randn(3, 5), torch.randn(3)),
        (torch.randn(5), torch.randn(3, 5), None),
        (torch.randn(2, 5).double(), torch.randn(3, 5).double(), None),
        (torch.randn(5, 2).t(), torch.randn(5, 3).t(), torch.randn(6)[::2]),
        (torch.randn(0, 5), torch.randn(3, 5), torch.randn(3)),
        (torch.randn(2, 0), torch.randn(3, 0), torch.randn(3)),
        (torch.randn(2, 5), torch.randn(0, 5), torch.randn(0)),
        (torch.randn(2, 5), torch.randn(3, 5), torch.randn(1)),
    ],
)
def test_other_operands(x, w, b):
    torch.testing.assert_close(library.linear_op(x, w, b), F.linear(x, w, b))


@pytest.mark.parametrize("b", [torch.randn(4), torch.randn(3).double()])
def test_errors_are_pytorchs(b):
    x, w = torch.randn(2, 5), torch.randn(3, 5)
    with pytest.raises(RuntimeError) as expected:
        F.linear(x, w, b)
    with pytest.raises(RuntimeError) as actual:
        library.linear_op(x, w, b)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias):
    x, w = (torch.randn(size, requires_grad=True) for size in ((2, 19), (5, 19)))
    torch.library.opcheck(library.linear_op, (x, w, torch.randn(5, requires_grad=True) if bias else None))


def network(bias=True):
    return nn.Sequential(block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(17, 5, bias=bias)).eval()


@both
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_in_a_graph(graphs, bias, blocked):
    model = network(bias)
    function, x = compiled(model.to(tb.blocked) if blocked else model, dynamic=False), torch.randn(2, 3, 9, 8)
    assert_close(function(x), network_answer(model, x))
    assert graphs.count(library.linear_op) == 1
    model[3].weight.mul_(2)  # it is read on every call
    assert_close(function(x), network_answer(model, x))


def network_answer(model, x):
    y = model[:3](x)
    y = y.to_dense() if isinstance(y, tb.BlockedTensor) else y
    return F.linear(y, model[3].weight, model[3].bias)


@torch.no_grad()
def test_many_images_are_left_to_pytorch(graphs):
    model, x = network(), torch.randn(5, 3, 9, 8)
    assert_close(compiled(model, dynamic=False)(x), model(x))
    assert graphs.count(library.linear_op) == 0


@torch.no_grad()
def test_batches_that_vary(graphs):
    model = network()
    function = compiled(model, dynamic=True)
    for n in (2, 9, 3):
        x = torch.randn(n, 3, 9, 8)
        assert_close(function(x), model(x))
    assert len(graphs) == 1 and graphs.count(library.linear_op) == 1


def test_training_is_left_to_pytorch(graphs):
    model, x = network().train(), torch.randn(2, 3, 9, 8)
    compiled(model, dynamic=False)(x).sum().backward()
    assert graphs.count(library.linear_op) == 0 and model[3].weight.grad is not None
