"""Over the channels alone: reductions, softmax and layer normalization, by `torch_blocked::reduce_channels` and so on.

They read each value once, where ATen's operators on a physical tensor take one loop a dim and several operators a
softmax. Traced, those are what Inductor fuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import equivalents, library
from torch_blocked.dispatch.convolution import CHANNELS
from torch_blocked.dispatch.physical import clear_padding, over_dims
from torch_blocked.reorder import to_blocking, to_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

_MOST_CHANNELS = 1 << 24  # the kernels count them in float32


def has_kernel(x: Tensor) -> bool:
    """Whether the operators take `x`, and it is not traced."""
    return (
        isinstance(x, BlockedTensor)
        and type(x._physical) is Tensor
        and any(x._blocking == CHANNELS[block] for block in library.kernel_blocks())
        and x.dtype is torch.float32
        and x.is_cpu
        and x.numel() > 0
        and x.size(1) <= _MOST_CHANNELS
    )


def _reduced(x: BlockedTensor, how: str) -> Tensor:
    return library.reduce_channels_op(x._physical, x.size(1), how)


def _mean(x: BlockedTensor) -> Tensor:
    return _reduced(x, "mean")


def _deviation(x: BlockedTensor, correction: float | None = None) -> Tensor:
    return _reduced(x, "norm_of_deviations").div_(math.sqrt(_freedom(x, correction)))


def _variance(x: BlockedTensor, correction: float | None = None) -> Tensor:
    return _deviation(x, correction).square_()  # a sum of squares may be beyond float32 where their mean is not


def _freedom(x: BlockedTensor, correction: float | None) -> float:
    """What the sum of the squared deviations is divided by."""
    return max(x.size(1) - (1 if correction is None else correction), 0)


def _norm(x: BlockedTensor, p: float | None = 2) -> Tensor | None:
    return _reduced(x, "norm") if p in (2, None) else None


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


# ---- Layer normalization by the channels, which lie last in what it takes: a view of an image blocked by them


def normalizes_channels(x: Tensor, size: Sequence[int], *vectors: Tensor | None) -> bool:
    """Whether `x` is blocked by its last axis alone, `size` is that axis, and there is a kernel, traced or not."""
    return (
        isinstance(x, BlockedTensor)
        and x.dim() > 2
        and x.dtype is torch.float32
        and x.is_cpu
        and x._blocking.axes == (x.dim() - 1,)
        and len(x._blocking) == 1
        and x._blocking[0][1] in library.kernel_blocks()
        and tuple(size) == tuple(x.shape[-1:])
        and all(v is None or (v.dtype is torch.float32 and v.shape == x.shape[-1:]) for v in vectors)
        and x.numel() > 0
        and x.size(-1) <= _MOST_CHANNELS
    )


def _image(physical: Tensor) -> Tensor:
    """(n, ..., blocks, block) as (n, blocks, ..., block), dense."""
    return physical.movedim(-2, 1).contiguous()


def _as(x: BlockedTensor, image: Tensor) -> BlockedTensor:
    return BlockedTensor(image.movedim(1, -2), x._blocking, x.shape)


def layer_norm(
    x: BlockedTensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The answer, blocked as x, mean and 1 / standard deviation, (n, ..., 1)."""
    vectors = (None if v is None else to_plain(v) for v in (weight, bias))
    y, mean, rstd = library.layer_norm_channels_op(_image(x._physical), x.size(-1), *vectors, eps)
    return _as(x, y), mean.unsqueeze(-1), rstd.unsqueeze(-1)


def layer_norm_gradient(
    grad: Tensor, x: BlockedTensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, blocked as it, of weight and of bias."""
    channels, diff = x.size(-1), _image(to_blocking(grad, x._blocking))
    mean, rstd = (to_plain(v).unsqueeze(1) for v in (mean, rstd))  # (n, 1, ..., 1)
    normal = (_image(x._physical) - mean).mul_(rstd)
    scaled = diff if weight is None else diff * equivalents.channels_as(diff, to_plain(weight))
    products = scaled * normal
    slope, shift = (
        library.reduce_channels_op(v, channels, "mean").unsqueeze(1).unsqueeze(-1) for v in (products, scaled)
    )
    diff_src = _as(x, (scaled - shift).sub_(normal * slope).mul_(rstd))
    clear_padding(diff_src._physical, x._blocking, x.shape)
    outer = [0, *range(2, diff.dim() - 1)]
    vectors = (over_dims(aten.sum.dim_IntList, v, outer).flatten()[:channels] for v in (diff * normal, diff))
    return diff_src, *vectors
