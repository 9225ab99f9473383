"""Calls that the handlers in C++ take, and calls that they leave to those in Python, for test_quick.py."""

import torch
import torch.nn.functional as F

import torch_blocked as tb

aten = torch.ops.aten


def image(channels=20, *, n=2, size=(5, 6), dtype=torch.float32, fmt=tb.blocked):
    return torch.randn(n, channels, *size).to(dtype).to(fmt)


def weight(*size, dtype=torch.float32):
    w = torch.randn(size).to(dtype)
    return w.to(tb.blocked.for_module()) if len(size) == 4 else w


def vectors(channels, dtype=torch.float32):
    """Weight, bias, mean and variance of a batch normalization."""
    return *torch.randn(3, channels, dtype=dtype), torch.rand(channels, dtype=dtype) + 0.5


def of_images(function, *channels, **kwargs):
    """A call, as a function that draws its arguments and one that takes them."""
    return lambda: [image(c, **kwargs) for c in channels], function


def conv(*args, src=20, size=(24, 20, 3, 3), bias=True, dtype=torch.float32, plain=False, function=F.conv2d):
    def draw():
        x = torch.randn(2, src, 9, 8) if plain else image(src, size=(9, 8), dtype=dtype)
        return [x, weight(*size, dtype=dtype), weight(size[0], dtype=dtype) if bias else None]

    return draw, lambda x, w, b: function(x, w, b, *args)


def batch_norm(dtype=torch.float32, channels=20, affine=True, fmt=tb.blocked):
    def draw():
        w, b, mean, var = vectors(channels)
        return [image(channels, dtype=dtype, fmt=fmt), mean, var, *((w, b) if affine else (None, None))]

    return draw, lambda *args: F.batch_norm(*args, False, 0.1, 1e-3)


def batch_norm_training(dtype=torch.float32, keep=True, **kwargs):
    def draw():
        w, b, mean, var = vectors(20)
        return [image(dtype=dtype, **kwargs), w, b, *((mean, var) if keep else (None, None))]

    return draw, lambda *args: aten.native_batch_norm.default(*args, True, 0.2, 1e-3)


def conv_backward(*wanted, src=20, size=(24, 20, 3, 3), groups=1, plain=False, dtype=torch.float32, window=((1,),) * 3):
    stride, padding, dilation = (v * (len(size) - 2) if len(v) == 1 else v for v in window)

    def draw():
        x = (torch.randn(2, src, *[9] * (len(size) - 2)) if plain else image(src, size=[9] * (len(size) - 2))).to(dtype)
        w = weight(*size, dtype=dtype)
        dst = [
            (9 + 2 * p - d * (k - 1) - 1) // s + 1
            for k, s, p, d in zip(size[2:], stride, padding, dilation, strict=True)
        ]
        return [image(size[0], size=dst, dtype=dtype), x, w]

    def call(grad, x, w):
        rest = [size[0]], stride, padding, dilation, False, [0] * len(stride), groups, list(wanted)
        return aten.convolution_backward.default(grad, x, w, *rest)

    return draw, call


def batch_norm_backward(*wanted, training=True, saved=True, dtype=torch.float32, affine=True):
    def draw():
        w, _, mean, var = vectors(20)
        return [image(dtype=dtype), image(dtype=dtype), w if affine else None, mean, var]

    def call(grad, x, w, mean, var):
        running, batch = ((None, None), (mean, var)) if saved else ((mean, var), (None, None))
        return aten.native_batch_norm_backward.default(grad, x, w, *running, *batch, training, 1e-3, list(wanted))

    return draw, call


def pointwise_backward(func, *scalars):
    return of_images(lambda grad, x: func(grad, x, *scalars), 32, 32)


def cat(dim, *sizes, dtype=torch.float32):
    return lambda: [torch.randn(s).to(dtype).to(tb.blocked) for s in sizes], lambda *xs: torch.cat(xs, dim)


