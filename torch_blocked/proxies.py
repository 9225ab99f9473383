"""Blocked tensors under `make_fx` and what is made of it, such as `torch.func.linearize`: none becomes a constant.

`make_fx` knows by a proxy which node of its graph a tensor comes from. Operators make proxies of their answers; between
a blocked tensor and its physical one no operator stands, so that here a node takes each from the other. Under
torch.compile and torch.export there is nothing to do: the physical tensors there have no proxies of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_blocked.memory_desc import Blocking

if TYPE_CHECKING:
    from torch_blocked.tensor import BlockedTensor

is_any_mode_on = torch._C._len_torch_dispatch_stack  # of a few nanoseconds: asked for every operator
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def follow_physical(tree: object) -> None:
    """Gives the physical tensors of the blocked ones in `tree` that have a proxy one of their own."""
    mode = torch._C._get_dispatch_mode(_PROXY)
    if mode is None:
        return
    for x in tree_leaves(tree):
        if hasattr(x, "_physical"):
            _follow(mode.tracer, x, x._physical, physical_of, ())


def follow_blocked(x: BlockedTensor) -> None:
    """Gives a blocked tensor a proxy where its physical one has one."""
    mode = torch._C._get_dispatch_mode(_PROXY)
    if mode is not None:
        _follow(mode.tracer, x._physical, x, blocked_of, (tuple(x._blocking), *x.shape))


def _follow(tracer: torch.fx.Tracer, source: Tensor, target: Tensor, function: Callable, others: tuple) -> None:
    from torch.fx.experimental import proxy_tensor  # a mode is on: it is imported

    if not proxy_tensor.has_proxy_slot(source, tracer) or proxy_tensor.has_proxy_slot(target, tracer):
        return
    symbols = proxy_tensor.fetch_sym_proxy(tracer)
    others = tuple(symbols(other) if isinstance(other, torch.SymInt) else other for other in others)
    source = proxy_tensor.get_proxy_slot(source, tracer).proxy
    with proxy_tensor.disable_proxy_modes_tracing():
        proxy = tracer.create_proxy("call_function", function, (source, *others), {})
        proxy_tensor.track_tensor_tree(target, proxy, constant=None, tracer=tracer)


# ---- What the nodes call


def physical_of(x: BlockedTensor) -> Tensor:
    """`x.physical`, of a graph."""
    return x._physical


def blocked_of(physical: Tensor, blocks: tuple[tuple[int, int], ...], *size: int) -> BlockedTensor:
    """The blocked tensor of these bytes, of a graph."""
    from torch_blocked.tensor import BlockedTensor

    return BlockedTensor(physical, Blocking(blocks), torch.Size(size))
