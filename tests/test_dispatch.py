"""Every handler of torch_blocked/dispatch: the plain tensor's answer, zero padding, no fallback where a kernel exists.

Values of convolutions are small integers, so that every order of summation gives the same float32.
"""

import contextlib
import copy
import inspect
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import AVAILABLE, CHANNELS, assert_same, dense
from torch import Tensor

import torch_blocked as tb
from torch_blocked.dispatch import registry
from torch_blocked.dispatch.pointwise import POOLED, handler_of, pointwise, pointwise_

aten = torch.ops.aten

# Around the CPU's own: other blocks, other orders of the outer axes, two blocks along one axis, batch in the block.
FORMATS = [tb.blocked, *map(tb.format, "nChw4c nChw8c nChw16c acdB8b BcdA4a4b aBcd2b4b cAdb4a".split())]


def formats(tier):
    """All of them on the best tier; the lower ones differ in the CPU's own block alone."""
    return FORMATS if tier == AVAILABLE[-1] else FORMATS[:1]


FLOATS = (torch.float64, torch.bfloat16)
OTHER_DTYPES = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are too small to share between threads, which would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- Helpers


def image(channels, n=2, h=5, w=6):
    return torch.randn(n, channels, h, w)


def integers(*size):
    return torch.randint(-4, 5, size).float()


def blocked(x, fmt=tb.blocked):
    """`x` in a format; what is no tensor, or has no dims, as it is."""
    return x.to(fmt) if isinstance(x, Tensor) and x.dim() else x


@contextlib.contextmanager
def native():
    """No operator inside falls back."""
    with tb.count() as counts:
        yield counts
    assert not counts.fallbacks, f"fell back: {dict(counts.fallbacks)}"


@contextlib.contextmanager
def falls_back():
    """Some operator inside falls back."""
    with tb.count() as counts:
        yield counts
    assert counts.fallbacks, "nothing fell back"


def is_well_formed(x):
    """Whether the physical shape is that of the blocking; of a list, of all in it."""
    if isinstance(x, (list, tuple)):
        return all(map(is_well_formed, x))
    return not isinstance(x, tb.BlockedTensor) or x.physical.shape == x.blocking.physical_shape(tuple(x.shape))


def check(f, *args, expects=native, **tolerances):
    """Plain and blocked arguments get the plain ones' answer, and are afterwards what those are; returns the answer."""
    plain = [dense(a).clone() if isinstance(a, Tensor) else dense(a) for a in args]
    expected = f(*plain)
    with expects():
        actual = f(*args)
    assert is_well_formed(actual)
    assert_same(actual, expected, equal_nan=True, **tolerances)
    for arg, expected in zip(args, plain, strict=True):
        assert_same(arg, expected, equal_nan=True)
    return actual


def check_in_place(f, x, *args, **how):
    """`f(x, ...)` writes into the bytes of `x`, which keeps its format, and says so to who watches the version."""
    physical, fmt, version = x.physical, x.format, x.physical._version
    assert check(f, x, *args, **how) is x
    assert x.physical is physical
    assert x.format == fmt
    assert x.physical._version > version


def check_error(f, *args):
    """What plain tensors refuse is refused with the same type of error, the blocked arguments untouched."""
    plain = [dense(a) for a in args]
    with pytest.raises(Exception) as expected:
        f(*[p.clone() if isinstance(p, Tensor) else p for p in plain])
    with pytest.raises(expected.type):
        f(*args)
    assert_same(list(args), plain)


def cases(table):
    """A parametrised argument `case` over the values of a table, named by its keys."""
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))


each_channels = pytest.mark.parametrize("channels", CHANNELS)


# ---- Convolution


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
WEIGHT_FORMATS = (None, *map(tb.format, "OIhw16i16o OIhw8i8o Ohwi16o Oihw8o OIhw4i16o4i oIhw4i".split()))


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
    torch.set_num_threads(threads)
    try:
        for src in (x, x.to(tb.blocked)):
            check(lambda x, w: F.conv2d(x, w, bias, padding=1), src, weight.to(tb.blocked))
            check(lambda x, w: F.conv2d(x, w, padding=1, groups=35), src, weight[:, :1].to(tb.blocked))
        check(lambda x: F.relu6(F.batch_norm(x, bias[:35], bias[:35].abs())), x.to(tb.blocked))
    finally:
        torch.set_num_threads(1)


SRC_VIEWS = {
    "channel slice": lambda x: x[:, 16:],
    "rows": lambda x: x[:, :, 1:-1],
    "every other column": lambda x: x[..., ::2],
    "every other row of some images": lambda x: x[1:, :, ::2],
    "transposed": lambda x: x.transpose(2, 3),
    "batch in place of width": lambda x: x.permute(3, 1, 2, 0),
    "channels in place of rows": lambda x: x.transpose(1, 2),
    "one pixel": lambda x: x[:, :, 2:3, 3:4],
}


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
    "bfloat16": lambda x, w: F.conv2d(x.bfloat16(), w.bfloat16()),
}


@cases(CONVOLUTIONS_ON_PLAIN_TENSORS)
def test_convolution_without_a_kernel_runs_on_plain_tensors(case):
    x, weight = integers(2, 17, 5, 6), integers(17, 17, 3, 3)
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
    "rank": dict(weight=(5, 17, 3)),
    "three strides": dict(stride=(1, 1, 1)),
}


@cases(CONVOLUTION_ERRORS)
def test_convolution_refuses_what_pytorch_refuses(case):
    case = dict(case)
    weight = torch.ones(case.pop("weight", (5, 17, 3, 3)), dtype=case.pop("weight_dtype", torch.float32))
    bias = case.pop("bias", None)
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


# ---- Batch normalization

BATCH_NORMS = {
    "plain": dict(),
    "no affine": dict(affine=False),
    "no running": dict(track_running_stats=False),
    "neither": dict(affine=False, track_running_stats=False),
    "momentum": dict(momentum=0.7, eps=0.1),
    "cumulative": dict(momentum=None),
}


def make_batch_norm(channels, dims=2, **how):
    norm = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[dims - 1](channels, **how)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5 if "var" in name else -1, 2)
    return norm


def check_batch_norm(norm, x, fmt, expects=native, **tolerances):
    twin = type(norm)(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    twin.load_state_dict(norm.state_dict())
    twin.train(norm.training)
    expected = twin(x)
    with expects(), torch.no_grad():
        y = norm(x.to(fmt))
    assert_same(y, expected, equal_nan=True, **tolerances)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value, equal_nan=True, msg=lambda m: f"{name}: {m}")  # noqa: B023
    return y


@each_channels
@pytest.mark.parametrize("training", [True, False])
@cases(BATCH_NORMS)
def test_batch_norm(isa, case, training, channels):
    for fmt in (tb.blocked, tb.format("nChw4c"), tb.nChw16c, tb.format("acdB8b")):
        norm = make_batch_norm(channels, **case).train(training)
        for _ in range(2):
            y = check_batch_norm(norm, image(channels) * 2 + 1, fmt)
            assert y.blocking == image(channels).to(fmt).blocking


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", [1, 3])
@each_channels
def test_batch_norm_of_other_ranks(isa, channels, dims, training):
    x = torch.randn(3, channels, *(4, 3, 2)[:dims])
    check_batch_norm(make_batch_norm(channels, dims).train(training), x, tb.blocked)


@pytest.mark.parametrize("training", [True, False])
@cases(SRC_VIEWS)
def test_batch_norm_of_views(isa, case, training):
    x = torch.randn(3, 48, 5, 6)
    c = case(x).size(1)
    mean, var, weight = torch.randn(c), torch.rand(c) + 0.5, torch.randn(c)
    for fmt in (tb.nChw8c, tb.nChw16c):
        blocks = case(x.to(fmt)).blocking
        expects = native if blocks.axes == (1,) else falls_back
        check(
            lambda x, m, v: F.batch_norm(x, m, v, weight, None, training), case(x.to(fmt)), mean, var, expects=expects
        )


BATCH_NORMS_ON_PLAIN_TENSORS = {
    "two axes": lambda x, f: f(x[:, :, 0, 0]),
    "double": lambda x, f: f(x.double(), torch.float64),
    "mixed": lambda x, f: f(x.bfloat16()),
    "empty batch": lambda x, f: f(x[:0]),
}


@pytest.mark.parametrize("training", [True, False])
@cases(BATCH_NORMS_ON_PLAIN_TENSORS)
def test_batch_norm_without_a_kernel(case, training):
    def f(x, dtype=torch.float32):
        mean, var = torch.zeros(17, dtype=dtype), torch.ones(17, dtype=dtype)
        return F.batch_norm(x, mean, var, None, mean + 1, training), mean, var

    check(lambda x: case(x, f), image(17).to(tb.nChw16c), expects=contextlib.nullcontext)


def test_batch_norm_of_one_value_a_channel():
    """Its unbiased variance is 0 / 0: NaN in the running variance, as for a plain tensor."""

    def f(x, mean, var):
        return torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)

    # The variance is 0, so values are multiplied by 1 / sqrt(eps) before the mean is taken off, in one rounding.
    check(f, torch.randn(1, 17, 1, 1).to(tb.nChw16c), torch.zeros(17), torch.ones(17), rtol=0, atol=1e-3)


def test_batch_norm_keeps_nonfinite_values_in_their_channels(isa):
    x = image(17)
    x[0, 3, 0, 0], x[1, 16, 1, 1] = math.nan, math.inf
    for training in (True, False):
        check_batch_norm(make_batch_norm(17).train(training), x, tb.blocked)
    norm = make_batch_norm(17).eval()
    norm.running_var[2], norm.running_mean[16] = math.nan, math.inf
    check_batch_norm(norm, image(17), tb.blocked)


def test_batch_norm_of_large_means(isa):
    x = image(17) + 300
    for training in (True, False):
        check_batch_norm(make_batch_norm(17).train(training), x, tb.blocked, rtol=1e-4, atol=1e-4)


BATCH_NORM_ERRORS = {
    "channels": lambda x: F.batch_norm(x, torch.zeros(16), torch.ones(16)),
    "weight": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17), torch.ones(16)),
    "no statistics": lambda x: F.batch_norm(x, None, None),
    "one value a channel": lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
}


@cases(BATCH_NORM_ERRORS)
def test_batch_norm_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))


# ---- Activations

