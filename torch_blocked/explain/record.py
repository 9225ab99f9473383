"""What ran: every call of an operator while `Recorder` is on, above the blocked tensors' own dispatch."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_blocked import counting, library
from torch_blocked.dispatch.reasons import Reason, blocked, reason, tensors
from torch_blocked.explain.algorithms import chosen
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor


class Operand(NamedTuple):
    """A tensor that an operator got or gave; `padding` is how many times as large its blocks make it, at least 1."""

    size: tuple[int, ...]
    dtype: str
    format: str
    is_blocked: bool = False
    padding: float = 1.0
    block: int = 1  # of axis 1


@dataclass
class Reorder:
    """A reorder, or the packing of weights, within a call.

    Attributes:
        src, dst: tags of the formats.
        nbytes: read plus written.
        seconds: None where the operator packs its weights itself: part of its own time.
        origin: the position of the call that had made the tensor plain which becomes blocked here.
        source: what else the plain tensor is: the name of a parameter or buffer, "" for others.
    """

    src: str
    dst: str
    nbytes: int
    seconds: float | None
    origin: int | None = None
    source: str = ""


@dataclass
class Call:
    """One call of one operator.

    Attributes:
        module: the path of the innermost module that ran, such as layer1.0.conv1; "" for the model itself.
        operator: its name, "reorder" for what `.to`, `.to_dense` and `.contiguous` do.
        inputs, outputs: its tensors.
        algorithm, why: of a convolution, as `torch_blocked.algorithm` says.
        fallback: why it ran on plain tensors; None where it did not fall back.
        seconds: what it took, reorders in it included; of a "reorder" the Python around the move, too.
        convolutions: how many it does, where it is one or several in a chain.
    """

    module: str
    operator: str
    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    algorithm: str = ""
    why: str = ""
    fallback: Reason | None = None
    reorders: list[Reorder] = field(default_factory=list)
    seconds: float = 0.0
    convolutions: int = 0

    def __post_init__(self) -> None:
        self.convolutions = self.convolutions or int(self.is_convolution)

    @property
    def is_blocked(self) -> bool:
        """Whether a blocked tensor is among its inputs or outputs."""
        return any(x.is_blocked for x in (*self.inputs, *self.outputs))

    @property
    def is_convolution(self) -> bool:
        return "conv" in self.operator and "convert" not in self.operator

    @property
    def is_gradient(self) -> bool:
        """Whether it is a part of the backward pass by its name."""
        return "backward" in self.operator or "gradient" in self.operator


def operand(x: Tensor) -> Operand:
    """What a report says of a tensor."""
    size, fmt = tuple(x.shape), counting.format_tag(x)
    dtype = str(x.dtype).removeprefix("torch.")
    if not isinstance(x, BlockedTensor):
        return Operand(size, dtype, fmt)
    padding = x._physical.numel() / x.numel() if x.numel() else 1.0
    return Operand(size, dtype, fmt, True, padding, x.blocking.block(1))


def reorder_of(
    src_blocking: Blocking, dst_blocking: Blocking, src: Tensor, dst: Tensor, seconds: float | None
) -> Reorder:
    """What a report says of a reorder that a listener is told of."""
    src_tag, dst_tag = (counting.physical_tag(*pair) for pair in ((src_blocking, src), (dst_blocking, dst)))
    nbytes = (src.numel() + dst.numel()) * dst.element_size()
    if dst is src:  # weights, which the operator packs
        return Reorder(src_tag, "packed", nbytes, None)
    return Reorder(src_tag, dst_tag, nbytes, seconds)


def address(x: Tensor) -> int:
    """Where the bytes of a tensor lie, 0 where it has none of its own: the same for its views."""
    physical = getattr(x, "_physical", x)
    return physical.untyped_storage().data_ptr() if physical.layout is torch.strided else 0


class Memory:
    """The largest sum of bytes that tensors made since held at one time."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}  # what was there before
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @staticmethod
    def _ref(x: Tensor) -> StorageWeakRef | None:
        physical = getattr(x, "_physical", x)
        return StorageWeakRef(physical.untyped_storage()) if physical.layout is torch.strided else None

    def add(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """Looks which of all tensors so far are still alive, those `made` of those `given` among them."""
        for ref in filter(None, map(self._ref, given)):
            if ref.cdata not in self._live:
                self._known.setdefault(ref.cdata, ref)
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        for x in made:
            ref = self._ref(x)
            if ref is not None and ref.cdata not in self._known:
                self._live[ref.cdata] = ref, getattr(x, "_physical", x).untyped_storage().nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))


