"""The models that benchmarks run: the networks of `MODELS` with seeded weights, and what a user names."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_blocked.benchmark.networks import MODELS
from torch_blocked.benchmark.report import UsageError, first_line


def make_model(name: str, seed: int = 0) -> nn.Module:
    """The model `name` of `MODELS` in training mode, weights drawn from `seed`. KeyError for another name.

    Convolutions are drawn by He's rule, as torchvision's are; the global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


@torch.no_grad()
def settle(model: nn.Module, images: Tensor) -> None:
    """Makes the statistics of batch normalization those of `images`, as training would.

    With the initial ones activations fade away from layer to layer, and all answers are the last layer's bias.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta, training = [norm.momentum for norm in norms], model.training
    for norm in norms:
        norm.momentum = 1
    model.train()(images)
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def factory(name: str) -> Callable[[], nn.Module]:
    """What makes the model: by a name of `MODELS`, or by ``package.module:factory``. UsageError for what is neither."""
    if name in MODELS:
        return lambda: make_model(name)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"unknown model {name!r}: one of {', '.join(MODELS)}, or package.module:factory")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # TypeError: a relative module
        raise UsageError(f"{name}: {error}") from None
    if not callable(found):
        raise UsageError(f"{name} is no function that makes a model")
    return found


def build(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` makes. UsageError, which calls it `name`, where that is none."""
    try:
        model = make()
    except Exception as error:  # of the user's own function
        raise UsageError(f"{name}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} makes {type(model).__name__}, no torch.nn.Module")
    return model