ACTIVATIONS = {
    "relu": lambda x, **how: F.relu(x, **how),
    "relu6": lambda x, **how: F.relu6(x, **how),
    "hardtanh": lambda x, **how: F.hardtanh(x, 0.2, 0.7, **how),
    "hardtanh below": lambda x, **how: F.hardtanh(x, -0.7, -0.2, **how),
    "leaky_relu": lambda x, **how: F.leaky_relu(x, 0.1, **how),
    "leaky_relu of an infinite slope": lambda x, **how: F.leaky_relu(x, math.inf, **how),
    "silu": lambda x, **how: F.silu(x, **how),
    "mish": lambda x, **how: F.mish(x, **how),
    "hardswish": lambda x, **how: F.hardswish(x, **how),
    "hardsigmoid": lambda x, **how: F.hardsigmoid(x, **how),
    "elu": lambda x, **how: F.elu(x, 0.3, **how),
    "celu": lambda x, **how: F.celu(x, 0.3, **how),
    "selu": lambda x, **how: F.selu(x, **how),
    "threshold": lambda x, **how: F.threshold(x, 0.1, 20.0, **how),
    "sigmoid": lambda x, inplace=False: x.sigmoid_() if inplace else torch.sigmoid(x),
    "tanh": lambda x, inplace=False: x.tanh_() if inplace else torch.tanh(x),
    "gelu": lambda x, inplace=False: aten.gelu_(x) if inplace else F.gelu(x),
    "gelu tanh": lambda x, inplace=False: (
        aten.gelu_(x, approximate="tanh") if inplace else F.gelu(x, approximate="tanh")
    ),
    "clamp": lambda x, inplace=False: x.clamp_(0.1, 0.5) if inplace else x.clamp(0.1, 0.5),
    "round": lambda x, inplace=False: x.round_(decimals=1) if inplace else x.round(decimals=1),
    "round to too many decimals": lambda x, inplace=False: x.round_(decimals=400) if inplace else x.round(decimals=400),
    "exp": lambda x, inplace=False: x.exp_() if inplace else x.exp(),
}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@cases(ACTIVATIONS)
def test_activation(isa, case, special):
    # PyTorch's own gelu of an infinity depends on the strides: NaN or the limit.
    infinity = 9.0 if case in (ACTIVATIONS["gelu"], ACTIVATIONS["gelu tanh"]) else math.inf
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        x = 3 * image(channels)
        if special:
            x[0, 0, 0, :5] = torch.tensor([math.nan, infinity, -infinity, 0.0, -0.0])
            x[-1, -1, -1, :2] = torch.tensor([infinity, math.nan])
        y = check(case, x.to(fmt))
        assert y.format == x.to(fmt).format
        check_in_place(lambda x: case(x, inplace=True), x.to(fmt))


@cases(SRC_VIEWS)
def test_in_place_of_views_reaches_the_tensor(isa, case):
    def write(x):
        case(x).add_(1).sigmoid_()
        case(x).relu_().mul_(case(torch.ones(3, 48, 5, 6)))
        case(x).zero_() if x.size(1) == 16 else case(x).fill_(3.0)
        return x

    for fmt in (tb.nChw8c, tb.nChw16c):
        check(write, torch.randn(3, 48, 5, 6).to(fmt))


def test_in_place_of_views_that_cut_the_padding():
    def write(x):
        x[:, 16:].add_(2).cos_()
        x[:1, 16:, ::2].fill_(5)
        x[:, 48:].copy_(torch.arange(5.0).view(5, 1, 1))
        x.transpose(1, 3)[..., 16:].sub_(1)
        return x

    check(write, image(53).to(tb.nChw16c))
    check(write, image(53).to(tb.nChw8c))


# ---- Dropout


def seeded(f):
    """`f` from the same state of the generator at every call."""

    def from_seed(*args, **kwargs):
        torch.manual_seed(7)
        return f(*args, **kwargs)

    return from_seed


DROPOUTS = {
    "train": lambda x, **how: F.dropout(x, 0.4, True, **how),
    "all": lambda x, **how: F.dropout(x, 1.0, True, **how),
    "none": lambda x, **how: F.dropout(x, 0.0, True, **how),
    "eval": lambda x, **how: F.dropout(x, 0.4, False, **how),
    "channels": lambda x, **how: F.dropout2d(x, 0.4, True, **how),
    "alpha": lambda x, **how: F.alpha_dropout(x, 0.4, True, **how),
    "feature alpha": lambda x, **how: F.feature_alpha_dropout(x, 0.4, True, **how),
}


@each_channels
@cases(DROPOUTS)
def test_dropout_draws_the_mask_of_a_plain_tensor(isa, case, channels):
    for fmt in formats(isa):
        assert isinstance(check(seeded(case), image(channels).to(fmt)), tb.BlockedTensor)
        x = image(channels).to(fmt)
        assert check(seeded(lambda x: case(x, inplace=True)), x) is x


# ---- Arithmetic of several tensors

BINARIES = {
    "add": (torch.add, Tensor.add_),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), lambda x, y: x.add_(y, alpha=3)),
    "sub": (torch.sub, Tensor.sub_),
    "mul": (torch.mul, Tensor.mul_),
    "div": (torch.div, Tensor.div_),
    "div floor": (lambda x, y: x.div(y, rounding_mode="floor"), lambda x, y: x.div_(y, rounding_mode="floor")),
    "pow": (lambda x, y: x.abs().pow(y), lambda x, y: x.abs_().pow_(y)),
    "maximum": (torch.maximum, lambda x, y: x.clamp_(min=y)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x.lerp_(y, 0.3)),
    "lt": (torch.lt, Tensor.lt_),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.copy_(torch.where(x > 0, x, y))),
}

# Shapes of the other tensor, broadcast against (2, c, 5, 6).
BROADCASTS = {
    "same": lambda c: (2, c, 5, 6),
    "a value an image and channel": lambda c: (2, c, 1, 1),
    "a value a channel": lambda c: (1, c, 1, 1),
    "a value a channel, 3-D": lambda c: (c, 1, 1),
    "a value a pixel": lambda c: (1, 1, 5, 6),
    "a value a pixel, 2-D": lambda c: (5, 6),
    "a value a column": lambda c: (6,),
    "a value an image": lambda c: (2, 1, 1, 1),
    "a channel image": lambda c: (1, c, 5, 6),
    "one": lambda c: (1,),
    "one, 4-D": lambda c: (1, 1, 1, 1),
    "no dims": lambda c: (),
}


@cases(BINARIES)
@pytest.mark.parametrize("shape", list(BROADCASTS.values()), ids=list(BROADCASTS))
def test_binary_broadcasts(isa, case, shape):
    out_of_place, in_place = case
    for channels in CHANNELS:
        other = torch.rand(shape(channels)) + 0.5
        x, same_rank = image(channels), other.dim() == 4
        for fmt, other_fmt in ((tb.blocked, None), (tb.blocked, tb.blocked), (tb.nChw16c, tb.nChw8c)):
            y = other if other_fmt is None else blocked(other, other_fmt if same_rank else tb.blocked)
            assert check(out_of_place, x.to(fmt), y).format == x.to(fmt).format
            check_in_place(in_place, x.to(fmt), y)
            # Led by a blocked tensor of fewer dims it may fall back.
            check(out_of_place, y, x.to(fmt), expects=native if same_rank or y is other else contextlib.nullcontext)


@cases(BINARIES)
@pytest.mark.parametrize("shape", list(BROADCASTS.values()), ids=list(BROADCASTS))
def test_binary_of_a_plain_tensor_and_a_blocked_one(isa, case, shape):
    out_of_place, in_place = case
    for channels in CHANNELS:
        x, other = image(channels), blocked(torch.rand(shape(channels)) + 0.5)
        expects = native if other.dim() == 4 else contextlib.nullcontext
        check(out_of_place, x, other, expects=expects)
        check(out_of_place, other, x, expects=expects)
        how = contextlib.nullcontext if case is BINARIES["where"] else native
        assert not isinstance(check(in_place, x, other, expects=how), tb.BlockedTensor)


@cases({name: f for name, f in BINARIES.items() if name not in ("maximum", "where")})
@pytest.mark.parametrize("scalar", [2, 0.5, math.inf, math.nan])
def test_binary_with_a_scalar(isa, case, scalar):
    out_of_place, in_place = case
    if out_of_place is BINARIES["lerp"][0]:
        out_of_place = in_place = lambda x, y: x.lerp_(x + 1, float(y))
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        check(out_of_place, image(channels).to(fmt), scalar)
        check_in_place(in_place, image(channels).to(fmt), scalar)


REFLECTED = {
    "rsub": lambda x: 2 - x,
    "rdiv": lambda x: 2 / x,
    "rpow": lambda x: 2**x,
    "radd": lambda x: 2 + x,
    "neg": lambda x: -x,
    "rfloordiv": lambda x: 2 // (x.abs() + 1),
}


@cases(REFLECTED)
def test_reflected_operators(case):
    native_ones = {k: v for k, v in REFLECTED.items() if k not in ("rpow", "rfloordiv")}.values()
    expects = native if case in native_ones else contextlib.nullcontext
    for channels in CHANNELS:
        check(case, image(channels).to(tb.blocked), expects=expects)


@pytest.mark.parametrize("other", [torch.tensor(1.5, dtype=torch.float64), torch.ones(1, dtype=torch.float64), 1.5])
def test_binary_promotes_as_pytorch_does(other):
    for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.bool):
        x = torch.ones(2, 17, 3, 3, dtype=dtype).to(tb.nChw16c)
        for f in (torch.add, torch.mul, torch.gt):
            check(f, x, other)


BINARY_ERRORS = {
    "shapes": lambda x: x + torch.ones(2, 16, 5, 6),
    "shapes in place": lambda x: x.add_(torch.ones(2, 16, 5, 6)),
    "grows in place": lambda x: x[:1].add_(x),
    "grows rank in place": lambda x: x.add_(torch.ones(1, 1, 1, 1, 1)),
    "to integer in place": lambda x: x.int().add_(1.5),
    "to integer in place by a tensor": lambda x: x.int().add_(x),
    "bits of floats": lambda x: x & 1,
}


@cases(BINARY_ERRORS)
def test_binary_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))


@pytest.mark.parametrize(
    "size", [(2, 16, 5, 6), (2, 18, 5, 6), (3, 17, 5, 6), (2, 17, 5, 7), (2, 1, 17, 5, 6)], ids=str
)
def test_blocked_operands_that_do_not_fit(size):
    """Also where both are one block of channels, or both pad to two."""
    x, y = image(17).to(tb.nChw16c), torch.ones(size).to(tb.blocked if len(size) == 5 else tb.nChw16c)
    grows = len(size) == 5  # which only out-of-place operators may
    for f in (Tensor.mul_, Tensor.copy_, *(() if grows else (torch.add, lambda x, y: torch.where(x > 0, x, y)))):
        check_error(f, x, y)


# ---- Pooling and resampling

