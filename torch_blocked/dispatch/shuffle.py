"""Channels moved to pixels, back, and among each other: on the channels gathered innermost, a copy in and one out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.registry import register
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor | None:
    n, h, w, c = x.shape
    if c % (factor * factor):
        return None
    y = x.view(n, h, w, c // (factor * factor), factor, factor).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, h * factor, w * factor, c // (factor * factor))


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor | None:
    n, h, w, c = x.shape
    if h % factor or w % factor:
        return None
    y = x.view(n, h // factor, factor, w // factor, factor, c).permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, h // factor, w // factor, c * factor * factor)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor | None:
    n, h, w, c = x.shape
    return None if c % groups else x.view(n, h, w, groups, c // groups).transpose(3, 4).reshape(n, h, w, c)


# Of (n, h, w, c); None of what PyTorch refuses.
SHUFFLES: dict[OpOverload, Callable[[Tensor, int], Tensor | None]] = {
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
}


@register(*SHUFFLES)
def shuffle(func: OpOverload, x: BlockedTensor, parameter: int) -> Tensor:
    """Of images with one block of channels."""
    blocking = x._blocking
    if x.dim() != 4 or len(blocking) != 1 or blocking.axes != (1,) or parameter < 1 or not x.numel():
        return fallback(func, x, parameter)
    innermost = x._physical.permute(0, 2, 3, 1, 4).flatten(3)[..., : x.size(1)].contiguous()
    y = SHUFFLES[func](innermost, parameter)
    if y is None:
        return fallback(func, x, parameter)
    n, h, w, c = y.shape
    block = blocking.block(1)
    physical = F.pad(y, [0, -c % block]).unflatten(3, (-1, block)).permute(0, 3, 1, 2, 4).contiguous()
    return BlockedTensor(physical, blocking, (n, c, h, w))
