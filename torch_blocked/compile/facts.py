"""What the backend made of each graph, for `torch_blocked.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_blocked.counting import Listener
from torch_blocked.dispatch.reasons import Reason, reason
from torch_blocked.memory_desc import Blocking


@dataclass
class Facts(Listener):
    """Of one graph; it listens while the graph is traced, for training together with that of its backward pass.

    Attributes:
        convolutions, fused: how many there are, and how many operators went into them.
        hoisted: values that are computed once, not per call.
        reorders: those of activations, "plain -> blocked" -> how many. Inductor fuses them into other kernels.
        fallbacks: operator -> why.
    """

    convolutions: int = 0
    fused: int = 0
    hoisted: int = 0
    reorders: Counter = field(default_factory=Counter)
    fallbacks: dict[str, Reason] = field(default_factory=dict)

    def reorder(
        self, src_blocking: Blocking, dst_blocking: Blocking, src: Tensor, dst: Tensor, seconds: float | None
    ) -> None:
        weights = 0 in (*src_blocking.axes, *dst_blocking.axes)
        if get_proxy_mode() is not None and not weights:  # the graph is traced more than once, and recorded once
            name = f"{'blocked' if src_blocking else 'plain'} -> {'blocked' if dst_blocking else 'plain'}"
            self._traced().reorders[name] += 1

    def fallback(self, func: OpOverload, args: tuple) -> None:
        self._traced().fallbacks.setdefault(str(func), reason(func, args))

    @cached_property
    def backward(self) -> Facts:
        """Those of the graph of the backward pass."""
        return Facts()

    def _traced(self) -> Facts:
        """The facts of the pass that is being traced: autograd itself runs the backward pass of a joint graph."""
        return self if torch._C._current_autograd_node() is None else self.backward

    def __str__(self) -> str:
        reorders = ", ".join(f"{n} {name}" for name, n in self.reorders.items()) or "none"
        fallbacks = ", ".join(self.fallbacks) or "none"
        return (
            f"{self.convolutions} convolutions, {self.fused} operators fused into them, {self.hoisted} values computed "
            f"once; reorders: {reorders}; fallbacks: {fallbacks}"
        )


# By the name that Inductor gives a graph, and PyTorch's profiler shows.
GRAPHS: dict[str, Facts] = {}


def keep(facts: Facts, compiled: Callable) -> Callable:
    """Remembers the facts of a graph that Inductor compiled; returns it."""
    if hasattr(compiled, "_fx_graph_cache_key"):
        if compiled._fx_graph_cache_key is None:  # its cache is off, or cannot take the graph
            compiled._fx_graph_cache_key = f"uncached_{len(GRAPHS)}"
        GRAPHS[compiled._fx_graph_cache_key] = facts
    return compiled