POOLINGS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max ceil": lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "max dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "max with indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max with indices, ceil": lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True, return_indices=True),
    "max of windows in the border": lambda x: F.max_pool2d(x[..., :4, :4], 2, 1, 1, 5, return_indices=True),
    "max of all": lambda x: F.max_pool2d(x, (5, 6)),
    "avg": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg ceil": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "avg without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg with divisor": lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive avg of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive avg of one axis": lambda x: F.adaptive_avg_pool2d(x, (1, None)),
    "adaptive avg, larger": lambda x: F.adaptive_avg_pool2d(x, (7, 8)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max with indices": lambda x: F.adaptive_max_pool2d(x, (2, 1), return_indices=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest to a size": lambda x: F.interpolate(x, (3, 11)),
    "nearest exact": lambda x: F.interpolate(x, scale_factor=(1.5, 0.7), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear aligned": lambda x: F.interpolate(x, (9, 3), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@cases(POOLINGS)
def test_pooling(isa, case, special):
    for channels, tag in itertools.product(CHANNELS, (None, "nChw4c", "nChw16c", "acdB8b")):
        x = image(channels)
        if special:
            x[0, 0, 2, 2], x[1, -1, 0, 0], x[0, -1, -1, -1] = math.nan, math.inf, -math.inf
        y = check(case, x.to(tb.format(tag) if tag else tb.blocked))
        assert isinstance(y[0] if isinstance(y, tuple) else y, tb.BlockedTensor)


@cases(SRC_VIEWS)
def test_pooling_of_views(case):
    for fmt in (tb.nChw8c, tb.nChw16c):
        view = case(torch.randn(3, 48, 5, 6).to(fmt))
        expects = native if view.blocking.axes == (1,) else falls_back
        check(lambda x: F.max_pool2d(x, 2, 1, 1, return_indices=True), view, expects=expects)
        check(lambda x: F.avg_pool2d(x, 2, 1, 1), view, expects=expects)


POOLINGS_ON_PLAIN_TENSORS = {
    "no batch": (tb.nCw16c, (17, 5, 6), lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "1-D": (tb.nCw16c, (2, 17, 6), lambda x: F.avg_pool1d(x, 2)),
    "3-D": (tb.nCdhw16c, (2, 17, 3, 5, 6), lambda x: F.max_pool3d(x, 2)),
    "blocked rows": (tb.format("abCd4c"), (2, 17, 5, 6), lambda x: F.avg_pool2d(x, 2)),
    "two blocks": (tb.format("aBcd4b4b"), (2, 17, 5, 6), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "empty batch": (tb.nChw16c, (0, 17, 5, 6), lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "lp": (tb.nChw16c, (2, 17, 5, 6), lambda x: F.lp_pool2d(x, 2, 2)),
}


@cases(POOLINGS_ON_PLAIN_TENSORS)
def test_pooling_without_a_kernel(case):
    fmt, size, f = case
    check(f, torch.randn(size).to(fmt), expects=contextlib.nullcontext)


POOLING_ERRORS = {
    "padding": lambda x: F.max_pool2d(x, 2, 1, 2),
    "kernel": lambda x: F.avg_pool2d(x, 7),
    "size": lambda x: F.adaptive_avg_pool2d(x, (-1, 2)),
    "stride": lambda x: F.avg_pool2d(x, 2, 0),
    "divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=0),
    "integers": lambda x: F.avg_pool2d(x.bool(), 2),
    "empty": lambda x: F.max_pool2d(x[:, :, :0], 2),
}


@cases(POOLING_ERRORS)
def test_pooling_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))


# ---- Joining and splitting


@pytest.mark.parametrize("dim", range(-4, 4))
@each_channels
def test_cat(isa, channels, dim):
    size = [2, channels, 5, 6]
    for lengths in ((1, 2), (3, 0, 3)) if dim % 4 != 1 else ((16, 32, 3), (16, channels), (3, 16), (0, 16, 0, 5)):
        tensors = [torch.randn(*size[: dim % 4], n, *size[dim % 4 + 1 :]) for n in lengths]
        for formats in ((tb.nChw16c,), (tb.nChw16c, None), (None, tb.nChw16c), (tb.nChw16c, tb.nChw8c)):
            given = [blocked(x, fmt) if fmt else x for x, fmt in zip(tensors, itertools.cycle(formats), strict=False)]
            whole = dim % 4 != 1 or (all(n % 16 == 0 for n in lengths[:-1]) and 0 not in lengths)
            y = check(lambda *xs: torch.cat(xs, dim), *given, expects=native if whole else falls_back)
            assert isinstance(y, tb.BlockedTensor) or not whole


CATS = {
    "one": lambda x: torch.cat([x]),
    "itself": lambda x: torch.cat([x, x, x], 2),
    "an empty vector": lambda x: torch.cat([torch.empty(0), x, torch.empty(0)], 3),
    "another dtype": lambda x: torch.cat([x, x.double()], 0),
    "integers": lambda x: torch.cat([x.int(), x.int()], 0),
    "stack": lambda x: torch.stack([x, x], 1),
    "stack last": lambda x: torch.stack([x, x], -1),
    "hstack": lambda x: torch.hstack([x, x]),
    "channels": lambda x: torch.cat([x[:, :16], x], 1),
    "permuted": lambda x: torch.cat([x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)], 2),
}


@cases(CATS)
def test_cat_of_odd_lists(case):
    check(case, image(53).to(tb.nChw16c), expects=contextlib.nullcontext)


def test_cat_of_weights():
    for tag in ("OIhw16i16o", "OIhw4i16o4i", "Ohwi16o"):
        x, y = torch.randn(17, 16, 3, 3).to(tb.format(tag)), torch.randn(17, 5, 3, 3).to(tb.format(tag))
        check(lambda x, y: torch.cat([x, y], 1), x, y)
        check(lambda x, y: torch.cat([x, y, x], 3), x, dense(x))
        check(lambda x, y: torch.cat([x, y], 0), x, x, expects=falls_back)


def test_cat_of_blocked_vectors():
    for n in (0, 1, 16, 17):
        check(
            lambda x, y: torch.cat([x, y]), torch.randn(n).to(tb.blocked), torch.ones(3), expects=contextlib.nullcontext
        )
        check(lambda x: torch.cat([x, torch.empty(0)]), torch.randn(n).to(tb.blocked), expects=contextlib.nullcontext)


SPLITS = {
    "split of blocks": lambda x, dim: x.split(16, dim),
    "split of two blocks": lambda x, dim: x.split(32, dim),
    "split of all": lambda x, dim: x.split(100, dim),
    "chunk": lambda x, dim: x.chunk(2, dim),
    "chunk of many": lambda x, dim: x.chunk(5, dim),
    "split in the block": lambda x, dim: x.split(3, dim),
    "sizes": lambda x, dim: x.split([min(16, x.size(dim)), 0, max(0, x.size(dim) - 16)], dim),
    "sizes of blocks": lambda x, dim: x.split([min(16, x.size(dim)), max(0, x.size(dim) - 16)], dim),
    "tensor_split": lambda x, dim: x.tensor_split(3, dim),
    "unbind": lambda x, dim: x.unbind(dim),
}  # fmt: skip


@cases(SPLITS)
@pytest.mark.parametrize("dim", range(-4, 4))
def test_split(isa, case, dim):
    for channels, spatial in itertools.product(CHANNELS, (1, 5, 20)):
        x = torch.randn(2, channels, spatial, 3).to(tb.nChw16c)
        lengths = [0, *itertools.accumulate(part.size(dim) if part.dim() == 4 else 1 for part in case(dense(x), dim))]
        whole = dim % 4 != 1 or (all(n % 16 == 0 for n in lengths[:-1]) and len(set(lengths)) == len(lengths))
        is_native = whole and case is not SPLITS["unbind"]
        parts = check(lambda x: case(x, dim), x, expects=native if is_native else contextlib.nullcontext)
        if is_native:
            storage = x.physical.untyped_storage().data_ptr()
            assert all(part.physical.untyped_storage().data_ptr() == storage for part in parts)


@cases(
    {
        "split": lambda x: x.split(3, 1),
        "chunk": lambda x: x.chunk(2, 1),
        "sizes": lambda x: x.split([16, 1, 36], 1),
        "an empty part": lambda x: x.split([16, 0, 37], 1),
        "slice": lambda x: x[:, 1:17],
        "every other": lambda x: x[:, ::2],
        "cat": lambda x: torch.cat([x, x], 1),
    }
)
def test_off_the_block_borders_falls_back(case):
    check(case, image(53).to(tb.nChw16c), expects=falls_back)


def test_split_reassembled_by_cat():
    x = image(53).to(tb.nChw16c)
    with native():
        y = torch.cat(x.split(16, 1), 1)
    assert y.format == x.format
    assert_same(y, x.to_dense())


# ---- Reductions

REDUCTIONS = {
    "mean": lambda x, dim, keepdim: x.mean(dim, keepdim),
    "sum": lambda x, dim, keepdim: x.sum(dim, keepdim),
    "sum in double": lambda x, dim, keepdim: x.sum(dim, keepdim, dtype=torch.float64),
    "amax": lambda x, dim, keepdim: x.amax(dim, keepdim),
    "amin": lambda x, dim, keepdim: (x - 100).amin(dim, keepdim),
    "amax of negative": lambda x, dim, keepdim: (x - 100).amax(dim, keepdim),
}
AXES = [(0,), (2,), (3,), (2, 3), (-1, -2), (0, 2, 3), (3, 0), (1,), (1, 2), (0, 1, 2, 3), ()]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
@cases(REDUCTIONS)
def test_reduction(isa, case, axes, keepdim):
    is_native = axes and 1 not in axes
    for channels, fmt in itertools.product(CHANNELS, ("nChw4c", "nChw16c", "acdB8b", "aBcd2b4b")):
        x = image(channels).to(tb.format(fmt))
        y = check(lambda x: case(x, list(axes), keepdim), x, expects=native if is_native else contextlib.nullcontext)
        if is_native and (keepdim or len(axes) == 1):
            assert isinstance(y, tb.BlockedTensor)


REDUCTIONS_OF_ALL = {
    "sum": Tensor.sum,
    "mean": Tensor.mean,
    "amax": Tensor.amax,
    "max": Tensor.max,
    "max over channels": lambda x: x.max(1),
    "var": lambda x: x.var((2, 3)),
    "norm": Tensor.norm,
    "argmax": Tensor.argmax,
    "prod": lambda x: x.prod(1),
    "any": Tensor.any,
    "all over channels": lambda x: x.ne(0).all(1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "sum of integers": lambda x: x.int().sum((2, 3)),
    "sum of bools": lambda x: x.gt(0).sum(3),
    "sum of nothing": lambda x: x[:0].sum((0, 2)),
    "mean of nothing": lambda x: x[:, :, :0].mean(2),
    "mean of many, as one vector": lambda x: x.mean((2, 3)).view(-1),
    "mean of columns, as a matrix": lambda x: x.mean(3).view(x.size(0), -1),
    "mean of all images, as a matrix": lambda x: x.mean((0, 2)).view(-1, 2),
}


@each_channels
@cases(REDUCTIONS_OF_ALL)
def test_other_reductions(case, channels):
    for fmt in FORMATS:
        check(case, image(channels).to(fmt), expects=contextlib.nullcontext)


def test_reduction_keeps_nonfinite_values_in_their_channels():
    x = image(17)
    x[0, 3, 0, 0], x[1, 16, 1, 1], x[0, 16, 0, 0] = math.nan, math.inf, -math.inf
    for case in REDUCTIONS.values():
        check(lambda x, f=case: f(x, (2, 3), True), x.to(tb.nChw16c))


def test_reduction_of_blocked_weights():
    for tag in ("OIhw16i16o", "OIhw4i16o4i", "Ohwi16o"):
        w = torch.randn(17, 20, 3, 2).to(tb.format(tag))
        check(lambda w: (w.sum((2, 3)), w.amax(2), w.mean((2, 3), keepdim=True)), w)


# ---- Shape: functions of (2, c, 4, 4) and the plain tensor's answer

SHAPES = {
    "flatten": lambda x: x.flatten(1),
    "flatten all": lambda x: x.flatten(),
    "flatten two": lambda x: x.flatten(2),
    "view": lambda x: x.view(2, -1),
    "view apart": lambda x: x.view(2, x.size(1), 2, 2, 4),
    "view as it is": lambda x: x.view(x.shape),
    "view as it is, one size unknown": lambda x: x.view(2, -1, 4, 4),
    "reshape": lambda x: x.reshape(-1, 8),
    "reshape as it is": lambda x: x.reshape(x.shape),
    "unflatten": lambda x: x.unflatten(1, (1, -1)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute all": lambda x: x.permute(3, -2, 1, 0),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose nothing": lambda x: x.transpose(2, 2),
    "movedim": lambda x: x.movedim(1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 3),
    "mT": lambda x: x.mT,
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze batch": lambda x: x[:1].squeeze(0),
    "squeeze channels": lambda x: x.squeeze(1),
    "squeeze nothing": lambda x: x.squeeze(2),
    "squeeze two": lambda x: x[:1, :, :1].squeeze((0, 2)),
    "squeeze all but two": lambda x: x[:, :, :1, :1].squeeze(),
    "squeeze to a vector": lambda x: x[:1, :, :1, :1].squeeze(),
    "squeeze to a scalar": lambda x: x[:1, :1, :1, :1].squeeze() if x.size(1) == 1 else x,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "unsqueeze first and back": lambda x: x.unsqueeze(-5).squeeze(0),
    "rows": lambda x: x[:, :, 1:3],
    "last rows": lambda x: x[:, :, -2:],
    "every other column": lambda x: x[..., ::2],
    "every third column from one": lambda x: x[..., 1::3],
    "no rows": lambda x: x[:, :, 2:2],
    "rows that end before they begin": lambda x: x[:, :, 3:1],
    "more rows than there are": lambda x: x[:, :, 1:100],
    "whole channels": lambda x: x[:, 0:],
    "channels from 16": lambda x: x[:, 16:],
    "two blocks of channels": lambda x: x[:, 16:48],
    "slice of a slice": lambda x: x[:, 16:][:, 16:],
    "channels in a block": lambda x: x[:, 1:3],
    "every other channel": lambda x: x[:, ::2],
    "no channels": lambda x: x[:, :0],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "image": lambda x: x[1],
    "channel": lambda x: x[:, 0],
    "pixel": lambda x: x[..., 1, 2],
    "element": lambda x: x[1, 0, 3, 2],
    "new axis": lambda x: x[None, :, :, None],
    "list of rows": lambda x: x[:, :, [2, 0]],
    "mask": lambda x: x[x > 0],
    "expand": lambda x: x[:1].expand(3, -1, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1, 3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), 1),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "view of another dtype": lambda x: x.view(torch.int32),
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(),
}  # fmt: skip


@each_channels
@cases(SHAPES)
def test_shape(isa, case, channels):
    for fmt in FORMATS:
        check(case, torch.randn(2, channels, 4, 4).to(fmt), expects=contextlib.nullcontext)


# Views of the same bytes of nChw16c: each keeps the storage, falls back on nothing, and is blocked.
BLOCKED_VIEWS = (
    "view as it is", "view as it is, one size unknown", "reshape as it is", "permute", "permute all", "transpose",
    "transpose nothing", "movedim", "swapaxes", "mT", "squeeze batch", "squeeze nothing", "unsqueeze", "unsqueeze last",
    "unsqueeze first and back", "rows", "last rows", "every other column", "every third column from one",
    "more rows than there are", "whole channels", "narrow",
)  # fmt: skip


@each_channels
@pytest.mark.parametrize("name", BLOCKED_VIEWS)
def test_views_share_the_bytes(isa, name, channels):
    for fmt in formats(isa):
        x = torch.randn(2, channels, 4, 4).to(fmt)
        if name == "squeeze batch" and 0 in x.blocking.axes:
            continue  # one image of a block of them
        y = check(SHAPES[name], x)
        assert isinstance(y, tb.BlockedTensor)
        assert y.physical.untyped_storage().data_ptr() == x.physical.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["channels from 16", "two blocks of channels", "slice of a slice"])
def test_channel_slices_at_block_borders_share_the_bytes(name):
    for fmt in (tb.nChw8c, tb.nChw16c, tb.format("nChw4c"), tb.format("aBcd2b8b")):
        x = image(53).to(fmt)
        y = check(SHAPES[name], x)
        assert y.physical.untyped_storage().data_ptr() == x.physical.untyped_storage().data_ptr()


def test_transpose_of_matrices():
    for size in ((17,), (3, 17), (0, 17), (17, 1)):
        y = check(torch.t, torch.randn(size).to(tb.blocked))
        assert isinstance(y, tb.BlockedTensor)


PLAIN_VIEWS = {
    "flatten of pixels": ((2, 32, 1, 1), lambda x: x.flatten(1)),
    "flatten of one pixel, odd channels": ((1, 17, 1, 1), lambda x: x.flatten(1)),
    "view of pixels": ((3, 16, 1, 1), lambda x: x.view(3, 4, 4)),
    "squeeze of pixels": ((2, 17, 1, 1), lambda x: x.squeeze()),
    "squeeze of one channel": ((2, 1, 3, 4), lambda x: x.squeeze(1)),
}


@cases(PLAIN_VIEWS)
def test_what_is_plain_already_is_not_copied(case):
    size, f = case
    x = torch.randn(size).to(tb.nChw16c)
    check(f, x)
    with tb.count() as counts:
        y = f(x)
    assert y.data_ptr() == x.physical.data_ptr()
    assert (counts.left, counts.reorders.total()) == (1, 0)


SHAPE_ERRORS = {
    "view": lambda x: x.view(3, 5),
    "view of two unknowns": lambda x: x.view(-1, -1),
    "permute twice": lambda x: x.permute(0, 1, 1, 2),
    "permute few": lambda x: x.permute(0, 1, 2),
    "permute over": lambda x: x.permute(0, 1, 2, 7),
    "permute under": lambda x: x.permute(0, 1, 2, -5),
    "transpose over": lambda x: x.transpose(0, 4),
    "t of four axes": lambda x: x.t(),
    "squeeze over": lambda x: x.squeeze(4),
    "squeeze under": lambda x: x.squeeze(-5),
    "squeeze twice": lambda x: x.squeeze((0, 0)),
    "unsqueeze over": lambda x: x.unsqueeze(6),
    "unsqueeze under": lambda x: x.unsqueeze(-6),
    "slice over": lambda x: aten.slice.Tensor(x, 4, 0, 1),
    "slice of no step": lambda x: aten.slice.Tensor(x, 2, 0, 1, 0),
    "slice backwards": lambda x: aten.slice.Tensor(x, 2, 3, 0, -1),
    "split over": lambda x: x.split(1, 4),
    "split of nothing": lambda x: x.split(0, 2),
    "split of a negative size": lambda x: x.split(-1, 2),
    "sizes": lambda x: x.split([1, 1], 2),
    "sizes over": lambda x: x.split([2, 2], -5),
    "negative sizes": lambda x: x.split([5, -1], 2),
    "chunk into none": lambda x: x.chunk(0, 2),
    "cat over": lambda x: torch.cat([x, x], 4),
    "cat under": lambda x: torch.cat([x, x], -5),
    "cat of other channels in the same block": lambda x: torch.cat([x, torch.ones(2, 18, 4, 4)], 0),
    "cat of other rows": lambda x: torch.cat([x, x[:, :, 1:]], 3),
    "cat of other ranks": lambda x: torch.cat([x, x[0]], 0),
    "sum over": lambda x: x.sum(4),
    "sum under": lambda x: x.sum(-5),
    "mean over": lambda x: x.mean((2, 6)),
    "amax over": lambda x: x.amax(4),
    "sum twice": lambda x: x.sum((2, -2)),
    "mean of integers": lambda x: x.int().mean((2, 3)),
    "amax of nothing": lambda x: x[:, :, :0].amax(2),
    "index": lambda x: x[2],
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x),
    "expand": lambda x: x.expand(2, 18, 4, 4),
}  # fmt: skip


@cases(SHAPE_ERRORS)
def test_shape_refuses_what_pytorch_refuses(case):
    check_error(case, torch.randn(2, 17, 4, 4).to(tb.nChw16c))


def test_cat_of_other_blocked_channels_in_the_same_block():
    x, y = torch.ones(2, 17, 4, 4).to(tb.nChw16c), torch.ones(2, 18, 4, 4).to(tb.nChw16c)
    for dim, order in itertools.product((0, 2, 3), ((x, y), (y, x))):
        check_error(lambda *xs, d=dim: torch.cat(xs, d), *order)


OTHER_RANKS = {
    "sequence": (2, 17, 5),
    "volume": (2, 17, 2, 3, 2),
    "matrix": (3, 17),
    "vector": (17,),
    "six axes": (2, 17, 1, 2, 1, 2),
    "empty batch": (0, 17, 3, 3),
    "no channels": (2, 0, 3, 3),
    "no pixels": (2, 17, 0, 3),
}
ANY_RANK = {
    "add": lambda x: x + x,
    "broadcast": lambda x: x * torch.arange(float(x.size(-1))),
    "cos": torch.cos,
    "cos_": lambda x: x.cos_(),
    "sum of the last": lambda x: x.sum(-1),
    "mean of the first": lambda x: x.mean(0, keepdim=True),
    "flatten": lambda x: x.flatten(),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))) + 1,
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1) - 1,
    "squeeze": lambda x: x.squeeze().exp(),
    "cat": lambda x: torch.cat([x, x], 0),
    "cat last": lambda x: torch.cat([x, x], -1),
    "chunk": lambda x: x.chunk(2, 0),
    "slice": lambda x: x[1:].exp(),
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones(x.size(-1))),
    "ones_like": torch.ones_like,
    "clone": torch.clone,
    "double": Tensor.double,
    "equal": lambda x: torch.equal(x, x + 0),
    "sigmoid of a slice": lambda x: x[..., :1].sigmoid(),
}


