"""Losses of images and their gradients.

What a network is trained on is plain, and a loss is a number: most read plain tensors, the network's answer reordered,
which takes no longer than the blocked ones with their padding. Of tensors blocked alike and without padding, features
of two networks say, a loss is the same one of the physical tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.physical import are_alike
from torch_blocked.dispatch.registry import register
from torch_blocked.dispatch.shape import as_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@register(
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
)
def loss(func: OpOverload, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    """A plain number; each element's loss and a gradient are as what they are computed of, blocked or plain."""
    images = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()]
    first = images[0]
    if not are_alike(tuple(images)) or first._physical.numel() != first.numel():
        return func(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})
    physical = func(*map(_physical, args), **{k: _physical(v) for k, v in kwargs.items()})
    return BlockedTensor(physical, first._blocking, first.shape) if physical.dim() else physical


def _plain(x: object) -> object:
    return as_plain(x).contiguous() if isinstance(x, BlockedTensor) else x


def _physical(x: object) -> object:
    return x._physical if isinstance(x, BlockedTensor) else x
