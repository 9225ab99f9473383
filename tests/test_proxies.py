"""`make_fx` and `torch.func.linearize`: the graph holds for other inputs, none of it is a constant of the trace."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, dense, one_line
from torch import nn
from torch.func import functional_call, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx

import torch_blocked as tb


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 20, 3)).eval()
    model[1].running_mean.normal_()
    return model.to(tb.blocked)


def same_bytes(x: torch.Tensor) -> torch.Tensor:
    vectors = x.contiguous().sum((2, 3), keepdim=True).repeat(1, 16, 1, 1)
    return tb.view_strided(tb.view_blocked(vectors, tb.nChw16c).relu())


NETWORK = network()
OTHER = torch.randn(2, 3, 8, 8).to(tb.blocked)

# Functions of a tensor of this size, plain or blocked; those with parameters, which `make_fx` takes as real only.
REAL = {
    "network": NETWORK,
    "network, plain answer": nn.Sequential(NETWORK, nn.Flatten()),
    "gradient": torch.func.grad(lambda x: NETWORK(x).sum()),
    "with a constant": lambda x: x + OTHER,
}
FUNCTIONS = {
    "nothing": lambda x: x,
    "to": lambda x: x.to(tb.blocked),
    "between blocks": lambda x: x.to(tb.nChw8c).to(tb.nChw16c).to_dense(),
    "pointwise": lambda x: (x.relu() * 2).to(memory_format=torch.channels_last),
    "in place": lambda x: x.clone().relu_().add_(1),
    "slice": lambda x: x[:, 1:] * 2,
    "fallback": lambda x: x.cummax(1).values,
    "physical": lambda x: x.to(tb.blocked).physical * 2,
    "the same bytes": same_bytes,
}
MODES = [("real", name) for name in REAL | FUNCTIONS] + [(m, name) for m in ("fake", "symbolic") for name in FUNCTIONS]


@pytest.mark.parametrize("blocked_input", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("mode, name", MODES)
def test_make_fx(mode, name, blocked_input):
    function = (REAL | FUNCTIONS)[name]
    given, others = ((x.to(tb.blocked) if blocked_input else x) for x in torch.randn(2, 2, 3, 8, 8))
    with tb.fallback("allow"):
        expected = function(others.clone())
        found = make_fx(function, tracing_mode=mode)(given)(others.clone())
    assert type(found) is type(expected)
    assert_same(dense(found), dense(expected), rtol=0, atol=0)


def test_make_fx_of_other_sizes():
    traced = make_fx(lambda x: x.to(tb.blocked) * 2, tracing_mode="symbolic")(torch.randn(2, 3, 8, 8))
    x = torch.randn(3, 3, 5, 6)
    assert_same(traced(x).to_dense(), x * 2)


def test_make_fx_of_parameters():
    state = {name: p.detach() for name, p in NETWORK.named_parameters()}
    x, others = torch.randn(2, 3, 8, 8), {name: p + 1 for name, p in state.items()}

    def function(state, x):
        return functional_call(NETWORK, state, (x,))

    assert_same(dense(make_fx(function)(state, x)(others, x)), dense(function(others, x)), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("blocked_input", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("name", ["network", "network, plain answer", "pointwise", "between blocks"])
def test_linearize(name, blocked_input):
    function = (REAL | FUNCTIONS)[name]
    x, tangent, another = ((x.to(tb.blocked) if blocked_input else x) for x in torch.randn(3, 2, 3, 8, 8))
    with tb.fallback("allow"):
        answer, derivative = linearize(function, x)
        assert_same(dense(answer), dense(function(x)))
        for t in (tangent, another, tangent):
            assert_same(dense(derivative(t)), dense(jvp(function, (x,), (t,))[1]), rtol=1e-5, atol=1e-5)


# ---- torch.jit.trace, which cannot

JIT_TRACED = {
    "a model": network,
    "to blocked": lambda: lambda x: x.to(tb.blocked),
    "to dense": lambda: lambda x: x.relu().to_dense(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("name", JIT_TRACED)
def test_jit_trace_is_refused(name):
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(RuntimeError, match=r"use torch\.export\.export") as error:
        torch.jit.trace(JIT_TRACED[name](), x.to(tb.nChw8c) if name == "to dense" else x)
    assert one_line(error)
