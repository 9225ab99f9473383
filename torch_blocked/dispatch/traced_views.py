"""Views that had to be copies, under tracing: a compiled function sees the writes through them as an eager one does.

A `CopiedView` cannot be traced. Under functionalization, where torch.compile and torch.export look for writes, the copy
is an ordinary traced tensor instead, and before and after every operator on a blocked tensor the two are brought level:
what was written to the copy goes to the tensor, what was written to the tensor goes to the copy. Of these writes the
graph keeps what is used.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import _detect_infra_mode

from torch_blocked import reorder
from torch_blocked.dispatch import registry
from torch_blocked.dispatch.fallback import assign
from torch_blocked.equivalents import blocked_to_plain
from torch_blocked.tensor import BlockedTensor


def is_traced(x: BlockedTensor) -> bool:
    """Whether `x` is in a trace that looks for writes."""
    return type(x._physical) is FunctionalTensor


def view_of_copy(func: OpOverload, x: BlockedTensor, args: tuple, kwargs: dict) -> object:
    """The view `func` of a copy of the traced tensor `x`; the copy and `x` are one tensor to the rest of the trace."""
    mode = _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    if mode not in _copies:
        _copies[mode] = []
        level = functools.partial(_level, weakref.ref(mode), _copies[mode])
        registry.LEVEL.append(level)
        weakref.finalize(mode, registry.LEVEL.remove, level)  # the copies end with the trace
    copy = next((copy for copy in _copies[mode] if copy.is_of(x)), None)
    if copy is None:
        copy = _TracedCopy(x)
        _copies[mode].append(copy)
    return func(copy.whole, *args, **kwargs)


def lies_in_a_copy(x: Tensor) -> bool:
    """Whether a plain traced tensor is a view of such a copy."""
    if type(x) is not FunctionalTensor:
        return False
    mode = _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return any(_storage(copy.whole) == _storage(x) for copy in (_copies.get(mode, ()) if mode else ()))


def _storage(x: FunctionalTensor) -> int:
    return x.elem.untyped_storage()._cdata


def _level(mode: weakref.ref[FunctionalTensorMode], copies: list[_TracedCopy]) -> None:
    for copy in copies:
        copy.level(mode())


class _TracedCopy:
    """A row-major copy of a traced blocked tensor, and how often each had been written to when they were level."""

    def __init__(self, source: BlockedTensor) -> None:
        self.source = BlockedTensor(source._physical, source._blocking, source.shape)  # `source` may become another
        # The view's handler has made, and counted, the like: what it made is dropped from the graph.
        self.whole = blocked_to_plain(source._physical, source.shape, sum(source._blocking, ())).clone(
            memory_format=torch.contiguous_format
        )
        self.written = self._writes()

    def is_of(self, x: BlockedTensor) -> bool:
        """Whether `x` is the source: the same bytes, seen in the same way."""
        return self.source._physical is x._physical and (self.source._blocking, self.source.shape) == (
            x._blocking,
            x.shape,
        )

    def _writes(self) -> tuple[int, int]:
        return tuple(torch._functionalize_mutation_counter(t.elem) for t in (self.source._physical, self.whole))

    def level(self, mode: FunctionalTensorMode) -> None:
        """Copies the one that was written to since to the other."""
        of_source, of_whole = self._writes()
        if (of_source, of_whole) == self.written:
            return
        if of_source != self.written[0] and of_whole != self.written[1]:
            raise RuntimeError(
                "torch.compile: plain views of a blocked tensor and of a permutation or part of it were written to one "
                "after the other: write to views of the same tensor, or to its .to_dense()"
            )
        with mode, torch.no_grad():
            if of_whole != self.written[1]:
                assign(self.source, self.whole)
            else:
                self.whole.copy_(reorder.to_plain(self.source))
        self.written = self._writes()


_copies: weakref.WeakKeyDictionary[FunctionalTensorMode, list[_TracedCopy]] = weakref.WeakKeyDictionary()
