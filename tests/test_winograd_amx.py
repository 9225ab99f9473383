"""Winograd convolutions whose products are made on tiles of bfloat16: as exact as the vectors'."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import VECTORS, padding_is_zero
from kernel_cases import assert_same_in_python_threads, pair, run
from test_post_ops import ACTIVATIONS, check_convolution, solved_once

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import weight_format

pytestmark = pytest.mark.skipif(tb.isa() != "amx", reason="this CPU has no tiles, or may not use them")

# (n, ic, oc, ih, iw, padding, dilation)
SHAPES = [
    (5, 17, 16, 1, 1, 1, 1),  # a tile an image, most of it padding
    (2, 32, 33, 9, 7, 1, 1),  # three blocks of output channels, the last nearly empty
    (5, 53, 15, 6, 6, 0, 1),  # the second block of a pair missing
    (1, 40, 16, 3, 3, (5, 4), 1),  # tiles that see only padding
    (1, 64, 64, 60, 61, 1, 1),  # weights that are kept, and several runs
    (5, 48, 72, 26, 27, (0, 2), 1),
    (1, 64, 40, 21, 23, 3, 3),
    (1, 100, 72, 20, 26, 4, (4, 2)),
    (1, 300, 200, 12, 13, 1, 1),  # few tiles: threads share the output channels
    (2, 530, 270, 7, 7, 1, 1),
    (9, 130, 160, 30, 28, 1, 1),  # long runs, the last register of tiles not full
]


# What has no parts, or parts whose products are not a number although float32's are.
UNUSUAL = [float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4028e38, 1e22]


@pytest.fixture(autouse=True)
def winograd_mode(tiles):
    with tb.winograd("f4"):
        yield


@functools.cache
def solved(shape):
    n, ic, oc, ih, iw, padding, dilation = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, 3, 3), torch.randn(oc)
    args = ((1, 1), pair(padding), pair(dilation), 1)
    return x, w, b, args, F.conv2d(x.double(), w.double(), b.double(), *args)


def convolve(x, w, b, args, dense=False, **post_ops):
    return run(x, w, b, args, tb.nChw16c, weight_format(w.shape, 16), 16, dense, **post_ops)


def algorithm(x, w, args):
    wei = w.to(weight_format(w.shape, 16))
    return tb.algorithm(x.to(tb.blocked), wei, stride=args[0], padding=args[1], dilation=args[2]).name


def error(y, expected):
    assert padding_is_zero(y)
    return float((y.to_dense() - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("dense", [False, True], ids=["strided", "dense"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(caches, guarded, shape, dense):
    x, w, b, args, expected = solved(shape)
    assert algorithm(x, w, args) == "winograd_f4_amx"
    assert error(convolve(x, w, b, args, dense), expected) < 3e-5


@pytest.mark.parametrize("depth, kernel, padding", [(1, 1, 0), (4, 3, 1), (5, 2, 0)])
def test_three_dims(guarded, depth, kernel, padding):
    x, w, b = torch.randn(2, 40, depth, 10, 9), torch.randn(24, 40, kernel, 3, 3), torch.randn(24)
    args = ((1, 1, 1), (padding, 1, 1), (1, 1, 1))
    y = F.conv3d(x.to(tb.blocked), w, b, *args)
    assert error(y, F.conv3d(x.double(), w.double(), b.double(), *args)) < 3e-5


@pytest.mark.parametrize("residual_last", [False, True], ids=["residual first", "residual last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 20, 37, (9, 8), (3, 3), ((1, 1), (1, 1), (1, 1), 1))], ids=str)
def test_post_ops(guarded, shape, activation, residual_last):
    check_convolution(solved_once(*shape), shape[-1], "f4", activation, residual_last)


@pytest.mark.parametrize("channels", [64, 512])
def test_error_is_that_of_vectors(channels):
    """Of the largest sums, and the bound of F(4x4, 3x3) whatever multiplies."""
    x, w = torch.randn(1, channels, 14, 14), torch.randn(64, channels, 3, 3)
    args = ((1, 1), (1, 1), (1, 1), 1)
    expected = F.conv2d(x.double(), w.double(), None, *args)
    got = error(convolve(x, w, None, args), expected)
    library.set_isa(VECTORS)
    vectors = error(convolve(x, w, None, args), expected)
    library.set_isa("amx")
    assert got < min(6e-5, 2 * vectors), f"{got:.1e}, vectors {vectors:.1e}"


@pytest.mark.parametrize("where", ["src", "weight"])
@pytest.mark.parametrize("value", UNUSUAL, ids=str)
def test_what_has_no_parts(value, where):
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
    torch.testing.assert_close(y.physical[:1], expected[:1], equal_nan=True, rtol=1e-4, atol=1e-3)


def test_images_do_not_depend_on_each_other():
    x, w, b, args, _ = solved((3, 300, 48, 6, 6, 1, 1))
    y = convolve(x, w, b, args).physical
    x = x.clone()
    x[1, 7, 2, 2] = float("nan")
    other = convolve(x, w, b, args).physical
    assert torch.equal(other[0::2], y[0::2]) and other[1].isnan().any()


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5], SHAPES[8], (1, 130, 160, 30, 28, 1, 1)], ids=str)
def test_is_the_same_in_any_batch_and_threads(shape):
    x, w, b, args, _ = solved((5, *shape[1:]))
    y = convolve(x, w, b, args).physical
    with num_threads(1):
        assert all(torch.equal(convolve(x[i : i + 1], w, b, args).physical, y[i : i + 1]) for i in range(5))
    with num_threads(7):
        assert all(torch.equal(convolve(x, w, b, args).physical, y) for _ in range(3))


def test_more_threads_than_have_a_share():
    """A range of output channels may be longer than a thread's even share."""
    x, w, b, args, expected = solved((1, 32, 2304, 6, 6, 1, 1))
    with num_threads(72):
        assert error(convolve(x, w, b, args), expected) < 3e-5


