"""Normalization: of a batch, of groups of channels, of trailing axes.

All by the kernels of batch normalization: (n, c / b, ..., b) is also one image of n * c / b blocks, each of whose
channels is one channel of one image of x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import equivalents, library
from torch_blocked.dispatch import channels
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.half import in_float32
from torch_blocked.dispatch.physical import clear_padding, operand
from torch_blocked.dispatch.registry import register
from torch_blocked.reorder import to_blocking, to_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def _has_kernel(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether x is blocked by channels and the vectors are float32, or all in half precision as x is."""
    if not isinstance(x, BlockedTensor) or x.dtype not in library.KERNEL_DTYPES or not x.numel():
        return False
    dtype = _dtype_of(x, *vectors)
    for vector in vectors:
        if vector is not None and vector.dtype is not dtype:
            return False
    return len(x._blocking) == 1 and x._blocking[0][0] == 1


def _has_channel_kernel(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether x has a kernel and each vector a value a channel. What is wrong is left to PyTorch.

    Raises: RuntimeError for more or fewer values, which PyTorch's own kernels would read and write all the same.
    """
    if not _has_kernel(x, *vectors):
        return False
    channels = x.size(1)
    for vector in vectors:
        if vector is not None and vector.numel() != channels:
            raise RuntimeError(
                f"batch norm of {channels} channels takes vectors of {channels} values, got {vector.numel()}"
            )
    return all(v is None or v.shape == x.shape[1:2] for v in vectors)


def _dtype_of(x: Tensor, *vectors: Tensor | None) -> torch.dtype:
    """That of the vectors, and of those that come out: of the first one, of x where there is none."""
    given = [v.dtype for v in vectors if v is not None]
    return torch.float32 if torch.float32 in given else x.dtype


def _values(vector: Tensor | None) -> Tensor | None:
    """A vector as the operators take it: plain, float32."""
    return None if vector is None else to_plain(vector).float()


def _normalize(
    x: BlockedTensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> BlockedTensor:
    physical = x._physical
    op = library.batch_norm_op if physical.is_cpu else equivalents.batch_norm_aten
    y = op(physical, _values(weight), _values(bias), _values(mean), _values(var), eps)
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
    if not _has_channel_kernel(x, weight, bias, mean, var):
        return fallback(func, x, weight, bias, mean, var, momentum, eps)
    nothing = torch.empty(0, dtype=_dtype_of(x, weight, bias, mean, var))
    return _normalize(x, weight, bias, mean, var, eps), nothing, nothing.clone()


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
    given = not training and running_mean is not None and running_var is not None
    if not given or not _has_channel_kernel(x, weight, bias, running_mean, running_var):
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
    if training and (isinstance(running_mean, BlockedTensor) or isinstance(running_var, BlockedTensor)):
        return _moving_blocked(func, x, weight, bias, (running_mean, running_var), training, momentum, eps)
    both = (running_mean is None) == (running_var is None)
    if not both or not _has_channel_kernel(x, weight, bias, running_mean, running_var):
        return fallback(func, x, weight, bias, running_mean, running_var, training, momentum, eps)
    dtype = _dtype_of(x, weight, bias, running_mean, running_var)
    if not training:
        if running_mean is None:
            raise RuntimeError("batch norm in eval mode takes running_mean and running_var, got None")
        nothing = torch.empty(0, dtype=dtype)
        return _normalize(x, weight, bias, running_mean, running_var, eps), nothing, nothing.clone()
    mean, var = _statistics(x)
    if running_mean is not None:
        count = x.numel() // x.size(1)
        _move(running_mean, mean, momentum)
        _move(running_var, var.mul(count).div(count - 1), momentum)  # of one value NaN, as PyTorch's
    saved = mean.to(dtype), torch.rsqrt(var + eps).to(dtype)
    if dtype is not torch.float32:  # PyTorch normalizes by what it rounded
        mean, var, eps = saved[0], saved[1].float() ** -2, 0.0
    return _normalize(x, weight, bias, mean, var, eps), *saved


def _moving_blocked(
    func: OpOverload, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple, *how: object
) -> tuple[Tensor, Tensor, Tensor]:
    """With running statistics that are blocked: as in PyTorch's own kernel, no write to them is counted."""
    plain = [to_plain(r) if isinstance(r, BlockedTensor) else r for r in running]
    answers = func(x, weight, bias, *plain, *how)
    for r, moved in zip(running, plain, strict=True):
        if isinstance(r, BlockedTensor):
            r._physical.copy_(to_blocking(moved, r._blocking))
    return answers


def _move(running: Tensor, value: Tensor, momentum: float) -> None:
    """A running statistic towards that of a batch, float32."""
    # Not lerp_, by whose difference infinities become NaN.
    moved = running.mul_(1 - momentum) if running.dtype is torch.float32 else running.float().mul_(1 - momentum)
    moved.add_(value, alpha=momentum)
    if moved is not running:
        running.copy_(moved)


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
    """Mean and biased variance of each channel, float32."""
    op = library.batch_norm_statistics_op if x.is_cpu else equivalents.batch_norm_statistics_aten
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
    by_running = not training and running_mean is not None and running_var is not None
    if by_running:
        mean, invstd = running_mean, running_var
    if mean is None or invstd is None:
        raise ValueError(
            "batch norm's gradient takes save_mean and save_invstd, or in eval mode running statistics, got None"
        )
    if not _has_channel_kernel(x, weight, mean, invstd) or grad.dtype is not x.dtype:
        return fallback(func, grad, x, weight, running_mean, running_var, mean, invstd, training, eps, output_mask)
    op = library.batch_norm_backward_op if x.is_cpu else equivalents.batch_norm_backward_aten
    diff_dst = to_blocking(grad, x._blocking)
    invstd = torch.rsqrt(_values(running_var) + eps) if by_running else _values(invstd)
    diff_src, *others = op(diff_dst, x._physical, _values(weight), _values(mean), invstd, training)
    grads = BlockedTensor(diff_src, x._blocking, x.shape), *(v.to(_dtype_of(x, weight, mean)) for v in others)
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


# ---- Of groups of channels


def _planes(physical: Tensor, axis: int = 2) -> Tensor:
    """(n, c / b, ..., b) as one image, the axes before `axis` its blocks: (1, n * c / b, ..., b)."""
    return physical.flatten(0, axis - 1).unsqueeze(0)


def _each(x: BlockedTensor, values: Tensor, padding: float = 0.0) -> Tensor:
    """(n, groups) or (1, c), a value for each of the channels of `_planes`."""
    n, c = x.shape[:2]
    values = values.repeat_interleave(c // values.size(1), 1)
    return F.pad(values, [0, -c % x._physical.size(-1)], value=padding).expand(n, -1).flatten()


def _of_groups(x: BlockedTensor, values: Tensor, groups: int) -> Tensor:
    """A value for each channel of `_planes` as (n, groups, channels a group)."""
    n, c = x.shape[:2]
    return values.view(n, -1)[:, :c].unflatten(1, (groups, c // groups))


def _group_moments(x: BlockedTensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each group, (n, groups)."""
    planes = _planes(x._physical)
    moments = library.batch_norm_statistics_op(planes, planes.size(1) * planes.size(-1))
    means, variances = (_of_groups(x, m, groups) for m in moments)
    mean = means.mean(2)
    return mean, (variances + (means - mean.unsqueeze(2)).square()).mean(2)


def _normalize_groups(
    x: BlockedTensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> BlockedTensor:
    """By statistics (n, groups) and, a channel, weight and bias."""
    scale = torch.ones(x.size(1), dtype=torch.float32) if weight is None else to_plain(weight)  # in the padding 0
    shift = None if bias is None else _each(x, to_plain(bias).unsqueeze(0))
    vectors = _each(x, scale.unsqueeze(0)), shift, _each(x, mean), _each(x, var, 1.0)
    y = library.batch_norm_op(_planes(x._physical), *vectors, eps).view(x._physical.shape)
    return BlockedTensor(y, x._blocking, x.shape)


def _group_gradients(
    diff_dst: Tensor, x: BlockedTensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[BlockedTensor, Tensor, Tensor]:
    """Of x and, a channel, of weight and bias; mean and rstd are (n, groups)."""
    (n, c), groups = x.shape[:2], mean.size(1)
    weight = torch.ones(1, c, dtype=torch.float32) if weight is None else to_plain(weight).unsqueeze(0)
    planes, alone = _planes(x._physical), groups == c
    vectors = _each(x, weight), _each(x, mean), _each(x, rstd)
    diff_src, *sums = library.batch_norm_backward_op(_planes(diff_dst), planes, *vectors, alone)
    diff_weight, diff_bias = (_of_groups(x, s, c).squeeze(2) for s in sums)
    if not alone:  # the statistics depend on the group's other channels
        count = x.numel() // (n * groups)
        slope, shift = (-(s * weight).view(n, groups, -1).sum(2) * rstd / count for s in (diff_weight, diff_bias))
        by_statistics = _each(x, slope * rstd), _each(x, shift), _each(x, mean), _each(x, torch.ones_like(mean), 1.0)
        diff_src.add_(library.batch_norm_op(planes, *by_statistics, 0.0))
    diff_src = BlockedTensor(diff_src.view(x._physical.shape), x._blocking, x.shape)
    return diff_src, diff_weight.sum(0), diff_bias.sum(0)


def _has_group_kernel(x: Tensor, groups: int, *vectors: Tensor | None) -> bool:
    """Whether `x` has a kernel and its channels make groups; each vector has a value a channel."""
    if not _has_kernel(x, *vectors) or x.dtype is not torch.float32 or not x.is_cpu:
        return False
    if groups < 1 or x.size(1) % groups:
        return False
    return all(v is None or v.shape == x.shape[1:2] for v in vectors)


@register(aten.native_group_norm.default)
@in_float32(mixed=True)
def group_norm(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of each group of channels of each image."""
    if not _has_group_kernel(x, groups, weight, bias) or (n, c, n * c * pixels) != (*x.shape[:2], x.numel()):
        return fallback(func, x, weight, bias, n, c, pixels, groups, eps)
    mean, var = _group_moments(x, groups)
    return _normalize_groups(x, weight, bias, mean, var, eps), mean, torch.rsqrt(var + eps)


@register(aten.native_group_norm_backward.default)
@in_float32(mixed=True)
def group_norm_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    pixels: int,
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """By the statistics of each group of channels of each image."""
    fits = _has_group_kernel(x, groups, weight) and (n, c, n * c * pixels) == (*x.shape[:2], x.numel())
    if not fits or not _has_gradient(grad, x, mean, rstd, (n, groups)):
        return fallback(func, grad, x, mean, rstd, weight, n, c, pixels, groups, output_mask)
    grads = _group_gradients(to_blocking(grad, x._blocking), x, weight, to_plain(mean), to_plain(rstd))
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


def _has_gradient(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, size: tuple[int, ...]) -> bool:
    """Whether all are float32, `grad` of the size of `x`, the statistics of `size`."""
    if any(t.dtype is not torch.float32 for t in (grad, mean, rstd)):
        return False
    return grad.shape == x.shape and mean.shape == rstd.shape == torch.Size(size)


@register(aten.instance_norm.default)
def instance_norm_whole(
    func: OpOverload,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """What `inference_mode` delivers, not yet taken apart."""
    how = (running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled)
    if running_mean is not None or running_var is not None or not use_input_stats:
        return func.decompose(x, weight, bias, *how)  # not of wide copies: it moves the running statistics
    return _instance_norm(func, x, weight, bias, *how)


@in_float32(mixed=True)
def _instance_norm(func: OpOverload, x: Tensor, weight: Tensor | None, bias: Tensor | None, *how: object) -> Tensor:
    """By the statistics of each image alone."""
    eps = how[4]
    if not _has_kernel(x, weight, bias) or not _has_group_kernel(x, x.size(1), weight, bias):
        return func.decompose(x, weight, bias, *how)
    return _normalize_groups(x, weight, bias, *_group_moments(x, x.size(1)), eps)


# ---- Of trailing axes: all but the batch, or spatial ones


def _has_layer_kernel(x: Tensor, size: list[int], *affine: Tensor | None) -> bool:
    """Whether `x` has a kernel, `size` is that of its last axes, and so is that of weight and bias."""
    if not _has_kernel(x, *affine) or x.dtype is not torch.float32 or not x.is_cpu or not 0 < len(size) < x.dim():
        return False
    return tuple(x.shape[-len(size) :]) == tuple(size) and all(v is None or v.shape == tuple(size) for v in affine)


def _rows_of(x: BlockedTensor, statistics: Tensor, axis: int) -> Tensor:
    """Statistics of the axes from `axis` on, one for each channel of `_planes(x, axis)`."""
    plain = to_plain(statistics).reshape(x.shape[:axis])
    return equivalents.plain_to_blocked(plain, range(axis), (1, x._physical.size(-1))).flatten()


@register(aten.native_layer_norm.default)
@in_float32(mixed=True)
def layer_norm(
    func: OpOverload, x: Tensor, size: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the last axes, `size`; weight and bias have a value for each of their elements."""
    if channels.normalizes_channels(x, size, weight, bias):
        return channels.layer_norm(x, weight, bias, eps)
    if not _has_layer_kernel(x, size, weight, bias):
        return fallback(func, x, size, weight, bias, eps)
    axis, block = x.dim() - len(size), x._physical.size(-1)
    if axis == 1:
        mean, var = _group_moments(x, 1)
        y = _normalize_groups(x, None, None, mean, var, eps)._physical
    else:
        planes = _planes(x._physical, axis)
        mean, var = library.batch_norm_statistics_op(planes, planes.size(1) * block)
        y = library.batch_norm_op(planes, None, None, mean, var, eps).view(x._physical.shape)
        outer = x._physical.shape[:axis]
        mean, var = (
            equivalents.blocked_to_plain(v.view(*outer, block), x.shape[:axis], (1, block)) for v in (mean, var)
        )
    if weight is not None:
        y.mul_(operand(weight, x._blocking, x.shape))
    if bias is not None:
        y.add_(operand(bias, x._blocking, x.shape))
    y = BlockedTensor(clear_padding(y, x._blocking, x.shape), x._blocking, x.shape)
    kept = (*x.shape[:axis], *[1] * len(size))
    return y, mean.reshape(kept), torch.rsqrt(var + eps).reshape(kept)


@register(aten.native_layer_norm_backward.default)
@in_float32(mixed=True)
def layer_norm_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    size: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """By the statistics of the last axes, `size`."""
    axis = x.dim() - len(size)
    kept = (*x.shape[:axis], *[1] * len(size))
    if channels.normalizes_channels(x, size, weight, bias) and _has_gradient(grad, x, mean, rstd, kept):
        grads = channels.layer_norm_gradient(grad, x, mean, rstd, weight)
        return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))
    if not _has_layer_kernel(x, size, weight, bias) or not _has_gradient(grad, x, mean, rstd, kept):
        return fallback(func, grad, x, size, mean, rstd, weight, bias, output_mask)
    diff_dst = to_blocking(grad, x._blocking)
    diff_src = diff_weight = diff_bias = None
    if output_mask[0]:
        scaled = diff_dst if weight is None else diff_dst * operand(weight, x._blocking, x.shape)
        diff_src = _layer_gradient(scaled, x, mean, rstd, axis)
    if output_mask[1]:
        normal = (x._physical - operand(mean, x._blocking, x.shape)).mul_(operand(rstd, x._blocking, x.shape))
        diff_weight = _sum_of_outer(normal.mul_(diff_dst), x, axis)
    if output_mask[2]:
        diff_bias = _sum_of_outer(diff_dst, x, axis)
    return diff_src, diff_weight, diff_bias


def _layer_gradient(diff_dst: Tensor, x: BlockedTensor, mean: Tensor, rstd: Tensor, axis: int) -> BlockedTensor:
    """Of x, normalized by the axes from `axis` on."""
    if axis == 1:
        return _group_gradients(diff_dst, x, None, to_plain(mean).view(-1, 1), to_plain(rstd).view(-1, 1))[0]
    planes, vectors = _planes(x._physical, axis), (None, _rows_of(x, mean, axis), _rows_of(x, rstd, axis))
    physical, _, _ = library.batch_norm_backward_op(_planes(diff_dst, axis), planes, *vectors, True)
    return BlockedTensor(physical.view(x._physical.shape), x._blocking, x.shape)


def _sum_of_outer(physical: Tensor, x: BlockedTensor, axis: int) -> Tensor:
    """The sum over the axes before `axis`, plain; the padding of `physical` is zero."""
    if axis > 1:
        return physical.sum([*range(axis), -1])
    return equivalents.blocked_to_plain(physical.sum(0), x.shape[1:], (0, physical.size(-1))).contiguous()
