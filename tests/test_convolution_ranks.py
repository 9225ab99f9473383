"""Convolutions of one and three dims and transposed ones: the operators at every ISA tier, then tensors and modules."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same
from dispatch_cases import cases, check, check_error, falls_back
from kernel_cases import CONVOLUTIONS, TRANSPOSED, between_nans, check_close
from module_cases import assert_same_backward
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format


def convolve_in_all_formats(op, x, w, oc, *arguments, plain_src=True):
    """The operator on every format of src and weight, as (formats, answer); all lie between NaNs."""
    block = library.isa_block()
    src_formats = [activation_format(x.dim(), b) for b in library.kernel_blocks()] + [None] * plain_src
    weights = [w, w.to(weight_format(w.shape, block)), w.to(weight_format((17, 17, *w.shape[2:]), 8))]
    for src_format, wei, dense in itertools.product(src_formats, weights, (False, True)):
        dst_block = src_format.blocking.block(1) if src_format else block
        is_blocked = isinstance(wei, tb.BlockedTensor)
        physical = op(
            between_nans(x.to(src_format).physical if src_format else x, dense),
            sum(src_format.blocking, ()) if src_format else (),
            between_nans(wei.physical) if is_blocked else wei, w.shape, sum(wei.blocking, ()) if is_blocked else (),
            *arguments, dst_block,
        )  # fmt: skip
        blocking = activation_format(x.dim(), dst_block).blocking
        yield tb.BlockedTensor(physical, blocking, (physical.size(0), oc, *physical.shape[2 : x.dim()]))


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_convolution(isa, guarded, shape):
    n, ic, oc, src, kernel, *window, groups = shape
    x, w, b = torch.randn(n, ic, *src), torch.randn(oc, ic // groups, *kernel), torch.randn(oc)
    expected = torch.convolution(x.double(), w.double(), b.double(), *window, False, [0] * len(src), groups)
    for y in convolve_in_all_formats(library.convolution_op, x, w, oc, b, *window, groups):
        check_close(y, expected)


@pytest.mark.parametrize("shape", TRANSPOSED, ids=str)
def test_transposed_convolution(isa, guarded, shape):
    n, ic, oc, src, kernel, stride, padding, output_padding, dilation, groups = shape
    x, w, b = torch.randn(n, ic, *src), torch.randn(ic, oc // groups, *kernel), torch.randn(oc)
    expected = torch.convolution(
        x.double(), w.double(), b.double(), stride, padding, dilation, True, output_padding, groups
    )
    for y in convolve_in_all_formats(
        library.convolution_transpose_op, x, w, oc, b, stride, padding, output_padding, dilation, groups,
        plain_src=False,
    ):  # fmt: skip
        check_close(y, expected)


@pytest.mark.parametrize("groups", [1, 20])
def test_output_padding_over_stride(isa, guarded, groups):
    """What PyTorch refuses: pixels far from any that a tap reaches."""
    x, w = torch.randn(1, 20, 4, 5), torch.randn(20, 20 // groups, 3, 3)
    expected = F.pad(F.conv_transpose2d(x.double(), w.double(), groups=groups), (0, 9, 0, 2))
    arguments = None, (1, 1), (0, 0), (2, 9), (1, 1), groups
    for y in convolve_in_all_formats(library.convolution_transpose_op, x, w, 20, *arguments, plain_src=False):
        check_close(y, expected)


# (n, ic, oc, src, kernel, stride, padding, dilation, groups): src is not always what the taps reach exactly
GRADIENTS = [
    (2, 33, 20, (9, 8), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (1, 17, 17, (8, 9), (3, 5), (2, 3), (1, 2), (1, 1), 17),
    (1, 20, 40, (11, 9), (3, 3), (3, 2), (2, 1), (2, 1), 10),
    (1, 3, 20, (15, 14), (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (1, 16, 32, (5, 5), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (1, 20, 17, (19,), (4,), (3,), (2,), (1,), 1),
    (1, 20, 16, (7, 6, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1),
]


@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradient_of_src(isa, guarded, shape):
    """The transposed convolution of dst's gradient by a convolution's own weight is the gradient of its src."""
    n, ic, oc, src, kernel, stride, padding, dilation, groups = shape
    x, w = torch.randn(n, ic, *src).double().requires_grad_(), torch.randn(oc, ic // groups, *kernel)
    y = torch.convolution(x, w.double(), None, stride, padding, dilation, False, [0] * len(src), groups)
    grad = torch.randn(y.shape)
    (expected,) = torch.autograd.grad(y, x, grad.double())
    output_padding = [
        i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for i, o, s, p, d, k in zip(src, y.shape[2:], stride, padding, dilation, kernel, strict=True)
    ]
    for found in convolve_in_all_formats(
        library.convolution_transpose_op, grad, w, ic, None, stride, padding, output_padding, dilation, groups,
        plain_src=False,
    ):  # fmt: skip
        check_close(found, expected)


def test_reference_of_three_dims(guarded):
    x, w, b = torch.randn(2, 17, 4, 5, 6), torch.randn(20, 17, 3, 2, 3), torch.randn(20)
    expected = F.conv3d(x.double(), w.double(), b.double(), (1, 2, 1), (1, 0, 2))
    src = x.to(activation_format(5, 5))
    physical = library.convolution_op(
        src.physical, (1, 5), w, w.shape, (), b, (1, 2, 1), (1, 0, 2), (1, 1, 1), 1, 5, activation="relu"
    )
    check_close(tb.BlockedTensor(physical, src.blocking, expected.shape), expected.relu())


def test_post_ops_of_three_dims(isa):
    x, w, scale, shift = torch.randn(2, 17, 3, 5, 6), torch.randn(20, 17, 3, 3, 3), torch.randn(20), torch.randn(20)
    fmt = activation_format(5, library.isa_block())
    residual = torch.randn(2, 20, 3, 5, 6)
    physical = library.convolution_op(
        x.to(fmt).physical, sum(fmt.blocking, ()), w, w.shape, (), None, (1, 1, 1), (1, 1, 1), (1, 1, 1), 1,
        library.isa_block(), scale, shift, residual.to(fmt).physical, "relu6",
    )  # fmt: skip
    y = F.conv3d(x.double(), w.double(), padding=1) * scale.view(-1, 1, 1, 1) + shift.view(-1, 1, 1, 1) + residual
    check_close(tb.BlockedTensor(physical, fmt.blocking, y.shape), F.relu6(y))


def test_pixels_that_no_tap_reaches_see_no_nan(isa):
    x, w = torch.full((1, 17, 3, 3), float("nan")), torch.ones(17, 5, 1, 1)
    y = F.conv_transpose2d(x.to(tb.blocked), w, torch.ones(5), stride=2)
    assert_same(y, F.conv_transpose2d(x, w, torch.ones(5), stride=2), equal_nan=True)


GOOD = {
    "src": torch.zeros(1, 1, 4, 4, 8), "src_blocking": [1, 8], "weight": torch.zeros(8, 8, 3, 3),
    "weight_size": [8, 8, 3, 3], "weight_blocking": [], "bias": torch.zeros(8), "stride": [2, 2], "padding": [1, 1],
    "output_padding": [1, 1], "dilation": [1, 1], "groups": 1, "block": 8,
}  # fmt: skip
BAD = [
    ({"src": GOOD["src"][0]}, ValueError, "src"),
    ({"src": GOOD["src"].double()}, TypeError, "float32, bfloat16 or"),
    ({"src": torch.zeros(1, 8, 4, 4), "src_blocking": []}, ValueError, "blocks of 8"),
    ({"weight": torch.zeros(8, 8, 3), "weight_size": [8, 8, 3]}, ValueError, "stride"),
    ({"weight_size": [8, 8]}, ValueError, "dims"),
    ({"weight_size": [8, 8, 3, 3, 3]}, ValueError, "dims"),
    ({"weight_size": [8] * 6}, ValueError, "dims"),
    ({"weight_size": [16, 8, 3, 3]}, ValueError, "physical shape"),
    ({"weight": torch.zeros(8, 8, 3, 1, 3), "weight_blocking": [3, 3]}, ValueError, "by channels only"),
    ({"weight": torch.zeros(8, 0, 3, 3), "weight_size": [8, 0, 3, 3]}, ValueError, "empty"),
    ({"stride": [0, 1]}, ValueError, "stride"),
    ({"padding": [1]}, ValueError, "padding"),
    ({"padding": [9, 9]}, RuntimeError, "no size"),
    ({"output_padding": [-1, 0]}, ValueError, "output_padding"),
    ({"output_padding": [0, 2**40]}, ValueError, "output_padding"),
    ({"output_padding": [0, 0, 0]}, ValueError, "output_padding"),
    ({"dilation": [0, 1]}, ValueError, "dilation"),
    ({"groups": 3}, ValueError, "input channels do not split"),
    ({"groups": 0}, ValueError, "groups"),
    ({"groups": 2}, ValueError, "bias"),
    ({"bias": torch.zeros(9)}, ValueError, "bias"),
    ({"block": 0}, ValueError, "blocks of"),
    ({"block": 5}, ValueError, "blocks of 5"),
    ({"src": torch.zeros(1, 1, 1, 1, 8).expand(1, 1, 2**40, 4, 8)}, RuntimeError, "below 2\\*\\*31"),
]


@pytest.mark.parametrize("change, error, words", BAD, ids=[f"{next(iter(c))}{i}" for i, (c, _, _) in enumerate(BAD)])
def test_transposed_convolution_refuses(change, error, words):
    library.convolution_transpose_op(**GOOD)
    with pytest.raises(error, match=words):
        library.convolution_transpose_op(**{**GOOD, **change})


# ---- Tensors: PyTorch's functions on them


def as_weight(w):
    """`w` as `module.to(tb.blocked)` would have it."""
    return w.to(weight_format(w.shape, library.isa_block()))


def natively(f, *args):
    with tb.count() as counts:
        y = f(*args)
    assert not counts.fallbacks and isinstance(y, tb.BlockedTensor)
    return y


# name -> (function of x and weight, x without channels, kernel, is the weight (ic, oc)?)
FUNCTIONS = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (9,), (3,), False),
    "conv1d, same": (lambda x, w: F.conv1d(x, w, padding="same", dilation=2), (9,), (3,), False),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1, stride=(1, 2, 1)), (3, 5, 4), (3, 3, 3), False),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (9,), (3,), True),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (5, 4), (4, 4), True),
    "conv_transpose2d, dilated": (
        lambda x, w: F.conv_transpose2d(x, w, dilation=2, output_padding=1), (5, 4), (3, 3), True,
    ),
    "conv_transpose3d": (
        lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=1), (3, 4, 3), (3, 4, 3), True,
    ),
    "one number": (
        lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0, 0, 0], 1), (3, 5, 4), (3, 3, 3), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(isa, name, channels):
    function, size, kernel, transposed = FUNCTIONS[name]
    x, w = torch.randint(-4, 5, (2, channels, *size)).float(), torch.randint(-4, 5, (20, channels, *kernel)).float()
    w = w.transpose(0, 1).contiguous() if transposed else w
    expected = function(x, w)
    for src, wei in ((x.to(tb.blocked), w), (x.to(tb.blocked), as_weight(w)), (x, w.to(tb.blocked))):
        assert_same(natively(function, src, wei), expected)
    assert_same(natively(function, x[:0].to(tb.blocked), w), expected[:0])
    with torch.inference_mode():
        assert_same(natively(function, x.to(tb.blocked), w), expected)


def test_strided_src():
    x, w = torch.randn(3, 48, 4, 6, 7), torch.randn(20, 32, 3, 3, 3)
    part = x.to(tb.blocked)[1:, 16:, 1:, ::2]
    assert_same(F.conv3d(part, w), F.conv3d(x[1:, 16:, 1:, ::2], w), rtol=1e-4, atol=1e-4)
    images, w = x[:, :, 0], torch.randn(32, 20, 4, 4)
    part = images.to(tb.blocked)[1:, 16:, ::2, 1:]
    expected = F.conv_transpose2d(images[1:, 16:, ::2, 1:], w, stride=2)
    assert_same(F.conv_transpose2d(part, w, stride=2), expected, rtol=1e-4, atol=1e-4)


FALL_BACK = {
    "double": lambda x, w: F.conv_transpose2d(x.double(), w.double()),
}


@cases(FALL_BACK)
def test_convolutions_on_plain_tensors(case):
    x, w = torch.randn(2, 17, 4, 5), torch.randn(17, 17, 3, 3)
    for wei in (w, as_weight(w)):
        check(case, x.to(tb.blocked), wei, expects=falls_back, rtol=1e-4, atol=1e-4)


ERRORS = {
    "channels": lambda x: F.conv_transpose2d(x, torch.ones(16, 5, 3, 3)),
    "bias": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3), torch.ones(4)),
    "stride 0": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3), stride=0),
    "negative padding": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3), padding=-1),
    "no pixel": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3), padding=5),
    "output padding": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3), stride=2, output_padding=2),
    "rank": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3)),
    "dtype": lambda x: F.conv_transpose2d(x, torch.ones(17, 5, 3, 3).double()),
    "kernel over src": lambda x: F.conv1d(x[:, :, 0], torch.ones(5, 17, 9)),
    "1-D channels": lambda x: F.conv1d(x[:, :, 0], torch.ones(5, 16, 2)),
}


@cases(ERRORS)
def test_what_pytorch_refuses(case):
    check_error(case, torch.ones(1, 17, 4, 5).to(tb.blocked))


# ---- Winograd


@pytest.mark.parametrize("mode", ["f2", "f4"])
@pytest.mark.parametrize("padding", [0, 1, 2, 4])
def test_transposed_convolution_by_winograd(isa, guarded, mode, padding):
    x, w, b = torch.randn(2, 33, 9, 10), torch.randn(33, 20, 3, 3), torch.randn(20)
    expected = F.conv_transpose2d(x.double(), w.double(), b.double(), padding=padding)
    with tb.winograd("never"):
        direct = F.conv_transpose2d(x.to(tb.blocked), w, b, padding=padding)
    with tb.winograd(mode):
        for wei in (w, as_weight(w)):
            y = F.conv_transpose2d(x.to(tb.blocked), wei, b, padding=padding)
            assert_same(y, expected.float(), rtol=1e-3, atol=1e-3)
            assert not torch.equal(y.physical, direct.physical), "direct ran"


WINOGRAD_3D = [
    # (n, ic, oc, src, kd, stride, padding, dilation)
    (2, 17, 33, (4, 9, 10), 3, (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    (1, 53, 20, (7, 5, 6), 2, (2, 1, 1), (1, 0, 1), (3, 1, 1)),
    (1, 16, 16, (3, 6, 5), 1, (1, 1, 1), (2, 1, 0), (1, 1, 1)),
    (1, 1, 15, (5, 8, 4), 5, (1, 1, 1), (2, 1, 1), (1, 1, 1)),
]


@pytest.mark.parametrize("mode", ["f2", "f4"])
@pytest.mark.parametrize("shape", WINOGRAD_3D, ids=str)
def test_three_dims_by_winograd(isa, guarded, mode, shape):
    n, ic, oc, size, kd, *window = shape
    x, w, b = torch.randn(n, ic, *size), torch.randn(oc, ic, kd, 3, 3), torch.randn(oc)
    stride, padding, dilation = window
    expected = F.conv3d(x.double(), w.double(), b.double(), *window)
    with tb.winograd(mode):
        for src, wei in itertools.product((x.to(tb.blocked), x.to(tb.nCdhw8c)), (w, as_weight(w))):
            how = tb.algorithm(src, wei, stride=stride, padding=padding, dilation=dilation)
            assert how.name == f"winograd_{mode}"
            assert_same(F.conv3d(src, wei, b, *window), expected.float(), rtol=1e-3, atol=1e-3)


def test_weights_shared_with_a_convolution():
    """Both keep transformed weights under the same tensor: neither takes the other's."""
    x, w = torch.randn(1, 32, 12, 12), torch.randn(32, 32, 3, 3)
    src, wei = x.to(tb.blocked), as_weight(w)
    with tb.winograd("f4"):
        for _ in range(3):
            assert_same(F.conv2d(src, wei), F.conv2d(x, w), rtol=1e-3, atol=1e-3)
            assert_same(F.conv_transpose2d(src, wei), F.conv_transpose2d(x, w), rtol=1e-3, atol=1e-3)