TAKEN = {
    "convolution": conv(),
    "convolution, no bias": conv(bias=False),
    "convolution, window": conv((2, 1), (1, 0), (1, 2)),
    "convolution, one number": conv([2], [1], [1]),
    "convolution, pointwise": conv(size=(24, 20, 1, 1)),
    "convolution, depthwise": conv(1, 1, 1, 20, size=(20, 1, 3, 3)),
    "convolution, groups": conv(1, 1, 1, 2, src=32, size=(32, 16, 3, 3)),
    "convolution, plain src": conv(2, 1, src=3, size=(24, 3, 3, 3), plain=True),
    "convolution, bfloat16": conv(dtype=torch.bfloat16),
    "convolution, float16": conv(dtype=torch.float16),
    "batch_norm": batch_norm(),
    "batch_norm, not affine": batch_norm(affine=False),
    "batch_norm, bfloat16": batch_norm(torch.bfloat16),
    "batch_norm, training": batch_norm_training(),
    "batch_norm, training, nothing kept": batch_norm_training(keep=False),
    "batch_norm, training, one value": batch_norm_training(n=1, size=(1, 1)),
    "batch_norm, training, float16": batch_norm_training(dtype=torch.float16),
    "batch_norm_backward": batch_norm_backward(True, True, True),
    "batch_norm_backward, not affine": batch_norm_backward(True, False, False, affine=False),
    "batch_norm_backward, by running": batch_norm_backward(True, True, True, training=False, saved=False),
    "batch_norm_backward, bfloat16": batch_norm_backward(True, True, True, dtype=torch.bfloat16),
    "convolution_backward": conv_backward(True, True, True),
    "convolution_backward, weight": conv_backward(False, True, False),
    "convolution_backward, window": conv_backward(True, True, True, window=((2, 1), (1, 0), (1, 2))),
    "convolution_backward, depthwise": conv_backward(True, True, False, size=(20, 1, 3, 3), groups=20),
    "convolution_backward, plain src": conv_backward(False, True, True, src=3, size=(24, 3, 3, 3), plain=True),
    "convolution_backward, bfloat16": conv_backward(True, True, True, dtype=torch.bfloat16),
    "convolution_backward, other order": (
        lambda: [image(24, size=(9, 9)), image(20, size=(9, 9)), torch.randn(24, 20, 3, 3).to(tb.format("IOhw16i16o"))],
        conv_backward(True, True, True)[1],
    ),
    "threshold_backward": pointwise_backward(aten.threshold_backward, 0),
    "hardtanh_backward": pointwise_backward(aten.hardtanh_backward, -0.3, 0.4),
    "leaky_relu_backward": pointwise_backward(aten.leaky_relu_backward, 0.1, False),
    "silu_backward": of_images(aten.silu_backward, 20, 20),
    "sigmoid_backward": of_images(aten.sigmoid_backward, 20, 20),
    "gelu_backward": of_images(aten.gelu_backward, 20, 20),
    "clone": of_images(torch.clone, 20),
    "relu": of_images(torch.relu, 20),
    "relu_": of_images(torch.relu_, 20),
    "relu, order of outer axes": of_images(torch.relu, 20, fmt=tb.format("cAdb4a")),
    "relu, float64": of_images(torch.relu, 20, dtype=torch.float64),
    "relu, pooled": of_images(torch.relu, 16, size=(160, 160)),
    "silu": of_images(F.silu, 20),
    "silu, pooled": of_images(F.silu, 20, size=(100, 100)),
    "gelu": of_images(F.gelu, 20),
    "hardswish": of_images(F.hardswish, 20),
    "sigmoid": of_images(torch.sigmoid, 32),
    "sigmoid, pooled": of_images(torch.sigmoid, 16, size=(160, 160)),
    "relu6": of_images(F.relu6, 32),
    "relu6_": of_images(lambda x: F.relu6(x, inplace=True), 32),
    "leaky_relu": of_images(lambda x: F.leaky_relu(x, 0.2), 32),
    "add": of_images(torch.add, 20, 20),
    "add_": of_images(lambda x, y: x.add_(y), 20, 20),
    "add_, itself": of_images(lambda x: x.add_(x), 20),
    "add, pooled": of_images(torch.add, 16, 16, size=(160, 160)),
    "mul": of_images(torch.mul, 20, 20),
    "mul, squeeze and excite": (lambda: [image(), image(size=(1, 1))], torch.mul),
    "mul, the first broadcasts": (lambda: [image(size=(1, 1)), image()], torch.mul),
    "mul, batch broadcasts": (lambda: [image(n=1), image()], torch.mul),
    "mul by a number": of_images(lambda x: x * 2, 32),
    "add a number": of_images(lambda x: x + 0.5, 32),
    "add a number, bfloat16": of_images(lambda x: x + 0.3, 32, dtype=torch.bfloat16),
    "div_ by a number": of_images(lambda x: x.div_(3), 32),
    "mul, a value a pixel": (lambda: [image(32), torch.randn(2, 1, 5, 6)], torch.mul),
    "mul, a value a pixel, pooled": (lambda: [image(32, size=(99, 99)), torch.randn(1, 1, 99, 99)], torch.mul),
    "sub_, a value a pixel": (lambda: [image(32), torch.randn(2, 1, 5, 6)], lambda x, y: x.sub_(y)),
    "div, a value a pixel of all images": (lambda: [image(32), torch.rand(5, 6) + 1], torch.div),
    "mul, a value a channel": (lambda: [image(32), torch.randn(1, 32, 1, 1)], torch.mul),
    "mul, a value a channel, fewer dims": (lambda: [image(32, fmt=tb.nChw8c), torch.randn(32, 1, 1)], torch.mul),
    "add, a value a channel and image": (lambda: [image(32), torch.randn(2, 32, 1, 1)], torch.add),
    "div, a value a pixel, expanded": (
        lambda: [image(32), (torch.rand(2, 1, 5, 6) + 1).expand(2, 32, 5, 6)],
        torch.div,
    ),
    "mul, a number expanded": (lambda: [image(32), torch.randn(1).expand(2, 32, 5, 6)], torch.mul),
    "mul, a scalar tensor": (lambda: [image(32), torch.tensor(1.5)], torch.mul),
    "div": of_images(torch.div, 32, 32),
    **{name: of_images(getattr(torch, name), 20) for name in ("abs", "neg", "sqrt", "tanh", "tanh_")},
    **{name: of_images(getattr(torch, name), 32) for name in ("exp", "rsqrt", "square")},
    "elu": of_images(F.elu, 32),
    "mish": of_images(F.mish, 20),
    "clamp": of_images(lambda x: x.clamp(-0.5, 0.5), 32),
    "clamp_, one side": of_images(lambda x: x.clamp_(0.1), 32),
    "pow": of_images(lambda x: x**2, 32),
    "square, pooled": of_images(torch.square, 16, size=(160, 160)),
    "rsub": of_images(lambda x: 1 - x, 32),
    "maximum": of_images(torch.maximum, 20, 20),
    "minimum": of_images(torch.minimum, 20, 20),
    "sub": of_images(torch.sub, 20, 20),
    "mean": of_images(lambda x: x.mean((2, 3), keepdim=True), 20),
    "mean, from the end": of_images(lambda x: x.mean([-1, -2], True), 20),
    "sum": of_images(lambda x: x.sum((2, 3), keepdim=True), 20),
    "sum, from the end": of_images(lambda x: x.sum((3, -2), keepdim=True), 20),
    "div by a number": of_images(lambda x: aten.div.Scalar(x, 3.0), 32),
    "adaptive_avg_pool2d": of_images(lambda x: F.adaptive_avg_pool2d(x, 1), 20),
    "adaptive_avg_pool2d, windows": of_images(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), 20),
    "adaptive_max_pool2d": of_images(lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), 20),
    "max_pool2d": of_images(lambda x: F.max_pool2d(x, 2), 20),
    "max_pool2d, window": of_images(lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2), ceil_mode=True), 20),
    "max_pool2d, indices": of_images(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), 20),
    "max_pool2d, one number, no stride": of_images(lambda x: aten.max_pool2d_with_indices(x, [2], []), 20),
    "max_pool2d, ends in the padding": of_images(lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), 20),
    "avg_pool2d": of_images(lambda x: F.avg_pool2d(x, 2), 20),
    "avg_pool2d, window": of_images(lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), True, False), 20),
    "avg_pool2d, divisor": of_images(lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=7), 20),
    "interpolate, factors": of_images(lambda x: F.interpolate(x, scale_factor=(1.7, 2.3)), 20),
    "interpolate, size": of_images(lambda x: F.interpolate(x, (9, 4)), 20),
    "interpolate, bilinear": of_images(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 20),
    "interpolate, bilinear, corners": of_images(
        lambda x: F.interpolate(x, (7, 8), mode="bilinear", align_corners=True), 20
    ),
    "interpolate, factors computed anew": of_images(
        lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True), 20
    ),
    "cat": cat(1, (2, 16, 4, 5), (2, 32, 4, 5), (2, 20, 4, 5)),
    "cat, one": cat(1, (2, 20, 4, 5)),
    "cat, rows": cat(-2, (2, 20, 4, 5), (2, 20, 3, 5)),
    "cat, images": cat(0, (2, 20, 4, 5), (1, 20, 4, 5), dtype=torch.bfloat16),
}

