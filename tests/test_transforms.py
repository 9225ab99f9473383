"""Transforms of functions and of models: torch.func and torch.fx."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_same, dense
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import torch_blocked as tb

# ---- torch.func

TRANSFORMS = {
    "grad": grad,
    "vmap": vmap,
    "vmap of grad": lambda f: vmap(grad(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_descriptors_inside_a_transform(name):
    """Those of plain tensors as ever; a wrapped blocked tensor reports strides that its bytes do not have."""
    x, described, refused = torch.randn(2, 17, 3, 3), [], []

    def describe(t):
        described.append(tb.MemoryDesc.of(t).strides)
        return t.sum()

    def refuse(t):
        for call in (tb.MemoryDesc.of, tb.show):
            with pytest.raises(ValueError, match="inside a transform") as error:
                call(t)
            refused.append(str(error.value))
        return t.sum()

    TRANSFORMS[name](describe)(x)
    TRANSFORMS[name](refuse)(x.to(tb.nChw16c))
    assert described == [x.stride()[-len(described[0]) :]]
    assert len(refused) == 2 and not any("\n" in message for message in refused)


EXAMPLES = {
    "relu": lambda m, x: torch.relu(x),
    "conv": lambda m, x: m[0](x[None])[0],
    "bn": lambda m, x: nn.functional.batch_norm(x[None], x.mean((1, 2)), x.var((1, 2)))[0],
    "pool": lambda m, x: m[3](x[None])[0] + 1,
    "net": lambda m, x: m(x[None])[0],
    "to": lambda m, x: x.to(tb.nCw16c if x.dim() == 2 else tb.format("aBc16b")) * 2,
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("axis", [0, 3])
def test_vmap(models, name, axis):
    x = torch.randn(2, 20, 6, 6)
    function, answers = EXAMPLES[name], []
    for model, t in zip(models, (x, x.to(tb.blocked)), strict=True):
        t = t if axis == 0 else t.permute(1, 2, 3, 0)
        answers.append(vmap(lambda t, m=model: function(m, t), in_dims=axis)(t))
    assert_same(answers[1], dense(answers[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocked_input", [False, True])
def test_gradients_of_each_example(models, blocked_input):
    x, target, answers = torch.randn(3, 20, 6, 6), torch.tensor([1, 4, 0]), []
    for model in models:
        state = {name: p.detach() for name, p in model.named_parameters()}

        def loss(state, x, target, model=model):
            return nn.functional.cross_entropy(functional_call(model, state, (x[None],)), target[None])

        images = x.to(tb.blocked) if blocked_input and model is models[1] else x
        answers.append(vmap(grad(loss), in_dims=(None, 0, 0))(state, images, target))
    for name, expected in answers[0].items():
        assert_same(answers[1][name], expected, rtol=1e-4, atol=1e-4)


DERIVATIVES = {
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(1, 5))[0],
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(models, name):
    plain, blocked = models
    x = torch.randn(1, 20, 5, 5)
    expected = DERIVATIVES[name](plain, x)
    for t in (x, x.to(tb.blocked)):
        assert_same(dense(DERIVATIVES[name](blocked, t)) + 0, expected, rtol=1e-4, atol=1e-4)
    converting = DERIVATIVES[name](lambda t: plain(t.to(tb.nChw16c).to(tb.nChw8c).to_dense()), x)
    assert_same(converting, expected, rtol=1e-4, atol=1e-4)


# ---- torch.fx


class Converting(nn.Module):
    def __init__(self, fmt):
        super().__init__()
        self.conv, self.fmt = nn.Conv2d(20, 24, 3), fmt

    def forward(self, x):
        return self.conv(x.to(self.fmt)).to(memory_format=self.fmt).relu().to_dense()


def test_symbolic_trace(models):
    plain, blocked = models
    x, traced = torch.randn(2, 20, 6, 6), torch.fx.symbolic_trace(blocked)
    for model in (traced, copy.deepcopy(traced)):
        assert_same(model(x.to(tb.blocked)), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [tb.blocked, tb.nChw8c], ids=repr)
def test_symbolic_trace_of_conversions(fmt):
    model, x = Converting(fmt), torch.randn(2, 20, 6, 6)
    traced = torch.fx.symbolic_trace(model)
    with tb.count() as counts:
        assert_same(traced(x), model(x))
    assert counts.left >= 2
    assert "torch_blocked" in traced.code
