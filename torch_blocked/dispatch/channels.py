"""Reductions over the channels alone, and softmax along them, by `torch_blocked::reduce_channels` and its like.

They read each value once, where ATen's operators on a physical tensor take one loop a dim and several operators a
softmax. Traced, those are what Inductor fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

# By the size of the block.
_BLOCKINGS = {block: Blocking(((1, block),)) for block in (8, 16)}
_MOST_CHANNELS = 1 << 24  # the kernels count them in float32


def has_kernel(x: Tensor) -> bool:
    """Whether the operators take `x`, and it is not traced."""
    return (
        isinstance(x, BlockedTensor)
        and type(x._physical) is Tensor
        and any(x._blocking == _BLOCKINGS[block] for block in library.kernel_blocks())
        and x.dtype is torch.float32
        and x.is_cpu
        and x.numel() > 0
        and x.size(1) <= _MOST_CHANNELS
    )


def _reduced(x: BlockedTensor, how: str) -> Tensor:
    return library.reduce_channels_op(x._physical, x.size(1), how)


def _mean(x: BlockedTensor) -> Tensor:
    return _reduced(x, "mean")


def _variance(x: BlockedTensor, correction: float | None = None) -> Tensor:
    return _reduced(x, "deviations").div_(max(x.size(1) - (1 if correction is None else correction), 0))


def _deviation(x: BlockedTensor, correction: float | None = None) -> Tensor:
    return _variance(x, correction).sqrt_()


def _norm(x: BlockedTensor, p: float | None = 2) -> Tensor | None:
    return _reduced(x, "squares").sqrt_() if p in (2, None) else None


# (x, keywords of the operator) -> a value a pixel, or several; None: not by the kernels.
REDUCERS: dict[OpOverload, Callable[..., Tensor | tuple[Tensor, Tensor] | None]] = {
    aten.sum.dim_IntList: lambda x: _reduced(x, "sum"),
    aten.mean.dim: _mean,
    aten.amax.default: lambda x: _reduced(x, "max"),
    aten.amin.default: lambda x: _reduced(x, "min"),
    aten.logsumexp.default: lambda x: _reduced(x, "logsumexp"),
    aten.linalg_vector_norm.default: lambda x, ord=2: _norm(x, ord),
    aten.norm.ScalarOpt_dim: _norm,
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: lambda x, correction=None: (_variance(x, correction), _mean(x)),
    aten.std_mean.correction: lambda x, correction=None: (_deviation(x, correction), _mean(x)),
}


def reduce_channels(
    func: OpOverload, x: BlockedTensor, axes: Sequence[int], values: dict[str, object]
) -> Tensor | tuple[Tensor, ...] | None:
    """A value a pixel, (n, ...), or several, where `axes` are the channels and there is a kernel; None: there is none.

    `values` are the operator's other arguments. All kernels compute in float32 only.
    """
    reducer = REDUCERS.get(func) if axes == [1] and "dtype" not in values else None
    return reducer(x, **values) if reducer and has_kernel(x) else None
