"""Reductions over channels and softmax along them, by the kernels: every ISA tier, odd sizes, special values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import assert_same
from kernel_cases import between_nans, check_refused

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format
from torch_blocked.physical import padding_of
from torch_blocked.tensor import BlockedTensor

CHANNELS = (1, 3, 8, 15, 16, 17, 31, 40, 130)
SIZES = ((1, 1), (2, 3), (4, 4), (7, 7), (5, 13), (3,), (2, 3, 5))

REDUCTIONS = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm_of_deviations": lambda x: x.std(1, correction=0) * math.sqrt(x.size(1)),
    "logsumexp": lambda x: x.logsumexp(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
}

# What a pixel's channels are: at random; with a few of these among them.
SPECIAL = {
    "finite": [],
    "large": [1e30, -1e30, 88.5, -103.0],
    "infinite": [math.inf],
    "minus infinite": [-math.inf],
    "nan": [math.nan],
    "all of them": [math.nan, math.inf, -math.inf],
}


def images(special=()):
    """Plain tensors of all sizes; each special value in about every eighth place, and alone in a pixel."""
    for channels, size in itertools.product(CHANNELS, SIZES):
        x = torch.randn(2, channels, *size)
        for i, value in enumerate(special):
            x[torch.rand(x.shape) < 0.1] = value
            x.flatten(2)[i % 2, :, -1] = value
        yield x


def each_src(x):
    """The physical tensor of `x` in blocks of every size that has a kernel, dense and as a view."""
    for block in library.kernel_blocks():
        physical = x.to(activation_format(x.dim(), block)).physical
        yield from (physical, between_nans(physical))


def back(physical, x):
    """The plain tensor of an answer of the blocks and the size of `x`; its padding is zero."""
    blocking = activation_format(x.dim(), physical.size(-1)).blocking
    y = BlockedTensor(physical, blocking, x.shape)
    assert not any(part.any() for part in padding_of(physical, blocking, x.shape))
    return y.to_dense()


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("how", REDUCTIONS)
def test_reduce(isa, guarded, how, special):
    for x in images(SPECIAL[special]):
        if special == "large" and how in ("sum", "mean"):  # beyond what float32 tells apart
            continue
        expected = REDUCTIONS[how](x.double()).float()
        for src in each_src(x):
            actual = library.reduce_channels_op(src, x.size(1), how)
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
            assert actual.is_contiguous()


@pytest.mark.parametrize("scale", [1e-25, 1e-16, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("how", ["norm", "norm_of_deviations"])
def test_roots_of_squares_beyond_float32(isa, guarded, how, scale):
    for x in images():
        x = (x.double() * scale).float()
        x[0, :, ..., 0] = 0
        expected = REDUCTIONS[how](x.double()).float()
        for src in each_src(x):
            actual = library.reduce_channels_op(src, x.size(1), how)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-30)


def test_deviations_from_a_large_mean(isa, guarded):
    """A mean has errors that are large beside what differs from it."""
    for mean in (1e4, 1e8):
        x = torch.full((1, 48, 3, 7), mean) + 8 * torch.randint(-3, 3, (1, 48, 3, 7))
        expected = x.double().var(1, correction=0) * 48
        for src in each_src(x):
            norm = library.reduce_channels_op(src, 48, "norm_of_deviations")
            torch.testing.assert_close(norm, expected.sqrt().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("least", [False, True], ids=["greatest", "least"])
def test_find(isa, guarded, least, special):
    for x in images(SPECIAL[special]):
        x = torch.where(torch.rand(x.shape) < 0.5, x.round(), x)  # some are equal
        expected = x.min(1) if least else x.max(1)
        for src in each_src(x):
            values, indices = library.find_channel_op(src, x.size(1), least)
            torch.testing.assert_close(values, expected.values, equal_nan=True, rtol=0, atol=0)
            assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_softmax(isa, guarded, log, special):
    for x in images(SPECIAL[special]):
        function = torch.log_softmax if log else torch.softmax
        y = function(x.double(), 1)
        for src in each_src(x):
            actual = back(library.softmax_channels_op(src, x.size(1), log), x)
            torch.testing.assert_close(actual, y.float(), equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_softmax_backward(isa, guarded, log):
    for x in images():
        wide = (8 * x).double().requires_grad_()
        y = (torch.log_softmax if log else torch.softmax)(wide, 1)
        diff = torch.randn_like(x)
        (expected,) = torch.autograd.grad(y, wide, diff.double())
        for src_diff, dst in zip(each_src(diff), each_src(y.detach().float()), strict=True):
            actual = back(library.softmax_channels_backward_op(src_diff, dst, x.size(1), log), x)
            torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)


def test_softmax_backward_of_special_values(isa, guarded):
    """What is not finite stays in its pixel, and the padding is zero."""
    for log in (False, True):
        y = (torch.log_softmax if log else torch.softmax)(torch.randn(2, 19, 3, 7), 1)
        diff = torch.randn_like(y)
        diff[0, 3, 1, 2], diff[1, 18, 2, 6] = math.inf, math.nan
        func = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
        expected = func(diff, y, 1, torch.float32)
        for src_diff, dst in zip(each_src(diff), each_src(y), strict=True):
            actual = back(library.softmax_channels_backward_op(src_diff, dst, 19, log), y)
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("special", ["finite", "infinite", "nan"])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(isa, guarded, affine, special):
    for x in images(SPECIAL[special]):
        vectors = torch.randn(2, x.size(1)) if affine else (None, None)
        wide, last = x.double().movedim(1, -1), (None if v is None else v.double() for v in vectors)
        y = torch.nn.functional.layer_norm(wide, x.shape[1:2], *last, eps=1e-2).movedim(-1, 1).float()
        rstd = torch.rsqrt(x.double().var(1, correction=0) + 1e-2).float()
        for src in each_src(x):
            dst, means, rstds = library.layer_norm_channels_op(src, x.size(1), *vectors, 1e-2)
            torch.testing.assert_close(back(dst, x), y, equal_nan=True, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(means, x.double().mean(1).float(), equal_nan=True, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rstds, rstd, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_many_channels(isa, guarded):
    """Sums of many: no worse than PyTorch's own."""
    x = torch.rand(1, 5000, 3, 6) + 1
    for src in each_src(x):
        torch.testing.assert_close(library.reduce_channels_op(src, 5000, "sum"), x.double().sum(1).float())
        norm = library.reduce_channels_op(src, 5000, "norm_of_deviations") / 4999**0.5
        torch.testing.assert_close(norm, x.double().std(1).float(), rtol=1e-5, atol=0)
        assert torch.equal(library.find_channel_op(src, 5000, True)[1], x.argmin(1))