@pytest.mark.parametrize("size", list(OTHER_RANKS.values()), ids=list(OTHER_RANKS))
@cases(ANY_RANK)
def test_other_ranks_and_empty_tensors(isa, case, size):
    check(case, torch.randn(size).to(tb.blocked), expects=contextlib.nullcontext)


# ---- Views that are written to: the tensor they are of has changed too, whether they share its bytes or are a copy

WRITTEN_VIEWS = {
    "image": lambda x: x[1],
    "channel": lambda x: x[:, 3],
    "row": lambda x: x.select(2, 1),
    "unbind": lambda x: x.unbind(0)[1],
    "channels in a block": lambda x: x[:, 3:5],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "split in a block": lambda x: x.split(3, 1)[1],
    "squeeze": lambda x: x[:, :, :1, :1].squeeze(),
    "squeeze to one axis": lambda x: x[:1, :, :1, :1].squeeze(),
    "t": lambda x: x[0, :, 0].t(),
    "detach": lambda x: x.detach(),
    "view_as": lambda x: x.view_as(x),
    "rows": lambda x: x[:, :, 1:3],
    "channels at the border": lambda x: x[:, 16:],
    "channels across blocks": lambda x: x[:, 3:17],
    "part across blocks": lambda x: x.chunk(2, 1)[1],
    "every other channel": lambda x: x[:, ::2],
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(2, -1),
    "reshape": lambda x: x.reshape(34, 16),
    "expand": lambda x: x[:, :, :1].expand(2, 17, 1, 4),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "unfold": lambda x: x.unfold(1, 4, 4),
    "as bits": lambda x: x.view(torch.int32),
    "real": lambda x: torch.view_as_complex(x.view(2, 17, 4, 2, 2)),
    "view of a view": lambda x: x.view(2, -1)[:, 3:7],
    "split of a view": lambda x: x.view(2, -1).split(5, 1)[2],
    "select of a copy": lambda x: x[:, 3:17][:, 2],
    "view of true view": lambda x: x[1].flatten(),
}  # fmt: skip


