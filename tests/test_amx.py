"""Convolutions on tiles of bfloat16: as exact as float32, and everything that the vectors' are."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import VECTORS, padding_is_zero
from kernel_cases import CONVOLUTIONS, SHAPES, assert_same_in_python_threads, pair, run
from test_post_ops import ACTIVATIONS, check_convolution, solved_once

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import weight_format

pytestmark = pytest.mark.skipif(tb.isa() != "amx", reason="this CPU has no tiles, or may not use them")

# (n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups): tiles of several images, sums of many steps, threads
# that share the output channels, parts of weights that are kept or made for each tile, dst beyond the caches.
MORE_SHAPES = [
    (5, 64, 200, 20, 20, 1, 1, 1, 0, 1, 1),
    (1, 600, 300, 9, 9, 1, 1, 1, 0, 1, 1),
    (1, 70, 600, 7, 7, 1, 1, 1, 0, 1, 1),
    (2, 100, 72, 19, 23, 3, 3, 1, 1, 1, 1),
    (1, 530, 40, 28, 29, 1, 1, 1, 0, 1, 1),
    (1, 270, 530, 13, 14, 3, 3, 2, 1, 1, 1),
    (9, 33, 17, 1, 1, 1, 1, 1, 0, 1, 1),
    (40, 64, 48, 4, 4, 3, 3, 1, 1, 1, 1),
    (3, 48, 130, 90, 91, 1, 1, 1, 0, 1, 1),
]
DENSE = [shape for shape in SHAPES if shape[1] >= 16 and shape[-1] == 1] + MORE_SHAPES


@functools.cache
def solved(shape):
    n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, kh, kw), torch.randn(oc)
    args = (pair(stride), pair(padding), pair(dilation), groups)
    return x, w, b, args, F.conv2d(x.double(), w.double(), b.double(), *args)


def convolve(x, w, b, args, dense=False, **post_ops):
    return run(x, w, b, args, tb.nChw16c, weight_format(w.shape, 16), 16, dense, **post_ops)


def error(y, expected):
    assert padding_is_zero(y)
    return float((y.to_dense() - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("dense", [False, True], ids=["strided", "dense"])
@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_convolution(tiles, caches, guarded, shape, dense):
    x, w, b, args, expected = solved(shape)
    name = tb.algorithm(x.to(tb.blocked), w.to(tb.OIhw16i16o), stride=args[0], padding=args[1], dilation=args[2]).name
    assert name == "direct_amx"
    assert error(convolve(x, w, b, args, dense), expected) < 4e-6


@pytest.mark.parametrize("shape", [s for s in CONVOLUTIONS if s[1] >= 16 and s[-1] == 1], ids=str)
def test_one_and_three_dims(tiles, guarded, shape):
    n, ic, oc, src, kernel, stride, padding, dilation, groups = shape
    x, w, b = torch.randn(n, ic, *src), torch.randn(oc, ic, *kernel), torch.randn(oc)
    args = (stride, padding, dilation, False, [0] * len(src), groups)
    expected = torch.convolution(x.double(), w.double(), b.double(), *args)
    y = torch.convolution(x.to(tb.blocked), w.to(weight_format(w.shape, 16)), b, *args)
    assert error(y, expected) < 4e-6


@pytest.mark.parametrize("residual_last", [False, True], ids=["residual first", "residual last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 20, 37, (9, 8), (3, 3), ((2, 1), (1, 1), (1, 1), 1)),
        (1, 20, 53, (9, 17), (1, 1), ((1, 1), (0, 0), (1, 1), 1)),
        (1, 64, 48, (16, 16), (1, 1), ((1, 1), (0, 0), (1, 1), 1)),  # the sums lie in dst
        (1, 300, 80, (8, 8), (1, 1), ((1, 1), (0, 0), (1, 1), 1)),
    ],
    ids=str,
)
def test_post_ops(tiles, guarded, shape, activation, residual_last):
    check_convolution(solved_once(*shape), shape[-1], "never", activation, residual_last)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels", [64, 512, 2048])
def test_error_is_below_that_of_float32(tiles, channels, kernel):
    """Of the largest sums, that of oneDNN's convolution, and the bound of all direct ones."""
    x, w = torch.randn(1, channels, 14, 14), torch.randn(64, channels, kernel, kernel)
    args = ((1, 1), (kernel // 2,) * 2, (1, 1), 1)
    expected = F.conv2d(x.double(), w.double(), None, *args)
    plain = float((F.conv2d(x, w, None, *args) - expected).abs().max() / expected.square().mean().sqrt())
    got = error(convolve(x, w, None, args), expected)
    assert got < min(3e-6, 2 * plain), f"{got:.1e}, float32 {plain:.1e}"


@pytest.mark.parametrize(
    "scale, bound", [(1e-36, 2e-2), (1e-31, 4e-6), (1e-18, 4e-6), (1e18, 4e-6), (1e31, 4e-6), (1e36, 2e-2)]
)
def test_magnitudes(tiles, scale, bound):
    """Parts below the least normal number, 1.2e-38, are lost."""
    x, w, args = torch.randn(1, 64, 9, 9), torch.randn(48, 64, 3, 3), ((1, 1), (1, 1), (1, 1), 1)
    for src, wei in ((x * scale, w), (x, w * scale), (x * scale, w / scale)):
        expected = F.conv2d(src.double(), wei.double(), None, *args)
        assert error(convolve(src, wei, None, args), expected) < bound


# What has no parts, or parts whose products are not a number although float32's are.
UNUSUAL = [float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4028e38, 1e19]


@pytest.mark.parametrize("where", ["src", "weight"])
@pytest.mark.parametrize("value", UNUSUAL, ids=str)
def test_what_has_no_parts(tiles, value, where):
    x, w = torch.rand(2, 40, 17, 18) + 0.5, torch.randint(1, 4, (37, 40, 3, 3)) / 4
    (x if where == "src" else w)[1, 7, 2, 1] = value
    args = ((1, 1), (1, 1), (1, 1), 1)
    library.set_isa(VECTORS)
    expected = convolve(x, w, None, args).physical
    library.set_isa("amx")
    y = convolve(x, w, None, args)
    assert padding_is_zero(y)
    anew = slice(1, 2) if where == "src" else slice(None)  # the images that no tile computes
    assert torch.equal(y.physical[anew].nan_to_num(0, 1, 2), expected[anew].nan_to_num(0, 1, 2))
    torch.testing.assert_close(y.physical, expected, equal_nan=True)


@pytest.mark.parametrize("x, w", [(1e30, 1e30), (3e20, -7e25), (1.8446743e19, 1.8446743e19), (-3e38, 2)])
def test_products_that_overflow(tiles, x, w):
    """As float32's: an infinity, not the NaN that infinities of both signs make, or what just does not overflow."""
    src, wei = torch.zeros(1, 32, 4, 4), torch.zeros(16, 32, 1, 1)
    src[:, 3], wei[:, 3] = x, w
    expected = F.conv2d(src, wei)
    torch.testing.assert_close(F.conv2d(src.to(tb.blocked), wei).to_dense(), expected)


def test_images_do_not_depend_on_each_other(tiles):
    x, w, b, args, _ = solved((3, 300, 48, 6, 6, 3, 3, 1, 1, 1, 1))
    y = convolve(x, w, b, args).physical
    x = x.clone()
    x[1, 7, 2, 2] = float("nan")
    other = convolve(x, w, b, args).physical
    assert torch.equal(other[0::2], y[0::2]) and other[1].isnan().any()


@pytest.mark.parametrize("shape", MORE_SHAPES[:6], ids=str)
def test_is_the_same_in_any_batch_and_threads(tiles, shape):
    x, w, b, args, _ = solved((5, *shape[1:]))
    y = convolve(x, w, b, args).physical
    with num_threads(1):
        assert all(torch.equal(convolve(x[i : i + 1], w, b, args).physical, y[i : i + 1]) for i in range(5))
    with num_threads(7):
        assert all(torch.equal(convolve(x, w, b, args).physical, y) for _ in range(3))


def test_threads_of_python(tiles):
    x, w, b, args, _ = solved(MORE_SHAPES[0])
    assert_same_in_python_threads(lambda: convolve(x, w, b, args).physical)


def test_dst_beyond_the_caches(tiles, guarded):
    x, w, b = torch.randn(6, 33, 115, 115), torch.randn(40, 33, 1, 1), torch.randn(40)
    args = ((1, 1), (0, 0), (1, 1), 1)
    y = convolve(x, w, b, args, activation="relu")
    assert 4 * (x.numel() + y.physical.numel()) > 12 << 20
    assert error(y, F.conv2d(x.double(), w.double(), b.double(), *args).relu()) < 4e-6


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_transposed(tiles, guarded, stride):
    """The phases' convolutions write pixels that lie apart."""
    x, w = torch.randn(2, 40, 11, 13), torch.randn(40, 36, 4, 3)
    y = F.conv_transpose2d(x.to(tb.blocked), w, stride=stride, padding=1)
    assert error(y, F.conv_transpose2d(x.double(), w.double(), stride=stride, padding=1)) < 4e-6


def test_gradients(tiles):
    image, w = torch.randn(2, 40, 9, 8), torch.randn(24, 40, 3, 3, requires_grad=True)
    x = image.to(tb.blocked).requires_grad_()
    exact = image.double().requires_grad_(), w.detach().double().requires_grad_()
    F.conv2d(x, w, padding=1).square().sum().backward()
    F.conv2d(*exact, padding=1).square().sum().backward()
    for got, expected in ((x.grad.to_dense(), exact[0].grad), (w.grad, exact[1].grad)):
        assert (got - expected).abs().max() / expected.square().mean().sqrt() < 2e-5


def test_half_precision(tiles):
    x, w = torch.randn(2, 64, 12, 12).bfloat16(), torch.randn(48, 64, 1, 1).bfloat16()
    torch.testing.assert_close(F.conv2d(x.to(tb.blocked), w).to_dense(), F.conv2d(x.float(), w.float()).bfloat16())


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((1, 64, 56, 56, 256, 1), "direct_amx"),
        ((1, 1024, 14, 14, 256, 1), "direct_amx"),
        ((16, 2048, 7, 7, 512, 1), "direct_amx"),
        ((1, 64, 1, 1, 64, 1), "direct"),
        ((1, 2048, 7, 7, 512, 1), "direct"),  # all weights for few pixels
        ((1, 3, 32, 32, 64, 3), "first"),
        ((1, 64, 56, 56, 64, 3), "winograd_f4"),
    ],
    ids=str,
)
def test_choice(shape, expected):
    n, ic, h, w, oc, k = shape
    x, wei = torch.empty(n, ic, h, w), torch.empty(oc, ic, k, k)
    src = x if ic < 16 else x.to(tb.blocked)
    with tb.winograd("auto"):
        assert tb.algorithm(src, wei.to(weight_format(wei.shape, 16)), padding=k // 2).name == expected


def test_environment_lowers_the_tier():
    code = (
        "import torch, torch_blocked as tb\n"
        "print(tb.isa(), tb.algorithm(torch.empty(1, 64, 56, 56).to(tb.blocked), torch.empty(256, 64, 1, 1)).name)"
    )
    environment = {"ATEN_CPU_CAPABILITY": "avx512", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["avx512", "direct"]