def test_bits_do_not_depend_on_threads_or_batch(isa):
    x = torch.randn(5, 70, 33, 21)
    src = x.to(activation_format(4, library.isa_block())).physical
    calls = [lambda src, how=how: library.reduce_channels_op(src, 70, how) for how in REDUCTIONS]
    calls += [lambda src, log=log: library.softmax_channels_op(src, 70, log) for log in (False, True)]
    for call in calls:
        y = call(src)
        for n in (1, 3, 7):
            with num_threads(n):
                assert torch.equal(call(src), y)
        assert all(torch.equal(call(src[i : i + 1]), y[i : i + 1]) for i in range(5))


# ---- Who calls them

MODULES = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "amax": lambda x: x.amax(1, keepdim=True),
    "amin": lambda x: x.amin((1,)),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1, keepdim=True),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "normalize": lambda x: torch.nn.functional.normalize(x),
    "var": lambda x: x.var(1, keepdim=True),
    "std": lambda x: x.std(1, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, 1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
}
_OPS = ("reduce_channels_op", "find_channel_op", "softmax_channels_op", "softmax_channels_backward_op")


@pytest.fixture
def called(monkeypatch):
    """The names of the operators that were called."""
    names = []

    def watch(name):
        op = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *args: names.append(name) or op(*args))

    for name in _OPS:
        watch(name)
    return names


@pytest.mark.parametrize("name", MODULES)
def test_operators_call_them(called, name):
    x = torch.randn(2, 19, 6, 5)
    with tb.fallback("error"):
        actual, expected = MODULES[name](x.to(tb.blocked)), MODULES[name](x)
    assert called
    for a, e in zip(*(v if isinstance(v, tuple) else (v,) for v in (actual, expected)), strict=True):
        assert_same(a.to_dense() if isinstance(a, BlockedTensor) else a, e)


def test_the_gradient_of_softmax_calls_one(called):
    x = torch.randn(2, 19, 6, 5).to(tb.blocked).requires_grad_()
    x.log_softmax(1).square().sum().backward()
    assert called == ["softmax_channels_op", "softmax_channels_backward_op"]


