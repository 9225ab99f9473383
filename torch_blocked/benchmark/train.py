"""`bench train`: a training step on a blocked model against the same model in NCHW and channels_last.

A step is forward and cross-entropy, backward, and SGD with momentum, in float32 on random images; all models start
from the same weights. The blocked model gets plain images, as a data loader gives them. With `--autocast` forward is
under `torch.amp.autocast("cpu", torch.bfloat16)`, and the blocked model in float32 is one more peer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.benchmark.measure import in_turn
from torch_blocked.benchmark.models import build, factory
from torch_blocked.benchmark.networks import MODELS
from torch_blocked.benchmark.report import (
    Column,
    Row,
    UsageError,
    add_options,
    first_line,
    positive,
    ratios,
    run_cases,
)

PHASES = ("forward", "backward", "update")

COLUMNS = (
    Column("name", "model", -24),
    Column("n", "N", 4),
    Column("ms", "step, ms", 9, ".1f"),
    *(Column(f"{phase}_ms", phase, 9, ".1f") for phase in PHASES),
    Column("vs_nchw", "/nchw", 8, ".2f"),
    Column("vs_channels_last", "/ch_last", 8, ".2f"),
    Column("vs_float32", "/float32", 8, ".2f"),
)

Times = tuple[float, ...]  # seconds of each of PHASES


class Case(NamedTuple):
    """A model, made by `make`, and a batch of n square images of `image` pixels a side; `autocast`: in bfloat16."""

    name: str
    make: Callable[[], nn.Module]
    n: int
    image: int
    autocast: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench train`."""
    known = ", ".join(MODELS)
    help_of_model = f"{known}, or package.module:factory, which gives a torch.nn.Module (default resnet18)"
    parser.add_argument("--model", nargs="+", default=["resnet18"], metavar="NAME", help=help_of_model)
    parser.add_argument("--batch", type=positive, default=16, metavar="N", help="batch size (default 16)")
    parser.add_argument("--image", type=positive, default=224, metavar="PIXELS", help="height and width (default 224)")
    parser.add_argument("--autocast", action="store_true", help="in bfloat16, against blocked float32 too")
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Measures each model; a ratio is the peer's median step over ours: above 1, blocked is faster."""
    cases = [Case(name, factory(name), args.batch, args.image, args.autocast) for name in args.model]
    run_cases(cases, measure, COLUMNS, args)


def measure(case: Case, rounds: int) -> Row:
    """The row of one case: medians of the step and of its phases; `fallbacks` of one blocked step."""
    steps = contestants(case)
    for step in steps.values():
        step()  # what only the first one does: memory allocated, momentum made
    with tb.count() as counts:
        steps["blocked"]()
    times = medians(steps, rounds)
    row: Row = {"name": case.name, "n": case.n, "image": case.image, "autocast": case.autocast}
    row["fallbacks"] = dict(counts.fallbacks)
    if counts.fallbacks:
        row["note"] = "fallback: " + ", ".join(sorted(counts.fallbacks))
    row["ms"] = 1e3 * times["blocked"]["step"]
    row |= {f"{phase}_ms": 1e3 * times["blocked"][phase] for phase in PHASES}
    row["peers"] = {name: {key: 1e3 * value for key, value in t.items()} for name, t in times.items()}
    return row | ratios({name: t["step"] for name, t in times.items()})


def contestants(case: Case) -> dict[str, Callable[[], Times]]:
    """A training step in each format, which gives the seconds of its phases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _made(case)
        images, target = torch.randn(case.n, 3, case.image, case.image), _target(model, case)
    nhwc, how = torch.channels_last, case.autocast
    steps = {
        "blocked": training_step(copy.deepcopy(model).to(tb.blocked), images, target, how),
        "nchw": training_step(copy.deepcopy(model), images, target, how),
        "channels_last": training_step(
            copy.deepcopy(model).to(memory_format=nhwc), images.contiguous(memory_format=nhwc), target, how
        ),
    }
    if case.autocast:
        steps["float32"] = training_step(copy.deepcopy(model).to(tb.blocked), images, target)
    return steps


def _made(case: Case) -> nn.Module:
    model = build(case.name, case.make)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{case.name} makes no torch.nn.Module with parameters to train")
    return model


def _target(model: nn.Module, case: Case) -> Tensor:
    """Random classes, (n, ...) for logits of (n, classes, ...). UsageError where the model does not take the images."""
    try:
        with torch.no_grad():  # of a copy: running statistics move
            size = copy.deepcopy(model)(torch.randn(2, 3, case.image, case.image)).shape
        return torch.randint(0, size[1], (case.n, *size[2:]))
    except Exception as error:  # of the user's own model
        sizes = f"3x{case.image}x{case.image}"
        raise UsageError(f"{case.name} does not make logits of {sizes} images: {first_line(error)}") from error


def training_step(model: nn.Module, images: Tensor, target: Tensor, autocast: bool = False) -> Callable[[], Times]:
    """Trains `model`, under `autocast` in bfloat16; a call is one step and gives the seconds of `PHASES`."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def step() -> Times:
        optimizer.zero_grad()
        start = perf_counter()
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(images), target)
        forward = perf_counter()
        loss.backward()
        backward = perf_counter()
        optimizer.step()
        return forward - start, backward - forward, perf_counter() - backward

    return step


def medians(steps: dict[str, Callable[[], Times]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the step and of each phase, medians of `rounds` interleaved steps."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    for name in in_turn(steps, rounds):
        times[name].append(steps[name]())
    return {
        name: {
            "step": statistics.median(map(sum, taken)),
            **dict(zip(PHASES, map(statistics.median, zip(*taken, strict=True)), strict=True)),
        }
        for name, taken in times.items()
    }
