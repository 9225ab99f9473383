"""Weight gradients by Winograd's algorithms: answers and errors at every ISA tier, threads, the choice."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import padding_is_zero
from kernel_cases import plain_weight_gradient, weight_gradient, weight_gradient_problem

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, plain_format, weight_format

MODES = ["f2", "f4"]


def shape_of(n, ic, oc, src, padding, kernel=(3, 3)):
    one = (1,) * len(src)
    return n, ic, oc, src, kernel, one, padding, one, 1


# Tiles whole and ragged, channels around the block, images smaller than a tile.
SHAPES = [shape_of(n, ic, oc, src, padding) for n, ic, oc, src, padding in [
    (1, 1, 1, (1, 1), (1, 1)),
    (1, 3, 17, (4, 4), (1, 1)),
    (2, 17, 33, (9, 7), (1, 1)),
    (3, 40, 15, (6, 6), (0, 0)),
    (1, 15, 40, (5, 30), (2, 0)),
    (1, 40, 16, (3, 3), (5, 4)),  # tiles that see only padding
    (1, 16, 16, (2, 9), (2, 0)),
    (5, 33, 20, (8, 5), (1, 2)),
    (2, 17, 33, (41, 50), (1, 1)),  # several chunks
    (4, 24, 24, (17, 66), (0, 1)),
]]  # fmt: skip
# Dilated: phases with as many tiles, some with a tile less, or of no pixels.
SHAPES += [
    (n, ic, oc, src, (3, 3), (1, 1), dilation, dilation, 1) for n, ic, oc, src, dilation in [
    (2, 17, 33, (16, 16), (2, 2)),
    (1, 20, 40, (9, 30), (4, 12)),
    (3, 8, 15, (5, 3), (1, 7)),
]]  # fmt: skip
SHAPES_3D = [
    shape_of(1, 17, 20, (1, 5, 6), (0, 1, 1), (1, 3, 3)),
    shape_of(2, 17, 33, (4, 5, 9), (1, 1, 0), (3, 3, 3)),
    (1, 20, 17, (7, 6, 8), (2, 3, 3), (2, 1, 1), (1, 1, 1), (3, 1, 1), 1),
]


def solve(mode, shape, block=None, wei_format=None):
    """The gradient by `mode`, and in float64."""
    x, diff_dst, size, arguments = weight_gradient_problem(shape)
    expected = plain_weight_gradient(x.double(), diff_dst.double(), size, *arguments)
    return run(mode, x, diff_dst, size, arguments, block, wei_format), expected


def run(mode, x, diff_dst, size, arguments, block=None, wei_format=None):
    block = block or library.isa_block()
    fmt = activation_format(x.dim(), block)
    with tb.winograd(mode):
        return weight_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format or weight_format(size, block))


def rms_error(gradient, expected):
    """The largest error, relative to the rms of the answer."""
    return ((gradient.to_dense() - expected).abs().max() / expected.pow(2).mean().sqrt()).item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_3D, ids=str)
def test_gradient(isa, guarded, mode, shape):
    for block in library.kernel_blocks():
        gradient, expected = solve(mode, shape, block)
        assert padding_is_zero(gradient)
        assert rms_error(gradient, expected) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ic", [5, 40])
def test_formats(isa, mode, ic):
    size = (33, ic, 3, 3)
    for fmt in (weight_format((17, 17, 3, 3), 8), weight_format((17, 1, 3, 3), 8), plain_format(4, None)):
        gradient, expected = solve(mode, shape_of(2, ic, 33, (9, 8), (1, 1)), wei_format=fmt)
        assert gradient.shape == size
        dense = gradient.to_dense() if fmt.blocking else gradient
        assert (dense - expected).abs().max() < 1e-5 * expected.abs().max()


# Of random data with as many pixels a weight as ResNet-18 has at batch 2; measured: half of the bounds.
@pytest.mark.parametrize("mode, most", [("never", 6e-6), ("f2", 6e-6), ("f4", 1.6e-5)])
@pytest.mark.parametrize("channels, size", [(64, 56), (256, 14), (512, 7)])
def test_error(mode, most, channels, size):
    error = rms_error(*solve(mode, shape_of(2, channels, channels, (size, size), (1, 1))))
    assert error < most, f"{error:.1e}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[-2], shape_of(1, 64, 64, (12, 12), (1, 1))], ids=str)
def test_bits_do_not_depend_on_threads(isa, mode, shape):
    given = weight_gradient_problem(shape)
    found = []
    for n in (1, 2, 5):
        with num_threads(n):
            found.append(run(mode, *given).physical)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ic", [3, 17])
def test_infinities_stay_in_their_channels(isa, mode, ic):
    x, diff_dst, size, arguments = weight_gradient_problem(shape_of(1, ic, 19, (6, 5), (1, 1)))
    clean = run(mode, x, diff_dst, size, arguments).to_dense()
    x[0, 1, 3, 3] = float("inf")
    diff_dst[0, 2, 3, 2] = float("nan")
    gradient = run(mode, x, diff_dst, size, arguments)
    assert padding_is_zero(gradient)
    found, spoilt = gradient.to_dense(), torch.zeros(size, dtype=torch.bool)
    spoilt[:, 1] = spoilt[2] = True
    assert not found[2].isfinite().any() and not found[:, 1].isfinite().all()
    assert torch.equal(found[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(isa, mode, dtype):
    """Images go through a part at a time, each of which adds to the gradient."""
    block = library.isa_block()
    fmt, size = activation_format(4, block), torch.Size((20, 24, 3, 3))
    x, diff_dst = torch.randn(11, 24, 80, 80).to(dtype), torch.randn(11, 20, 80, 80).to(dtype)
    arguments = ((1, 1), (1, 1), (1, 1), 1)
    wei_format = weight_format(size, block)
    with tb.winograd(mode):
        physical = library.convolution_weight_gradient_op(
            x.to(fmt).physical, sum(fmt.blocking, ()), diff_dst.to(fmt).physical, size, wei_format.order,
            sum(wei_format.blocking, ()), *arguments,
        )  # fmt: skip
    gradient = tb.BlockedTensor(physical, wei_format.blocking, size)
    expected = plain_weight_gradient(x.double(), diff_dst.double(), size, *arguments)
    assert gradient.dtype is dtype and padding_is_zero(gradient)
    assert (gradient.to_dense() - expected).abs().max() < torch.finfo(dtype).eps * expected.abs().max()


def test_from_several_threads():
    given = weight_gradient_problem(shape_of(2, 40, 40, (30, 30), (1, 1)))
    with tb.winograd("f4"):
        block = library.isa_block()
        fmt, wei_format = activation_format(4, block), weight_format(given[2], block)
        operands = given[0].to(fmt), given[1].to(fmt), *given[2:], wei_format
        expected = weight_gradient(*operands).physical
        wrong = []

        def work():
            for _ in range(20):
                if not torch.equal(weight_gradient(*operands).physical, expected):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "shape, mode, same_as",
    [
        (shape_of(1, 64, 64, (56, 56), (1, 1)), "auto", "f4"),
        (shape_of(1, 64, 64, (56, 56), (1, 1)), "always", "f4"),
        (shape_of(1, 64, 64, (2, 2), (1, 1)), "auto", "never"),
        (shape_of(1, 64, 64, (2, 2), (1, 1)), "always", "f2"),
    ],
    ids=str,
)
def test_choice(shape, mode, same_as):
    """By the bits of the answer, which no two algorithms share."""
    given = weight_gradient_problem(shape)
    bits = {each: run(each, *given).physical for each in ("never", "f2", "f4")}
    assert not any(torch.equal(bits[a], bits[b]) for a, b in (("never", "f2"), ("f2", "f4"), ("f4", "never")))
    assert torch.equal(run(mode, *given).physical, bits[same_as])


@pytest.mark.parametrize(
    "kernel, stride, dilation, groups",
    [
        ((3, 3), (2, 2), (1, 1), 1),
        ((3, 3), (2, 2), (2, 2), 1),
        ((3, 1), (1, 1), (1, 1), 1),
        ((3, 3), (1, 1), (1, 1), 2),
    ],
    ids=str,
)
def test_what_is_not_for_winograd_is_direct(kernel, stride, dilation, groups):
    given = weight_gradient_problem((1, 32, 32, (9, 9), kernel, stride, (1, 1), dilation, groups))
    assert torch.equal(run("always", *given).physical, run("never", *given).physical)
