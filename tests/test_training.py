"""Training: curves of blocked and plain models, optimizers and their state, what is done around a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, dense, padding_is_zero
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from training_cases import assert_alike, batches, pair, plain_step, sgd, train

import torch_blocked as tb
from torch_blocked.benchmark.networks import BasicBlock, ResNet

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Curves


@pytest.mark.parametrize("winograd", ["never", "auto"])
def test_loss_curves(isa, winograd):
    with tb.winograd(winograd):
        curves = [train(model, sgd(model), 200) for model in pair()]
    assert curves[0][-1] < 0.3 * curves[0][0]
    for plain, blocked in zip(*curves, strict=True):
        assert blocked == pytest.approx(plain, rel=0.01)


def gradients(model, x, target):
    F.cross_entropy(model(x), target).backward()
    return [dense(p.grad).double() for p in model.parameters()]


# Winograd's algorithms round more: F(4x4) about five times as much as oneDNN's direct convolution.
@pytest.mark.parametrize("winograd, factor", [("never", 3), ("auto", 8)])
def test_gradients_are_as_exact_as_plain_ones(isa, winograd, factor):
    """Of a residual network against float64; relative to each gradient's largest."""
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10)
    x, target = torch.randn(4, 3, 64, 64), torch.arange(4)
    exact = gradients(copy.deepcopy(model).double(), x.double(), target)
    plain = gradients(copy.deepcopy(model), x, target)
    with tb.winograd(winograd):
        blocked = gradients(model.to(tb.blocked), x, target)
    for e, p, b in zip(exact, plain, blocked, strict=True):
        errors = [float((g - e).abs().max() / e.abs().max()) for g in (p, b)]
        assert errors[1] <= factor * errors[0]


def test_a_step_of_a_resnet_does_not_fall_back():
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10).to(tb.blocked)
    optimizer = sgd(model)
    with tb.count() as counts:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.arange(2)).backward()
            optimizer.step()
    assert not counts.fallbacks


# ---- Optimizers

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-3, "amsgrad": True, "maximize": False}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3, "momentum": 0.9, "centered": True}),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, foreach):
    make, options = OPTIMIZERS[name]
    options = options | {"foreach": foreach} | ({} if make is torch.optim.RMSprop else {"fused": False})
    plain, blocked = pair()
    optimizer = make(blocked.parameters(), **options)
    expected = train(plain, make(plain.parameters(), **options), 10)
    assert train(blocked, optimizer, 10) == pytest.approx(expected, rel=1e-3)
    assert_alike(plain, blocked, optimizer)