@cases(WRITTEN_VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tag", ["nChw16c", "ABcd8b8a", "acdB8b"])
def test_a_write_to_a_view_reaches_the_tensor(case, mode, tag):
    with mode():
        plain = torch.randn(2, 17, 4, 4)
        x = plain.to(tb.format(tag))
        version = None if x.is_inference() else x.physical._version
        for part in (case(x), case(plain)):
            part.fill_(7)
        assert_same(x, plain)
        assert version is None or x.physical._version > version


@cases(WRITTEN_VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_shows_what_is_written_to_the_tensor(case, mode):
    with mode():
        plain = torch.randn(2, 17, 4, 4)
        x = plain.to(tb.nChw16c)
        parts = case(x), case(plain)
        for whole in (x, plain):
            whole.mul_(2)
            whole[1].add_(1)
        assert_same(parts[0].clone(), parts[1].clone())
        for whole, part in zip((x, plain), parts, strict=True):
            whole.neg_()
            part[0] = 3
        assert_same(x, plain)


DIFFERENTIABLE = {k: f for k, f in WRITTEN_VIEWS.items() if k not in ("as bits", "expand", "detach", "unbind")}


@cases({k: f for k, f in DIFFERENTIABLE.items() if "split" not in k and "part" not in k})
def test_the_gradient_of_a_write_to_a_view(case):
    grads = []
    for convert in (lambda x: x, lambda x: x.to(tb.nChw16c)):
        torch.manual_seed(0)
        leaf = torch.randn(2, 17, 4, 4, requires_grad=True)
        x = convert(leaf) * 2
        case(x).mul_(3)
        x.square().sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])
    assert type(grads[1]) is torch.Tensor


def test_a_copied_view_is_otherwise_an_ordinary_tensor():
    plain = torch.randn(2, 17, 4, 4)
    view, expected = plain.to(tb.nChw16c).flatten(1), plain.flatten(1)
    assert type(view) is not torch.Tensor and type(view + 1) is type(view.clone()) is torch.Tensor
    assert (view.numpy() == expected.numpy()).all() and view.tolist() == expected.tolist()
    assert view.stride() == expected.stride() and view.is_contiguous()
    saved = io.BytesIO()
    torch.save(view, saved)
    saved.seek(0)
    for same in (torch.load(saved), copy.deepcopy(view), torch.from_dlpack(view)):
        assert type(same) is torch.Tensor
        assert_same(same, expected)
    assert "tensor" in repr(view).lower() or "CopiedView" in repr(view)
    y = plain.to(tb.nChw16c)
    assert_same(y + y.view(2, 17, 16).view(2, 17, 4, 4), plain + plain)
    assert_same(torch.add(y[:, 1:], plain[:, 1:], out=torch.empty(0)), 2 * plain[:, 1:])


def test_gradients_are_never_copied_views():
    linear = torch.nn.Linear(17 * 16, 3)
    leaf = torch.randn(2, 17 * 16, requires_grad=True)
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c).requires_grad_()
    (linear((x * leaf.view(2, 17, 4, 4)).flatten(1)).sum() + leaf.sum()).backward()
    assert not any(type(t.grad).__name__ == "CopiedView" for t in (leaf, x, *linear.parameters()))


SET_ITEMS = {
    "pixel": lambda x: x.__setitem__((0, 3, 1, 2), 5.0),
    "image": lambda x: x.__setitem__(1, 5.0),
    "channel": lambda x: x.__setitem__((slice(None), 3), torch.arange(4.0)),
    "channels in a block": lambda x: x.__setitem__((slice(None), slice(3, 5)), 5.0),
    "channels across blocks": lambda x: x.__setitem__((slice(None), slice(3, 17)), torch.ones(4)),
    "channels at the border": lambda x: x.__setitem__((slice(None), slice(16, None)), 5.0),
    "every other row": lambda x: x.__setitem__((..., slice(None, None, 2), slice(None)), 5.0),
    "all": lambda x: x.__setitem__(..., 5.0),
    "list": lambda x: x.__setitem__((slice(None), [0, 16]), 5.0),
    "list of an image": lambda x: x.__setitem__((0, [1, 2]), 5.0),
    "list of rows of channels": lambda x: x.__setitem__((slice(None), slice(3, 5), [1, 2]), 5.0),
    "mask": lambda x: x.__setitem__(dense(x) > 0, 5.0),
    "blocked mask": lambda x: x.__setitem__(x > 0, 5.0),
    "blocked value": lambda x: x.__setitem__(0, x[1]),
    "augmented": lambda x: x.__setitem__((0, 16), x[0, 16] + 1),
}


@cases(SET_ITEMS)
def test_assignment_to_items(case):
    check(case, torch.randn(2, 17, 4, 4).to(tb.nChw16c), expects=contextlib.nullcontext)


# ---- Copies, conversions, tensors alike

COPIES = {
    "plain": lambda x: torch.randn(x.shape),
    "blocked": lambda x: torch.randn(x.shape).to(tb.nChw16c),
    "other format": lambda x: torch.randn(x.shape).to(tb.nChw8c),
    "channels last": lambda x: torch.randn(x.shape).to(memory_format=torch.channels_last),
    "double": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "integers": lambda x: torch.randint(0, 9, x.shape).to(tb.nChw16c),
    "a value a channel": lambda x: torch.randn(x.size(1), 1, 1),
    "a value a channel, blocked": lambda x: torch.randn(1, x.size(1), 1, 1).to(tb.nChw8c),
    "one": lambda x: torch.randn(()),
    "one, 1-D": lambda x: torch.randn(1).to(tb.blocked),
    "a row": lambda x: torch.randn(6),
    "expanded": lambda x: torch.randn(1, 1, 1, 6).expand(x.shape),
    "bool": lambda x: torch.randn(x.shape).gt(0),
}


@cases(COPIES)
def test_copy(isa, case):
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        src = case(image(channels))
        check_in_place(Tensor.copy_, image(channels).to(fmt), src)
        if src.dtype != torch.int64:
            check_in_place(Tensor.copy_, image(channels).mul(5).int().to(fmt), src.float().mul(10))
        check(Tensor.copy_, image(channels), blocked(src))


COPY_ERRORS = {
    "shape": lambda x: x.copy_(torch.ones(2, 16, 5, 6)),
    "rank": lambda x: x.copy_(torch.ones(1, 2, 17, 5, 6)),
    "fill with many": lambda x: x.fill_(torch.ones(2)),
    "set_ of a plain tensor": lambda x: x.set_(torch.ones(3).int()),
}


@cases(COPY_ERRORS)
def test_copy_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))


# Whether the answer is blocked, and the function.
CONVERSIONS = {
    "clone": (True, lambda x: x.clone()),
    "clone preserving": (True, lambda x: x.clone(memory_format=torch.preserve_format)),
    "clone contiguous": (False, lambda x: x.clone(memory_format=torch.contiguous_format)),
    "clone channels last": (False, lambda x: x.clone(memory_format=torch.channels_last)),
    "detach": (True, lambda x: x.detach()),
    "double": (True, lambda x: x.double()),
    "bfloat16": (True, lambda x: x.to(torch.bfloat16)),
    "int": (True, lambda x: (x * 3).int()),
    "bool": (True, lambda x: x.relu().bool()),
    "complex": (True, lambda x: x.to(torch.complex64)),
    "double, channels last": (False, lambda x: x.to(torch.float64, memory_format=torch.channels_last)),
    "channels last": (False, lambda x: x.to(memory_format=torch.channels_last)),
    "copy": (True, lambda x: x.to(torch.float32, copy=True)),
    "type_as": (True, lambda x: x.type_as(torch.ones(1).double())),
    "zeros_like": (True, torch.zeros_like),
    "ones_like": (True, torch.ones_like),
    "ones_like integers": (True, lambda x: torch.ones_like(x, dtype=torch.int64)),
    "ones_like channels last": (False, lambda x: torch.ones_like(x, memory_format=torch.channels_last)),
    "full_like": (True, lambda x: torch.full_like(x, math.nan)),
    "full_like bool": (True, lambda x: torch.full_like(x, True, dtype=torch.bool)),
    "empty_like": (True, lambda x: torch.empty_like(x).fill_(2)),
    "rand_like": (True, seeded(torch.rand_like)),
    "randn_like": (True, seeded(lambda x: torch.randn_like(x, dtype=torch.float64))),
    "randn_like channels last": (False, seeded(lambda x: torch.randn_like(x, memory_format=torch.channels_last))),
    "randint_like": (True, seeded(lambda x: torch.randint_like(x, 9))),
    "randint_like from": (True, seeded(lambda x: torch.randint_like(x, -3, 9))),
    "new_zeros": (False, lambda x: x.new_zeros(3, 2)),
    "new_ones": (False, lambda x: x.new_ones(x.shape, dtype=torch.int32)),
    "new_full": (False, lambda x: x.new_full((), 3.5)),
    "new_empty": (False, lambda x: x.new_empty(0)),
    "new_empty_strided": (False, lambda x: x.new_empty_strided((0, 2), (2, 1))),
    "new_tensor": (False, lambda x: x.new_tensor([1, 2])),
}


@cases(CONVERSIONS)
def test_conversion(isa, case):
    keeps, f = case
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        x = image(channels).to(fmt)
        y = check(f, x)
        assert isinstance(y, tb.BlockedTensor) == keeps
        if keeps:
            assert y.format == x.format
        if not keeps and y.dim() == 4:
            assert y.stride() == f(image(channels)).stride()


@pytest.mark.parametrize("value", [3, -1.5, math.nan, math.inf, True, torch.tensor(2.5), torch.tensor(3)])
def test_fill(isa, value):
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        check_in_place(Tensor.fill_, image(channels).to(fmt), value)
        check_in_place(lambda x: x.zero_(), (image(channels) / 0).to(fmt))


