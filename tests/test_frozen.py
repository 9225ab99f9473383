"""Inductor's freezing: the weights of a model that does not change any more are constants of its graph."""

import copy

import pytest
import torch
from backend_cases import assert_close, block, both, compiled, conv, fresh  # noqa: F401
from conftest import dense
from torch import nn
from torch._inductor import config as inductor_config

import torch_blocked as tb
from torch_blocked import _python, library

modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@pytest.fixture(autouse=True)
def freezing():
    with inductor_config.patch(freezing=True):
        yield


@both
@modes
def test_answers(mode, blocked, graphs):
    """The plain model's, and no weight is packed after the first call, for Winograd's algorithm neither."""
    head = nn.Sequential(conv(17, 64), conv(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))
    model = nn.Sequential(block(), head).eval()
    frozen = compiled(copy.deepcopy(model).to(tb.blocked) if blocked else copy.deepcopy(model))
    with mode(), tb.winograd("f4"):
        frozen(torch.randn(2, 3, 14, 13))
        packed = _python.weight_reorders()
        for _ in range(2):
            x = torch.randn(2, 3, 14, 13)
            assert_close(frozen(x), model(x))
        assert _python.weight_reorders() == packed


@modes
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_few_images(mode, bias, graphs):
    """Freezing has packed its weight for MKL, which is slower for few images."""
    model = nn.Sequential(conv(3, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5, bias=bias)).eval()
    x = torch.randn(2, 3, 8, 8)
    with mode():
        assert_close(compiled(model)(x), model(x))
    assert graphs.count(library.linear_op) == 1


def test_models_of_one_class(graphs):
    models = [nn.Sequential(conv(3, 17), conv(17, 5)) for _ in range(3)]
    frozen, x = [compiled(model) for model in models], torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for _ in range(2):
            for function, model in zip(frozen, models, strict=True):
                assert_close(function(x), model(x))


def test_other_sizes(graphs):
    model = nn.Sequential(block(), conv(17, 8)).eval()
    frozen = torch.compile(model, backend="torch_blocked", dynamic=True)
    with torch.no_grad():
        for n, h, w in ((2, 14, 13), (3, 9, 20), (1, 7, 7)):
            x = torch.randn(n, 3, h, w)
            assert_close(frozen(x), model(x))


def test_training_is_not_frozen(graphs):
    model = nn.Sequential(conv(3, 17), nn.ReLU(), conv(17, 4))
    frozen, x = compiled(model), torch.randn(2, 3, 8, 8)
    before = dense(frozen(x)).detach()
    frozen(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert (dense(frozen(x)) - before).abs().max() > 1e-3


def test_explained():
    """Inductor keeps no such graph in its cache where it packs a weight; explain knows it all the same."""
    model = nn.Sequential(block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(17, 5)).eval()
    with torch.no_grad():
        report = tb.explain(compiled(model), torch.randn(2, 3, 14, 13))
    (line,) = report.run.graphs
    assert "2 convolutions, 5 operators fused into them" in line
