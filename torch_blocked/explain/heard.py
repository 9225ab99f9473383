"""What ran in eager mode beside compiled graphs: its fallbacks and reorders, as marks in a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator

from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from torch_blocked import counting
from torch_blocked.dispatch.reasons import Reason, reason, tensors
from torch_blocked.explain.record import Call, Operand, Reorder, operand, reorder_of
from torch_blocked.memory_desc import Blocking

FALLBACK, REORDER = "torch_blocked.fallback ", "torch_blocked.reorder "  # what a mark is of; the rest of it is JSON


class Marks(counting.Listener):
    """Leaves a mark in the profile for each fallback and reorder, so that it lies within the operator that it is of."""

    def fallback(self, func: OpOverload, args: tuple) -> None:
        _mark(FALLBACK, [reason(func, args), *map(operand, tensors(args))])

    def reorder(
        self, src_blocking: Blocking, dst_blocking: Blocking, src: Tensor, dst: Tensor, seconds: float | None
    ) -> None:
        found = reorder_of(src_blocking, dst_blocking, src, dst, seconds)
        _mark(REORDER, [found.src, found.dst, found.nbytes, found.seconds])


def _mark(kind: str, what: object) -> None:
    with record_function(kind + json.dumps(what)):
        pass


def apply(call: Call, below: list[FunctionEvent]) -> None:
    """Gives a call what was heard within its event."""
    call.reorders += [Reorder(*told) for told in _told(below, REORDER)]
    for why, *operands in _told(below, FALLBACK):
        call.fallback, call.inputs = Reason(*why), [Operand(tuple(size), *rest) for size, *rest in operands]
        return  # what it runs on plain tensors may fall back, too


def _told(events: list[FunctionEvent], kind: str) -> Iterator[list]:
    return (json.loads(event.name.removeprefix(kind)) for event in events if event.name.startswith(kind))