def test_threads_of_python():
    x, w, b, args, _ = solved(SHAPES[5])
    assert_same_in_python_threads(lambda: convolve(x, w, b, args).physical)


def test_dst_beyond_the_caches(guarded):
    x, w, b = torch.randn(6, 33, 115, 115), torch.randn(40, 33, 3, 3), torch.randn(40)
    args = ((1, 1), (1, 1), (1, 1), 1)
    y = convolve(x, w, b, args, activation="relu")
    assert 4 * (x.numel() + y.physical.numel()) > 12 << 20
    assert error(y, F.conv2d(x.double(), w.double(), b.double(), *args).relu()) < 3e-5


def test_of_no_images():
    x, w = torch.empty(0, 40, 8, 8), torch.randn(40, 40, 3, 3)
    library.set_amx_always(False)
    for threads in (1, 2):
        with num_threads(threads), tb.winograd("auto"):
            assert algorithm(x, w, ((1, 1), (1, 1), (1, 1))) != "reference"
    assert F.conv2d(x.to(tb.blocked), w, padding=1).shape == (0, 40, 8, 8)


def test_shares_the_weights_that_vectors_keep():
    x, weight = torch.randn(1, 64, 12, 12).to(tb.blocked), torch.nn.Parameter(torch.randn(48, 64, 3, 3))
    kept, before = [], library.packed_weights_bytes()
    with torch.no_grad():
        weight = weight.to(tb.OIhw16i16o)
        for always, name in ((False, "winograd_f4"), (True, "winograd_f4_amx")):
            library.set_amx_always(always)
            assert tb.algorithm(x, weight, padding=1).name == name
            F.conv2d(x, weight, padding=1).to_dense()
            kept.append(library.packed_weights_bytes() - before)
    assert kept == [36 * 64 * 48 * 4] * 2


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((1, 64, 56, 64), "winograd_f4"),
        ((1, 64, 224, 64), "winograd_f4_amx"),
        ((1, 256, 14, 256), "winograd_f4"),  # all weights for few tiles
        ((16, 256, 14, 256), "winograd_f4_amx"),
        ((16, 512, 7, 512), "winograd_f4_amx"),
        ((1, 512, 7, 512), "winograd_f4_unpacked"),
        ((1, 16, 56, 64), "winograd_f4"),  # half of each row of src would be padding
    ],
    ids=str,
)
def test_choice(shape, expected):
    n, ic, size, oc = shape
    library.set_amx_always(False)
    with tb.winograd("auto"), num_threads(2):
        x, w = torch.empty(n, ic, size, size), torch.empty(oc, ic, 3, 3)
        assert algorithm(x, w, ((1, 1), (1, 1), (1, 1))) == expected
