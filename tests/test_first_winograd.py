"""Winograd's algorithm along the rows of a plain src, at every ISA tier."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import padding_is_zero
from kernel_cases import run

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

# (n, ic, oc, ih, iw, kh, kw, (stride_h, stride_w), padding): phases of three and of four columns, one to five of them
# (12 and 20 columns are not sorted by shuffles), whole and ragged tiles, several calls of a kernel in a row, several
# bands of rows, a row of less than one tile, odd numbers of blocks of output channels.
SHAPES = [
    (1, 3, 64, 40, 131, 7, 7, (2, 2), (3, 3)),
    (2, 3, 17, 33, 29, 7, 7, (2, 2), (3, 3)),
    (2, 1, 40, 9, 5, 3, 3, (1, 1), (1, 1)),
    (1, 4, 33, 35, 70, 11, 11, (4, 4), (2, 2)),
    (3, 2, 8, 13, 18, 5, 5, (2, 2), (2, 2)),
    (1, 3, 48, 12, 9, 4, 4, (1, 1), (0, 0)),
    (1, 3, 20, 11, 50, 3, 8, (1, 2), (0, 3)),
    (1, 3, 20, 10, 60, 5, 9, (3, 3), (2, 4)),
    (1, 2, 16, 7, 90, 1, 20, (2, 5), (0, 7)),
    (1, 4, 24, 300, 8, 2, 3, (1, 1), (0, 1)),
    (1, 3, 16, 4, 4, 4, 4, (1, 1), (0, 0)),
]
# And dilation_h: with the stride it has a divisor, which the rows that are read are apart, or none.
DILATED = [
    (2, 3, 33, 40, 60, 7, 7, (2, 2), (6, 3), 2),
    (1, 3, 20, 47, 50, 7, 7, (2, 2), (3, 3), 4),
    (1, 2, 16, 37, 44, 5, 9, (3, 3), (6, 4), 3),
    (1, 3, 16, 33, 29, 7, 7, (2, 2), (9, 3), 3),
    (1, 3, 16, 30, 29, 7, 7, (4, 2), (9, 3), 6),
]


def conv(x, w, b, stride, padding, dilation=(1, 1), **post_ops):
    """The operator on plain x, with blocked weights."""
    block = library.isa_block()
    with tb.winograd("f4"):
        wei = w.to(weight_format(w.shape, block))
        assert tb.algorithm(x, wei, stride=stride, padding=padding, dilation=dilation).name == "first_winograd"
        return run(x, w, b, (stride, padding, dilation, 1), None, weight_format(w.shape, block), block, **post_ops)


def check(y, expected):
    assert y.shape == expected.shape and padding_is_zero(y)
    assert (y.to_dense() - expected).abs().max() < 2e-5 * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(isa, guarded, shape, channels_last):
    n, ic, oc, ih, iw, kh, kw, stride, padding = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, kh, kw), torch.randn(oc)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    check(conv(x, w, b, stride, padding), F.conv2d(x.double(), w.double(), b.double(), stride, padding))


@pytest.mark.parametrize("shape", DILATED, ids=str)
def test_dilated_rows(isa, guarded, shape):
    n, ic, oc, ih, iw, kh, kw, stride, padding, dilation_h = shape
    x, w, window = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, kh, kw), (stride, padding, (dilation_h, 1))
    check(conv(x, w, None, *window), F.conv2d(x.double(), w.double(), None, *window))


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_post_ops(isa, guarded, activation):
    x, w, b = torch.randn(2, 3, 19, 46), torch.randn(37, 3, 7, 7), torch.randn(37)
    scale, shift, residual = torch.randn(37), torch.randn(37), 3 * torch.randn(2, 37, 10, 23)
    y = F.conv2d(x.double(), w.double(), b.double(), 2, 3)
    expected = y * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
    expected = {"none": lambda t: t, "relu": F.relu, "silu": F.silu}[activation](expected)
    blocked = residual.to(activation_format(4, library.isa_block())).physical
    got = conv(x, w, b, (2, 2), (3, 3), scale=scale, shift=shift, residual=blocked, activation=activation)
    check(got, expected)


def test_large_dst(isa, guarded):
    """Large enough to be written past the caches, with a ragged tile at the end of a row."""
    x, w = torch.randn(6, 3, 240, 242), torch.randn(64, 3, 7, 7)
    check(conv(x, w, None, (2, 2), (3, 3)), F.conv2d(x, w, None, 2, 3))


@pytest.mark.parametrize(
    "src, wei, window",
    [((2, 2, 101), (33, 2, 7), (2, 3)), ((2, 3, 5, 9, 30), (20, 3, 3, 7, 7), ((1, 2, 2), (1, 3, 3)))],
    ids=["one", "three"],
)
def test_other_numbers_of_dims(isa, src, wei, window):
    x, w = torch.randn(src), torch.randn(wei)
    function = {3: F.conv1d, 5: F.conv3d}[x.ndim]
    blocked = w.to(weight_format(w.shape, library.isa_block()))
    with tb.winograd("f4"):
        assert tb.algorithm(x, blocked, stride=window[0], padding=window[1]).name == "first_winograd"
        check(function(x, blocked, None, *window), function(x.double(), w.double(), None, *window))


def test_the_same_bits_for_any_batch_and_number_of_threads(isa):
    x, w = torch.randn(5, 3, 45, 75), torch.randn(48, 3, 7, 7)
    window = (2, 2), (3, 3)
    whole = conv(x, w, None, *window).to_dense()
    for image in (0, 4):
        assert torch.equal(conv(x[image : image + 1], w, None, *window).to_dense()[0], whole[image])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(conv(x, w, None, *window).to_dense(), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kept", [False, True])
def test_one_weight_with_several_strides(isa, kept):
    """Where its transforms are kept, of weights blocked along two axes, one stride's phases are not another's."""
    block, w = library.isa_block(), torch.randn(32, 3, 8, 8)
    fmt = tb.format(f"OIhw{block}i{block}o") if kept else weight_format(w.shape, block)
    wei, x = w.to(fmt), torch.randn(1, 3, 30, 40)
    tb.empty_cache()
    with tb.winograd("f4"):
        for stride in (2, 3, 2):
            assert tb.algorithm(x, wei, stride=stride).name == "first_winograd"
            check(F.conv2d(x, wei, stride=stride), F.conv2d(x.double(), w.double(), stride=stride))
    assert (library.packed_weights_bytes() > 0) == kept


@pytest.mark.parametrize("plain", [False, True])
def test_every_write_to_the_weights_is_seen(isa, plain):
    """Also one that PyTorch does not count, through `.data` of a plain view."""
    x, w = torch.randn(1, 3, 32, 32), torch.randn(16, 3, 7, 7)
    wei = w.to(weight_format(w.shape, library.isa_block()))
    with tb.winograd("f4"), torch.no_grad():
        for _ in range(3):
            check(F.conv2d(x, wei, None, 2, 3), F.conv2d(x.double(), wei.to_dense().double(), None, 2, 3))
            (wei.physical.data if plain else wei).mul_(2)


def test_not_of_rows_larger_than_the_cache(isa):
    """Of strides and kernels that large the transform of one row's src would take hundreds of megabytes."""
    wei = torch.empty(16, 3, 1200, 1200).to(weight_format((16, 3, 1200, 1200), library.isa_block()))
    with tb.winograd("always"):
        assert tb.algorithm(torch.empty(1, 3, 1300, 1300), wei, stride=300).name == "first"


def test_choice(isa):
    """Where the kernel is wide; the transforms of a narrow one cost more than it saves."""

    def name(kernel, stride):
        wei = torch.nn.Parameter(torch.empty(64, 3, kernel, kernel))
        wei = wei.to(weight_format(wei.shape, library.isa_block()))
        return tb.algorithm(torch.empty(1, 3, 224, 224), wei, stride=stride, padding=kernel // 2).name

    with tb.winograd("auto"):
        assert name(7, 2) == name(11, 4) == "first_winograd"
        assert name(3, 2) == name(1, 1) == "first"
    with tb.winograd("never"):
        assert name(7, 2) == "first"