@pytest.mark.parametrize("other", [
    lambda x: x.double().to(tb.blocked).sum(1),
    lambda x: x.to(tb.nChw4c).sum(1),
    lambda x: x.to(tb.blocked).sum(1, dtype=torch.float64),
    lambda x: x.to(tb.blocked).norm(p=1, dim=1),
    lambda x: x.to(tb.blocked).sum((1, 2)),
    lambda x: x[:0].to(tb.blocked).sum(1),
    lambda x: x.to(tb.blocked).softmax(2),
])  # fmt: skip
def test_others_do_not(called, other):
    other(torch.randn(2, 19, 6, 5))
    assert not called


# ---- The operators in torch.library

P = torch.randn(2, 3, 5, 6, 8, generator=torch.Generator().manual_seed(0))
P[:, 2, ..., 4:] = 0
Y = equivalents.softmax_channels_aten(P, 20, False)

CALLS = {
    **{how: ("reduce_channels", [P, 20, how]) for how in REDUCTIONS},
    "greatest": ("find_channel", [P, 20, False]),
    "least": ("find_channel", [P, 20, True]),
    "softmax": ("softmax_channels", [P, 20, False]),
    "log_softmax": ("softmax_channels", [P, 20, True]),
    "layer_norm": ("layer_norm_channels", [P, 20, P[0, 0, 0, 0].repeat(3)[:20], P[0, 0, 0, 1].repeat(3)[:20], 0.1]),
    "layer_norm, no vectors": ("layer_norm_channels", [P, 20, None, None, 0.1]),
    "softmax backward": ("softmax_channels_backward", [P, Y, 20, False]),
    "log_softmax backward": ("softmax_channels_backward", [P, Y, 20, True]),
    "strided": ("softmax_channels", [P.transpose(2, 3), 20, False]),
    "no images": ("reduce_channels", [P[:0], 20, "sum"]),
    "no pixels": ("softmax_channels", [P[:, :, :0], 20, False]),
}


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, requires_grad):
    op, (src, *args) = CALLS[name]
    src = src.detach().clone().requires_grad_(requires_grad)
    torch.library.opcheck(getattr(torch.ops.torch_blocked, op).default, [src, *args])


@pytest.mark.parametrize("name", CALLS)
def test_the_same_in_aten(name):
    op, args = CALLS[name]
    actual = getattr(torch.ops.torch_blocked, op)(*args)
    torch.testing.assert_close(actual, getattr(equivalents, f"{op}_aten")(*args))


GOOD = {
    "reduce_channels": dict(src=P, channels=20, how="sum"),
    "find_channel": dict(src=P, channels=20, least=False),
    "softmax_channels": dict(src=P, channels=20, log=False),
    "layer_norm_channels": dict(src=P, channels=20, weight=torch.ones(20), bias=None, eps=0.1),
    "softmax_channels_backward": dict(diff_dst=P, dst=Y, channels=20, log=False),
}
BAD = [
    ("reduce_channels", {"src": P[0, 0, 0]}, ValueError, "src is"),
    ("reduce_channels", {"src": P.double()}, TypeError, "float32 only"),
    ("reduce_channels", {"src": P[..., :4]}, ValueError, "blocks of 4"),
    ("reduce_channels", {"src": P[..., :4], "channels": 12}, ValueError, "blocks of 8"),
    ("reduce_channels", {"channels": 16}, ValueError, "20|16 channels"),
    ("reduce_channels", {"channels": -1}, ValueError, "channels"),
    ("reduce_channels", {"channels": 2**63 - 1}, ValueError, "channels"),
    ("reduce_channels", {"src": P[:, :0], "channels": 0}, ValueError, "1 to"),
    ("reduce_channels", {"how": "prod"}, ValueError, "one of sum"),
    ("find_channel", {"src": P[:, :0], "channels": 0}, ValueError, "1 to"),
    ("softmax_channels", {"src": P.half()}, TypeError, "float32 only"),
    ("layer_norm_channels", {"src": P.double()}, TypeError, "float32 only"),
    ("layer_norm_channels", {"weight": torch.ones(24)}, ValueError, "weight has one value"),
    ("layer_norm_channels", {"bias": torch.ones(20, 1)}, ValueError, "bias has one value"),
    ("layer_norm_channels", {"bias": torch.ones(20).double()}, TypeError, "bias is float32"),
    ("softmax_channels_backward", {"dst": Y[:1]}, ValueError, "one shape"),
    ("softmax_channels_backward", {"dst": Y.double()}, TypeError, "float32 only"),
]


@pytest.mark.parametrize("name, change, error, words", BAD, ids=[f"{b[0]}-{b[3]}-{i}" for i, b in enumerate(BAD)])
def test_refuses(name, change, error, words):
    check_refused(name, GOOD[name], change, error, words)
