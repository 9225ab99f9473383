"""Runs of a model that leave it as it was, several of them, and medians."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torch_blocked.explain.record import Call

PASSES = 25  # at most
SECONDS = 2.0  # no pass is begun after them


class Runner:
    """Runs ``model(*inputs, **kwargs)`` on copies of the inputs; buffers and the random state are restored."""

    def __init__(self, model: Callable, inputs: tuple, kwargs: dict) -> None:
        self.model, self._inputs, self._kwargs = model, inputs, kwargs

    def run(self, record: contextlib.AbstractContextManager | None = None) -> float:
        """Seconds of one run, within `record`."""
        inputs, kwargs = tree_map_only(Tensor, partial(_copied, {}), (self._inputs, self._kwargs))
        with _unchanged(self.model), record or contextlib.nullcontext():
            start = perf_counter()
            self.model(*inputs, **kwargs)
            return perf_counter() - start

    def passes(self, record: Callable[[], object], plain: bool = True) -> tuple[float, list]:
        """The median of the seconds of several runs, and what `record` answers after each: both see the same machine.

        Not `plain`: of nothing but `record`.
        """
        seconds, passes, end = [], [], perf_counter() + SECONDS
        while not passes or (len(passes) < PASSES and perf_counter() < end):
            seconds.append(self.run() if plain else 0.0)
            passes.append(record())
        return statistics.median(seconds), passes


def _copied(copies: dict[int, Tensor], x: Tensor) -> Tensor:
    """A copy of `x`; the same one where it is given again."""
    if id(x) not in copies:
        copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return copies[id(x)]


@contextlib.contextmanager
def _unchanged(model: Callable) -> Iterator[None]:
    """Afterwards buffers and the random state are what they were."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    buffers = [(m, dict(m._buffers)) for m in modules]
    values = [(b, b.detach().clone()) for _, held in buffers for b in held.values() if b is not None]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, held in buffers:
                module._buffers.clear()
                module._buffers.update(held)
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                        buffer.copy_(value)


def merged(passes: list[list[Call]]) -> list[Call]:
    """The calls of the first pass with the median times of the others, of those that made the same calls."""
    first, *others = passes
    same = [p for p in others if list(map(_what, p)) == list(map(_what, first))]
    for i, call in enumerate(first if same else []):
        call.seconds = statistics.median(p[i].seconds for p in same)
        for j, reorder in enumerate(call.reorders):
            if reorder.seconds is not None:
                reorder.seconds = statistics.median(p[i].reorders[j].seconds for p in same)
    return first


def _what(call: Call) -> tuple:
    """What a call did, but for the times."""
    return call.module, call.operator, [(r.src, r.dst) for r in call.reorders]