class ModulePath:
    """While on: which module of `model` runs, by hooks for all modules, which the model's own do not show."""

    def __init__(self, model: object) -> None:
        self._names = {id(m): name for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
        self._stack, self._thread = [""], threading.get_ident()

    @property
    def now(self) -> str:
        return self._stack[-1]

    def __enter__(self) -> ModulePath:
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        self._handles = before, hooks.register_module_forward_hook(self._leave, always_call=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self._names.get(id(module), f"{self.now}({type(module).__name__})"))

    def _leave(self, module: nn.Module, inputs: tuple, output: object) -> None:
        if threading.get_ident() == self._thread and len(self._stack) > 1:
            self._stack.pop()


class Recorder(TorchDispatchMode, counting.Listener):
    """Records `calls` while on, of this thread; `named` has the names of tensors that were there before.

    With `details` it asks for the algorithms of convolutions and follows the memory, which takes time between calls.
    """

    def __init__(self, path: ModulePath, named: dict[str, Tensor], details: bool) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.memory = Memory()
        self._path, self._details, self._thread = path, details, threading.get_ident()
        self._sources = {address(x): name for name, x in named.items()}
        self._origins: dict[int, int] = {}  # address of a tensor that was blocked once -> the call that made it plain
        self._running: Call | None = None
        self._muted = False
        self._told = 0.0  # of the running conversion: the seconds of its reorders, and of what is done here with them

    def __enter__(self) -> Recorder:
        self._listening = counting.listen(self)
        self._listening.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._listening.__exit__(*exception)

    def __torch_dispatch__(
        self, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is library.reorder_op:  # of `x.to(fmt)`; `reorder` below hears of it
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        call = Call(self._path.now, func._opname, list(map(operand, given)))
        self.calls.append(call)
        self._running = call
        start = perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            call.seconds = perf_counter() - start
            self._running = None
        made = tensors(result)
        call.outputs = list(map(operand, made))
        self._follow(given, made)
        if self._details:
            self.memory.add(given, made)
            self._muted = True  # asking may reorder the input
            call.algorithm, call.why = chosen(func, args, kwargs)
            self._muted = False
        return result

    def _follow(self, given: list[Tensor], made: list[Tensor]) -> None:
        """Remembers of plain tensors that come of blocked ones which call made them plain."""
        origin = next((self._origins[address(x)] for x in given if address(x) in self._origins), None)
        if blocked(given):
            origin = len(self.calls) - 1
        before = {0, *map(address, given)}
        for x in made:
            if isinstance(x, BlockedTensor) or origin is None:
                self._origins.pop(address(x), None)
            elif address(x) not in before:
                self._origins[address(x)] = origin

    def reorder(
        self, src_blocking: Blocking, dst_blocking: Blocking, src: Tensor, dst: Tensor, seconds: float | None
    ) -> None:
        if self._muted or threading.get_ident() != self._thread:
            return
        heard = perf_counter()
        found = reorder_of(src_blocking, dst_blocking, src, dst, seconds)
        if not src_blocking:
            found.origin, found.source = self._origins.get(address(src)), self._sources.get(address(src), "")
        if self._details and dst is not src:
            self.memory.add([src], [dst])
        if self._running is None:
            self._explicit(found, src_blocking, dst_blocking, src, dst)
            self._told += found.seconds + perf_counter() - heard
        else:
            self._running.reorders.append(found)

    def conversion(self, seconds: float) -> None:
        """Gives the call of a reorder the Python around it, too."""
        if self._told and threading.get_ident() == self._thread:
            self.calls[-1].seconds += seconds - self._told
            self._told = 0.0

    def _explicit(
        self, found: Reorder, src_blocking: Blocking, dst_blocking: Blocking, src: Tensor, dst: Tensor
    ) -> None:
        """A reorder that no operator did: a call of its own."""
        pairs = (src, src_blocking), (dst, dst_blocking)
        # Of a plain tensor its size; of two blocked ones the size with the padding, which is all that they show.
        size = next((x.shape for x, b in pairs if not b), None) or [
            n * src_blocking.block(d) for d, n in enumerate(src.shape[: src.dim() - len(src_blocking)])
        ]
        dtype = str(dst.dtype).removeprefix("torch.")
        operands = [
            Operand(tuple(size), dtype, tag, bool(b)) for (_, b), tag in zip(pairs, (found.src, found.dst), strict=True)
        ]
        self.calls.append(
            Call(self._path.now, "reorder", operands[:1], operands[1:], reorders=[found], seconds=found.seconds)
        )
        if src_blocking and not dst_blocking:
            self._origins[address(dst)] = len(self.calls) - 1

    def fallback(self, func: OpOverload, args: tuple) -> None:
        if self._running is not None and threading.get_ident() == self._thread and self._running.fallback is None:
            self._running.fallback = reason(func, args)
