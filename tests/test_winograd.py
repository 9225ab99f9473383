"""Winograd's algorithms: answers and errors at every ISA tier, and the choice between them and direct."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import VECTORS, padding_is_zero
from kernel_cases import run

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, weight_format

pytestmark = pytest.mark.usefixtures("vectors")  # which the choice is between here; of tiles: test_*amx.py

# (n, ic, oc, ih, iw, padding): tiles whole and ragged, channels around the block, images smaller than a tile.
SHAPES = [
    (1, 16, 16, 1, 1, (1, 1)),
    (1, 1, 53, 4, 4, (0, 0)),
    (2, 17, 33, 9, 7, (1, 1)),
    (3, 53, 15, 6, 6, (0, 0)),
    (1, 15, 17, 5, 30, (2, 0)),
    (2, 64, 48, 14, 14, (1, 1)),
    (1, 40, 16, 3, 3, (5, 4)),  # tiles that see only padding
    (1, 40, 120, 14, 13, (1, 1)),  # few tiles: three blocks of output channels a call, and two
    (1, 24, 100, 12, 11, (1, 1)),
    (1, 24, 32, 40, 3, (0, 1)),
    (5, 300, 40, 11, 12, (1, 1)),
    (3, 261, 40, 13, 12, (1, 1)),  # chunks of input channels, half a block in the last one
    (2, 512, 256, 6, 6, (1, 1)),  # long runs, output channels shared by the threads
    (12, 512, 256, 8, 8, (1, 1)),  # long runs, tiles shared by them
]
MODES = ["f2", "f4"]
STRIDES = [1, 2]
UNIT = ((1, 1), (1, 1), (1, 1), 1)  # stride, padding, dilation, groups


@pytest.fixture(autouse=True)
def winograd_mode():
    with tb.winograd("auto"):
        yield


def conv(x, w, b, padding, mode="never", max_bytes=None, stride=1, dilation=(1, 1), **post_ops):
    """The operator on blocked x and w."""
    block = library.isa_block()
    with tb.winograd(mode, max_bytes):
        return run(
            x, w, b, ((stride, stride), padding, dilation, 1), activation_format(4, block),
            weight_format(w.shape, block), block, **post_ops,
        )  # fmt: skip


def rms_error(y, expected):
    """The largest error, relative to the rms of the answer."""
    return ((y.to_dense() - expected).abs().max() / expected.pow(2).mean().sqrt()).item()


def blocked(x):
    return x.to(activation_format(4, library.isa_block()))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(isa, caches, guarded, mode, shape, stride):
    n, ic, oc, ih, iw, padding = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, 3, 3), torch.randn(oc)
    assert algorithm(x, w, padding=padding, stride=stride, mode=mode).name.startswith(f"winograd_{mode}")
    y = conv(x, w, b, padding, mode, stride=stride)
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=padding, stride=stride)
    assert y.shape == expected.shape and padding_is_zero(y)
    assert rms_error(y, expected) < 6e-5


# (n, ic, oc, ih, iw, padding, dilation): phases with as many tiles, some with a tile less, or of no pixels.
DILATED = [
    (2, 17, 33, 16, 16, (2, 2), (2, 2)),
    (1, 40, 48, 9, 13, (2, 3), (2, 3)),
    (2, 24, 16, 17, 11, (4, 1), (4, 1)),
    (1, 15, 20, 14, 30, (0, 12), (1, 12)),
    (1, 20, 40, 3, 5, (7, 9), (7, 9)),
    (1, 16, 16, 11, 12, (0, 0), (2, 2)),
    (1, 512, 40, 26, 25, (2, 2), (2, 2)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", DILATED, ids=str)
def test_dilated(isa, guarded, mode, shape):
    n, ic, oc, ih, iw, padding, dilation = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, 3, 3), torch.randn(oc)
    assert algorithm(x, w, padding=padding, dilation=dilation, mode=mode).name.startswith(f"winograd_{mode}")
    expected = F.conv2d(x.double(), w.double(), b.double(), 1, padding, dilation)
    residual = torch.randn(expected.shape)
    y = conv(x, w, b, padding, mode, dilation=dilation, residual=blocked(residual).physical, activation="relu")
    assert y.shape == expected.shape and padding_is_zero(y)
    assert (y.to_dense() - F.relu(expected + residual)).abs().max() < 6e-5 * expected.pow(2).mean().sqrt()


def test_a_dilation_takes_no_stride(isa):
    x, w = torch.randn(1, 32, 16, 16), torch.randn(32, 32, 3, 3)
    assert algorithm(x, w, padding=2, stride=2, dilation=2, mode="always").name == "direct"


def test_caches_have_a_size():
    with pytest.raises(ValueError, match="bytes of L1 and L2, or zeros, got -1 and 0"):
        library.set_caches(-1, 0)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_post_ops(isa, guarded, mode, activation, stride):
    x, w, b = torch.randn(2, 20, 9 * stride, 8 * stride), torch.randn(37, 20, 3, 3), torch.randn(37)
    scale, shift, residual = torch.randn(37), torch.randn(37), 3 * torch.randn(2, 37, 9, 8)
    y = F.conv2d(x.double(), w.double(), b.double(), padding=1, stride=stride)
    y = y * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
    expected = {"none": lambda t: t, "relu": F.relu, "relu6": F.relu6}[activation](y)
    post_ops = {"scale": scale, "shift": shift, "residual": blocked(residual).physical, "activation": activation}
    got = conv(x, w, b, (1, 1), mode, stride=stride, **post_ops)
    assert padding_is_zero(got)
    assert (got.to_dense() - expected).abs().max() < 6e-5 * y.pow(2).mean().sqrt()


@pytest.mark.parametrize(
    "mode, stride, most",
    [("never", 1, 3e-6), ("f2", 1, 5e-6), ("f4", 1, 2.5e-5), ("never", 2, 3e-6), ("f2", 2, 5e-6), ("f4", 2, 6e-6)],
)
def test_error(isa, caches, mode, stride, most):
    x, w = torch.randn(2, 512, 10, 10), torch.randn(512, 512, 3, 3)
    for images in (x, x[:1, :, :8, :8]):  # many tiles, few
        expected = F.conv2d(images.double(), w.double(), padding=1, stride=stride)
        error = rms_error(conv(images, w, None, (1, 1), mode, stride=stride), expected)
        assert error < most, f"{error:.1e}"


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", ["never", *MODES])
@pytest.mark.parametrize("ic, oc, size", [(48, 256, (13, 11)), (512, 256, (13, 11)), (24, 160, (28, 27))])
def test_the_same_bits_for_any_batch_and_number_of_threads(isa, caches, mode, ic, oc, size, stride):
    x, w = torch.randn(5, ic, *size), torch.randn(oc, ic, 3, 3)
    whole = conv(x, w, None, (1, 1), mode, stride=stride).to_dense()
    for image in (0, 4):
        alone = conv(x[image : image + 1], w, None, (1, 1), mode, stride=stride).to_dense()
        assert torch.equal(alone[0], whole[image])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(conv(x, w, None, (1, 1), mode, stride=stride).to_dense(), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wei_format", [None, tb.OIhw4i16o4i, tb.OIhw8i8o, tb.Ohwi16o, tb.format("hwio")])
def test_weights_in_any_format(isa, wei_format):
    x, w = torch.randn(1, 33, 8, 8), torch.randn(40, 33, 3, 3)
    block = library.isa_block()
    blocked_format = wei_format if wei_format is not None and wei_format.blocking else None
    with tb.winograd("f4"):
        plain = w if blocked_format or wei_format is None else w.to(wei_format)
        y = run(x, plain, None, UNIT, activation_format(4, block), blocked_format, block)
    assert rms_error(y, F.conv2d(x.double(), w.double(), padding=1)) < 6e-5


# Of few tiles the weights are transformed at every call, where the tier has registers for the sums of so many.
MOST_UNPACKED = {"avx512": 4, "avx2": 2, "default": 1}
# (n, ic, oc, ih, iw, padding), tiles: whole and ragged, of several rows and images, channels around the block.
UNPACKED = [
    ((1, 16, 16, 1, 1, (1, 1)), 1),
    ((1, 512, 40, 6, 6, (0, 0)), 1),
    ((1, 40, 24, 4, 5, (1, 1)), 2),
    ((2, 17, 33, 3, 4, (1, 1)), 2),
    ((3, 8, 48, 4, 2, (1, 1)), 3),
    ((1, 53, 70, 7, 7, (1, 1)), 4),
    ((4, 33, 15, 5, 6, (0, 0)), 4),
    ((1, 24, 129, 3, 3, (3, 3)), 4),  # tiles that see only padding
]


@pytest.mark.parametrize("shape, tiles", UNPACKED, ids=str)
def test_few_tiles(isa, guarded, shape, tiles):
    n, ic, oc, ih, iw, padding = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic, 3, 3), torch.randn(oc)
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=padding)
    residual = torch.randn(expected.shape)
    with tb.winograd("f4", max_bytes=0):
        unpacked = algorithm(x, w, padding=padding).name == "winograd_f4_unpacked"
    assert unpacked == (tiles <= MOST_UNPACKED[isa])
    y = conv(x, w, b, padding, "f4", 0, residual=blocked(residual).physical, activation="relu")
    assert y.shape == expected.shape and padding_is_zero(y)
    error = (y.to_dense() - F.relu(expected + residual)).abs().max()
    assert error < 6e-5 * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [(1, 2, 2), (2, 2, 2), (2, 1, 1)], ids=str)
def test_strides_in_three_dims(isa, guarded, mode, stride):
    x, w = torch.randn(2, 20, 5, 9, 12), torch.randn(33, 20, 3, 3, 3)
    fmt, wei_format = activation_format(5, library.isa_block()), weight_format(w.shape, library.isa_block())
    with tb.winograd(mode):
        wei = w.to(wei_format)
        assert tb.algorithm(x.to(fmt), wei, stride=stride, padding=1).name == f"winograd_{mode}"
        y = F.conv3d(x.to(fmt), wei, stride=stride, padding=1)
    assert padding_is_zero(y)
    assert rms_error(y, F.conv3d(x.double(), w.double(), stride=stride, padding=1)) < 6e-5


def test_few_tiles_in_three_dims(isa, guarded):
    x, w = torch.randn(1, 20, 3, 4, 4), torch.randn(33, 20, 3, 3, 3)
    fmt, wei_format = activation_format(5, library.isa_block()), weight_format(w.shape, library.isa_block())
    with tb.winograd("f4"):
        y = F.conv3d(x.to(fmt), w.to(wei_format), padding=(1, 1, 1))
    assert padding_is_zero(y)
    assert rms_error(y, F.conv3d(x.double(), w.double(), padding=1)) < 6e-5


def test_one_weight_with_several_strides(isa):
    """The transformed weights are kept apart: they have the same size and other values."""
    x, w = torch.randn(1, 32, 20, 20), torch.randn(32, 32, 3, 3)
    src, wei = blocked(x), w.to(weight_format(w.shape, library.isa_block()))
    with tb.winograd("f4"):
        for stride in (1, 2, 1, 2):
            y = F.conv2d(src, wei, padding=1, stride=stride)
            assert rms_error(y, F.conv2d(x.double(), w.double(), padding=1, stride=stride)) < 6e-5


def test_few_tiles_keep_no_weights(isa):
    tb.empty_cache()
    size = (64, 64, 3, 3)
    x, w = blocked(torch.randn(1, 64, 4, 4)), torch.randn(size).to(weight_format(size, library.isa_block()))
    with tb.winograd("f4", max_bytes=0):
        assert tb.algorithm(x, w, padding=1).name == "winograd_f4_unpacked"
        y = F.conv2d(x, w, padding=1)
        assert library.packed_weights_bytes() == 0
        with num_threads(1):
            assert torch.equal(F.conv2d(x, w, padding=1).to_dense(), y.to_dense())


def test_from_several_threads():
    x, w = torch.randn(1, 64, 20, 20), torch.randn(64, 64, 3, 3)
    expected = conv(x, w, None, (1, 1), "f4").to_dense()
    src, wei = blocked(x), w.to(weight_format(w.shape, library.isa_block()))
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(F.conv2d(src, wei, padding=1).to_dense(), expected):
                wrong.append(1)

    with tb.winograd("f4"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# ---- the choice

SMALL_IMAGE = {"avx512": "winograd_f4_unpacked", "avx2": "winograd_f2", "default": "winograd_f4"}


def algorithm(x, w, mode=None, **window):
    """What the convolution of blocked x and w would run, and why."""
    src, wei = blocked(x), w.to(weight_format(w.shape, library.isa_block()))
    with tb.winograd(mode) if mode else contextlib.nullcontext():
        return tb.algorithm(src, wei, **window)


@pytest.mark.parametrize(
    "shape, window, expected",
    [
        ((1, 64, 56, 56, 64, 3), {"padding": 1}, "winograd_f4"),
        ((16, 512, 14, 14, 512, 3), {"padding": 1}, "winograd_f4"),
        ((1, 512, 7, 7, 512, 3), {"padding": 1}, SMALL_IMAGE[VECTORS]),
        ((1, 64, 56, 56, 64, 3), {"padding": 1, "stride": 2}, "winograd_f4"),
        ((1, 256, 28, 28, 256, 3), {"padding": 1, "stride": 2}, "winograd_f2"),
        ((1, 64, 2, 2, 128, 3), {"padding": 1, "stride": 2}, "direct"),
        ((1, 64, 56, 56, 64, 3), {"padding": 1, "stride": (2, 1)}, "direct"),
        ((1, 64, 56, 56, 64, 3), {"padding": 1, "stride": 3}, "direct"),
        ((1, 64, 56, 56, 64, 3), {"padding": 2, "dilation": 2}, "winograd_f4"),
        ((1, 512, 33, 33, 256, 3), {"padding": 24, "dilation": 24}, "direct"),
        ((1, 64, 56, 56, 64, 3), {"padding": 2, "dilation": 2, "stride": 2}, "direct"),
        ((1, 64, 56, 56, 64, 1), {}, "direct"),
        ((1, 64, 8, 8, 64, 5), {}, "direct"),
    ],
    ids=str,
)
def test_choice(shape, window, expected):
    n, ic, h, w, oc, k = shape
    x, wei = torch.empty(n, ic, h, w), torch.empty(oc, ic, k, k)
    first = algorithm(x, wei, **window)
    assert first.name == expected and first.reason
    assert algorithm(x, wei, **window) == first


def test_no_choice():
    x, w = torch.randn(1, 32, 12, 12), torch.randn(32, 1, 3, 3)
    assert algorithm(x, w, padding=1, groups=32).name == "depthwise"
    assert tb.algorithm(torch.randn(1, 3, 12, 12), torch.randn(32, 3, 3, 3)).name == "first"


def test_modes():
    x, w = torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3)
    with tb.winograd("never"):
        assert algorithm(x, w, padding=1).name == "direct"
        with tb.winograd("f2"):
            assert algorithm(x, w, padding=1).name == "winograd_f2"
        assert algorithm(x, w, padding=1).name == "direct"
    tiny = torch.randn(1, 16, 1, 1), torch.randn(16, 16, 3, 3)
    assert algorithm(*tiny, padding=1).name == "direct"
    with tb.winograd("always"):
        assert algorithm(*tiny, padding=1).name.startswith("winograd")


@pytest.mark.parametrize("bad", [("sometimes", None), (None, None), ("auto", -1), ("auto", 2**80)])
def test_bad_modes(bad):
    with pytest.raises(ValueError, match="winograd"):
        tb.winograd(*bad)
    with pytest.raises(TypeError, match="winograd: max_bytes"):
        tb.winograd("auto", 1.5)
    with tb.winograd("never"):
        assert algorithm(torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3), padding=1).name == "direct"


def test_algorithm_of_no_tensors():
    for bad in ((3, torch.ones(1, 1, 3, 3)), (torch.ones(1, 1, 3, 3), None)):
        with pytest.raises(TypeError, match="algorithm takes a tensor"):
            tb.algorithm(*bad)


def test_what_gains_least_runs_direct():
    """Room for one layer: the one that saves more time a byte gets it, whoever comes first."""
    tb.empty_cache()
    weights = [torch.randn(64, 64, 3, 3).to(weight_format((64, 64, 3, 3), library.isa_block())) for _ in range(2)]
    images = [blocked(torch.randn(1, 64, size, size)) for size in (12, 60)]
    packed = 36 * 64 * 64 * 4
    for order in ((0, 1), (1, 0)):
        tb.empty_cache()
        with tb.winograd("auto", max_bytes=packed):
            for _ in range(2):
                for i in order:
                    F.conv2d(images[i], weights[i], padding=1)
            names = [tb.algorithm(images[i], weights[i], padding=1).name for i in (0, 1)]
            assert names == ["direct", "winograd_f4"]
            assert "max_bytes" in tb.algorithm(images[0], weights[0], padding=1).reason
            assert library.packed_weights_bytes() <= packed


def test_no_room_at_all():
    w, x = (
        torch.randn(64, 64, 3, 3).to(weight_format((64, 64, 3, 3), library.isa_block())),
        blocked(torch.randn(1, 64, 60, 60)),
    )
    with tb.winograd("auto", max_bytes=0):
        assert tb.algorithm(x, w, padding=1).name == "direct"
        F.conv2d(x, w, padding=1)
        assert library.packed_weights_bytes() == 0


def test_weights_that_change_every_call_count_their_packing():
    """One use a version: transforming the weights each time costs more than it saves on a small image."""
    tb.empty_cache()
    size = (512, 512, 3, 3)
    w, x = torch.randn(size).to(weight_format(size, library.isa_block())), blocked(torch.randn(1, 512, 14, 14))
    for _ in range(3):
        F.conv2d(x, w, padding=1)
        w.mul_(1)
    assert tb.algorithm(x, w, padding=1).name == "direct"