def test_detach_shares_the_bytes():
    x = image(17).to(tb.nChw16c)
    for y in (x.detach(), x.data, x.view(x.shape)):
        assert y.physical.data_ptr() == x.physical.data_ptr()
    assert x.clone().physical.data_ptr() != x.physical.data_ptr()


RANDOM_IN_PLACE = {
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "bernoulli by a tensor": lambda x: x.bernoulli_(torch.linspace(0, 1, x.numel()).view(x.shape)),
    "cauchy": lambda x: x.cauchy_(1, 2),
    "exponential": lambda x: x.exponential_(2),
    "geometric": lambda x: x.geometric_(0.3),
    "log_normal": lambda x: x.log_normal_(0, 0.5),
    "normal": lambda x: x.normal_(3, 2),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(100),
    "random from": lambda x: x.random_(-5, 100),
    "uniform": lambda x: x.uniform_(1, 2),
    "generator": lambda x: x.uniform_(1, 2, generator=torch.Generator().manual_seed(3)),
    "init": torch.nn.init.xavier_normal_,
}


@cases(RANDOM_IN_PLACE)
def test_random_in_place_draws_what_a_plain_tensor_would(isa, case):
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        check_in_place(seeded(case), image(channels).to(fmt))


def test_random_errors():
    check_error(lambda x: x.uniform_(2, 1), image(17).to(tb.nChw16c))
    check_error(lambda x: x.bernoulli_(2.0), image(17).to(tb.nChw16c))
    check_error(lambda x: x.normal_(0, -1), image(17).to(tb.nChw16c))


@each_channels
def test_answers_that_are_no_tensors(isa, channels):
    x = image(channels)
    other = x.clone()
    other[-1, -1, -1, -1] += 1
    for fmt in formats(isa):
        check(torch.equal, x.to(fmt), x)
        check(torch.equal, x, x.to(fmt))
        check(torch.equal, x.to(fmt), other.to(tb.nChw16c))
        check(torch.equal, x.to(fmt), x[:1].to(fmt))
        check(lambda x, y: x.is_same_size(y), x.to(fmt), x[:1])
        check(lambda x: x[:1, :, :1, :1].max().item(), x.to(fmt), expects=contextlib.nullcontext)
        check(lambda x: x[:1, -1:, :1, :1].item(), x.to(fmt), expects=contextlib.nullcontext)
    assert torch.ones(1, 1, 1, 1).to(tb.nChw16c).item() == 1


def test_set_takes_the_values_of_a_blocked_tensor():
    x, y = image(17).to(tb.nChw16c), image(17).to(tb.nChw8c)
    version = x.physical._version
    x.set_(y)
    assert_same(x, y.to_dense())
    assert x.format == tb.nChw16c
    assert x.physical._version > version


# ---- Every overload, by its schema

# Arguments by name. Tensors are drawn; what has a default and is not here keeps it.
VALUES = dict(
    alpha=2, approximate="tanh", beta=1.3, decimals=1, eps=0.1, exponent=2, input_scale=0.8, is_result=False, lambd=0.3,
    max=0.3, max_val=0.3, min=-0.4, min_val=-0.4, n=2, negative_slope=0.1, neginf=-3.0, other=0.4, p=1, posinf=3.0,
    reduction=1, x=0.5,
    rounding_mode="floor", scale=1.2, self=0.4, self_is_result=False, threshold=0.2, value=0.7, weight=0.3,
)  # fmt: skip

# The range of the values of all tensors, (-0.9, 0.9) by default: where a function is defined, and not steep.
POSITIVE = (
    "digamma lgamma log log10 log2 log1p logit pow rsqrt sqrt reciprocal sinc addcdiv div true_divide tan".split()
)
RANGES = {
    **dict.fromkeys(POSITIVE, (0.1, 0.9)),
    "acosh": (1.1, 3.0),
    **dict.fromkeys(["fmod", "remainder", "floor_divide", "mvlgamma", "polygamma"], (0.5, 5.0)),
}
BITWISE = """
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm __lshift __rshift
    __ilshift __irshift __xor __ixor
""".split()

POINTWISE = [f for f, handler in registry.HANDLERS.items() if handler.__module__.endswith(".pointwise")]
RANDOM = [f for f in POINTWISE if registry.HANDLERS[f].__name__ == "random_"]
POINTWISE = [f for f in POINTWISE if f not in RANDOM]


# Take other arguments than tensors of one size and dtype: see test_opinfo.py.
ODD_ARGUMENTS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.float_power_.Scalar, aten.float_power_.Tensor}


# PyTorch's answer depends on where an element lies among the others: of a NaN, of float16.
UNSTEADY_OF_NAN = ("polynomial", "logit_backward")
UNSTEADY_OF_HALF = ("special_i0e",)


def is_any_of(overload, parts):
    return any(part in name_of(overload) for part in parts)


def overloads_by_rule():
    """The overloads of ATen that have no entry of their own and are pointwise by their tag or name, without `out`."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        f = getattr(getattr(aten, packet, None), overload or "default", None) if name.startswith("aten::") else None
        if f is None or f in registry.HANDLERS or f in ODD_ARGUMENTS:
            continue
        if handler_of(f) in (pointwise, pointwise_):
            yield f


POINTWISE += overloads_by_rule()


def name_of(overload):
    return overload._schema.name.removeprefix("aten::").rstrip("_")


def draw(overload, size, dtype):
    """A tensor of the overload's range; of integers those around it, of bools either."""
    low, high = RANGES.get(name_of(overload), (-0.9, 0.9))
    x = torch.empty(size, dtype=torch.float64).uniform_(low, high)
    if not dtype.is_floating_point and not dtype.is_complex:
        x = (x * 10).round() if dtype != torch.bool else x > 0.4
    return x.to(dtype)


def arguments(overload, size, dtype=torch.float32):
    """Plain arguments, positional and by name."""
    args, kwargs = [], {}
    for a in overload._schema.arguments:
        is_tensor = "Tensor" in str(a.type)
        if is_tensor:
            is_condition = a.name in ("condition", "mask")
            value = draw(overload, size, torch.bool if is_condition else dtype)
        elif a.name in VALUES:
            value = VALUES[a.name]
            if name_of(overload) in BITWISE:
                value = 5
        elif a.has_default_value():
            continue
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


@contextlib.contextmanager
def dispatched(overload):
    """The handler registered for `overload` is called inside."""
    seen, handler = [], registry.look_up(overload)

    def watched(*args, **kwargs):
        seen.append(overload)
        return handler(*args, **kwargs)

    assert inspect.unwrap(handler) is (registry.HANDLERS.get(overload) or handler_of(overload))
    registry._resolved[overload] = watched
    try:
        yield
    finally:
        registry._resolved[overload] = handler
    assert seen, f"{overload} was not dispatched"


# Formats of the tensors among the arguments, in their order; None is plain.
ARRANGEMENTS = [
    (tb.blocked,),
    (tb.nChw16c, None),
    (None, tb.nChw8c),
    (tb.nChw8c, tb.nChw16c),
    (tb.format("acdB4b"), None),
]


def arrange(args, formats):
    """The arguments with their tensors in these formats, over and over."""
    formats = itertools.cycle(formats)
    return [(blocked(a, fmt) if (fmt := next(formats)) else a) if isinstance(a, Tensor) else a for a in args]


def check_overload(overload, args, kwargs, expects=native):
    """Called itself: in inference mode, where those that PyTorch decomposes arrive too."""
    with torch.inference_mode(), dispatched(overload):
        in_place = overload._schema.is_mutable and isinstance(args[0], tb.BlockedTensor)
        (check_in_place if in_place else check)(seeded(lambda *a: overload(*a, **kwargs)), *args, expects=expects)


@pytest.mark.parametrize("overload", POINTWISE, ids=str)
def test_each_pointwise_overload(isa, overload):
    dtype = torch.int32 if name_of(overload) in BITWISE else torch.float32
    for channels, formats in itertools.product(CHANNELS, ARRANGEMENTS if isa == AVAILABLE[-1] else ARRANGEMENTS[:1]):
        args, kwargs = arguments(overload, (2, channels, 3, 5), dtype)
        args = arrange(args, formats)
        if any(isinstance(a, tb.BlockedTensor) for a in args):
            check_overload(overload, args, kwargs)


@pytest.mark.parametrize("overload", [f for f in POINTWISE if not is_any_of(f, UNSTEADY_OF_HALF)], ids=str)
def test_each_pointwise_overload_in_other_dtypes(overload):
    for dtype, formats in itertools.product(OTHER_DTYPES, ARRANGEMENTS[:3]):
        args, kwargs = arguments(overload, (2, 17, 2, 3), dtype)
        given = arrange(args, formats)
        if not any(isinstance(a, tb.BlockedTensor) for a in given):
            continue

        def f(*a, kwargs=kwargs):
            return overload(*a, **kwargs)

        try:
            f(*[a.clone() if isinstance(a, Tensor) else a for a in args])
        except (RuntimeError, NotImplementedError):
            check_error(f, *given)
        else:
            check(f, *given, expects=native if dtype in FLOATS else contextlib.nullcontext)