LEFT = {
    "convolution, transposed": conv(size=(20, 24, 3, 3), bias=False, function=F.conv_transpose2d),
    "convolution, plain src": conv(src=32, size=(24, 32, 3, 3), plain=True),
    "convolution, other dtype": conv(dtype=torch.float64),
    "convolution, too few channels": conv(size=(24, 21, 3, 3)),
    "convolution, no groups": conv(1, 1, 1, 0),
    "convolution, stride 0": conv(0),
    "convolution, other blocks": (
        lambda: [image(fmt=tb.format("nChw4c")), weight(24, 20, 3, 3)],
        lambda x, w: F.conv2d(x, w),
    ),
    "convolution_backward, plain gradient": (
        lambda: [torch.randn(2, 24, 9, 9), image(20, size=(9, 9)), weight(24, 20, 3, 3)],
        conv_backward(True, True, True)[1],
    ),
    "hardtanh_backward, padded": of_images(lambda g, x: aten.hardtanh_backward(g, x, -0.3, 0.4), 20, 20),
    "batch_norm, training, half, no vectors": (
        lambda: [image(dtype=torch.bfloat16)],
        lambda x: aten.native_batch_norm.default(x, None, None, None, None, True, 0.1, 1e-3),
    ),
    "batch_norm, half": (
        lambda: [image(dtype=torch.bfloat16), *vectors(20, torch.bfloat16)],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
    ),
    "batch_norm, order of rows": batch_norm(fmt=tb.format("aBcd2b4b")),
    "exp, padded": of_images(torch.exp, 20),
    "rsqrt, padded": of_images(torch.rsqrt, 20),
    "clamp, padded": of_images(lambda x: x.clamp(0.1), 20),
    "pow, padded": of_images(lambda x: x**0, 20),
    "pow of complex numbers": of_images(lambda x: x**2j, 32),
    "sigmoid, padded": of_images(torch.sigmoid, 20),
    "relu6, padded": of_images(F.relu6, 20),
    "hardsigmoid_, padded": of_images(lambda x: F.hardsigmoid(x, inplace=True), 20),
    "mul by a number, padded": of_images(lambda x: x * 2, 20),
    "add a number, alpha": of_images(lambda x: torch.add(x, 2, alpha=3), 32),
    "mul by a great number": of_images(lambda x: x * 2**70, 32),
    "mul by a bool": of_images(lambda x: x * True, 32),
    "mul by a complex number": of_images(lambda x: x * 2j, 32),
    "add, alpha": of_images(lambda x, y: torch.add(x, y, alpha=2), 20, 20),
    "add, integers": of_images(torch.add, 20, 20, dtype=torch.int32),
    "add, two dtypes": (lambda: [image(), image(dtype=torch.bfloat16)], torch.add),
    "add, two formats": (lambda: [image(), image(fmt=tb.format("nChw4c"))], torch.add),
    "add, plain": (lambda: [image(), torch.randn(2, 20, 5, 6)], torch.add),
    "add, plain, whole blocks": (lambda: [image(32), torch.randn(2, 32, 5, 6)], torch.add),
    "add, plain of more dims": (lambda: [image(32), torch.randn(1, 1, 1, 1, 1)], torch.add),
    "sub from a plain tensor": (lambda: [torch.randn(2, 1, 5, 6), image(32)], torch.sub),
    "mul, a value a pixel, padded": (lambda: [image(), torch.randn(2, 1, 5, 6)], torch.mul),
    "mul, a value a channel, padded": (lambda: [image(), torch.randn(20, 1, 1)], torch.mul),
    "mul, a value a pixel of another dtype": (lambda: [image(32), torch.randn(2, 1, 5, 6).double()], torch.mul),
    "mul, a scalar tensor of another dtype": (lambda: [image(32), torch.tensor(2.0).double()], torch.mul),
    "div, padded": of_images(torch.div, 20, 20),
    "add, a value a pixel, expanded and padded": (
        lambda: [image(), torch.randn(2, 1, 5, 6).expand(2, 20, 5, 6)],
        torch.add,
    ),
    "mul_, infinity, expanded and padded": (
        lambda: [image(), torch.full((2, 1, 5, 6), torch.inf).expand(2, 20, 5, 6)],
        lambda x, y: x.mul_(y),
    ),
    "sub, more images": (lambda: [image(32, n=1), torch.randn(2, 1, 5, 6)], torch.sub),
    "mul_, a value a pixel of more images": (lambda: [image(32, n=1), torch.randn(2, 1, 5, 6)], lambda x, y: x.mul_(y)),
    "add, a blocked axis broadcasts": (lambda: [image(), image(1)], torch.add),
    "add_, greater": (lambda: [image(n=1), image()], lambda x, y: x.add_(y)),
    "add, no common size": (lambda: [image(), image(size=(5, 7))], torch.add),
    "max_pool2d, float64": of_images(lambda x: F.max_pool2d(x, 2), 20, dtype=torch.float64),
    "max_pool2d, other blocks": of_images(lambda x: F.max_pool2d(x, 2), 20, fmt=tb.format("nChw4c")),
    "max_pool2d, more padding than half a window": of_images(lambda x: F.max_pool2d(x, 2, 2, 2), 20),
    "max_pool2d, larger than the image": of_images(lambda x: F.max_pool2d(x, 7), 20),
    "max_pool2d, stride 0": of_images(lambda x: F.max_pool2d(x, 2, 0), 20),
    "max_pool2d, three numbers": of_images(lambda x: aten.max_pool2d_with_indices(x, [2, 2, 2]), 20),
    "max_pool2d, no image": of_images(lambda x: F.max_pool2d(x, 2), 20, n=0),
    "avg_pool2d, no divisor": of_images(lambda x: F.avg_pool2d(x, 2, divisor_override=0), 20),
    "avg_pool2d, one row": of_images(lambda x: F.avg_pool2d(x, 2), 20, size=(1, 6)),
    "adaptive_max_pool2d, no window": of_images(lambda x: F.adaptive_max_pool2d(x, (0, 2)), 20),
    "interpolate, bfloat16": of_images(lambda x: F.interpolate(x, scale_factor=2), 20, dtype=torch.bfloat16),
    "interpolate, to nothing": of_images(lambda x: F.interpolate(x, scale_factor=0.1), 20),
    "mean, of images": of_images(lambda x: x.mean((0, 2), keepdim=True), 20),
    "mean, dims go": of_images(lambda x: x.mean((2, 3)), 20),
    "mean, one dim": of_images(lambda x: x.mean(2, keepdim=True), 20),
    "sum, of images": of_images(lambda x: x.sum((0, 2, 3)), 20),
    "sum, bfloat16": of_images(lambda x: x.sum((2, 3), keepdim=True), 20, dtype=torch.bfloat16),
    "div by a number, padded": of_images(lambda x: aten.div.Scalar(x, 0), 20),
    "mean, float64": of_images(lambda x: x.mean((2, 3), keepdim=True), 20, dtype=torch.float64),
    "adaptive_avg_pool2d, nothing": of_images(lambda x: F.adaptive_avg_pool2d(x, (3, 0)), 20),
    "mean, dtype": of_images(lambda x: x.mean((2, 3), keepdim=True, dtype=torch.float64), 20),
    "cat, a block is cut": cat(1, (2, 20, 4, 5), (2, 16, 4, 5)),
    "cat, nothing": cat(1, (2, 16, 4, 5), (2, 0, 4, 5)),
    "cat, other rows": cat(1, (2, 16, 4, 5), (2, 16, 5, 5)),
    "cat, no such axis": cat(4, (2, 16, 4, 5)),
    "cat, plain": (lambda: [image(), torch.randn(2, 20, 5, 6)], lambda *xs: torch.cat(xs)),
}
