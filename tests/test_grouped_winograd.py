"""Winograd's algorithms for groups of whole blocks of channels, and for blocks of whole groups, at every ISA tier."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import padding_is_zero
from kernel_cases import run

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

# (n, groups, channels of a group: in, out, ih, iw, padding): tiles whole and ragged, several images in a run of tiles
# and several runs in an image, products in the place of src (as many channels out as in, of one block or two) or not.
SHAPES = [
    (1, 2, 16, 16, 1, 1, (1, 1)),
    (3, 2, 16, 16, 14, 14, (1, 1)),
    (20, 3, 32, 32, 7, 7, (1, 1)),
    (2, 2, 16, 48, 9, 7, (1, 1)),
    (2, 2, 48, 16, 6, 6, (0, 0)),
    (2, 2, 48, 48, 5, 11, (1, 0)),
    (1, 4, 32, 16, 40, 3, (0, 1)),
    (1, 2, 16, 16, 3, 130, (5, 4)),
    (1, 2, 336, 48, 5, 6, (1, 1)),  # sums in several parts
    (3, 2, 8, 8, 14, 14, (1, 1)),  # groups that share a block, or fill the smaller one
    (20, 7, 8, 8, 7, 7, (1, 1)),  # ... and leave a part of the last one empty
    (2, 9, 4, 4, 9, 7, (0, 1)),
    (1, 3, 2, 2, 3, 130, (5, 4)),
]
MODES = ["f2", "f4"]
STRIDES = [1, 2]


def blocked(x):
    return x.to(activation_format(4, library.isa_block()))


def conv(x, w, b, padding, groups, mode, stride=1, dilation=1, **post_ops):
    """The operator on blocked x and w."""
    block = library.isa_block()
    with tb.winograd(mode):
        return run(
            x, w, b, ((stride, stride), padding, (dilation, dilation), groups), activation_format(4, block),
            weight_format(w.shape, block), block, **post_ops,
        )  # fmt: skip


def check(y, expected):
    assert y.shape == expected.shape and padding_is_zero(y)
    assert (y.to_dense() - expected).abs().max() < 6e-5 * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(isa, guarded, mode, shape, stride):
    n, groups, ic, oc, ih, iw, padding = shape
    x, w, b = torch.randn(n, groups * ic, ih, iw), torch.randn(groups * oc, ic, 3, 3), torch.randn(groups * oc)
    with tb.winograd(mode):
        wei = w.to(weight_format(w.shape, library.isa_block()))
        taken = tb.algorithm(blocked(x), wei, padding=padding, stride=stride, groups=groups).name
        assert taken == f"winograd_{mode}"
    y = conv(x, w, b, padding, groups, mode, stride)
    check(y, F.conv2d(x.double(), w.double(), b.double(), padding=padding, stride=stride, groups=groups))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 2, 16, 48, 17, 11), (3, 7, 8, 8, 9, 14), (1, 2, 48, 48, 5, 30)], ids=str)
def test_dilated(isa, guarded, mode, shape):
    n, groups, ic, oc, ih, iw = shape
    x, w = torch.randn(n, groups * ic, ih, iw), torch.randn(groups * oc, ic, 3, 3)
    for dilation in (2, 3, 7):
        expected = F.conv2d(x.double(), w.double(), None, 1, dilation, dilation, groups)
        residual = torch.randn(expected.shape)
        padding = (dilation, dilation)
        y = conv(x, w, None, padding, groups, mode, dilation=dilation, residual=blocked(residual).physical)
        check(y, expected + residual)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("channels", [2, 4, 8, 16, 32])
def test_each_number_of_tiles(isa, guarded, channels, stride):
    """As many tiles as a call of each kernel takes, and as several calls share."""
    x, w = torch.randn(33, 2 * channels, 4, 4), torch.randn(2 * channels, channels, 3, 3)
    expected = F.conv2d(x.double(), w.double(), padding=1, stride=stride, groups=2)
    for n in range(1, 34):
        check(conv(x[:n], w, None, (1, 1), 2, "f4", stride), expected[:n])


@pytest.mark.parametrize("mode", MODES)
def test_post_ops(isa, guarded, mode):
    x, w, b = torch.randn(2, 32, 9, 8), torch.randn(64, 16, 3, 3), torch.randn(64)
    scale, shift, residual = torch.randn(64), torch.randn(64), 3 * torch.randn(2, 64, 9, 8)
    y = F.conv2d(x.double(), w.double(), b.double(), padding=1, groups=2)
    post_ops = {"scale": scale, "shift": shift, "residual": blocked(residual).physical, "activation": "relu"}
    expected = F.relu(y * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual)
    check(conv(x, w, b, (1, 1), 2, mode, **post_ops), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [4, 8, 32])
def test_three_dims(isa, mode, channels):
    x, w = torch.randn(2, 64, 4, 9, 10), torch.randn(64, channels, 2, 3, 3)
    fmt, wei_format = activation_format(5, library.isa_block()), weight_format(w.shape, library.isa_block())
    with tb.winograd(mode):
        wei = w.to(wei_format)
        assert tb.algorithm(x.to(fmt), wei, padding=(1, 1, 1), groups=64 // channels).name == f"winograd_{mode}"
        y = F.conv3d(x.to(fmt), wei, padding=(1, 1, 1), groups=64 // channels)
    check(y, F.conv3d(x.double(), w.double(), padding=(1, 1, 1), groups=64 // channels))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [4, 8, 16, 48])
def test_the_same_bits_for_any_batch_and_number_of_threads(isa, mode, channels, stride):
    x, w = torch.randn(5, 3 * channels, 13, 11), torch.randn(3 * channels, channels, 3, 3)
    whole = conv(x, w, None, (1, 1), 3, mode, stride).to_dense()
    for image in (0, 4):
        assert torch.equal(conv(x[image : image + 1], w, None, (1, 1), 3, mode, stride).to_dense()[0], whole[image])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(conv(x, w, None, (1, 1), 3, mode, stride).to_dense(), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("channels", [2, 4, 8, 16])
def test_groups_are_apart(isa, channels, stride):
    """What one group holds does not reach the others, NaN neither."""
    x, w = torch.randn(1, 3 * channels, 9, 9), torch.randn(3 * channels, channels, 3, 3)
    x[:, :channels] = torch.nan
    y = conv(x, w, None, (1, 1), 3, "f4", stride).to_dense()
    assert y[:, :channels].isnan().all()
    others = F.conv2d(x[:, channels:], w[channels:], padding=1, stride=stride, groups=2)
    torch.testing.assert_close(y[:, channels:], others, rtol=1e-4, atol=1e-3)


def test_one_weight_with_groups_and_without(isa):
    """The weights are kept apart: their transforms lie differently."""
    w = torch.randn(64, 16, 3, 3)
    wei = w.to(weight_format(w.shape, library.isa_block()))
    with tb.winograd("f4"):
        for groups in (1, 4, 1):
            x = torch.randn(1, 16 * groups, 12, 12)
            y = F.conv2d(blocked(x), wei, padding=1, groups=groups)
            check(y, F.conv2d(x.double(), w.double(), padding=1, groups=groups))


def test_choice(isa):
    """Where the multiplications saved are worth the transforms."""

    def name(channels, size, groups):
        wei = torch.nn.Parameter(torch.empty(channels, channels // groups, 3, 3))
        wei = wei.to(weight_format(wei.shape, library.isa_block()))
        return tb.algorithm(blocked(torch.empty(16, channels, size, size)), wei, padding=1, groups=groups).name

    with tb.winograd("auto"):
        assert name(1024, 28, 8) == "winograd_f4"
        assert name(256, 28, 32) == "winograd_f4"
        assert name(128, 28, 64) == ("winograd_f4" if isa == "default" else "depthwise")
        assert name(128, 28, 128) == "depthwise"
    with tb.winograd("never"):
        assert name(1024, 28, 8) == "direct"
