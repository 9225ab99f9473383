"""Reductions over axes that are not blocked: the same reduction of the physical tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim

from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import clear_padding, shifted
from torch_blocked.dispatch.pooling import global_average, has_kernel
from torch_blocked.dispatch.registry import register
from torch_blocked.dispatch.shape import as_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _reduce_physical(func: OpOverload, physical: Tensor, dims: list[int], keepdim: bool, kwargs: dict) -> Tensor:
    """Neighbouring axes as one, where they lie so: ATen's loops over one axis are several times faster."""
    first, last = dims[0], dims[-1]
    neighbours = len(dims) == last - first + 1 > 1
    if not neighbours or any(physical.stride(d) != physical.size(d + 1) * physical.stride(d + 1) for d in dims[:-1]):
        return func(physical, dims, keepdim, **kwargs)
    reduced = func(physical.flatten(first, last), [first], False, **kwargs)
    return reduced.reshape(*reduced.shape[:first], *[1] * len(dims), *reduced.shape[first:]) if keepdim else reduced


@register(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduce(
    func: OpOverload, x: BlockedTensor, dim: list[int] | None = (), keepdim: bool = False, **kwargs: object
) -> Tensor:
    """Over H, W, N: blocked, without the reduced axes if not kept; of two axes or fewer plain, for what follows."""
    dims = [canonicalize_dim(x.dim(), d) for d in ([dim] if isinstance(dim, int) else dim or [])]
    if not dims or len(set(dims)) != len(dims) or not x.numel() or any(d in x._blocking.axes for d in dims):
        return fallback(func, x, dim or [], keepdim, **kwargs)
    if func is aten.mean.dim and sorted(dims) == [2, 3] and keepdim and not kwargs and has_kernel(x):
        return global_average(x)
    physical = _reduce_physical(func, x._physical, sorted(dims), keepdim, kwargs)
    kept = [d for d in range(x.dim()) if keepdim or d not in dims]
    size = tuple(1 if d in dims else x.size(d) for d in kept)
    blocking = shifted(x._blocking, {d: i for i, d in enumerate(kept)})
    y = BlockedTensor(clear_padding(physical, blocking, size), blocking, size)
    return y if len(size) > 2 else as_plain(y).contiguous()