@pytest.mark.parametrize(
    "overload",
    [f for f in POINTWISE if name_of(f) not in BITWISE and not is_any_of(f, UNSTEADY_OF_NAN)],
    ids=str,
)
def test_each_pointwise_overload_of_special_values(overload):
    """NaN and infinities stay in their channels, and out of the padding."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    args, kwargs = arguments(overload, (2, 17, 2, 5))
    for i, a in enumerate(a for a in args if isinstance(a, Tensor) and a.is_floating_point()):
        a[0, 0, 0], a[1, 16, 1], a[0, 5, 1] = special.roll(i), special, special.roll(2 * i)
    check_overload(overload, arrange(args, (tb.nChw16c,)), kwargs)
    check_overload(overload, arrange(args, (tb.nChw8c, None)), kwargs)


LARGE = {
    "add": lambda x: x + x,
    "a float": lambda x: x * 2.5,
    "an int": lambda x: x / 3,
    "a complex number": lambda x: x * 2j,
    "a complex sum": lambda x: x + 1j,
    "a tensor of no dims": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "clamp": lambda x: x.clamp(0.1, 1),
    "sigmoid": lambda x: x.sigmoid(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "plain and broadcast": lambda x: x + torch.ones(17, 1, 1),
    "relu backward": lambda x: aten.threshold_backward(x, x - 1, 0),
}


@cases(LARGE)
def test_large_answers(case):
    """Those that lie in the pool."""
    x = torch.randn(2, 17, 96, 96)
    assert x.to(tb.nChw16c).physical.numel() >= POOLED
    check(case, x.to(tb.nChw16c), expects=contextlib.nullcontext)


# The overloads outside the pointwise families: a function of a blocked image of `c` channels that calls it.
CALLS = {
    aten.convolution.default: lambda x, f: f(x, x, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    aten.convolution_backward.default: lambda x, f: f(
        torch.ones(2, 2, 3, 3), x, x, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    ),
    aten.native_batch_norm_backward.default: lambda x, f: f(
        x + 1, x, ones(x), None, None, ones(x), 2 * ones(x), True, 1e-5, [True, True, True]
    ),
    aten.pixel_shuffle.default: lambda x, f: f(x.repeat(1, 4, 1, 1), 2),
    aten.pixel_unshuffle.default: lambda x, f: f(x.repeat(1, 1, 1, 2), 2),
    aten.channel_shuffle.default: lambda x, f: f(x.repeat(1, 2, 1, 1), 2),
    aten.native_channel_shuffle.default: lambda x, f: f(x.repeat(1, 3, 1, 1), 3),
    aten.conv2d.default: lambda x, f: f(x, x, None, [1, 1], [1, 1]),
    aten.batch_norm.default: lambda x, f: f(x, ones(x), None, ones(x), 2 * ones(x), False, 0.1, 1e-5, False),
    aten._native_batch_norm_legit_no_training.default: lambda x, f: f(x, None, None, ones(x), 2 * ones(x), 0.1, 1e-5),
    aten.native_batch_norm.default: lambda x, f: f(x, ones(x), None, ones(x), ones(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: lambda x, f: f(x, None, ones(x), ones(x), ones(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda x, f: f(x, None, None, True, 0.1, 1e-5),
    aten.avg_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten._adaptive_avg_pool2d.default: lambda x, f: f(x, [2, 3]),
    aten.adaptive_avg_pool2d.default: lambda x, f: f(x, [2, 3]),
    aten.upsample_nearest2d.default: lambda x, f: f(x, [6, 7]),
    aten.upsample_bilinear2d.default: lambda x, f: f(x, [6, 7], False),
    aten._upsample_nearest_exact2d.default: lambda x, f: f(x, [6, 7]),
    aten.upsample_nearest2d.vec: lambda x, f: f(x, [6, 7], None),
    aten._upsample_nearest_exact2d.vec: lambda x, f: f(x, None, [1.7, 0.6]),
    aten.upsample_bilinear2d.vec: lambda x, f: f(x, None, True, [1.7, 0.6]),
    aten.upsample_bicubic2d.vec: lambda x, f: f(x, None, False, [1.7, 0.6]),
    aten.upsample_bicubic2d.default: lambda x, f: f(x, [6, 7], True),
    aten.max_pool2d_with_indices.default: lambda x, f: f(x, [2, 2]),
    aten.max_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten.adaptive_max_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten.upsample_linear1d.default: lambda x, f: f(x, [6], False),
    aten.upsample_trilinear3d.default: lambda x, f: f(x, [3, 5, 4], True),
    aten.upsample_nearest1d.default: lambda x, f: f(x, [6]),
    aten.upsample_nearest3d.default: lambda x, f: f(x, [3, 5, 4]),
    aten._upsample_nearest_exact1d.default: lambda x, f: f(x, [6]),
    aten._upsample_nearest_exact3d.default: lambda x, f: f(x, [3, 5, 4]),
    aten.upsample_linear1d.vec: lambda x, f: f(x, None, False, [1.7]),
    aten.upsample_trilinear3d.vec: lambda x, f: f(x, [3, 5, 4], True, None),
    aten.upsample_nearest1d.vec: lambda x, f: f(x, None, [1.7]),
    aten.upsample_nearest3d.vec: lambda x, f: f(x, None, [1.7, 2, 0.6]),
    aten._upsample_nearest_exact1d.vec: lambda x, f: f(x, [6], None),
    aten._upsample_nearest_exact3d.vec: lambda x, f: f(x, None, [1.7, 2, 0.6]),
    aten.avg_pool3d.default: lambda x, f: f(x, [2, 2, 2]),
    aten._adaptive_avg_pool3d.default: lambda x, f: f(x, [2, 3, 1]),
    aten.max_pool3d_with_indices.default: lambda x, f: f(x, [2, 2, 2]),
    aten.adaptive_max_pool3d.default: lambda x, f: f(x, [2, 3, 1]),
    aten.avg_pool2d_backward.default: lambda x, f: f(x, x, [3, 3], [1, 1], [1, 1], False, True, None),
    aten.avg_pool3d_backward.default: lambda x, f: f(x, x, [3] * 3, [1] * 3, [1] * 3, False, True, None),
    aten._adaptive_avg_pool2d_backward.default: lambda x, f: f(x[:, :, :1, :3], x),
    aten._adaptive_avg_pool3d_backward.default: lambda x, f: f(x[:, :, :1, :3], x),
    aten.max_pool2d_with_indices_backward.default: lambda x, f: f(
        x, x, *(maximum := ([3, 3], [1, 1], [1, 1], [1, 1], False)), aten.max_pool2d_with_indices(x, *maximum)[1]
    ),
    aten.max_pool3d_with_indices_backward.default: lambda x, f: f(
        x, x, *(maximum := ([3] * 3, [1] * 3, [1] * 3, [1] * 3, False)), aten.max_pool3d_with_indices(x, *maximum)[1]
    ),
    aten.adaptive_max_pool2d_backward.default: lambda x, f: f(x, x, aten.adaptive_max_pool2d(x, x.shape[2:])[1]),
    aten.adaptive_max_pool3d_backward.default: lambda x, f: f(x, x, aten.adaptive_max_pool3d(x, x.shape[2:])[1]),
    **{
        getattr(aten, name).default: lambda x, f, how=how: f(x, x.shape[2:], [*x.shape[:2], *how[0]], *how[1:])
        for name, how in {
            "upsample_nearest2d_backward": ([3, 2],),
            "_upsample_nearest_exact2d_backward": ([3, 2],),
            "upsample_bilinear2d_backward": ([3, 2], True),
            "upsample_bicubic2d_backward": ([3, 2], True),
            "upsample_linear1d_backward": ([3], True),
            "upsample_trilinear3d_backward": ([3, 2, 4], True),
            "upsample_nearest1d_backward": ([3],),
            "upsample_nearest3d_backward": ([3, 2, 4],),
            "_upsample_nearest_exact1d_backward": ([3],),
            "_upsample_nearest_exact3d_backward": ([3, 2, 4],),
        }.items()
    },
    aten.native_group_norm.default: lambda x, f: f(x, ones(x), None, *x.shape[:2], 20, 1, 1e-5),
    aten.native_group_norm_backward.default: lambda x, f: f(
        x + 1, x, torch.ones(2, 1), torch.ones(2, 1), 2 * ones(x), *x.shape[:2], 20, 1, [True, True, True]
    ),
    aten.instance_norm.default: lambda x, f: f(x, None, ones(x), None, None, True, 0.1, 1e-5, False),
    aten.native_layer_norm.default: lambda x, f: f(x, x.shape[2:], torch.ones(x.shape[2:]), None, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, f: f(
        x + 1, x, x.shape[1:], *[torch.ones(2, 1, 1, 1)] * 2, *[torch.ones(x.shape[1:])] * 2, [True, True, True]
    ),
    aten.expand.default: lambda x, f: f(x[:, :, :1], [3, -1, -1, 7, 5]),
    aten.view.default: lambda x, f: f(x, [-1]),
    aten._unsafe_view.default: lambda x, f: f(x, [-1, 5]),
    aten.reshape.default: lambda x, f: f(x, [5, -1]),
    aten.permute.default: lambda x, f: f(x, [3, 2, 1, 0]),
    aten.transpose.int: lambda x, f: f(x, 1, 2),
    aten.t.default: lambda x, f: f(x),
    aten.slice.Tensor: lambda x, f: f(x, 2, 1, 3),
    aten.select.int: lambda x, f: f(x, 2, 1),
    aten.native_dropout.default: lambda x, f: f(x, 0.5, True),
    aten.unbind.int: lambda x, f: f(x, 2),
    aten.split.Tensor: lambda x, f: f(x, 2, 2),
    aten.split_with_sizes.default: lambda x, f: f(x, [1, 3], 2),
    aten.cat.default: lambda x, f: f([x, x], 2),
    aten.unsqueeze.default: lambda x, f: f(x, 2),
    aten.squeeze.dim: lambda x, f: f(x[..., :1], 3),
    aten.squeeze.default: lambda x, f: f(x[..., :1]),
    aten.squeeze.dims: lambda x, f: f(x[:1, ..., :1], [0, 3]),
    aten.squeeze_.dim: lambda x, f: f(x.unsqueeze(3), 3),
    aten.squeeze_.dims: lambda x, f: f(x.unsqueeze(3).unsqueeze(0), [3, 0, 4]),
    aten.unsqueeze_.default: lambda x, f: f(x.clone(), -1),
    aten.transpose_.default: lambda x, f: f(x.clone(), 1, -1),
    aten.diagonal.default: lambda x, f: f(x, 1, 3, -2),
    aten.diagonal_backward.default: lambda x, f: f(x.sum(2), [*x.shape[:2], 6, 5], 0, 2, 3),
    aten.mean.dim: lambda x, f: f(x, [2]),
    aten.sum.dim_IntList: lambda x, f: f(x, [2, 3], True),
    aten.amax.default: lambda x, f: f(x, [-1]),
    aten.amin.default: lambda x, f: f(x, [0]),
    aten.sum.default: lambda x, f: f(x),
    aten.nansum.default: lambda x, f: f(x, [1]),
    aten.mean.default: lambda x, f: f(x),
    aten.max.default: lambda x, f: f(x),
    aten.max.dim: lambda x, f: f(x, 1),
    aten.min.default: lambda x, f: f(x - 9),
    aten.min.dim: lambda x, f: f(x, 1, True),
    aten.aminmax.default: lambda x, f: f(x, dim=1),
    aten.argmax.default: lambda x, f: f(x - 9),
    aten.argmin.default: lambda x, f: f(x, 1),
    aten.all.default: lambda x, f: f(x + 9),
    aten.all.dim: lambda x, f: f(x, 1),
    aten.all.dims: lambda x, f: f(x, [0, 1]),
    aten.any.default: lambda x, f: f(x),
    aten.any.dim: lambda x, f: f(x, 1),
    aten.any.dims: lambda x, f: f(x, [0, 1]),
    aten.prod.default: lambda x, f: f(x / 4),
    aten.prod.dim_int: lambda x, f: f(x / 4, 1),
    aten.count_nonzero.default: lambda x, f: f(x, 1),
    aten.count_nonzero.dim_IntList: lambda x, f: f(x, [1, 3]),
    aten.logsumexp.default: lambda x, f: f(x, [1]),
    aten.linalg_vector_norm.default: lambda x, f: f(x + 5, -1, [1]),
    aten.norm.Scalar: lambda x, f: f(x, 3),
    aten.norm.ScalarOpt_dim: lambda x, f: f(x, None, [1]),
    aten.norm.ScalarOpt_dim_dtype: lambda x, f: f(x, 1, [1], True, dtype=torch.float64),
    aten.norm.ScalarOpt_dtype: lambda x, f: f(x, 2, dtype=torch.float64),
    aten.var.correction: lambda x, f: f(x, [1, 2]),
    aten.std.correction: lambda x, f: f(x, [1, 2], correction=0, keepdim=True),
    aten.var_mean.correction: lambda x, f: f(x),
    aten.std_mean.correction: lambda x, f: f(x, [1, 2]),
    aten._softmax.default: lambda x, f: f(x, 1, False),
    aten._log_softmax.default: lambda x, f: f(x, 1, False),
    aten._softmax_backward_data.default: lambda x, f: f(x, dense(x).softmax(1), 1, torch.float32),
    aten._log_softmax_backward_data.default: lambda x, f: f(x, x.log_softmax(1), 1, torch.float32),
    aten.cumsum.default: lambda x, f: f(x, 1),
    aten.cumprod.default: lambda x, f: f(x / 4, 1),
    aten.cummax.default: lambda x, f: f(x, 2),
    aten.cummin.default: lambda x, f: f(x, 3),
    aten.logcumsumexp.default: lambda x, f: f(x, 2),
    aten.sort.default: lambda x, f: f(x),
    aten.sort.stable: lambda x, f: f(x, stable=True, dim=2),
    aten.topk.default: lambda x, f: f(x.cumsum(2).abs().cumsum(2), 2, 2)[0],
    aten.kthvalue.default: lambda x, f: f(x, 2, 0),
    aten.median.dim: lambda x, f: f(x, 2),
    aten.nanmedian.dim: lambda x, f: f(x, 2, True),
    aten.mode.default: lambda x, f: f(x, 3),
    aten.stack.default: lambda x, f: f([x, x + 1], 1),
    aten.flip.default: lambda x, f: f(x, [1, 2]),
    aten.roll.default: lambda x, f: f(x, [1, 2], [1, 3]),
    aten.repeat.default: lambda x, f: f(x, [2, 2, 1, 3]),
    aten.expand.default: lambda x, f: f(x, [2, *x.shape]),
    aten.constant_pad_nd.default: lambda x, f: f(x, [1, -1, 0, 2], 3),
    aten.reflection_pad1d.default: lambda x, f: f(x[0], [1, 2]),
    aten.reflection_pad2d.default: lambda x, f: f(x, [1, 2, 3, 0]),
    aten.reflection_pad3d.default: lambda x, f: f(x.unsqueeze(0).transpose(1, 2), [1, 2, 3, 0, 1, 1]),
    aten.replication_pad1d.default: lambda x, f: f(x[0], [1, 2]),
    aten.replication_pad2d.default: lambda x, f: f(x, [1, 2, 9, 0]),
    aten.replication_pad3d.default: lambda x, f: f(x.unsqueeze(0).transpose(1, 2), [1, 2, 3, 0, 1, 1]),
    aten.reflection_pad1d_backward.default: lambda x, f: f(x[0], x[0, ..., :3], [1, 1]),
    aten.reflection_pad2d_backward.default: lambda x, f: f(x, x[:, :, :3, :3], [1, 1, 0, 1]),
    aten.reflection_pad3d_backward.default: lambda x, f: f(
        x.unsqueeze(2), x[:, :, :3, :3].unsqueeze(2), [1, 1, 0, 1, 0, 0]
    ),
    aten.replication_pad1d_backward.default: lambda x, f: f(x[0], x[0, ..., :3], [1, 1]),
    aten.replication_pad2d_backward.default: lambda x, f: f(x, x[:, :, :3, :3], [1, 1, 0, 1]),
    aten.replication_pad3d_backward.default: lambda x, f: f(
        x.unsqueeze(2), x[:, :, :3, :3].unsqueeze(2), [1, 1, 0, 1, 0, 0]
    ),
    aten.index_select.default: lambda x, f: f(x, 2, torch.tensor([3, 0, 3])),
    aten.index.Tensor: lambda x, f: f(x, [None, None, torch.tensor([3, 0, 3])]),
    aten.index_put.default: lambda x, f: f(dense(x), [None, None, torch.tensor([3, 0])], x[:, :, :2], True),
    aten.index_add.default: lambda x, f: f(dense(x), 2, torch.tensor([3, 3]), x[:, :, :2], alpha=2),
    aten.index_add_.default: lambda x, f: f(x, 2, torch.tensor([3, 3]), x[:, :, :2] + 1),
    aten.index_copy.default: lambda x, f: f(x, 2, torch.tensor([3, 1]), x[:, :, :2]),
    aten.index_copy_.default: lambda x, f: f(x, 2, torch.tensor([3, 1]), x[:, :, :2] + 1),
    aten.gather.default: lambda x, f: f(x, 2, places(x)),
    aten.scatter.src: lambda x, f: f(dense(x), 0, torch.zeros_like(x[:1], dtype=torch.int64), x),
    aten.scatter.value: lambda x, f: f(x, 2, places(x), 3),
    aten.scatter.reduce: lambda x, f: f(x, 2, places(x), x, reduce="add"),
    aten.scatter.value_reduce: lambda x, f: f(x, 2, places(x), 3, reduce="multiply"),
    aten.scatter_add.default: lambda x, f: f(dense(x), 2, places(x), x),
    aten.scatter_reduce.two: lambda x, f: f(x, 2, places(x), x, "amax"),
    aten.tril.default: lambda x, f: f(x, 1),
    aten.triu.default: lambda x, f: f(x),
    aten.select_backward.default: lambda x, f: f(x, [*x.shape[:2], 3, *x.shape[2:]], 2, -1),
    aten.slice_backward.default: lambda x, f: f(x, [*x.shape[:2], 9, 5], 2, 1, 9, 2),
    aten.detach.default: lambda x, f: f(x),
    aten.alias.default: lambda x, f: f(x),
    aten.clone.default: lambda x, f: f(x),
    aten._to_copy.default: lambda x, f: f(x, dtype=torch.float64),
    aten.copy_.default: lambda x, f: f(x, x + 1),
    aten.zeros_like.default: lambda x, f: f(x),
    aten.ones_like.default: lambda x, f: f(x),
    aten.full_like.default: lambda x, f: f(x, 3),
    aten.empty_like.default: lambda x, f: f(x).zero_(),
    aten.rand_like.default: lambda x, f: f(x),
    aten.randn_like.default: lambda x, f: f(x),
    aten.randint_like.default: lambda x, f: f(x, 5),
    aten.randint_like.low_dtype: lambda x, f: f(x, -2, 5),
    aten.new_empty.default: lambda x, f: f(x, [2]).zero_(),
    aten.new_zeros.default: lambda x, f: f(x, [2]),
    aten.new_ones.default: lambda x, f: f(x, [2]),
    aten.new_full.default: lambda x, f: f(x, [2], 3),
    aten.new_empty_strided.default: lambda x, f: f(x, [2], [2]).zero_(),
    aten.zero_.default: lambda x, f: f(x),
    aten.fill_.Scalar: lambda x, f: f(x, 3),
    aten.fill_.Tensor: lambda x, f: f(x, torch.tensor(3)),
    aten._local_scalar_dense.default: lambda x, f: f(x),
    aten.equal.default: lambda x, f: f(x, x),
    aten.is_same_size.default: lambda x, f: f(x, x),
    aten.bernoulli_.Tensor: lambda x, f: f(x, torch.full(x.shape, 0.3)),
    aten.bernoulli_.float: lambda x, f: f(x, 0.3),
    aten.cauchy_.default: lambda x, f: f(x),
    aten.exponential_.default: lambda x, f: f(x),
    aten.geometric_.default: lambda x, f: f(x, 0.3),
    aten.log_normal_.default: lambda x, f: f(x),
    aten.normal_.default: lambda x, f: f(x),
    getattr(aten.random_, "from"): lambda x, f: f(x, 2, 9),
    aten.random_.to: lambda x, f: f(x, 9),
    aten.random_.default: lambda x, f: f(x),
    aten.uniform_.default: lambda x, f: f(x),
    aten.transpose_.default: lambda x, f: f(x, 1, -1),
    aten.t_.default: lambda x, f: f(x),
    aten.squeeze_.default: lambda x, f: f(x),
    aten.squeeze_.dim: lambda x, f: f(x, 0),
    aten.squeeze_.dims: lambda x, f: f(x, [0, 2]),
    aten.unsqueeze_.default: lambda x, f: f(x, 1),
    aten.resize_.default: lambda x, f: f(x, [x.size(1), 5, 8]),
    aten.resize_as_.default: lambda x, f: f(x, torch.empty(x.size(1), 40)),
}  # fmt: skip

# Logical sizes, for those that do not take a blocked image of (2, channels, 4, 5).
SIZES = {
    aten.t.default: lambda c: (3, c),
    aten.t_.default: lambda c: (3, c),
    aten.squeeze_.default: lambda c: (1, c + 1, 4, 5),
    aten.squeeze_.dim: lambda c: (1, c, 4, 5),
    aten.squeeze_.dims: lambda c: (1, c, 1, 4, 5),
    aten._local_scalar_dense.default: lambda c: (1, 1, 1, 1),
}
SIZES |= {f: lambda c: (2, c, 5) for f in CALLS if "1d" in str(f) and "_pad" not in str(f)}
SIZES |= {f: lambda c: (2, c, 3, 4, 5) for f in CALLS if "3d" in str(f) and "_pad" not in str(f)}

# Overloads that have no plain answer to compare with, or are tested by themselves.
NOT_CALLED = {
    aten.set_.source_Tensor: "copies where plain tensors share; test_set_takes_the_values_of_a_blocked_tensor"
}


def ones(x):
    return torch.ones(x.size(1))


def places(x):
    """Indices 0 and 1, blocked as x is."""
    return (x > 0).long()


def test_every_overload_has_a_case():
    tested = {*POINTWISE, *CALLS, *NOT_CALLED}
    assert set(registry.HANDLERS) - tested == set(), "handlers without a case"
    assert [o for o in tested - set(registry.HANDLERS) if not handler_of(o)] == [], "cases without a handler"


@pytest.mark.parametrize("overload", list(CALLS), ids=str)
def test_each_other_overload(isa, overload):
    size = SIZES.get(overload, lambda c: (2, c, 4, 5))
    for channels in CHANNELS:
        with torch.inference_mode(), dispatched(overload):
            x = integers(*size(channels)).to(tb.blocked)
            check(seeded(lambda x: CALLS[overload](x, overload)), x, expects=native)


@pytest.mark.parametrize(
    "name", [*BLOCKED_VIEWS, "flatten", "image", "squeeze channels", "view", "channels in a block"]
)
def test_views_in_inference_mode_of_tensors_made_outside(name):
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c)
    with torch.inference_mode():
        check(SHAPES[name], x, expects=contextlib.nullcontext)


# ---- Losses: what depends on the number of elements counts the logical ones


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@each_channels
def test_gradient_of_mse_loss(channels, reduction):
    x, target = image(channels), image(channels)
    grads = []
    for to in (lambda x: x, lambda x: x.to(tb.nChw16c)):
        leaf = to(x).detach().requires_grad_()
        F.mse_loss(leaf, to(target), reduction=reduction).backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])
