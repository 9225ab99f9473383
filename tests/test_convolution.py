"""Convolutions of two dims: every mix of formats, views, and what has no kernel.

Values are small integers, so that every order of summation gives the same float32.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same
from dispatch_cases import SRC_VIEWS, cases, check, check_error, each_channels, falls_back, image, integers, native

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads

pytestmark = pytest.mark.usefixtures("one_thread")


def convolution_case(kernel, stride=1, padding=0, dilation=1, groups=1, ic=None, oc=None, bias=True, n=2, h=7, w=9):
    """Sizes of one problem; `ic` and `oc` a group, the number of channels of the test where None."""
    return dict(
        kernel=(kernel, kernel) if isinstance(kernel, int) else kernel, n=n, h=h, w=w, ic=ic, oc=oc, bias=bias,
        arguments=dict(stride=stride, padding=padding, dilation=dilation, groups=groups),
    )  # fmt: skip


CONVOLUTIONS = {
    "1x1": convolution_case(1),
    "1x1 stride": convolution_case(1, stride=2, bias=False),
    "1x1 padding": convolution_case(1, padding=1),
    "3x3": convolution_case(3, padding=1),
    "3x3 no bias": convolution_case(3, padding=1, bias=False),
    "3x3 stride": convolution_case(3, stride=2, padding=1, oc=20),
    "uneven": convolution_case((1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "7x1": convolution_case((7, 1), stride=(1, 3), padding=(3, 0)),
    "dilated": convolution_case(3, padding=2, dilation=2, oc=33),
    "stride over kernel": convolution_case(2, stride=3, oc=5),
    "few to many": convolution_case(3, ic=3, padding=1),
    "many to one": convolution_case(3, oc=1, padding=1),
    "two groups": convolution_case(3, padding=1, groups=2),
    "three groups of 16": convolution_case(3, ic=16, oc=16, groups=3, bias=False),
    "three groups, few in": convolution_case(1, ic=2, groups=3),
    "one output pixel": convolution_case((7, 9)),
    "empty batch": convolution_case(3, n=0),
    "one row": convolution_case((1, 2), h=1, w=17),
    "padding wider than src": convolution_case(3, padding=(4, 5), h=1, w=2),
}

DEPTHWISE = {
    "3x3": dict(kernel=(3, 3), padding=1),
    "5x5 stride": dict(kernel=(5, 5), padding=2, stride=2),
    "dilated": dict(kernel=(3, 2), dilation=(2, 3), padding=(0, 3)),
    "multiplier": dict(kernel=(3, 3), multiplier=2),
    "1x1": dict(kernel=(1, 1), stride=(2, 1), multiplier=3),
}

SRC_FORMATS = (None, *map(tb.format, "nChw16c nChw8c nChw4c Chwn4c acdB16b".split()))

BY_CHANNELS = "OIhw16i16o OIhw8i8o Ohwi16o Oihw8o OIhw4i16o4i oIhw4i"
BY_WIDTH_TOO = "OihW4w16o OihW2w8o OIHw2h8i8o"
WEIGHT_FORMATS = (None, *map(tb.format, f"{BY_CHANNELS} {BY_WIDTH_TOO}".split()))


def convolve_in_all_formats(x, weight, bias, arguments):
    expected = F.conv2d(x, weight, bias, **arguments)
    for src_format, weight_format in itertools.product(SRC_FORMATS, WEIGHT_FORMATS):
        if src_format is None and weight_format is None:
            continue
        src = x if src_format is None else x.to(src_format)
        wei = weight if weight_format is None else weight.to(weight_format)
        with native():
            y = F.conv2d(src, wei, bias, **arguments)
        assert isinstance(y, tb.BlockedTensor)
        assert_same(y, expected, msg=lambda m: f"src {src_format}, weight {weight_format}: {m}")  # noqa: B023


@each_channels
@cases(CONVOLUTIONS)
def test_convolution(isa, case, channels):
    groups = case["arguments"]["groups"]
    ic, oc = case["ic"] or channels, (case["oc"] or channels) * groups
    weight = integers(oc, ic, *case["kernel"])
    bias = integers(oc) if case["bias"] else None
    convolve_in_all_formats(integers(case["n"], ic * groups, case["h"], case["w"]), weight, bias, case["arguments"])


@each_channels
@cases(DEPTHWISE)
def test_depthwise_convolution(isa, case, channels):
    case = dict(case)
    kernel, oc = case.pop("kernel"), channels * case.pop("multiplier", 1)
    weight, bias = integers(oc, 1, *kernel), integers(oc)
    convolve_in_all_formats(integers(2, channels, 7, 8), weight, bias, dict(case, groups=channels))


@pytest.mark.parametrize("tag", ["nChw8c", "nChw16c"])
def test_convolution_answers_in_the_blocking_of_its_src(isa, tag):
    y = F.conv2d(image(20).to(tb.format(tag)), torch.randn(20, 20, 3, 3).to(tb.blocked))
    fastest = tag if isa == "avx512" else "nChw8c"
    assert y.format == tb.format(fastest)


@each_channels
def test_convolution_of_any_values(isa, channels):
    x, weight, bias = image(channels), torch.randn(19, channels, 3, 3) / channels, torch.randn(19)
    with native():
        y = F.conv2d(x.to(tb.blocked), weight.to(tb.blocked), bias, padding=1)
    assert_same(y, F.conv2d(x.double(), weight.double(), bias.double(), padding=1).float())


@pytest.mark.parametrize("threads", [3])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_shared_between_threads(isa, kernel, threads):
    x, weight, bias = integers(3, 35, 23, 21), integers(70, 35, kernel, kernel), integers(70)
    with num_threads(threads):
        for src in (x, x.to(tb.blocked)):
            check(lambda x, w: F.conv2d(x, w, bias, padding=1), src, weight.to(tb.blocked))
            check(lambda x, w: F.conv2d(x, w, padding=1, groups=35), src, weight[:, :1].to(tb.blocked))
        check(lambda x: F.relu6(F.batch_norm(x, bias[:35], bias[:35].abs())), x.to(tb.blocked))


@pytest.mark.parametrize("kernel", [1, 3])
@cases(SRC_VIEWS)
def test_convolution_of_views(isa, case, kernel):
    x = integers(3, 48, 5, 6)
    ic = case(x).size(1)
    for fmt, groups in itertools.product(("nChw8c", "nChw16c"), {1, ic}):
        weight, bias = integers(ic, ic // groups, kernel, kernel), integers(ic)
        src = case(x.to(tb.format(fmt)))
        y = check(lambda x, w, g=groups, b=bias: F.conv2d(x, w, b, padding=1, groups=g), src, weight.to(tb.blocked))
        assert isinstance(y, tb.BlockedTensor)


PLAIN_SRC = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "flipped batch": lambda x: x.flip(0)[::2],
}


@cases(PLAIN_SRC)
@each_channels
def test_convolution_of_strided_plain_tensors(isa, case, channels):
    x = case(integers(3, channels, 5, 6))
    weight = integers(7, x.size(1), 3, 3)
    for w in (weight, weight.flip(3).flip(3), weight.contiguous(memory_format=torch.channels_last)):
        check(lambda x, w: F.conv2d(x, w), x, w.to(tb.blocked))
        check(lambda x, w: F.conv2d(x, w), x.to(tb.blocked), w)


@pytest.mark.parametrize(
    "bias",
    [torch.ones(10)[::2], torch.ones(1).expand(5), torch.arange(5.0).to(tb.blocked), torch.arange(5.0).flip(0)],
    ids=["strided", "expanded", "blocked", "flipped"],
)
def test_convolution_takes_any_bias(isa, bias):
    check(F.conv2d, integers(1, 17, 4, 4).to(tb.blocked), integers(5, 17, 3, 3), bias)


CONVOLUTIONS_ON_PLAIN_TENSORS = {
    "transposed double": lambda x, w: F.conv_transpose2d(x.double(), w.double()),
    "double": lambda x, w: F.conv2d(x.double(), w.double()),
    "complex": lambda x, w: F.conv2d(x.cfloat(), w.cfloat()),
    "a stride over any size": lambda x, w: F.conv2d(x, w, stride=2**24),
}
each_mode = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@each_mode
@cases(CONVOLUTIONS_ON_PLAIN_TENSORS)
def test_convolution_without_a_kernel_runs_on_plain_tensors(case, mode):
    x, weight = integers(2, 17, 5, 6), integers(17, 17, 3, 3)
    with mode():
        check(case, x.to(tb.blocked), weight, expects=falls_back)
        check(case, x.to(tb.blocked), weight.to(tb.blocked), expects=falls_back)


def test_convolution_without_a_batch():
    check(F.conv2d, integers(17, 5, 6).to(tb.nCw16c), integers(5, 17, 3, 3).to(tb.blocked))
    check(F.conv2d, integers(17, 5, 6), integers(5, 17, 3, 3).to(tb.blocked))


ONE_NUMBER = {
    "stride": lambda x, w: F.conv2d(x, w, stride=[2]),
    "padding": lambda x, w: F.conv2d(x, w, padding=[1]),
    "dilation": lambda x, w: F.conv2d(x, w, dilation=[2]),
    "all": lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0], 1),
}


@cases(ONE_NUMBER)
def test_convolution_with_one_number_for_both_axes(case):
    check(case, integers(2, 17, 5, 6).to(tb.blocked), integers(3, 17, 3, 3))


CONVOLUTION_ERRORS = {
    "channels": dict(weight=(5, 16, 3, 3)),
    "groups": dict(groups=2),
    "no groups": dict(groups=0),
    "negative groups": dict(groups=-1),
    "negative padding": dict(padding=-1),
    "stride 0": dict(stride=0),
    "dilation 0": dict(dilation=0),
    "kernel over src": dict(weight=(5, 17, 6, 3)),
    "bias": dict(bias=torch.zeros(6)),
    "dtype": dict(weight_dtype=torch.float64),
    "bias dtype": dict(bias=torch.zeros(5, dtype=torch.int64)),
    "bias of another precision": dict(bias=torch.zeros(5, dtype=torch.float16)),
    "padding over any size": dict(padding=2**62),
    "dilation over any size": dict(dilation=2**24),
    "rank": dict(weight=(5, 17, 3)),
    "three strides": dict(stride=(1, 1, 1)),
}


@each_mode
@cases(CONVOLUTION_ERRORS)
def test_convolution_refuses_what_pytorch_refuses(case, mode):
    case = dict(case)
    weight = torch.ones(case.pop("weight", (5, 17, 3, 3)), dtype=case.pop("weight_dtype", torch.float32))
    bias = case.pop("bias", None)
    with mode():
        check_error(lambda x: F.conv2d(x, weight, bias, **case), image(17).to(tb.nChw16c))
        check_error(lambda x: torch.ops.aten.conv2d.default(x, weight, bias), image(18).to(tb.nChw16c))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_keeps_nonfinite_values_out_of_the_padding(isa, value, kernel):
    x = integers(1, 17, 6, 6)
    x[0, 3, 2, 2] = x[0, 16, 0, 5] = value
    for groups, oc in ((1, 19), (17, 17), (17, 34)):
        weight = integers(oc, 17 // groups, kernel, kernel).abs() + 1
        for src, wei in ((x, weight.to(tb.blocked)), (x.to(tb.blocked), weight), (x.to(tb.nChw8c), weight)):
            check(lambda x, w, g=groups: F.conv2d(x, w, groups=g), src, wei)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_src_that_is_all_padding(size, dtype):
    weight, bias = torch.randn(8, 4, 1, 1, dtype=dtype), torch.randn(8, dtype=dtype)
    for block in library.kernel_blocks():
        src = torch.empty(1, 1, *size, block, dtype=dtype)
        y = library.convolution_op(src, [1, block], weight, [8, 4, 1, 1], [], bias, [1, 1], [1, 1], [1, 1], 1, block)
        assert y.shape == (1, 1, size[0] + 2, size[1] + 2, block)
        assert bool((y[..., :8] == bias).all()) and not y[..., 8:].any()
