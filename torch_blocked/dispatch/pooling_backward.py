"""The gradients of pooling and resampling: by the kernels for what the forward has one for, else as a batch of images.

The gradient of a blocked tensor is blocked, whatever the format of the one that comes in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.half import in_float32
from torch_blocked.dispatch.pooling import Window, blocked_of, has_kernel, images_of, is_blocked_image, like
from torch_blocked.dispatch.registry import register
from torch_blocked.reorder import to_blocking
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


# ---- Pooling


@register(
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool3d_backward.default,
)
def gradient_of_images(func: OpOverload, grad: Tensor, x: Tensor, *args: object) -> Tensor:
    """Of what treats each channel alike; `x`, and the indices that may be among `args`, as the operator takes them."""
    if func in _OF_MAXIMA and max(args[3]) > 1:
        grad, args = _without_outside(grad, x, args)
    tensors = [grad, *(a for a in args if isinstance(a, Tensor))]
    fits = is_blocked_image(func, x) and all(t.dim() == x.dim() and t.shape[:2] == x.shape[:2] for t in tensors)
    if not fits or not all(t.numel() for t in tensors):
        return fallback(func, grad, x, *args)
    given = [images_of(to_blocking(a, x._blocking)) if isinstance(a, Tensor) else a for a in (grad, x, *args)]
    if func is aten.adaptive_max_pool3d_backward.default:  # reads the indices as if they were row-major
        given = [a.contiguous() for a in given]
    return blocked_of(func(*given), x)


_OF_MAXIMA = {aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default}


def _without_outside(grad: Tensor, x: Tensor, args: tuple) -> tuple[Tensor, tuple]:
    """The gradient and the arguments, indices last, without those of windows that are all padding.

    Their indices are outside the plane, where ATen would write. Only windows with a dilation can be all padding.
    """
    *how, indices = args
    outside = (indices < 0) | (indices >= x.shape[2:].numel())
    return grad.masked_fill(outside, 0), (*how, indices.masked_fill(outside, 0))


def _has_kernel(grad: Tensor, x: Tensor, indices: Tensor | None = None) -> bool:
    """Whether the operators take the gradient of `x`'s windows, and the indices of maxima."""
    if not has_kernel(x) or grad.dtype is not torch.float32 or grad.dim() != 4 or not grad.numel():
        return False
    if indices is not None and (indices.dtype is not torch.int64 or indices.shape != grad.shape):
        return False
    return grad.shape[:2] == x.shape[:2]


def _fits(window: Window | None, grad: Tensor, x: Tensor, ceil_mode: bool) -> bool:
    """Whether there are as many windows on `x` as `grad` has pixels."""
    return window is not None and window.dst_size(x.shape[2:], ceil_mode) == list(grad.shape[2:])


@register(aten.max_pool2d_with_indices_backward.default)
def max_pool_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each gradient goes to the pixel that was the maximum."""
    window = Window.of(kernel_size, stride, padding, dilation)
    if not _has_kernel(grad, x, indices) or not _fits(window, grad, x, ceil_mode):
        return gradient_of_images(func, grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices)
    return _to_maxima(grad, x, indices)


@register(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool_backward(func: OpOverload, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Each gradient goes to the pixel that was the maximum."""
    if not _has_kernel(grad, x, indices):
        return gradient_of_images(func, grad, x, indices)
    return _to_maxima(grad, x, indices)


def _to_maxima(grad: Tensor, x: BlockedTensor, indices: Tensor) -> BlockedTensor:
    diff_dst, found = to_blocking(grad, x._blocking), to_blocking(indices, x._blocking)
    return like(library.max_pool_backward_op(diff_dst, found, x.shape[2:]), x)


@register(aten.avg_pool2d_backward.default)
def avg_pool_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Each gradient is shared by its window."""
    window = Window.of(kernel_size, stride, padding)
    if not _has_kernel(grad, x) or not _fits(window, grad, x, ceil_mode) or divisor_override == 0:
        how = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return gradient_of_images(func, grad, x, *how)
    diff_dst = to_blocking(grad, x._blocking)
    how = (*window[:3], count_include_pad, divisor_override)
    return like(library.avg_pool_backward_op(diff_dst, x.shape[2:], *how), x)


@register(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool_backward(func: OpOverload, grad: Tensor, x: Tensor) -> Tensor:
    """Each gradient is shared by its window."""
    if not _has_kernel(grad, x):
        return gradient_of_images(func, grad, x)
    return like(library.avg_pool_backward_op(to_blocking(grad, x._blocking), x.shape[2:]), x)


# ---- Resampling: PyTorch gives the sizes, not src


@register(
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
)
@in_float32()
def upsample_gradient_of_images(
    func: OpOverload, grad: BlockedTensor, output_size: list[int], input_size: list[int], *how: object
) -> Tensor:
    """Of what treats each channel alike."""
    if not is_blocked_image(func, grad) or list(grad.shape[:2]) != list(input_size[:2]):
        return fallback(func, grad, output_size, input_size, *how)
    images = images_of(grad._physical)
    return blocked_of(func(images, output_size, [*images.shape[:2], *input_size[2:]], *how), grad)


_MODES = {
    aten.upsample_nearest2d_backward.default: "nearest",
    aten._upsample_nearest_exact2d_backward.default: "nearest-exact",
    aten.upsample_bilinear2d_backward.default: "bilinear",
}


@register(*_MODES)
@in_float32()
def upsample_backward(
    func: OpOverload, grad: BlockedTensor, output_size: list[int], input_size: list[int], *how: object
) -> Tensor:
    """`how` is align_corners (of bilinear), then the scales."""
    size = [*input_size[:2], *output_size]
    if not has_kernel(grad) or list(grad.shape) != size or len(input_size) != 4 or any(n < 1 for n in input_size):
        return upsample_gradient_of_images(func, grad, output_size, input_size, *how)
    mode = _MODES[func]
    how = how if mode == "bilinear" else (False, *how)
    return like(library.upsample_backward_op(grad._physical, input_size[2:], mode, *how), grad)
