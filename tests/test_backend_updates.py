"""The backend of torch.compile: what it computes of parameters once, it computes anew after they change."""

import copy

import pytest
import torch
from backend_cases import Lambda, assert_close, block, both, compiled, conv, fresh  # noqa: F401
from conftest import dense
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.compile import hoist


def optimizer_step(model, optimizer=torch.optim.AdamW, **options):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer(model.parameters(), lr=0.5, **options).step()


def replace_data_twice(model):
    """The second may lie where the first parameter lay."""
    weight = model.layers.b.weight
    for factor in (2, 3):
        weight.data = weight.data * factor


UPDATES = {
    "load_state_dict": lambda model: model.load_state_dict(block().state_dict()),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(
        {k: v * 2 for k, v in model.state_dict().items()}, assign=True
    ),
    "in place": lambda model: model.layers.b.weight.mul_(2),
    "part of it, in place": lambda model: model.layers.b.weight[3].mul_(2),
    "through detach": lambda model: model.layers.b.weight.detach().mul_(2),
    "a bias": lambda model: model.layers.b.bias.add_(5),
    "statistics": lambda model: model.layers.m.running_var.mul_(9),
    "statistics, in training mode": lambda model: (model.train()(torch.randn(4, 3, 6, 5)), model.eval()),
    "optimizer": optimizer_step,
    "fused SGD": lambda model: optimizer_step(model, torch.optim.SGD, fused=True),
    "fused Adam": lambda model: optimizer_step(model, torch.optim.Adam, fused=True),
    "fused AdamW": lambda model: optimizer_step(model, fused=True),
    "fused Adagrad": lambda model: optimizer_step(model, torch.optim.Adagrad, fused=True),
    "data": lambda model: setattr(model.layers.b.weight, "data", model.layers.b.weight.data * 2),
    "data, twice": replace_data_twice,
    "parameter": lambda model: setattr(model.layers.b, "weight", nn.Parameter(model.layers.b.weight * 2)),
}


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_seen(name, mode, blocked, graphs):
    model, x = block(), torch.randn(2, 3, 6, 5)
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    with mode():
        before = dense(function(x)).clone()
    for _ in range(2):
        with torch.no_grad():
            UPDATES[name](model)
        with mode():
            assert_close(function(x), dense(model(x)))
            assert not torch.equal(dense(function(x)), before)


@both
@torch.inference_mode()
def test_writes_in_inference_mode_are_seen(blocked, graphs):
    with torch.inference_mode(False):
        model, x = block(), torch.randn(2, 3, 6, 5)
        model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    for _ in range(3):
        assert_close(function(x), dense(model(x)))
        model.layers.b.weight.mul_(2)


@pytest.fixture
def prologues(monkeypatch):
    """One entry for each time that weights were packed."""
    runs, init = [], hoist.Hoisted.__init__

    def recording(self, prologue, *args):
        init(self, lambda *inputs: runs.append(1) or prologue(*inputs), *args)

    monkeypatch.setattr(hoist.Hoisted, "__init__", recording)
    return runs


@both
@torch.no_grad()
def test_packed_once(blocked, graphs, prologues):
    """And not again while nothing changes."""
    model, x = block(), torch.randn(2, 3, 6, 5)
    function = compiled(model.to(tb.blocked) if blocked else model)
    for calls in (1, 1, 2, 2):
        if calls > len(prologues) > 0:
            model.layers.m.running_var.mul_(2)
        function(x)
        assert len(prologues) == calls


@both
@torch.no_grad()
def test_models_that_share_code_are_packed_once_each(blocked, graphs, prologues):
    """Dynamo compiles a class once for all its models: they take turns."""
    models, x = [block() for _ in range(3)], torch.randn(2, 3, 6, 5)
    models = [model.to(tb.blocked) if blocked else model for model in models]
    functions = [compiled(model) for model in models]
    for _ in range(3):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), dense(model(x)))
    assert len(graphs) == 1 and len(prologues) == 3
    models[1].layers.m.running_var.mul_(2)
    for _ in range(2):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), dense(model(x)))
    assert len(prologues) == 4


@torch.no_grad()
def test_values_of_a_model_that_is_gone_are_freed(graphs, monkeypatch):
    made, init = [], hoist.Hoisted.__init__
    monkeypatch.setattr(hoist.Hoisted, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    x = torch.randn(2, 3, 6, 5)
    for _ in range(4):
        model = block()
        assert_close(compiled(model)(x), model(x))
    assert len(made) == 1 and len(made[0]._values) <= 2


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_of_winograd_are_kept(mode, blocked, graphs):
    model, x = conv(32, 32), torch.randn(1, 32, 12, 12)
    function = compiled(model.to(tb.blocked) if blocked else model)
    tb.empty_cache()
    with tb.winograd("always"), mode():
        for _ in range(2):
            function(x)
        assert library.ops.packed_weights_bytes() > 0


@torch.no_grad()
def test_a_returned_value_of_parameters_alone(graphs):
    """Is the caller's to write to."""
    model = Lambda(lambda m, x: (m.a(x), m.a.weight * 2, (m.a.weight + 1).flatten()), a=conv(3, 17))
    function, x = compiled(model), torch.randn(2, 3, 6, 5)
    for _ in range(2):
        for actual, expected in zip(function(x), model(x), strict=True):
            assert_close(actual, expected)
            actual.zero_()


def test_statistics_in_training_without_gradients(graphs):
    model, x = block().train(), torch.randn(2, 3, 6, 5)
    other, function = copy.deepcopy(model), compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert_close(function(x), other(x))
    for actual, expected in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_inference_tensors(graphs):
    with torch.inference_mode():
        model, x = block(), torch.randn(2, 3, 6, 5)
        function = compiled(model)
        for _ in range(2):
            assert_close(function(x), model(x))
            model.layers.b.weight.mul_(2)