@pytest.mark.parametrize("source", ["plain", "blocked"])
@pytest.mark.parametrize("target", ["plain", "blocked"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_state_goes_between_plain_and_blocked_models(source, target, name):
    """Training goes on as if nothing had happened; state stays in the format that it was made in."""
    make, options = OPTIMIZERS[name]
    models = {"plain": (a := pair())[0], "blocked": a[1]}
    resumed = copy.deepcopy(models[target])
    first, second = (make(m.parameters(), **options) for m in (models[source], resumed))
    train(models[source], first, 4)
    state = copy.deepcopy({"model": models[source].state_dict(), "optimizer": first.state_dict()})
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    expected = train(models[source], first, 4)
    assert train(resumed, second, 4) == pytest.approx(expected, rel=1e-3)
    for p, q in zip(models[source].parameters(), resumed.parameters(), strict=True):
        assert isinstance(q, tb.BlockedTensor) == (target == "blocked" and p.dim() == 4)
        assert_same(q.detach(), dense(p.detach()), rtol=1e-3, atol=1e-4)
    assert all(padding_is_zero(value) for value in second.state.values())


def test_copies_of_model_and_optimizer_train_alone():
    _, model = pair()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    other, others = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, 3)
    assert train(other, others, 3) == expected
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(dense(p.detach()), dense(q.detach())) and p.data_ptr() != q.data_ptr()


# ---- What is done around a step


def clipped(clip: Callable, **options) -> Callable:
    def step(model, x, target):
        loss = plain_step(model, x, target)
        clip(model.parameters(), 0.05, **options)
        return loss

    return step


def accumulated(model, x, target):
    parts = zip(x.split(4), target.split(4), strict=True)
    return sum(plain_step(model, *part) for part in parts)


def autocast(model, x, target):
    with torch.amp.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = F.cross_entropy(y.float(), target)
    loss.backward()
    return loss.detach()


def checkpointed(reentrant: bool) -> Callable:
    def step(model, x, target):
        y = checkpoint(model.body, x.requires_grad_(reentrant), use_reentrant=reentrant)
        loss = F.cross_entropy(model.head(y), target)
        loss.backward()
        return loss.detach()

    return step


def functional(model, x, target):
    """By torch.func.grad of functional_call; the buffers stay as they were."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters):
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return F.cross_entropy(functional_call(model, (parameters, buffers), (x,)), target)

    grads, loss = torch.func.grad_and_value(loss_of)(parameters)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    return loss


def penalized(model, x, target):
    """Gradient penalty: the gradient of a gradient."""
    x.requires_grad_()
    loss = F.cross_entropy(model(x), target)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + 10 * grad.square().sum((1, 2, 3)).mean()
    loss.backward()
    return loss.detach()


def evaluated(mode: Callable) -> Callable:
    """Evaluation between the steps."""

    def step(model, x, target):
        with mode():
            model.eval()(x)
            model.train()
        return plain_step(model, x, target)

    return step


def kept_gradients(model, x, target):
    """zero_grad(set_to_none=False): the gradients' memory is used again."""
    before = [p.grad for p in model.parameters()]
    for grad in before:
        if grad is not None:
            grad.zero_()
    model.zero_grad(set_to_none=False)
    loss = plain_step(model, x, target)
    assert all(old is None or p.grad is old for p, old in zip(model.parameters(), before, strict=True))
    return loss


class KeepingGradients(torch.optim.SGD):
    """Leaves zeroing to the step."""

    def zero_grad(self, set_to_none=True):
        pass


# name -> what computes and differentiates the loss, and how far parameters may be apart after three steps
STEPS = {
    "clip_grad_norm_": (clipped(nn.utils.clip_grad_norm_), 1e-4),
    "clip_grad_norm_ one by one": (clipped(nn.utils.clip_grad_norm_, foreach=False), 1e-4),
    "clip_grad_norm_ foreach": (clipped(nn.utils.clip_grad_norm_, foreach=True), 1e-4),
    "clip_grad_norm_ largest": (clipped(nn.utils.clip_grad_norm_, norm_type=float("inf")), 1e-4),
    "clip_grad_value_": (clipped(nn.utils.clip_grad_value_), 1e-4),
    "clip_grad_value_ foreach": (clipped(nn.utils.clip_grad_value_, foreach=True), 1e-4),
    "accumulated": (accumulated, 1e-4),
    "autocast": (autocast, 1e-2),
    "checkpoint": (checkpointed(False), 1e-4),
    "reentrant checkpoint": (checkpointed(True), 1e-4),
    "functional_call": (functional, 1e-4),
    "gradient penalty": (penalized, 1e-4),
    "no_grad": (evaluated(torch.no_grad), 1e-4),
    "inference_mode": (evaluated(torch.inference_mode), 1e-4),
    "zero_grad(set_to_none=False)": (kept_gradients, 1e-4),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    step, atol = STEPS[name]
    plain, blocked = pair()
    make = KeepingGradients if step is kept_gradients else torch.optim.SGD
    optimizers = [make(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, blocked)]
    expected = train(plain, optimizers[0], 3, step)
    assert train(blocked, optimizers[1], 3, step) == pytest.approx(expected, rel=10 * atol)
    assert_alike(plain, blocked, optimizers[1], rtol=0, atol=atol)
    for (key, p), q in zip(plain.named_parameters(), blocked.parameters(), strict=True):
        assert q.grad.dtype is p.grad.dtype and isinstance(q.grad, tb.BlockedTensor) == (p.dim() == 4), key
        assert_same(q.grad, p.grad, rtol=0, atol=100 * atol * max(0.01, float(p.grad.abs().max())))
    for p, q in zip(plain.buffers(), blocked.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=10 * atol)


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["mean", "ema"])
def test_averaged_model(options):
    averages = []
    for model in pair():
        average, optimizer = AveragedModel(model, **options), sgd(model)
        for _ in range(3):
            train(model, optimizer, 1)
            average.update_parameters(model)
        averages.append(average.module)
    assert_alike(*averages)


@pytest.mark.parametrize("axis", ["examples", "models"])
def test_vmap(axis):
    """Gradients of each example, answers of several models."""
    answers = []
    x, target = next(batches(1))
    for model in pair():
        state = {name: p.detach() for name, p in model.eval().named_parameters()}

        def loss_of(state, x, target, model=model):
            return F.cross_entropy(functional_call(model, state, (x,)), target)

        if axis == "examples":
            grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(state, x[:, None], target[:, None])
            answers.append([grads[name].to_dense() for name in ("conv1.weight", "conv3.weight", "head.2.bias")])
        else:
            several = {name: torch.stack([t, 2 * t]) for name, t in state.items()}
            answers.append(torch.func.vmap(loss_of, in_dims=(0, None, None))(several, x, target).to_dense())
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-3, atol=1e-4)
