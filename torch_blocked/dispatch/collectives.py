"""Collectives of `torch.distributed`. They take plain tensors, so that processes may hold different formats.

c10d's schemas do not say what they write to, and all of them may write later: a blocked tensor is written when they
have done so, before the call returns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.fallback import announce, run_plain
from torch_blocked.dispatch.registry import Handler, register_rule
from torch_blocked.tensor import BlockedTensor

RECEIVE = {"recv_", "recv_any_source_", "irecv"}


@register_rule
def handler_of(func: OpOverload) -> Handler | None:
    """Those that write: of c10d all that end in "_", of the functional ones those whose schemas say it."""
    if func.namespace in ("c10d", "_c10d_functional") and func._opname in RECEIVE:
        return receive
    if func.namespace == "c10d" and func._opname.endswith("_"):
        return collective
    if func.namespace != "_c10d_functional":
        return None
    if func._opname == "wait_tensor":
        return wait_tensor
    return functional if any(a.is_write for a in func._schema.arguments) else None


def collective(func: OpOverload, outputs: object, *args: object, **kwargs: object) -> object:
    """Writes to its first argument, a tensor or a list or lists of them; answers what to wait for, last or alone."""
    announce(func, (outputs, *args))
    return run_plain(func, (outputs, *args), kwargs, written=_tensors(outputs), wait=_wait)


def receive(func: OpOverload, *args: object, **kwargs: object) -> None:
    """Refused: what is to arrive must not be waited for here, and nothing tells when it has."""
    raise RuntimeError(
        f"{func} cannot write to a blocked tensor when the message arrives: receive into a plain one, y.copy_(it)"
    )


def functional(func: OpOverload, *args: object, **kwargs: object) -> object:
    """In place or with `out`."""
    announce(func, args)
    return run_plain(func, args, kwargs, wait=_wait_for_tensors)


def wait_tensor(func: OpOverload, x: BlockedTensor) -> BlockedTensor:
    """Nothing writes to a blocked tensor any more."""
    return x


def _wait(answer: object) -> None:
    (answer[-1] if isinstance(answer, tuple) else answer).wait()


def _wait_for_tensors(answers: object) -> None:
    for x in _tensors(answers):
        torch.ops._c10d_functional.wait_tensor(x)


def _tensors(x: object) -> list[Tensor]:
    return [t for part in x for t in _tensors(part)] if isinstance(x, (list, tuple)) else [x]
