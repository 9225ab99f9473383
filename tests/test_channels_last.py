"""Linear layers on permuted images are convolutions in compiled graphs; layer normalization by channels is native."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Block, Lambda, assert_close, compiled, conv, fresh, network, randomized  # noqa: F401
from conftest import assert_same, dense
from torch import nn

import torch_blocked as tb
from torch_blocked import library


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that Inductor is given."""
    from torch_blocked.compile import lower

    seen, before = [], lower._inductor
    monkeypatch.setattr(lower, "_inductor", lambda gm, *args, **how: seen.append(gm) or before(gm, *args, **how))
    return seen


def operators(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("channels", "inside"), [(19, True), (32, False)])
def test_blocks_of_convolutions_alone(fresh, graphs, channels, inside):  # noqa: F811
    model, x = network(channels, inside=inside), torch.randn(2, 3, 12, 11)
    with torch.no_grad():
        assert_close(compiled(model)(x), model(x))
    (gm,) = graphs
    names = operators(gm)
    # All else went into these, but the way to a plain answer.
    assert names.count("torch_blocked.convolution.default") == 7
    assert names.count("torch_blocked.layer_norm_channels.default") == 2
    assert not {"aten.addmm.default", "aten.mm.default", "aten.erf.default", "aten.mul.Tensor", "aten.add.Tensor"} & {
        *names
    }


@torch.no_grad()
def test_arguments_by_name(fresh, graphs):  # noqa: F811
    def linear(m, x):
        return F.linear(bias=None, weight=m.l.weight, input=m.c(x).permute(0, 2, 3, 1))

    model, x = Lambda(linear, c=conv(3, 20), l=nn.Linear(20, 5)), torch.randn(2, 3, 8, 8)
    assert_close(compiled(model)(x), model(x))


@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
def test_changes_of_the_weight_are_seen(fresh, blocked):  # noqa: F811
    model, x = network(16), torch.randn(2, 3, 8, 8)
    fast = compiled(model.to(tb.blocked) if blocked else model)
    with torch.no_grad():
        before = fast(x)
        model[1].expand.weight.mul_(2)
        model[2].scale.add_(1)
        after = fast(x)
        assert_close(after, model(x))
        assert (after - before).abs().max() > 1e-3


def test_any_number_of_images(fresh):  # noqa: F811
    model = network(16)
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for n, size in ((2, 12), (3, 12), (5, 9)):
            x = torch.randn(n, 3, size, size + 1)
            assert_close(fast(x), model(x))


class Others(nn.Module):
    """What is no part of such a region, or leaves it in the middle."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.other = conv(3, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.of_width = nn.Linear(9, 9)
        self.register_buffer("matrix", torch.randn(9, 16))

    def forward(self, x):
        first = self.conv(x)
        y = first.permute(0, 2, 3, 1)
        z = F.relu(self.linear(y))
        back = self.other(z).permute(0, -1, 1, 2)
        odd = self.of_width(first).permute(0, 2, 3, 1) + self.matrix  # neither: a vector, a linear layer of channels
        both = z + torch.mul(z, 2)
        swapped = z.permute(0, 2, 1, 3)
        return back + first, z, both.permute(0, 3, 1, 2), odd, swapped, F.relu(self.linear(y), inplace=True)


def test_what_leaves_a_region(fresh):  # noqa: F811
    model, x = randomized(Others()), torch.randn(2, 3, 7, 9)
    with torch.no_grad():
        expected, actual = model(x), compiled(model)(x)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
        assert a.stride() == e.stride()


def test_graphs_without_convolutions_stay(fresh, graphs):  # noqa: F811
    model = Lambda(lambda m, x: m.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), linear=nn.Linear(16, 16))
    x = torch.randn(2, 16, 4, 5)
    with torch.no_grad():
        assert_close(compiled(model)(x), model(x))
    assert not graphs


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
def test_training(fresh, graphs, blocked):  # noqa: F811
    block = Block(19, inside=blocked, activation=F.relu)
    model, x = randomized(nn.Sequential(conv(3, 19), block)), torch.randn(2, 3, 8, 8)
    named = dict(model.named_parameters())
    model(x).square().mean((2, 3)).sum().backward()
    expected = {name: p.grad for name, p in named.items()}
    model.zero_grad()
    model = nn.Sequential(model.to(tb.blocked) if blocked else model, Lambda(lambda m, x: x.square().mean((2, 3))))
    compiled(model)(x).sum().backward()
    for name, grad in expected.items():
        actual = named[name].grad
        assert isinstance(actual, tb.BlockedTensor) == isinstance(named[name], tb.BlockedTensor)
        torch.testing.assert_close(dense(actual), grad, rtol=1e-3, atol=1e-4)
    assert not {"aten.addmm.default", "aten.mm.default"} & {name for gm in graphs for name in operators(gm)}


# ---- Layer normalization of the channels of a permuted image


def normalized(x, weight, bias):
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, 1e-6).permute(0, 3, 1, 2)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("channels", [1, 16, 19, 40])
def test_layer_norm(isa, guarded, channels, affine):
    x = torch.randn(2, channels, 5, 7) + 3
    vectors = torch.randn(2, channels) if affine else (None, None)
    for block in library.kernel_blocks():
        blocked = x.to(tb.format(f"nChw{block}c"))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), tb.fallback("error"):
                y = normalized(blocked, *vectors)
            assert y.blocking == blocked.blocking
            assert_same(y, normalized(x, *vectors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [16, 19])
def test_gradients_of_layer_norm(channels):
    x, vectors, by = torch.randn(2, channels, 5, 7), torch.randn(2, channels), torch.randn(2, channels, 5, 7)
    found = []
    for fmt in (None, tb.blocked):
        src = (x if fmt is None else x.to(fmt)).clone().requires_grad_()
        weight, bias = (v.clone().requires_grad_() for v in vectors)
        with tb.fallback("error"):
            y = normalized(src, weight, bias)
            grads = torch.autograd.grad((y * (by if fmt is None else by.to(fmt))).sum(), (src, weight, bias))
        found.append(grads)
    (diff, *plain), (blocked_diff, *others) = found
    assert_same(blocked_diff, diff, rtol=1e-4, atol=1e-5)
    for a, e in zip(others, plain, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_layer_norm_of_other_axes():
    x = torch.randn(2, 16, 5, 16)
    for size in ((16,), (5, 16)):
        assert_same(F.layer_norm(x.to(tb.blocked), size), F.layer_norm(x, size))