# ---- Modules

MODULES = {
    "Conv1d": (nn.Conv1d(20, 17, 3, padding=1, stride=2), (2, 20, 9)),
    "Conv3d": (nn.Conv3d(20, 17, 3, padding=1), (2, 20, 3, 5, 4)),
    "Conv3d of few channels": (nn.Conv3d(3, 20, 3, padding=1), (1, 3, 4, 5, 6)),
    "Conv1d, depthwise": (nn.Conv1d(20, 20, 3, groups=20), (2, 20, 9)),
    "ConvTranspose1d": (nn.ConvTranspose1d(20, 17, 4, 2, 1), (2, 20, 9)),
    "ConvTranspose2d": (nn.ConvTranspose2d(20, 17, 4, 2, 1), (2, 20, 5, 4)),
    "ConvTranspose2d of stride 1": (nn.ConvTranspose2d(20, 17, 3), (2, 20, 5, 4)),
    "ConvTranspose2d, cropped": (nn.ConvTranspose2d(20, 17, 3, 3, 2, 1), (2, 20, 5, 4)),
    "ConvTranspose3d": (nn.ConvTranspose3d(20, 17, 3, 2, 1, 1), (2, 20, 3, 4, 3)),
    "ConvTranspose2d, depthwise": (nn.ConvTranspose2d(20, 20, 3, 2, 1, 1, groups=20), (2, 20, 5, 4)),
    "ConvTranspose2d of groups": (nn.ConvTranspose2d(20, 30, 3, 2, 1, 1, groups=5, dilation=2), (2, 20, 5, 4)),
    "sequence": (
        nn.Sequential(nn.Conv2d(3, 20, 3, 2, 1), nn.BatchNorm2d(20), nn.ReLU(), nn.ConvTranspose2d(20, 3, 4, 2, 1)),
        (2, 3, 8, 6),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_modules(name):
    plain, size = copy.deepcopy(MODULES[name][0]), MODULES[name][1]
    model = copy.deepcopy(plain).to(tb.blocked)
    theirs = torch.randn(size).requires_grad_()
    ours = theirs.detach().clone().requires_grad_()
    with tb.count() as counts:
        y = model(ours.to(tb.blocked))
    assert not counts.fallbacks
    expected = plain(theirs)
    assert_same(y, expected, rtol=1e-4, atol=1e-4)
    assert_same_backward(model, plain, (ours, theirs), (y, expected), rtol=1e-4, atol=1e-4)
    assert all(isinstance(p, tb.BlockedTensor) == (p.dim() in (4, 5)) for p in model.parameters())


@pytest.mark.parametrize("name", ["Conv1d", "Conv3d", "ConvTranspose2d of groups", "ConvTranspose3d"])
def test_compiled(name):
    plain, size = MODULES[name]
    model, x = copy.deepcopy(plain).to(tb.blocked), torch.randn(size)
    with torch.no_grad():
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x.to(tb.blocked))
        assert_same(y, plain(x), rtol=1e-4, atol=1e-4)
