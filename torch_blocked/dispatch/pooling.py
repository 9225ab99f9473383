"""Pooling and resampling over H, W: `torch_blocked::pool` and `torch_blocked::upsample`, float32 on the CPU.

For the rest, 1-D and 3-D among it, a blocked tensor is, block by block, a batch of channels_last images.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.half import in_float32
from torch_blocked.dispatch.physical import clear_padding
from torch_blocked.dispatch.registry import Handler, look_up, register
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


# ---- As a batch of images


def images_of(physical: Tensor) -> Tensor:
    """(n, c / b, ..., b) as (n * c / b, b, ...), strides channels_last: a view where the outer axes merge."""
    return physical.flatten(0, 1).movedim(-1, 1)


def blocked_of(images: Tensor, x: BlockedTensor) -> BlockedTensor:
    """The way back, for images of any size and the blocks of `x`."""
    return like(images.movedim(1, -1).contiguous().unflatten(0, x._physical.shape[:2]), x)


def like(physical: Tensor, x: BlockedTensor) -> BlockedTensor:
    """A physical tensor of other spatial sizes and the blocks of `x`."""
    return BlockedTensor(physical, x._blocking, (*x.shape[:2], *physical.shape[2:-1]))


@functools.cache
def spatial_dims(func: OpOverload) -> int:
    """1 of `upsample_linear1d`, 2 of `avg_pool2d`, ..."""
    return int(re.search(r"(\d)d", func._schema.name)[1])


def is_blocked_image(func: OpOverload, x: Tensor) -> bool:
    """Whether `x` is not empty, of as many dims as `func` takes batches of, with one block of channels."""
    if not isinstance(x, BlockedTensor) or x.dim() != 2 + spatial_dims(func) or not x.numel():
        return False
    return len(x._blocking) == 1 and x._blocking.axes == (1,)


@register(aten.avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def per_channel(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """An operator that treats each channel alike and makes zero of zeros: of one answer or more, all blocked."""
    if not is_blocked_image(func, x):
        return fallback(func, x, *args, **kwargs)
    return _each(lambda images: blocked_of(images, x), func(images_of(x._physical), *args, **kwargs))


def per_plane(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """The same by PyTorch's kernels of images that are not channels_last: (b, n * c / b, ...) are as much a batch."""
    if not is_blocked_image(func, x):
        return fallback(func, x, *args, **kwargs)
    answers = func(images_of(x._physical).transpose(0, 1), *args, **kwargs)
    return _each(lambda images: blocked_of(images.transpose(0, 1), x), answers)


