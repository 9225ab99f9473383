"""The operators' shape-only kernels: of what size, strides and dtype their answers are, for fake and meta tensors.

Each takes what the operator takes (library.py describes it); FAKES says which is whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_blocked import equivalents
from torch_blocked.equivalents import PostOp
from torch_blocked.memory_desc import Blocking


def _reorder(
    src: Tensor,
    size: Sequence[int],
    src_blocking: Sequence[int],
    dst_order: Sequence[int],
    dst_blocking: Sequence[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _new_physical(src, size, dst_order, dst_blocking, dtype or src.dtype)


def _new_physical(
    like: Tensor, size: Sequence[int], order: Sequence[int], blocking: Sequence[int], dtype: torch.dtype
) -> Tensor:
    blocks = Blocking(equivalents.pairs(blocking))
    outer, ndim = blocks.outer(tuple(size)), len(size)
    back = [list(order).index(d) for d in range(ndim)] + [ndim + i for i in range(len(blocks))]
    return like.new_empty([outer[d] for d in order] + list(blocks.inner_blks), dtype=dtype).permute(back)


def _convolution(
    src: Tensor,
    src_blocking: Sequence[int],
    weight: Tensor,
    weight_size: Sequence[int],
    weight_blocking: Sequence[int],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    block: int,
    *post_ops: PostOp,
    **named_post_ops: PostOp,
) -> Tensor:
    spatial = equivalents.convolution_size(src.shape[2 : len(weight_size)], weight_size[2:], stride, padding, dilation)
    return src.new_empty([src.size(0), -(-weight_size[0] // block), *spatial, block])


def _convolution_transpose(
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
    window = zip(
        src.shape[2 : len(weight_size)], weight_size[2:], stride, padding, dilation, output_padding, strict=True
    )
    spatial = [(n - 1) * s - 2 * pad + d * (k - 1) + 1 + out for n, k, s, pad, d, out in window]
    return src.new_empty([src.size(0), -(-weight_size[1] * groups // block), *spatial, block])


def _out(dst: Tensor, first_block: int, src: Tensor, *_: object, **__: object) -> None:
    pass


def _convolution_chain(
    src: Tensor,
    src_blocking: Sequence[int],
    weights: Sequence[Tensor],
    channels: Sequence[int],
    biases: Sequence[Tensor | None],
    strides: Sequence[int],
    paddings: Sequence[int],
    dilations: Sequence[int],
    groups: Sequence[int],
    block: int,
    *_: object,
    **__: object,
) -> Tensor:
    spatial = list(src.shape[2:4])
    for i, weight in enumerate(weights):
        window = (pairs[2 * i : 2 * i + 2] for pairs in (strides, paddings, dilations))
        spatial = equivalents.convolution_size(spatial, weight.shape[2:4], *window)
    return src.new_empty([src.size(0), -(-channels[-1] // block), *spatial, block])


def _new_empty(like: Tensor, size: Sequence[int]) -> Tensor:
    return like.new_empty(size)


def _convolution_weight_gradient(
    src: Tensor,
    src_blocking: Sequence[int],
    diff_dst: Tensor,
    weight_size: Sequence[int],
    weight_order: Sequence[int],
    weight_blocking: Sequence[int],
    *window: Sequence[int] | int,
) -> Tensor:
    return _new_physical(src, weight_size, weight_order, weight_blocking, src.dtype)


def _batch_norm(
    src: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _batch_norm_scale_shift(
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return mean.new_empty(mean.shape), mean.new_empty(mean.shape)


def _batch_norm_statistics(src: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    return src.new_empty([channels], dtype=torch.float32), src.new_empty([channels], dtype=torch.float32)


def _batch_norm_backward(
    diff_dst: Tensor, src: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    diff_src = torch.empty_like(src, memory_format=torch.contiguous_format)
    return diff_src, torch.empty_like(mean), torch.empty_like(mean)


def _reduce_channels(src: Tensor, channels: int, how: str) -> Tensor:
    return src.new_empty([src.size(0), *src.shape[2:-1]])


def _find_channel(src: Tensor, channels: int, least: bool) -> tuple[Tensor, Tensor]:
    dst = _reduce_channels(src, channels, "max")
    return dst, torch.empty_like(dst, dtype=torch.int64)


def _softmax_channels(src: Tensor, channels: int, log: bool) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _layer_norm_channels(
    src: Tensor, channels: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dst = torch.empty_like(src, memory_format=torch.contiguous_format)
    return dst, _reduce_channels(src, channels, "mean"), _reduce_channels(src, channels, "mean")


def _softmax_channels_backward(diff_dst: Tensor, dst: Tensor, channels: int, log: bool) -> Tensor:
    return torch.empty_like(dst, memory_format=torch.contiguous_format)


def _pool(
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
    size = [*src.shape[:2], *output_size, src.size(4)]
    return src.new_empty(size), src.new_empty(size if indices else [0], dtype=torch.int64)


def _upsample(
    src: Tensor, output_size: Sequence[int], *_: str | bool | float | None, **__: bool | float | None
) -> Tensor:
    return src.new_empty([*src.shape[:2], *output_size, src.size(4)])


def _max_pool_backward(diff_dst: Tensor, indices: Tensor, src_size: Sequence[int]) -> Tensor:
    return diff_dst.new_empty([*diff_dst.shape[:2], *src_size, diff_dst.size(4)])


def _avg_pool_backward(
    diff_dst: Tensor, src_size: Sequence[int], *_: Sequence[int] | bool | int | None, **__: bool | int | None
) -> Tensor:
    return diff_dst.new_empty([*diff_dst.shape[:2], *src_size, diff_dst.size(4)])


def _upsample_backward(
    diff_dst: Tensor, src_size: Sequence[int], *_: str | bool | float | None, **__: bool | float | None
) -> Tensor:
    return diff_dst.new_empty([*diff_dst.shape[:2], *src_size, diff_dst.size(4)])


FAKES = {
    "reorder": _reorder,
    "convolution": _convolution,
    "convolution_transpose": _convolution_transpose,
    "convolution_out": _out,
    "convolution_transpose_out": _out,
    "copy_out": _out,
    "convolution_chain": _convolution_chain,
    "linear": equivalents.linear_aten,
    "new_empty": _new_empty,
    "convolution_weight_gradient": _convolution_weight_gradient,
    "batch_norm": _batch_norm,
    "batch_norm_scale_shift": _batch_norm_scale_shift,
    "batch_norm_statistics": _batch_norm_statistics,
    "batch_norm_backward": _batch_norm_backward,
    "reduce_channels": _reduce_channels,
    "find_channel": _find_channel,
    "softmax_channels": _softmax_channels,
    "layer_norm_channels": _layer_norm_channels,
    "softmax_channels_backward": _softmax_channels_backward,
    "pool": _pool,
    "upsample": _upsample,
    "max_pool_backward": _max_pool_backward,
    "avg_pool_backward": _avg_pool_backward,
    "upsample_backward": _upsample_backward,
}
