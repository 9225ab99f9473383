"""The C++ operators in ATen operations: for other devices, under tracing, and to differentiate.

Each function `<operator>_aten` takes what the operator of that name takes (library.py describes it) and returns the
same values in the same physical form, by ATen operations only: right on every device, in every dtype and under every
transform, and far slower than the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_blocked.memory_desc import Blocking

PostOp = Tensor | str | float | bool | None  # of `PostOps`


def pairs(blocking: Sequence[int] | None) -> list[tuple[int, int]]:
    """A flat blocking (axis, size, axis, size, ...) as (axis, size) pairs; None is empty: a plain tensor's."""
    blocking = blocking or ()
    return list(zip(blocking[::2], blocking[1::2], strict=True))


def blocked_to_plain(src: Tensor, size: Sequence[int], blocking: Sequence[int] | None) -> Tensor:
    """The logical tensor of a physical one: each axis' blocks beside it, merged, the padding cut off."""
    blocks, ndim = pairs(blocking), len(size)
    axes = [[d] + [ndim + i for i, (axis, _) in enumerate(blocks) if axis == d] for d in range(ndim)]
    src = src.permute([p for group in axes for p in group])
    for d, group in enumerate(axes):
        if len(group) > 1:
            src = src.flatten(d, d + len(group) - 1).narrow(d, 0, size[d])
    return src


def plain_to_blocked(src: Tensor, order: Sequence[int], blocking: Sequence[int]) -> Tensor:
    """The physical tensor of a logical one: padded with zeros, split into blocks, dense in the order `order`."""
    blocking, ndim = Blocking(pairs(blocking)), src.dim()
    outer = blocking.outer(tuple(src.shape))
    blocks = [[i for i, axis in enumerate(blocking.inner_idxs) if axis == d] for d in range(ndim)]
    if blocking:
        tail = [padded - n for padded, n in zip(blocking.padded(tuple(src.shape)), src.shape, strict=True)]
        src = F.pad(src, [side for n in reversed(tail) for side in (0, n)])
        src = src.reshape([n for d in range(ndim) for n in (outer[d], *(blocking.inner_blks[i] for i in blocks[d]))])
    # Where the outer dim of each axis, and each inner block, has come to lie.
    starts = [d + sum(map(len, blocks[:d])) for d in range(ndim)]
    inner = [starts[axis] + 1 + blocks[axis].index(i) for i, axis in enumerate(blocking.inner_idxs)]
    src = src.permute([*(starts[d] for d in order), *inner]).clone(memory_format=torch.contiguous_format)
    return src.permute([*(list(order).index(d) for d in range(ndim)), *range(ndim, ndim + len(inner))])


def convert(src: Tensor, dtype: torch.dtype) -> Tensor:
    """`src` in another dtype by oneDNN's rule: floating point to integer rounds to nearest even and saturates."""
    if not src.is_floating_point() or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return src.to(dtype)
    info, exact = torch.iinfo(dtype), src.double().nan_to_num(0.0).round()
    if info.bits < 64:
        return exact.clamp(info.min, info.max).to(dtype)
    bound = float(2 ** (info.bits - (info.min < 0)))
    over = exact >= bound
    inside = torch.where(over, 0.0, exact.clamp_min(float(info.min))).to(dtype).view(torch.int64)
    largest = info.max if info.min < 0 else -1  # -1 has the bits of 2**64 - 1
    return torch.where(over, largest, inside).view(dtype)


