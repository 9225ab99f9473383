"""Hooks of blocked modules, and what torch.nn.utils makes of their weights: parametrizations, pruning, fusion."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_same, dense
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval, parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_weights

import torch_blocked as tb


def seen_by_hooks(model, x):
    """What each kind of hook on the first layer sees, as sums, with values changed on the way."""
    seen, model, x = [], copy.deepcopy(model), x.requires_grad_()

    def note(name, *tensors):
        seen.append((name, [None if t is None else float(dense(t.detach()).double().sum()) for t in tensors]))

    layer = model[0]
    layer.register_forward_pre_hook(lambda m, inputs: note("pre", *inputs))
    layer.register_forward_hook(lambda m, inputs, output: note("forward", output) or output * 2)
    layer.register_full_backward_pre_hook(lambda m, grads: note("backward pre", *grads))
    layer.register_full_backward_hook(lambda m, to, grads: note("backward", *to, *grads) or tuple(3 * g for g in to))
    layer.weight.register_hook(lambda g: note("weight", g))
    layer.weight.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad))
    hidden = layer(x)
    hidden.register_hook(lambda g: note("tensor", g) or g * 2)
    hidden.retain_grad()
    model[1:](hidden).square().sum().backward()
    note("gradients", hidden.grad, x.grad)
    return seen


@pytest.mark.parametrize("blocked_input", [False, True])
def test_hooks(models, blocked_input):
    x = torch.randn(2, 20, 6, 6)
    expected = seen_by_hooks(models[0], x.clone())
    seen = seen_by_hooks(models[1], x.to(tb.blocked) if blocked_input else x.clone())
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, actual), (_, right) in zip(seen, expected, strict=True):
        assert actual == pytest.approx(right, rel=1e-3, abs=1e-3), name


# ---- torch.nn.utils


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 2 + weight.flip(-1)


REWRITES = {
    "parametrization": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Scaled()),
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of inputs": lambda m: parametrizations.weight_norm(m, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "l1_unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.3),
    "ln_structured": lambda m: prune.ln_structured(m, "weight", 0.5, 2, 0),
    "random_unstructured": lambda m: prune.random_unstructured(m, "weight", 0.3),
    "pruning removed": lambda m: prune.remove(prune.l1_unstructured(m, "weight", 0.3), "weight"),
    "weight_norm removed": lambda m: nn.utils.parametrize.remove_parametrizations(
        parametrizations.weight_norm(m), "weight"
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("name", REWRITES)
@pytest.mark.parametrize("order", ["blocked first", "blocked last"])
def test_rewritten_weights(name, order):
    plain, x, answers = nn.Conv2d(20, 24, 3), torch.randn(2, 20, 6, 6), []
    for blocked in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(plain)
        if blocked and order == "blocked first":
            model.to(tb.blocked)
        with torch.no_grad():  # a graph would hold the parameters, which then cannot be converted
            REWRITES[name](model)
        if blocked and order == "blocked last":
            model.to(tb.blocked)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().mean().backward()
        answers.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*reversed(answers), strict=True):
        assert_same(actual, expected, rtol=1e-3, atol=1e-4)


def test_fusion(models):
    x = torch.randn(2, 20, 6, 6)
    (conv, bn), (conv_blocked, bn_blocked) = (m[:2] for m in models)
    fused = fuse_conv_bn_eval(conv_blocked, bn_blocked)
    assert type(fused.weight) is tb.BlockedTensor
    assert_same(fused(x), bn(conv(x)), rtol=1e-4, atol=1e-4)
    statistics = bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
    actual = fuse_conv_bn_weights(conv_blocked.weight, conv_blocked.bias, *statistics)
    expected = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours.detach(), theirs.detach())