def _each(function: Callable[[Tensor], Tensor], answers: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tuple(map(function, answers)) if isinstance(answers, tuple) else function(answers)


@register(
    aten.upsample_bicubic2d.default,
    aten.upsample_linear1d.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_nearest1d.default,
    aten._upsample_nearest_exact1d.default,
)
@in_float32()  # PyTorch interpolates channels-last images of half precision in another precision
def upsample_per_channel(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> Tensor:
    """As `per_channel`."""
    return per_channel(func, x, *args, **kwargs)


@register(aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default)
@in_float32()
def nearest_of_images(func: OpOverload, x: BlockedTensor, output_size: list[int], *scales: float | None) -> Tensor:
    """The nearest pixel.

    Of channels_last images PyTorch ignores a scale where the size stays or doubles, and finds that of doubles in single
    precision.
    """
    sizes = zip(x.shape[2:], output_size, scales, strict=False)
    ignored = any(m in (n, 2 * n) and scale is not None and m != n * scale for n, m, scale in sizes)
    return (per_plane if ignored or x.dtype is torch.float64 else per_channel)(func, x, output_size, *scales)


@register(aten.adaptive_max_pool3d.default)
def max_of_images(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Values and indices, both blocked. An index counts within its plane, whatever the format.

    PyTorch counts pixels of channels_last images of integers by integers of their type, and refuses larger planes.
    """
    return _max_by(per_channel if x.is_floating_point() else per_plane, func, x, *args, **kwargs)


@register(aten.max_pool3d_with_indices.default)
@in_float32()
def max_of_volumes(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """As `max_of_images`.

    Where all are -inf PyTorch answers a wrong index of channels_last volumes in half precision, and of channels that
    are less than a vector.
    """
    if is_blocked_image(func, x) and x._blocking.block(1) * x.itemsize % _vector_bytes() != 0:
        return _max_by(per_plane, func, x, *args, **kwargs)
    return max_of_images(func, x, *args, **kwargs)


@functools.cache
def _vector_bytes() -> int:
    """Of PyTorch's kernels; those that are compiled for no CPU have vectors as AVX2's."""
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


def _max_by(how: Handler, func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    answers = how(func, x, *args, **kwargs)
    for y in answers:  # the maximum of zeros is at some index, that of an empty window -inf
        if isinstance(y, BlockedTensor):  # no fallback's
            clear_padding(y._physical, y._blocking, y.shape)
    return answers


# ---- By the kernels

_CHANNELS = (Blocking(((1, 8),)), Blocking(((1, 16),)))


def has_kernel(x: Tensor) -> bool:
    """Whether the operators take `x`."""
    return (
        isinstance(x, BlockedTensor)
        and x._blocking in _CHANNELS
        and x.dim() == 4
        and x.dtype is torch.float32
        and x.is_cpu
        and x.numel() > 0
    )


def are_sizes(sizes: Sequence[int]) -> bool:
    """Whether the operators take them as dst's h, w; of others PyTorch says what is wrong."""
    return len(sizes) == 2 and all(1 <= n <= 2**30 for n in sizes)


class Window(NamedTuple):
    """The windows' sizes, each a pair (h, w)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)

    @staticmethod
    def of(kernel: object, stride: object, padding: object, dilation: object = 1) -> Window | None:
        """As PyTorch reads its arguments; None for those that it refuses."""
        return _checked_window(_tuple(kernel), _tuple(stride or kernel), _tuple(padding), _tuple(dilation))

    def dst_size(self, src_size: Sequence[int], ceil_mode: bool) -> list[int]:
        """The windows along each axis; those that would start in the padding at the end are dropped."""
        sizes = []
        for n, k, s, p, d in zip(src_size, *self, strict=True):
            span = n + 2 * p - d * (k - 1) - 1
            size = (span + (s - 1 if ceil_mode else 0)) // s + 1
            sizes.append(size - 1 if ceil_mode and (size - 1) * s >= n + p else size)
        return sizes


def _tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


@functools.lru_cache(maxsize=1024)  # a network has few windows, and a call on a small image is short
def _checked_window(*values: tuple[int, ...]) -> Window | None:
    pairs = [v * 2 if len(v) == 1 else v for v in values]
    if any(len(pair) != 2 for pair in pairs):
        return None
    window = Window(*pairs)
    least, most = min(*window.kernel, *window.stride, *window.dilation), max(map(max, window))
    too_wide = any(p > k // 2 for p, k in zip(window.padding, window.kernel, strict=True))
    return None if least < 1 or min(window.padding) < 0 or most > 2**24 or too_wide else window


@register(aten.max_pool2d_with_indices.default)
def max_pool_with_indices(
    func: OpOverload,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int] = (),
    padding: list[int] = 0,
    dilation: list[int] = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Values and indices, both blocked. An index counts within its plane, whatever the format."""
    if not has_kernel(x):
        return max_of_images(func, x, kernel_size, stride, padding, dilation, ceil_mode)
    ys = _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, indices=True)
    return ys or fallback(func, x, kernel_size, stride, padding, dilation, ceil_mode)


@register(aten.max_pool2d.default)
def max_pool_whole(
    func: OpOverload,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int] = (),
    padding: list[int] = 0,
    dilation: list[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """What `inference_mode` delivers, not yet taken apart: no one asks for the indices."""
    if has_kernel(x):
        ys = _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, indices=False)
        if ys is not None:
            return ys[0]
    return aten.max_pool2d_with_indices.default(x, kernel_size, stride, padding, dilation, ceil_mode)[0]


def _max_pool(
    x: BlockedTensor, kernel: object, stride: object, padding: object, dilation: object, ceil_mode: bool, indices: bool
) -> tuple[Tensor, ...] | None:
    """None where PyTorch says what is wrong."""
    window = Window.of(kernel, stride, padding, dilation)
    size = window and window.dst_size(x.shape[2:], ceil_mode)
    if not size or any(n < 1 for n in size):
        return None
    dst, found = library.pool_op(x._physical, x.size(1), size, "max", *window, indices=indices)
    return (like(dst, x), like(found, x)) if indices else (like(dst, x),)


@register(aten.avg_pool2d.default)
def avg_pool(
    func: OpOverload,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int] = (),
    padding: list[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The average of each window."""
    if not has_kernel(x):
        return per_channel(func, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    window = Window.of(kernel_size, stride, padding)
    size = window and window.dst_size(x.shape[2:], ceil_mode)
    if not size or any(n < 1 for n in size) or divisor_override == 0:
        return fallback(func, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    dst, _ = library.pool_op(x._physical, x.size(1), size, "avg", *window, count_include_pad, divisor_override)
    return like(dst, x)


def global_average(x: BlockedTensor) -> BlockedTensor:
    """The averages over H, W, (n, c, 1, 1), of an `x` that has a kernel."""
    return like(library.pool_op(x._physical, x.size(1), (1, 1), "avg")[0], x)


def global_sum(x: BlockedTensor) -> BlockedTensor:
    """The sums over H, W, (n, c, 1, 1), of an `x` that has a kernel: one window, divided by 1."""
    window = Window(x.shape[2:], x.shape[2:], (0, 0))
    return like(library.pool_op(x._physical, x.size(1), (1, 1), "avg", *window, divisor_override=1)[0], x)


def global_maximum(x: BlockedTensor) -> BlockedTensor:
    """The greatest over H, W, (n, c, 1, 1), of an `x` that has a kernel."""
    return like(library.pool_op(x._physical, x.size(1), (1, 1), "max")[0], x)


@register(aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool(func: OpOverload, x: Tensor, output_size: list[int]) -> Tensor:
    """As many windows as `output_size` says. `inference_mode` delivers the second, not yet taken apart."""
    if not has_kernel(x):
        return per_channel(func, x, output_size)
    if not are_sizes(output_size):
        return fallback(func, x, output_size)
    return like(library.pool_op(x._physical, x.size(1), output_size, "avg")[0], x)


@register(aten.adaptive_max_pool2d.default)
def adaptive_max_pool(func: OpOverload, x: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    """As many windows as `output_size` says; values and indices."""
    if not has_kernel(x):
        return max_of_images(func, x, output_size)
    if not are_sizes(output_size):
        return fallback(func, x, output_size)
    dst, found = library.pool_op(x._physical, x.size(1), output_size, "max", indices=True)
    return like(dst, x), like(found, x)


_NEAREST = {aten.upsample_nearest2d.default: "nearest", aten._upsample_nearest_exact2d.default: "nearest-exact"}


@register(*_NEAREST)
@in_float32()
def upsample_nearest(
    func: OpOverload,
    x: Tensor,
    output_size: list[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """The nearest pixel."""
    if not has_kernel(x):
        return nearest_of_images(func, x, output_size, scales_h, scales_w)
    if not are_sizes(output_size):
        return fallback(func, x, output_size, scales_h, scales_w)
    return like(library.upsample_op(x._physical, output_size, _NEAREST[func], False, scales_h, scales_w), x)


@register(aten.upsample_bilinear2d.default)
@in_float32()
def upsample_bilinear(
    func: OpOverload,
    x: Tensor,
    output_size: list[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """Between the four nearest pixels."""
    if not has_kernel(x):
        return per_channel(func, x, output_size, align_corners, scales_h, scales_w)
    if not are_sizes(output_size):
        return fallback(func, x, output_size, align_corners, scales_h, scales_w)
    return like(library.upsample_op(x._physical, output_size, "bilinear", align_corners, scales_h, scales_w), x)


_WHOLE = {
    aten.upsample_nearest2d.vec: aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.vec: aten._upsample_nearest_exact2d.default,
    aten.upsample_bilinear2d.vec: aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.vec: aten.upsample_bicubic2d.default,
    aten.upsample_linear1d.vec: aten.upsample_linear1d.default,
    aten.upsample_trilinear3d.vec: aten.upsample_trilinear3d.default,
    aten.upsample_nearest1d.vec: aten.upsample_nearest1d.default,
    aten.upsample_nearest3d.vec: aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.vec: aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact3d.vec: aten._upsample_nearest_exact3d.default,
}


@register(*_WHOLE)
def upsample_whole(
    func: OpOverload, x: Tensor, output_size: list[int] | None, *align_corners_and_scales: object
) -> Tensor:
    """What `inference_mode` delivers, not yet taken apart: a size or factors."""
    *align_corners, scales = align_corners_and_scales
    ndim = spatial_dims(func)
    if x.dim() != 2 + ndim or (output_size is None) == (scales is None) or len(output_size or scales) != ndim:
        return fallback(func, x, output_size, *align_corners_and_scales)
    if output_size is None:
        if not all(abs(scale) < math.inf for scale in scales):  # PyTorch says what is wrong
            return fallback(func, x, output_size, *align_corners_and_scales)
        output_size = [torch.sym_int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]
    whole = _WHOLE[func]
    return look_up(whole)(whole, x, output_size, *align_corners, *(scales or [None] * ndim))
