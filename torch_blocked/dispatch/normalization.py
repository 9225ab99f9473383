"""Batch normalization: statistics over the physical tensor's batch and spatial axes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.registry import register
from torch_blocked.reorder import to_blocking, to_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _has_kernel(x: Tensor, *vectors: Tensor | None) -> bool:
    if not isinstance(x, BlockedTensor) or x.dtype is not torch.float32 or not x.numel():
        return False
    for vector in vectors:
        if vector is not None and vector.dtype is not torch.float32:
            return False
    return len(x._blocking) == 1 and x._blocking[0][0] == 1


def _normalize(
    x: BlockedTensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> BlockedTensor:
    physical = x._physical
    op = library.batch_norm_op if physical.is_cpu else library.batch_norm_aten
    y = op(physical, to_plain(weight), to_plain(bias), to_plain(mean), to_plain(var), eps)
    return BlockedTensor(y, x._blocking, x.shape)


@register(aten._native_batch_norm_legit_no_training.default)
def batch_norm_eval(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the running statistics."""
    if not _has_kernel(x, weight, bias, mean, var):
        return fallback(func, x, weight, bias, mean, var, momentum, eps)
    return _normalize(x, weight, bias, mean, var, eps), torch.empty(0), torch.empty(0)


@register(aten.batch_norm.default)
def batch_norm_whole(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """What `inference_mode` delivers, not yet taken apart."""
    if training or running_mean is None or not _has_kernel(x, weight, bias, running_mean, running_var):
        return func.decompose(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return _normalize(x, weight, bias, running_mean, running_var, eps)


@register(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the batch's statistics, which move the running ones, or (eval) by the running ones."""
    if not _has_kernel(x, weight, bias, running_mean, running_var):
        return fallback(func, x, weight, bias, running_mean, running_var, training, momentum, eps)
    if not training:
        return _normalize(x, weight, bias, running_mean, running_var, eps), torch.empty(0), torch.empty(0)
    mean, var = _statistics(x)
    if running_mean is not None:
        count = x.numel() // x.size(1)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var.mul(count).div(count - 1), momentum)  # of one value NaN, as PyTorch's
    return _normalize(x, weight, bias, mean, var, eps), mean, torch.rsqrt(var + eps)


@register(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_running(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the batch's statistics, nothing kept."""
    if not _has_kernel(x, weight, bias):
        return fallback(func, x, weight, bias, training, momentum, eps)
    native = aten.native_batch_norm.default
    return batch_norm(native, x, weight, bias, None, None, True, momentum, eps)


def _statistics(x: BlockedTensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel."""
    cpu = x._physical.device.type == "cpu"
    op = library.batch_norm_statistics_op if cpu else library.batch_norm_statistics_aten
    return op(x._physical, x.size(1))


@register(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    training: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """By the statistics of the batch, or (eval) by the running ones."""
    if not training and running_mean is not None and running_var is not None:
        mean, invstd = running_mean, torch.rsqrt(running_var + eps)
    if mean is None or not _has_kernel(x, weight, mean, invstd) or grad.dtype is not torch.float32:
        return fallback(func, grad, x, weight, running_mean, running_var, mean, invstd, training, eps, output_mask)
    cpu = x._physical.device.type == "cpu"
    op = library.batch_norm_backward_op if cpu else library.batch_norm_backward_aten
    diff_dst = to_blocking(grad, x._blocking)
    diff_src, *others = op(diff_dst, x._physical, *map(to_plain, (weight, mean, invstd)), training)
    grads = BlockedTensor(diff_src, x._blocking, x.shape), *others
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))