def reorder_aten(
    src: Tensor,
    size: Sequence[int],
    src_blocking: Sequence[int],
    dst_order: Sequence[int],
    dst_blocking: Sequence[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`reorder` in ATen operations: any device, any dtype, traceable, differentiable."""
    plain = blocked_to_plain(src, size, src_blocking)
    if dtype is not None and dtype != src.dtype:
        plain = convert(plain, dtype)
    return plain_to_blocked(plain, dst_order, dst_blocking)


def _widened(src: Tensor) -> Tensor:
    """Half precision as float32, what the operators compute in."""
    return src.float() if src.dtype in (torch.bfloat16, torch.float16) else src


def convolution_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """The spatial size of a convolution's answer from that of its src."""
    dims = zip(size, kernel, stride, padding, dilation, strict=True)
    # A quotient, not one and one more: Inductor cannot put strides in order that are products of such sums.
    return [(n + 2 * p - d * (k - 1) - 1 + s) // s for n, k, s, p, d in dims]


# Of the answer and the parameter alpha.
_ACTIVATIONS = {
    "none": lambda x, _: x,
    "relu": lambda x, _: torch.relu(x),
    "relu6": lambda x, _: F.relu6(x),
    "leaky_relu": F.leaky_relu,
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "silu": lambda x, _: F.silu(x),
    "hardsigmoid": lambda x, _: F.hardsigmoid(x),
    "hardswish": lambda x, _: F.hardswish(x),
    "gelu": lambda x, _: F.gelu(x),
    "gelu_tanh": lambda x, _: F.gelu(x, approximate="tanh"),
}


class PostOps(NamedTuple):
    """The last arguments of a convolution; a transposed one has no src_scale."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "none"
    alpha: float = 0.0
    residual_last: bool = False
    src_scale: Tensor | None = None


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, *window: object) -> Tensor:
    """`torch.convolution` in the precision of the sums, which a bias of another dtype than x and w is added in."""
    x, w = _widened(x), _widened(w)
    return torch.convolution(x, w, None if bias is None else bias.to(x.dtype), *window)


def _with_post_ops(y: Tensor, dtype: torch.dtype, block: int, ops: PostOps) -> Tensor:
    """The physical tensor of a convolution's plain answer, after its post-ops, rounded once to `dtype`."""
    channels = (-1, *[1] * (y.dim() - 2))
    if ops.scale is not None:
        y = y * ops.scale.view(channels)
    if ops.shift is not None:
        y = y + ops.shift.view(channels)
    other = None if ops.residual is None else blocked_to_plain(ops.residual, y.shape, (1, block))
    if other is not None and not ops.residual_last:
        y = y + other
    y = _ACTIVATIONS[ops.activation](y, ops.alpha)
    if other is not None and ops.residual_last:
        y = y + other
    return plain_to_blocked(y.to(dtype), range(y.dim()), (1, block))


def convolution_aten(
    src: Tensor,
    src_blocking: Sequence[int] | None,
    weight: Tensor,
    weight_size: Sequence[int],
    weight_blocking: Sequence[int] | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    block: int,
    *post_ops: PostOp,
    **named_post_ops: PostOp,
) -> Tensor:
    """`convolution` in ATen operations: any device, differentiable."""
    ndim, ops = len(weight_size), PostOps(*post_ops, **named_post_ops)
    src = src if ops.src_scale is None else src * ops.src_scale
    x = blocked_to_plain(src, (src.size(0), weight_size[1] * groups, *src.shape[2:ndim]), src_blocking)
    w = blocked_to_plain(weight, weight_size, weight_blocking)
    y = _convolve(x, w, bias, stride, padding, dilation, False, [0] * (ndim - 2), groups)
    return _with_post_ops(y, src.dtype, block, ops)


def convolution_transpose_aten(
    src: Tensor,
    src_blocking: Sequence[int],
    weight: Tensor,
    weight_size: Sequence[int],
    weight_blocking: Sequence[int],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    block: int,
    *post_ops: PostOp,
    **named_post_ops: PostOp,
) -> Tensor:
    """`convolution_transpose` in ATen operations: any device, differentiable."""
    ndim = len(weight_size)
    x = blocked_to_plain(src, (src.size(0), weight_size[0], *src.shape[2:ndim]), src_blocking)
    w = blocked_to_plain(weight, weight_size, weight_blocking)
    y = _convolve(x, w, bias, stride, padding, dilation, True, output_padding, groups)
    return _with_post_ops(y, src.dtype, block, PostOps(*post_ops, **named_post_ops))


def convolution_weight_gradient_aten(
    src: Tensor,
    src_blocking: Sequence[int],
    diff_dst: Tensor,
    weight_size: Sequence[int],
    weight_order: Sequence[int],
    weight_blocking: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`convolution_weight_gradient` in ATen operations: any device, differentiable."""
    ndim = len(weight_size)
    x = blocked_to_plain(src, (src.size(0), weight_size[1] * groups, *src.shape[2:ndim]), src_blocking)
    dst_size = (diff_dst.size(0), weight_size[0], *diff_dst.shape[2:ndim])
    diff = blocked_to_plain(diff_dst, dst_size, (1, int(diff_dst.size(-1))))
    _, diff_weight, _ = torch.ops.aten.convolution_backward(
        diff, x, x.new_zeros(weight_size), None, stride, padding, dilation, False, [0] * (ndim - 2), groups,
        [False, True, False],
    )  # fmt: skip
    return plain_to_blocked(diff_weight, weight_order, weight_blocking)


def batch_norm_aten(
    src: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """`batch_norm` in ATen operations: any device, any floating dtype, differentiable."""
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    return (src * channels_as(src, scale) + channels_as(src, shift)).to(src.dtype)


def channels_as(src: Tensor, values: Tensor) -> Tensor:
    """A value a channel, of the physical shape that broadcasts against `src`."""
    block = src.size(-1)
    return F.pad(values, [0, -values.size(0) % block]).view([-1, *[1] * (src.dim() - 3), block])


def batch_norm_statistics_aten(src: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """`batch_norm_statistics` in ATen operations: any device, any floating dtype, differentiable."""
    src, dims = _widened(src), [0, *range(2, src.dim() - 1)]
    # Not var_mean, whose mean of infinities is NaN.
    mean, var = src.mean(dims), src.var(dims, correction=0)
    return mean.flatten()[:channels].clone(), var.flatten()[:channels].clone()


def batch_norm_backward_aten(
    diff_dst: Tensor, src: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`batch_norm_backward` in ATen operations: any device, any floating dtype, differentiable."""
    dims, channels, dtype = [0, *range(2, src.dim() - 1)], mean.size(0), src.dtype
    diff_dst, src = _widened(diff_dst), _widened(src)
    apart = src - channels_as(src, mean)
    total = diff_dst.sum(dims).flatten()[:channels]
    products = (diff_dst * apart).sum(dims).flatten()[:channels]
    factor = invstd if weight is None else invstd * weight
    diff_src = diff_dst * channels_as(src, factor)
    if training:
        count = src.numel() // (src.size(1) * src.size(-1))
        slope, shift = -factor * invstd.square() * products / count, -factor * total / count
        diff_src = diff_src + apart * channels_as(src, slope) + channels_as(src, shift)
    return diff_src.to(dtype), products * invstd, total.clone()


def linear_aten(src: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` in ATen operations."""
    return torch.nn.functional.linear(src, weight, bias)


def _channels_of(src: Tensor, channels: int) -> Tensor:
    """The plain tensor of one blocked by channels."""
    return blocked_to_plain(src, (src.size(0), channels, *src.shape[2:-1]), (1, int(src.size(-1))))


_REDUCTIONS_OF_CHANNELS = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm_of_deviations": lambda x: torch.linalg.vector_norm(x - x.mean(1, keepdim=True), dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
}


def reduce_channels_aten(src: Tensor, channels: int, how: str) -> Tensor:
    """`reduce_channels` in ATen operations: any device, any floating dtype, differentiable."""
    return _REDUCTIONS_OF_CHANNELS[how](_channels_of(src, channels)).clone()


def find_channel_aten(src: Tensor, channels: int, least: bool) -> tuple[Tensor, Tensor]:
    """`find_channel` in ATen operations: any device, any floating dtype, differentiable."""
    x = _channels_of(src, channels)
    return tuple(x.min(1)) if least else tuple(x.max(1))


def softmax_channels_aten(src: Tensor, channels: int, log: bool) -> Tensor:
    """`softmax_channels` in ATen operations: any device, any floating dtype, differentiable."""
    x = _channels_of(src, channels)
    y = x.log_softmax(1) if log else x.softmax(1)
    return plain_to_blocked(y, range(y.dim()), (1, int(src.size(-1))))


def layer_norm_channels_aten(
    src: Tensor, channels: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`layer_norm_channels` in ATen operations: any device, any floating dtype, differentiable."""
    x = _channels_of(src, channels)
    var, mean = torch.var_mean(x, 1, correction=0)
    rstd, one_each = torch.rsqrt(var + eps), [channels, *[1] * (x.dim() - 2)]
    y = (x - mean.unsqueeze(1)) * rstd.unsqueeze(1)
    y = y if weight is None else y * weight.view(one_each)
    y = y if bias is None else y + bias.view(one_each)
    return plain_to_blocked(y, range(y.dim()), (1, int(src.size(-1)))), mean, rstd


def softmax_channels_backward_aten(diff_dst: Tensor, dst: Tensor, channels: int, log: bool) -> Tensor:
    """`softmax_channels_backward` in ATen operations: any device, any floating dtype, differentiable."""
    diff, y = _channels_of(diff_dst, channels), _channels_of(dst, channels)
    diff = diff - y.exp() * diff.sum(1, keepdim=True) if log else (diff - (diff * y).sum(1, keepdim=True)) * y
    return plain_to_blocked(diff, range(diff.dim()), (1, int(dst.size(-1))))


def pool_aten(
    src: Tensor,
    channels: int,
    output_size: Sequence[int],
    mode: str,
    kernel_size: Sequence[int] = (),
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
    dilation: Sequence[int] = (),
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    indices: bool = False,
) -> tuple[Tensor, Tensor]:
    """`pool` in ATen operations: any device, any floating dtype, differentiable."""
    blocking = (1, int(src.size(-1)))
    x = blocked_to_plain(src, (src.size(0), channels, *src.shape[2:4]), blocking)
    if mode == "max":
        window = (kernel_size, stride, padding, dilation, True)
        ys = (
            F.max_pool2d_with_indices(x, *window) if kernel_size else F.adaptive_max_pool2d_with_indices(x, output_size)
        )
    elif kernel_size:
        ys = (F.avg_pool2d(x, kernel_size, stride, padding, True, count_include_pad, divisor_override),)
    else:
        ys = (F.adaptive_avg_pool2d(x, output_size),)
    # Rounded up there may be one window more than the caller wants.
    oh, ow = output_size
    dst, *found = (plain_to_blocked(y[..., :oh, :ow], (0, 1, 2, 3), blocking) for y in ys)
    return dst, found[0] if indices else dst.new_empty(0, dtype=torch.int64)


def upsample_aten(
    src: Tensor,
    output_size: Sequence[int],
    mode: str,
    align_corners: bool = False,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> Tensor:
    """`upsample` in ATen operations: any device, any floating dtype, differentiable."""
    n, c_blocks, h, w, _ = src.shape
    block = int(src.size(-1))
    x = blocked_to_plain(src, (n, c_blocks * block, h, w), (1, block))
    if mode == "bilinear":
        y = torch.ops.aten.upsample_bilinear2d(x, output_size, align_corners, scale_h, scale_w)
    elif mode == "nearest":
        y = torch.ops.aten.upsample_nearest2d(x, output_size, scale_h, scale_w)
    else:
        y = torch.ops.aten._upsample_nearest_exact2d(x, output_size, scale_h, scale_w)
    return plain_to_blocked(y, (0, 1, 2, 3), (1, block))


def _as_images(physical: Tensor) -> Tensor:
    """A batch of images of one block of channels: (n * blocks, block, h, w)."""
    return physical.flatten(0, 1).movedim(-1, 1)


def _from_images(images: Tensor, like: Tensor) -> Tensor:
    return images.movedim(1, -1).unflatten(0, like.shape[:2]).clone(memory_format=torch.contiguous_format)


def max_pool_backward_aten(diff_dst: Tensor, indices: Tensor, src_size: Sequence[int]) -> Tensor:
    """`max_pool_backward` in ATen operations: any device, any floating dtype, differentiable."""
    n, c_blocks, _, _, block = diff_dst.shape
    h, w = src_size
    inside = (indices >= 0) & (indices < h * w)
    diffs = torch.where(inside, diff_dst, 0.0).flatten(2, 3)
    planes = diff_dst.new_zeros(n, c_blocks, h * w, block)
    return planes.scatter_add(2, torch.where(inside, indices, 0).flatten(2, 3), diffs).unflatten(2, (h, w))


def avg_pool_backward_aten(
    diff_dst: Tensor,
    src_size: Sequence[int],
    kernel_size: Sequence[int] = (),
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """`avg_pool_backward` in ATen operations: any device, any floating dtype, differentiable."""
    diff = _as_images(diff_dst)
    x = diff.new_zeros(*diff.shape[:2], *src_size)
    if kernel_size:
        # Rounded up there may be one window more than the caller wants.
        size = F.avg_pool2d(x[:1, :1], kernel_size, stride, padding, True).shape[2:]
        diff = F.pad(diff, [0, size[1] - diff.size(3), 0, size[0] - diff.size(2)])
        window = (kernel_size, stride, padding, True, count_include_pad, divisor_override)
        y = torch.ops.aten.avg_pool2d_backward(diff, x, *window)
    else:
        y = torch.ops.aten._adaptive_avg_pool2d_backward(diff, x)
    return _from_images(y, diff_dst)


def upsample_backward_aten(
    diff_dst: Tensor,
    src_size: Sequence[int],
    mode: str,
    align_corners: bool = False,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> Tensor:
    """`upsample_backward` in ATen operations: any device, any floating dtype, differentiable."""
    diff = _as_images(diff_dst)
    sizes = diff.shape[2:], [*diff.shape[:2], *src_size]
    if mode == "bilinear":
        y = torch.ops.aten.upsample_bilinear2d_backward(diff, *sizes, align_corners, scale_h, scale_w)
    elif mode == "nearest":
        y = torch.ops.aten.upsample_nearest2d_backward(diff, *sizes, scale_h, scale_w)
    else:
        y = torch.ops.aten._upsample_nearest_exact2d_backward(diff, *sizes, scale_h, scale_w)
    return _from_images(y, diff_dst)
