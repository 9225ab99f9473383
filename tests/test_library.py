"""The C++ operators: convolution and batch_norm at every ISA tier, guard bytes around what they write."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same, padding_is_zero
from kernel_cases import SHAPES, assert_same_in_python_threads, check_close, pair, run

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, weight_format

# Of SHAPES' kind; src and dst are larger than the caches.
STREAMED = {
    "depthwise": (2, 20, 20, 265, 265, 3, 3, 1, 1, 1, 20),
    "first": (2, 3, 40, 250, 253, 3, 3, 1, 1, 1, 1),
    "direct": (4, 20, 40, 150, 151, 3, 3, 1, 1, 1, 1),
    "direct 1x1": (6, 33, 40, 115, 115, 1, 1, 1, 0, 1, 1),
    "direct, of several sums": (2, 68, 40, 160, 161, 3, 3, 1, 1, 1, 1),
    "winograd_f4": (4, 20, 40, 150, 151, 3, 3, 1, 1, 1, 1),
    "winograd_f2": (4, 20, 40, 150, 151, 3, 3, 1, 1, 1, 1),
    "winograd_f4 of groups": (2, 32, 32, 205, 206, 3, 3, 1, 1, 1, 2),
}


def problem(shape):
    n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups = shape
    x, w, b = torch.randn(n, ic, ih, iw), torch.randn(oc, ic // groups, kh, kw), torch.randn(oc)
    return x, w, b, (pair(stride), pair(padding), pair(dilation), groups)


@functools.cache
def solved(shape):
    """A problem and its answer in float64, which is slow: once for all tiers."""
    x, w, b, args = problem(shape)
    return x, w, b, args, F.conv2d(x.double(), w.double(), b.double(), *args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(isa, guarded, shape):
    x, w, b, args, expected = solved(shape)
    block = library.isa_block()
    wei_formats = [None, weight_format(w.shape, block), weight_format(w.shape, 8), tb.OIhw4i16o4i]
    for src_format in (None, activation_format(4, block), tb.nChw8c, tb.nChw4c):
        dst_block = src_format.blocking.block(1) if src_format in (tb.nChw8c, tb.nChw4c) else block
        for wei_format, dense in itertools.product(wei_formats, (False, True)):
            with tb.winograd("never"):
                check_close(run(x, w, b, args, src_format, wei_format, dst_block, dense), expected)


@pytest.mark.parametrize("name", STREAMED)
def test_answers_larger_than_the_caches(isa, guarded, name):
    x, w, b, args = problem(STREAMED[name])
    block = library.isa_block()
    src_format = None if x.size(1) < 4 else activation_format(4, block)
    mode = {"winograd_f4": "f4", "winograd_f2": "f2"}.get(name.split()[0], "never")
    with tb.winograd(mode):
        y = run(x, w, b, args, src_format, weight_format(w.shape, block), block, activation="relu")
    assert 4 * (x.numel() + y.physical.numel()) > (20 if name == "depthwise" else 12) << 20
    check_close(y, F.conv2d(x, w, b, *args).relu())


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] > 1 or shape[4] == 7], ids=str)
def test_convolution_is_the_same_in_any_batch_and_threads(isa, shape):
    x, w, b, args = problem((5, *shape[1:]))
    block = library.isa_block()
    formats = activation_format(4, block), weight_format(w.shape, block), block
    y = run(x, w, b, args, *formats).physical
    with num_threads(1):
        assert all(torch.equal(run(x[i : i + 1], w, b, args, *formats).physical, y[i : i + 1]) for i in range(5))
    with num_threads(7):  # more than there are cores: some do the work of others
        assert all(torch.equal(run(x, w, b, args, *formats).physical, y) for _ in range(3))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("kind", ["dense", "first", "depthwise", "reference"])
def test_post_ops(isa, guarded, channels, activation, kind):
    groups = channels if kind == "depthwise" else 1
    x, w, b, args = problem((2, channels, channels, 9, 8, 3, 3, 1, 1, 1, groups))
    block = 5 if kind == "reference" else library.isa_block()
    fmt = None if kind == "first" else activation_format(4, library.isa_block())
    scale, shift, residual = torch.randn(channels), torch.randn(channels), 3 * torch.randn(2, channels, 9, 8)
    y = F.conv2d(x.double(), w.double(), b.double(), *args) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
    expected = {"none": lambda t: t, "relu": F.relu, "relu6": F.relu6}[activation](y)
    physical = residual.to(activation_format(4, block)).physical
    wei_format = weight_format(w.shape, library.isa_block())
    post_ops = {"scale": scale, "shift": shift, "residual": physical, "activation": activation}
    check_close(run(x, w, b, args, fmt, wei_format, block, **post_ops), expected)


@pytest.mark.parametrize("kernel", [1, 3])
def test_post_ops_of_many_columns(isa, guarded, kernel):
    """A residual is read where each call side by side writes."""
    x, w, b, args = problem((2, 24, 40, 9, 150, kernel, kernel, 1, kernel // 2, 1, 1))
    fmt, residual = activation_format(4, library.isa_block()), torch.randn(2, 40, 9, 150)
    expected = F.relu(F.conv2d(x.double(), w.double(), b.double(), *args) + residual)
    post_ops = {"residual": residual.to(fmt).physical, "activation": "relu"}
    check_close(run(x, w, b, args, fmt, None, library.isa_block(), **post_ops), expected)


@pytest.mark.parametrize("name", ["scale", "shift", "bias"])
def test_each_post_op_alone(isa, name):
    x, w, b, args = problem((1, 17, 19, 6, 5, 3, 3, 1, 1, 1, 1))
    y = F.conv2d(x.double(), w.double(), None, *args)
    values = b.view(-1, 1, 1)
    fmt = activation_format(4, library.isa_block())
    post_ops = {} if name == "bias" else {name: b}
    got = run(x, w, b if name == "bias" else None, args, fmt, None, library.isa_block(), **post_ops)
    check_close(got, y * values if name == "scale" else y + values)


def test_nan_stays_in_its_channel(isa):
    x, w, _, args = problem((1, 20, 20, 6, 6, 3, 3, 1, 1, 1, 20))
    x[0, 3] = float("nan")
    y = run(x, w, None, args, activation_format(4, library.isa_block()), None, library.isa_block())
    assert padding_is_zero(y)
    assert y.to_dense()[0, 3].isnan().all() and not y.to_dense()[0, [*range(3), *range(4, 20)]].isnan().any()


def test_nan_does_not_reach_the_padding(isa):
    x, w, _, args = problem((1, 20, 20, 6, 6, 3, 3, 1, 1, 1, 1))
    x[:] = float("inf")
    y = run(x, w, None, args, activation_format(4, library.isa_block()), None, library.isa_block())
    assert padding_is_zero(y) and not y.to_dense().isfinite().any()
    relu = run(
        x, w, None, args, activation_format(4, library.isa_block()), None, library.isa_block(), activation="relu"
    )
    plain = F.relu(F.conv2d(x, w, None, *args))
    assert torch.equal(relu.to_dense().isnan(), plain.isnan())


def test_strided_src(isa):
    x, w, b, args = problem((4, 48, 32, 9, 9, 3, 3, 1, 1, 1, 1))
    fmt = activation_format(4, library.isa_block())
    y = x.to(fmt)
    part = y[1:3, :, 2:7, 1:8]
    for stride_args in (args, ((2, 1), (0, 2), (1, 1), 1)):
        expected = F.conv2d(x[1:3, :, 2:7, 1:8].double(), w.double(), b.double(), *stride_args)
        for image in (part, x[1:3, :, 2:7, 1:8], x.contiguous(memory_format=torch.channels_last)[1:3, :, 2:7, 1:8]):
            blocked = isinstance(image, tb.BlockedTensor)
            physical = library.convolution_op(
                image.physical if blocked else image, sum(fmt.blocking, ()) if blocked else (),
                w, w.shape, (), b, *stride_args, library.isa_block(),
            )  # fmt: skip
            check_close(tb.BlockedTensor(physical, fmt.blocking, expected.shape), expected)
    one_by_one = torch.randn(32, 48, 1, 1)
    check_close(F.conv2d(part, one_by_one), F.conv2d(x[1:3, :, 2:7, 1:8].double(), one_by_one.double()))


def test_same_bits_every_time():
    x, w, b, args = problem((2, 64, 64, 14, 14, 3, 3, 1, 1, 1, 1))
    fmt = activation_format(4, library.isa_block())
    first = run(x, w, b, args, fmt, None, library.isa_block()).physical
    for _ in range(3):
        assert torch.equal(run(x, w, b, args, fmt, None, library.isa_block()).physical, first)


def test_from_several_threads():
    x, w, b, args = problem((1, 32, 32, 20, 20, 3, 3, 1, 1, 1, 1))
    fmt, block = activation_format(4, library.isa_block()), library.isa_block()
    assert_same_in_python_threads(lambda: run(x, w, b, args, fmt, None, block).physical, times=20)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(isa, guarded, channels, affine):
    for size in [(2, channels, 5, 7), (1, channels, 3), (2, channels, 3, 2, 5)]:
        x = torch.randn(size)
        mean, var = torch.randn(channels), torch.rand(channels) + 0.1
        weight, bias = (torch.randn(channels), torch.randn(channels)) if affine else (None, None)
        expected = F.batch_norm(x.double(), mean.double(), var.double(), eps=1e-3)
        if affine:
            shape = (-1, *[1] * (x.dim() - 2))
            expected = expected * weight.view(shape) + bias.view(shape)
        for block in (8, 16, 5):
            fmt = activation_format(x.dim(), block)
            physical = library.batch_norm_op(x.to(fmt).physical, weight, bias, mean, var, 1e-3)
            check_close(tb.BlockedTensor(physical, fmt.blocking, x.shape), expected)


P, W = torch.zeros(1, 1, 4, 4, 16), torch.zeros(16, 16, 3, 3)
GOOD = {
    "src": P, "src_blocking": [1, 16], "weight": W, "weight_size": [16, 16, 3, 3], "weight_blocking": [], "bias": None,
    "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1, "block": 16,
}  # fmt: skip
BAD = [
    ({"src": P[0]}, ValueError, "src"),
    ({"src": P.double()}, TypeError, "float32, bfloat16 or"),
    ({"weight": W.half()}, TypeError, "one dtype"),
    ({"weight_size": [16, 16]}, ValueError, "3 to 5 dims"),
    ({"weight_size": [16, 16, 3]}, ValueError, "stride"),
    ({"weight_size": [16, 15, 3, 3]}, ValueError, "physical shape"),
    ({"weight_size": [0, 16, 3, 3], "weight": W[:0]}, ValueError, "empty"),
    ({"stride": [0, 1]}, ValueError, "stride"),
    ({"stride": [1]}, ValueError, "stride"),
    ({"padding": [-1, 0]}, ValueError, "padding"),
    ({"dilation": [1, 2**40]}, ValueError, "dilation"),
    ({"padding": [0, 0], "dilation": [4, 4]}, RuntimeError, "kernel can't be greater"),
    ({"groups": 3}, ValueError, "groups"),
    ({"groups": 0}, ValueError, "groups"),
    ({"block": 0}, ValueError, "blocks of"),
    ({"block": -16}, ValueError, "blocks of"),
    ({"src_blocking": [1]}, ValueError, "pairs"),
    ({"src_blocking": [9, 16]}, ValueError, "axis 9"),
    ({"src_blocking": [1, 0]}, ValueError, "block of 0"),
    ({"bias": torch.zeros(3)}, ValueError, "bias"),
    ({"bias": torch.zeros(16).double()}, TypeError, "bias"),
    ({"scale": torch.zeros(2, 8)}, ValueError, "scale"),
    ({"residual": torch.zeros(1, 1, 4, 4, 8)}, ValueError, "residual"),
    ({"activation": "tanh"}, ValueError, "activation"),
]


@pytest.mark.parametrize(
    "change, error, words", BAD, ids=[str(next(iter(c))) + str(i) for i, (c, _, _) in enumerate(BAD)]
)
def test_convolution_refuses(change, error, words):
    library.convolution_op(**GOOD)
    with pytest.raises(error, match=words) as info:
        library.convolution_op(**{**GOOD, **change})
    assert "\n" not in str(info.value).split("\nException raised from")[0]


def test_outputs_can_be_resized():
    y = torch.randn(1, 16, 2, 2).to(tb.nChw16c).physical.clone()
    z = torch.randn(1, 16, 2, 2).to(tb.nChw16c).physical
    z.resize_(4096)
    z[:64] = y.flatten()
    assert torch.equal(z[:64], y.flatten())


@pytest.mark.parametrize("tier", ["default", "avx2"])
def test_environment_lowers_the_tier(tier):
    code = "import torch_blocked as tb, torch; print(tb.isa(), torch.randn(1,3,2,2).to(tb.blocked).format.tag)"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": tier}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert out in ([tier, "nChw8c"], ["default", "nChw8c"])  # a CPU without AVX2 has the default only


def test_one_openmp_runtime():
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) == 1, runtimes


# ---- Denormals and memory


def test_denormals_are_flushed_inside_and_only_there(isa):
    tiny = 1e-39
    x, w = torch.full((1, 32, 40, 40), tiny), torch.ones(32, 32, 3, 3)
    fmt = activation_format(4, library.isa_block())
    y = run(
        x, w, None, ((1, 1), (1, 1), (1, 1), 1), fmt, weight_format(w.shape, library.isa_block()), fmt.blocking.block(1)
    )
    assert not y.to_dense().any()
    assert torch.equal(x.to(fmt).to_dense(), x), "a reorder keeps them"
    everywhere = torch.full((1 << 20,), tiny) * 0.5  # in all of PyTorch's threads
    assert everywhere.count_nonzero() == everywhere.numel()


COMPARED = {
    "max_pool2d": lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True),
    "adaptive_max_pool2d": lambda x: torch.nn.functional.adaptive_max_pool2d(x, 2, return_indices=True),
    "amax of images": lambda x: x.amax((2, 3)),
    "max of channels": lambda x: x.max(1),
    "min of channels": lambda x: x.min(1),
    "argmax": lambda x: x.argmax(1),
    "amin": lambda x: x.amin(1),
    "relu": lambda x: x.relu(),
}


@pytest.mark.parametrize("name", COMPARED)
def test_denormals_that_are_compared_differ(isa, name):
    x = torch.randint(-9, 9, (2, 17, 6, 6)) * 1e-42
    with torch.no_grad(), tb.fallback("error"):
        actual, expected = COMPARED[name](x.to(tb.blocked)), COMPARED[name](x)
    if isinstance(expected, torch.Tensor):
        actual, expected = (actual,), (expected,)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b, rtol=0, atol=0)


WITHOUT_MEMORY = """
import resource, torch, torch_blocked as tb
tb.winograd("never")  # a sum of ones is exact
x, w = torch.ones(1, 16, 64, 64).to(tb.nChw8c), torch.ones(16, 16, 3, 3).to(tb.OIhw8i8o)
wide = torch.ones(1, 16, 2, 2).to(tb.nChw8c)
torch.nn.functional.conv2d(x, w)  # everything is loaded
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for call in (lambda: torch.nn.functional.conv2d(wide, w, padding=30000), lambda: x.expand(100000, -1, -1, -1) + 1):
    resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
    try:
        call()
        raise SystemExit("enough memory?")
    except torch.OutOfMemoryError as error:
        print("out of memory:", str(error).splitlines()[0])
    except RuntimeError as error:
        print("refused:", str(error).splitlines()[0])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.nn.functional.conv2d(x, w).to_dense()[0, 0, 1, 1] == 144
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the process' memory as Linux does")
def test_out_of_memory_leaves_everything_usable():
    result = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "out of memory" in result.stdout
