"""Counts of what costs time without being asked for: reorders and fallbacks. They are logged here, too."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_blocked import _python, logs
from torch_blocked.formats import format_of
from torch_blocked.memory_desc import Blocking
from torch_blocked.physical import outer_order


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


_mode = torch._C._get_dispatch_mode
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY

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
    """Counts inside a ``with`` block: ``with torch_blocked.count() as c: model(x)``, then ``c.reorders``.

    Counted is what runs in eager mode: neither what a compiled graph does, of which `torch_blocked.explain` tells, nor
    what is traced, such as on fake tensors.
    """
    counts = Counters()
    _python.finish_deferred()  # what was called before is not counted, what is called inside is
    _active.append(counts)
    try:
        yield counts
    finally:
        _python.finish_deferred()
        # By identity: counters that hold the same numbers are equal.
        _active[:] = [c for c in _active if c is not counts]


class Listener:
    """What is told of every reorder and fallback of every thread while `listen` has it."""

    def reorder(
        self,
        src_blocking: Blocking,
        dst_blocking: Blocking,
        src: torch.Tensor,
        dst: torch.Tensor,
        seconds: float | None,
    ) -> None:
        """A reorder between physical tensors; where `dst` is `src` an operator did it within, its time not known."""

    def conversion(self, seconds: float) -> None:
        """A conversion that was asked for is done: its reorders, the Python around them, and what heard of them."""

    def fallback(self, func: torch._ops.OpOverload, args: tuple) -> None:
        """An operator is going to run on plain tensors."""


_listeners: list[Listener] = []


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Tells `listener` inside a ``with`` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_heard() -> bool:
    """Whether any listener is told."""
    return bool(_listeners)


def timed(convert: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """``convert(*args)``, a conversion that was asked for; tells the listeners how long it took."""
    start = perf_counter()
    result = convert(*args)
    seconds = perf_counter() - start
    for listener in _listeners:
        listener.conversion(seconds)
    return result


def record_reorder(
    src_blocking: Blocking,
    dst_blocking: Blocking,
    src: torch.Tensor,
    dst: torch.Tensor,
    seconds: float | None = None,
) -> None:
    """One reorder between physical tensors; where `dst` is `src` an operator did it within."""
    for listener in _listeners:
        listener.reorder(src_blocking, dst_blocking, src, dst, seconds)
    name = f"{_name(src_blocking)} -> {_name(dst_blocking)}"
    nbytes = (src.numel() + dst.numel()) * dst.element_size()
    if _is_traced() or not isinstance(nbytes, int) or isinstance(dst, FakeTensor) or dst.device.type == "meta":
        return  # nothing runs
    for counts in _active:
        counts.reorders[name] += 1
        counts.reorder_bytes += nbytes
        counts.left += bool(src_blocking) and not dst_blocking
    if logs.REORDERS.isEnabledFor(logging.DEBUG):
        after = "packed by the operator" if dst is src else f"{physical_tag(dst_blocking, dst)} {_shape(dst)}"
        what = f"{physical_tag(src_blocking, src)} {_shape(src)} -> {after}"
        logs.REORDERS.debug("%s, %d bytes, at %s", what, nbytes, logs.user_line())


def _is_traced() -> bool:
    """Whether operators are traced into a graph, or told their sizes alone: nothing runs."""
    return _mode(_FAKE) is not None or _mode(_PROXY) is not None


def record_left() -> None:
    """One blocked tensor seen as a plain one on the same bytes."""
    for counts in [] if _is_traced() else _active:
        counts.left += 1


def record_fallback(name: str) -> None:
    """One operator that ran on plain tensors."""
    for counts in [] if _is_traced() else _active:
        counts.fallbacks[name] += 1


def tell_fallback(func: torch._ops.OpOverload, args: tuple) -> None:
    """Tells the listeners, and the log, of an operator that is going to run on plain tensors."""
    for listener in _listeners:
        listener.fallback(func, args)
    if logs.FALLBACKS.isEnabledFor(logging.INFO):
        logs.FALLBACKS.info("%s(%s), at %s", func, ", ".join(map(_describe, args)), logs.user_line())


def format_tag(x: torch.Tensor) -> str:
    """The tag of a tensor's format, such as nChw16c or nhwc."""
    return physical_tag(getattr(x, "blocking", Blocking()), getattr(x, "_physical", x))


def physical_tag(blocking: Blocking, physical: torch.Tensor) -> str:
    """The same from the blocking and the physical tensor, which is the tensor itself where it is plain."""
    if physical.layout is not torch.strided:
        return str(physical.layout).removeprefix("torch.")
    ndim = physical.dim() - len(blocking)
    return format_of(outer_order(physical, ndim), blocking).tag if ndim else "scalar"


def _shape(x: torch.Tensor) -> str:
    return f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"


def _describe(argument: object) -> str:
    """An argument of an operator; of a tensor its format, size and bytes."""
    if isinstance(argument, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in argument):
        return f"[{', '.join(map(_describe, argument))}]"
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    return f"{format_tag(argument)} {_shape(argument)} {argument.numel() * argument.element_size()} bytes"


def _name(blocking: Blocking) -> str:
    return "".join(f"{size}{'abcdefghijkl'[axis]}" for axis, size in blocking) or "plain"
