"""Runs of a model that leave it as it was, several of them, and medians."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
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
        with _mode_of(x):
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return copies[id(x)]


def _mode_of(x: Tensor) -> contextlib.AbstractContextManager:
    """What is made within is an inference tensor only where `x` is one, whatever the caller's mode: others run then."""
    return torch.inference_mode(x.is_inference())


@contextlib.contextmanager
def _unchanged(model: Callable) -> Iterator[None]:
    """Afterwards the random state is what it was, and the modules hold the buffers that they held, of the same values.

    The values are restored of strided buffers: sparse ones, of MKL-DNN, nested, meta, fake and not yet initialized ones
    stay as the model leaves them, and so do expanded ones, which nothing can write to.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    held = [(m._buffers, dict(m._buffers.items())) for m in modules]
    values = [_Value(b) for _, buffers in held for b in buffers.values() if _has_values(b)]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the model's own exception is the one to tell
                _restore(held, values)
            raise
        _restore(held, values)


def _has_values(buffer: Tensor | None) -> bool:
    """Whether it has bytes of its own, one place for each element."""
    if buffer is None or is_lazy(buffer) or isinstance(buffer, FakeTensor) or buffer.is_nested:
        return False
    physical = getattr(buffer, "_physical", buffer)
    if physical.layout is not torch.strided or physical.device.type == "meta":
        return False
    return all(stride or n <= 1 for n, stride in zip(physical.shape, physical.stride(), strict=True))


class _Value:
    """The value of a buffer, and where it lies."""

    def __init__(self, buffer: Tensor) -> None:
        with _mode_of(buffer):
            self.buffer, self._same, self._copy = buffer, buffer.detach(), buffer.detach().clone()
        self._storage = getattr(buffer, "_physical", buffer).untyped_storage()
        self._nbytes = self._storage.nbytes()

    def restore(self) -> None:
        """Where the model has changed it: in place, after a change of size, too."""
        with _mode_of(self.buffer), torch.no_grad():
            if self._storage.nbytes() < self._nbytes:
                self._storage.resize_(self._nbytes)
            if _place(self.buffer) != _place(self._same):
                self.buffer.data = self._same
            if not torch.equal(self.buffer, self._copy):
                self.buffer.copy_(self._copy)


def _place(x: Tensor) -> tuple:
    physical = getattr(x, "_physical", x)
    return x.dtype, x.shape, physical.stride(), physical.data_ptr()


def _restore(held: list[tuple[MutableMapping, dict]], values: list[_Value]) -> None:
    for buffers, before in held:
        if list(buffers.keys()) != list(before):  # not so in TorchScript, whose modules keep their names
            buffers.clear()
            buffers.update(before)
        for name in [n for n, b in before.items() if buffers[n] is not b]:
            buffers[name] = before[name]
    for value in values:
        value.restore()


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
