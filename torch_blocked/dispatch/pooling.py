"""Pooling and resampling over H, W: a blocked tensor is, block by block, a batch of channels_last images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.physical import clear_padding
from torch_blocked.dispatch.registry import register
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _images(x: BlockedTensor) -> Tensor:
    """(n, c / b, h, w, b) as (n * c / b, b, h, w), strides channels_last: a view where the outer axes merge."""
    return x._physical.flatten(0, 1).permute(0, 3, 1, 2)


def _blocked(images: Tensor, x: BlockedTensor) -> BlockedTensor:
    """The way back, for images of any size."""
    physical = images.permute(0, 2, 3, 1).contiguous().unflatten(0, x._physical.shape[:2])
    return BlockedTensor(physical, x._blocking, (*x.shape[:2], *physical.shape[2:4]))


def is_blocked_image(x: Tensor) -> bool:
    """Whether `x` is 4-D with one block of channels."""
    return isinstance(x, BlockedTensor) and x.dim() == 4 and len(x._blocking) == 1 and x._blocking.axes == (1,)


@register(
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten._upsample_nearest_exact2d.default,
    aten.upsample_bicubic2d.default,
)
def per_channel(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor:
    """An operator that treats each channel alike and makes zero of zeros."""
    if not is_blocked_image(x) or not x.numel():
        return fallback(func, x, *args, **kwargs)
    return _blocked(func(_images(x), *args, **kwargs), x)


@register(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default)
def max_pool(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Values and indices, both blocked. An index counts within its plane, whatever the format."""
    if not is_blocked_image(x) or not x.numel():
        return fallback(func, x, *args, **kwargs)
    values, indices = (_blocked(images, x) for images in func(_images(x), *args, **kwargs))
    for y in (values, indices):  # the maximum of zeros is at some index, that of an empty window -inf
        clear_padding(y._physical, y._blocking, y.shape)
    return values, indices
