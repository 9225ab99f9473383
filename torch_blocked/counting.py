"""Counts of what costs time without being asked for: reorders and fallbacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torch_blocked.memory_desc import Blocking


@dataclass
class Counters:
    """What ran since the counting began.

    Attributes:
        reorders: "source -> destination" -> how often; a plain side is called "plain".
        reorder_bytes: bytes read plus bytes written by them.
        left: blocked tensors that became plain, by a reorder or as a view of the same bytes.
        fallbacks: operator name -> how often it ran on plain tensors because it has no blocked implementation.
    """

    reorders: Counter = field(default_factory=Counter)
    reorder_bytes: int = 0
    left: int = 0
    fallbacks: Counter = field(default_factory=Counter)


_total = Counters()
_active: list[Counters] = [_total]


def counters() -> Counters:
    """The counts since the import of torch_blocked or the last `reset_counters`."""
    return _total


def reset_counters() -> None:
    """Sets all counts to zero."""
    _total.__init__()


@contextlib.contextmanager
def count() -> Iterator[Counters]:
    """Counts inside a ``with`` block: ``with torch_blocked.count() as c: model(x)``, then ``c.reorders``."""
    counts = Counters()
    _active.append(counts)
    try:
        yield counts
    finally:
        # By identity: counters that hold the same numbers are equal.
        _active[:] = [c for c in _active if c is not counts]


def record_reorder(src_blocking: Blocking, dst_blocking: Blocking, src: torch.Tensor, dst: torch.Tensor) -> None:
    """One reorder between physical tensors."""
    name = f"{_name(src_blocking)} -> {_name(dst_blocking)}"
    nbytes = (src.numel() + dst.numel()) * dst.element_size()
    if not isinstance(nbytes, int):
        return  # symbolic sizes: the graph is traced, nothing runs
    for counts in _active:
        counts.reorders[name] += 1
        counts.reorder_bytes += nbytes
        counts.left += bool(src_blocking) and not dst_blocking


def record_left() -> None:
    """One blocked tensor seen as a plain one on the same bytes."""
    for counts in _active:
        counts.left += 1


def record_fallback(name: str) -> None:
    """One operator that ran on plain tensors."""
    for counts in _active:
        counts.fallbacks[name] += 1


def _name(blocking: Blocking) -> str:
    return "".join(f"{size}{'abcdefghijkl'[axis]}" for axis, size in blocking) or "plain"
