"""Gradients: the operators at every ISA tier, then by autograd through convolutions and batch normalization."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same, dense
from kernel_cases import (
    CONVOLUTIONS,
    SHAPES,
    TRANSPOSED,
    check_close,
    pair,
    plain_weight_gradient,
    weight_gradient,
    weight_gradient_problem,
)
from torch.utils._python_dispatch import TorchDispatchMode

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, weight_format

# (n, ic, oc, src, kernel, stride, padding, dilation, groups)
SHAPES_OF_ALL_RANKS = CONVOLUTIONS + [
    (n, ic, oc, (ih, iw), (kh, kw), pair(stride), pair(padding), pair(dilation), groups)
    for n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups in SHAPES
]
SHAPES_OF_ALL_RANKS += [
    (3, 20, 33, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),  # a chunk of several images
    (2, 33, 40, (40, 30), (3, 3), (1, 1), (1, 1), (1, 1), 1),  # several chunks an image
    (1, 300, 16, (9, 9), (1, 1), (1, 1), (0, 0), (1, 1), 1),  # more blocks of src than a tile has
    (2, 48, 96, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), 2),  # groups wider than a block that end inside one
    (2, 3, 17, (20, 21), (5, 5), (2, 2), (2, 2), (2, 2), 1),
]


@functools.cache
def solved(shape):
    """A problem and its gradient in float64, which is slow: once for all tiers."""
    x, diff_dst, size, arguments = weight_gradient_problem(shape)
    return x, diff_dst, size, arguments, plain_weight_gradient(x.double(), diff_dst.double(), size, *arguments)


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_RANKS, ids=str)
def test_weight_gradient(isa, guarded, shape):
    x, diff_dst, size, arguments, expected = solved(shape)
    for block in library.kernel_blocks():
        fmt = activation_format(x.dim(), block)
        for src in [x.to(fmt)] + [x] * (arguments[-1] == 1):
            for wei_format in (weight_format(size, block), weight_format((17, 17, *size[2:]), 8)):
                gradient = weight_gradient(src, diff_dst.to(fmt), size, arguments, wei_format)
                check_close(gradient, expected)


def test_bits_do_not_depend_on_threads():
    x, diff_dst, size, arguments = weight_gradient_problem((3, 33, 40, (30, 20), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    found = []
    for n in (1, 2, 5):
        with num_threads(n):
            found.append(weight_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format).physical)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("ic", [3, 17])
def test_infinities_stay_out_of_the_padding(isa, ic):
    x, diff_dst, size, arguments = weight_gradient_problem((1, ic, 19, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    x[0, 1, 3, 3] = float("inf")
    diff_dst[0, 2, 3, 2] = float("nan")
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    gradient = weight_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format)
    rebuilt = gradient.to_dense().to(wei_format).physical  # whose padding is zero
    torch.testing.assert_close(gradient.physical, rebuilt, rtol=0, atol=0, equal_nan=True)
    expected = plain_weight_gradient(x, diff_dst, size, *arguments)
    torch.testing.assert_close(gradient.to_dense(), expected, equal_nan=True)


def test_empty_batch():
    x, diff_dst, size, arguments = weight_gradient_problem((0, 17, 20, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    gradient = weight_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format)
    assert not gradient.physical.any()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    x, diff_dst, size, arguments = weight_gradient_problem((1, 17, 18, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    tensors = [t.to(fmt).physical.requires_grad_(requires_grad) for t in (x, diff_dst)]
    blocking = sum(fmt.blocking, ())
    torch.library.opcheck(
        library.convolution_weight_gradient_op,
        (tensors[0], blocking, tensors[1], size, wei_format.order, sum(wei_format.blocking, ()), *arguments),
    )


# (what is wrong, what differs from a right call, the message)
BAD = [
    ("dtype", {"src": torch.randn(1, 2, 5, 4, 8, dtype=torch.float64)}, "one dtype"),
    ("shape of diff_dst", {"diff_dst": torch.randn(1, 2, 5, 5, 8)}, "diff_dst has dst's shape"),
    ("dims of diff_dst", {"diff_dst": torch.randn(1, 2, 5, 4)}, "is blocked"),
    ("blocking of src", {"src": torch.randn(1, 4, 5, 4, 4), "src_blocking": (1, 4)}, "in blocks of 8"),
    ("plain src in groups", {"src": torch.randn(1, 16, 5, 4), "src_blocking": (), "groups": 2}, "without groups"),
    ("order", {"weight_order": (0, 0, 1, 2)}, "names each of 4 axes once"),
    ("weight blocking", {"weight_blocking": (0, 0)}, "block of 0"),
    ("weight size", {"diff_dst": torch.zeros([1] * 64), "weight_size": (1,) * 63}, "at most 12 dims"),
    ("stride", {"stride": (0, 1)}, "stride"),
    (
        "a padded src of more than 2**63 numbers",
        {
            "src": torch.zeros(1, 1, 1, 1, 1), "src_blocking": (), "diff_dst": torch.zeros(1, 1, 2, 2, 2, 8),
            "weight_size": (8, 1, 2, 2, 2), "weight_order": (0, 1, 2, 3, 4), "stride": (1, 1, 1),
            "padding": (1 << 23,) * 3, "dilation": ((1 << 24) - 1,) * 3,
        },
        "memory",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changed, message", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_arguments(changed, message):
    right = {
        "src": torch.randn(1, 2, 5, 4, 8), "src_blocking": (1, 8), "diff_dst": torch.randn(1, 2, 5, 4, 8),
        "weight_size": (16, 16 // changed.get("groups", 1), 3, 3), "weight_order": (0, 1, 2, 3),
        "weight_blocking": (0, 8), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        library.convolution_weight_gradient_op(*(right | changed).values())


# ---- By autograd


def gradients(f, *leaves):
    """The gradients of `f`'s answer, each pixel weighed otherwise; the same weights for the same shape."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = f(*leaves)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (dense(y) * weights).sum().backward()
    return [leaf.grad for leaf in leaves]


def check_gradients(f, *leaves, blocked):
    """Those of the leaves at the places `blocked` made blocked are blocked, nothing falls back, all are right."""
    expected = gradients(lambda *a: f(*a), *(leaf.double() for leaf in leaves))
    given = [leaf.to(tb.blocked) if i in blocked else leaf for i, leaf in enumerate(leaves)]
    with tb.count() as counts:
        found = gradients(f, *given)
    assert not counts.fallbacks
    for i, (grad, right) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(grad, tb.BlockedTensor) == (i in blocked)
        assert_same(grad, right.float(), rtol=1e-4, atol=1e-4 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_RANKS, ids=str)
def test_convolution(shape):
    n, ic, oc, src, kernel, *window, groups = shape
    x, w, b = torch.randn(n, ic, *src), torch.randn(oc, ic // groups, *kernel), torch.randn(oc)
    for blocked in ((0, 1), (1,)) if groups == 1 else ((0, 1),):
        check_gradients(
            lambda *a: torch.convolution(*a, *window, False, [0] * len(src), groups), x, w, b, blocked=blocked
        )


@pytest.mark.parametrize("shape", TRANSPOSED, ids=str)
def test_transposed_convolution(shape):
    n, ic, oc, src, kernel, stride, padding, output_padding, dilation, groups = shape
    if any(out >= s for out, s in zip(output_padding, stride, strict=True)):
        return check_fallback(shape)
    x, w, b = torch.randn(n, ic, *src), torch.randn(ic, oc // groups, *kernel), torch.randn(oc)
    check_gradients(
        lambda *a: torch.convolution(*a, stride, padding, dilation, True, output_padding, groups),
        x, w, b, blocked=(0, 1),
    )  # fmt: skip


def check_fallback(shape):
    """Rows of dst that no src reaches: right, by PyTorch."""
    n, ic, oc, src, kernel, stride, padding, output_padding, dilation, groups = shape
    x, w = torch.randn(n, ic, *src), torch.randn(ic, oc // groups, *kernel)

    def f(x, w):
        return torch.convolution(x, w, None, stride, padding, dilation, True, output_padding, groups)

    for grad, right in zip(gradients(f, x.to(tb.blocked), w), gradients(f, x, w), strict=True):
        assert_same(grad, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tag", ["OIhW4w16i16o", "OIHw2h8i8o", "OihW2w8o"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_blocked_by_height_or_width_too(tag, transposed):
    function = F.conv_transpose2d if transposed else F.conv2d
    x, w = torch.randn(2, 32, 5, 7), torch.randn(32, 32, 3, 3)
    expected = gradients(lambda x, w: function(x, w, padding=1), x.double(), w.double())
    with tb.count() as counts:
        found = gradients(lambda x, w: function(x, w, padding=1), x.to(tb.blocked), w.to(tb.format(tag)))
    assert not counts.fallbacks and found[1].format == tb.format(tag)
    for grad, right in zip(found, expected, strict=True):
        assert_same(grad, right.float(), rtol=1e-4, atol=1e-4)


def test_convolution_wants_only_some():
    x, w = torch.randn(2, 17, 6, 5).to(tb.blocked), torch.randn(20, 17, 3, 3).to(tb.blocked)
    for leaf, others in ((x, lambda x: F.conv2d(x, w)), (w, lambda w: F.conv2d(x, w))):
        (grad,) = gradients(others, leaf)
        assert isinstance(grad, tb.BlockedTensor)


def test_convolution_twice():
    """The gradient of a gradient."""
    x, w = torch.randn(1, 17, 5, 4), torch.randn(18, 17, 3, 3)
    found = []
    for to in (lambda t: t.double(), lambda t: t.to(tb.blocked)):
        leaves = [to(t).requires_grad_() for t in (x, w)]
        first = torch.autograd.grad(F.conv2d(*leaves).sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for right, grad in zip(*found, strict=True):
        assert_same(grad, right.float(), rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", CHANNELS)
def test_batch_norm(isa, channels, training):
    mean, var, weight = torch.randn(channels), torch.rand(channels) + 0.1, torch.randn(channels)

    def f(x, *affine):
        return F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), *affine, training=training)

    for size in [(3, channels, 5, 7), (4, channels, 3), (2, channels, 3, 2, 5)]:
        check_gradients(f, torch.randn(size) * 2 + 1, weight, torch.randn(channels), blocked=(0,))
        check_gradients(f, torch.randn(size), blocked=(0,))


def test_batch_norm_by_plain_gradient():
    """The gradient that comes in may be plain."""
    x = torch.randn(2, 17, 4, 5)
    check_gradients(lambda x: F.batch_norm(x, None, None, training=True).mul(torch.ones(1)), x, blocked=(0,))


@pytest.mark.parametrize("block", [5, 8, 16])
@pytest.mark.parametrize("channels", CHANNELS)
def test_batch_norm_operators(isa, guarded, channels, block):
    for size in [(3, channels, 40, 30), (1, channels, 3), (2, channels, 3, 2, 5)]:
        fmt, x, diff = activation_format(len(size), block), torch.randn(size) + 100, torch.randn(size)
        mean, var = library.batch_norm_statistics_op(x.to(fmt).physical, channels)
        dims = [0, *range(2, x.dim())]
        torch.testing.assert_close(mean, x.double().mean(dims).float())
        torch.testing.assert_close(var, x.double().var(dims, correction=0).float(), rtol=1e-4, atol=1e-6)
        weight, invstd = torch.randn(channels), torch.rand(channels) + 0.1
        for training in (True, False):
            arguments = (diff.to(fmt).physical, x.to(fmt).physical, weight, mean, invstd, training)
            expected = equivalents.batch_norm_backward_aten(
                *(a.double() if torch.is_tensor(a) else a for a in arguments)
            )
            physical, *others = library.batch_norm_backward_op(*arguments)
            check_close(
                tb.BlockedTensor(physical, fmt.blocking, x.shape),
                equivalents.blocked_to_plain(expected[0], size, (1, block)),
            )
            for found, right in zip(others, expected[1:], strict=True):
                torch.testing.assert_close(found, right.float(), rtol=1e-4, atol=1e-3)


def test_statistics_of_nonfinite_values(isa):
    x = torch.randn(2, 17, 5, 6)
    x[0, 2, 0, 0], x[0, 3, 1, 1], x[1, 16, 2, 2] = float("inf"), float("inf"), float("nan")
    y = [t.to(tb.blocked).physical if i else t for i, t in enumerate((x, x))]
    mean, var = library.batch_norm_statistics_op(y[1], 17)
    torch.testing.assert_close(mean, x.mean((0, 2, 3)), equal_nan=True)
    torch.testing.assert_close(var, x.var((0, 2, 3), correction=0), equal_nan=True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["batch_norm_statistics", "batch_norm_backward"])
def test_opcheck_of_batch_norm(name, requires_grad):
    x, diff = (torch.randn(2, 2, 3, 4, 16).requires_grad_(requires_grad) for _ in range(2))
    vectors = [torch.rand(32).add(0.5).requires_grad_(requires_grad) for _ in range(3)]
    arguments = {"batch_norm_statistics": (x, 32), "batch_norm_backward": (diff, x, *vectors, True)}[name]
    torch.library.opcheck(getattr(library.ops, name).default, arguments)


BAD_BATCH_NORM = [
    ("batch_norm_statistics", (torch.randn(2, 3), 3), "src is"),
    ("batch_norm_statistics", (torch.randn(2, 2, 3, 16), 3), "blocks of 16"),
    ("batch_norm_statistics", (torch.randn(2, 2, 3, 16).double(), 32), "float32, bfloat16 or"),
    ("batch_norm_statistics", (torch.randn(0, 2, 3, 16), 32), "no values"),
    (
        "batch_norm_backward",
        (torch.randn(2, 2, 4, 16), torch.randn(2, 2, 3, 16), None, *[torch.ones(32)] * 2, True),
        "one",
    ),
    ("batch_norm_backward", (*[torch.randn(2, 2, 3, 16)] * 2, None, torch.ones(32), torch.ones(31), True), "invstd"),
    (
        "batch_norm_backward",
        (*[torch.randn(2, 2, 3, 16)] * 2, torch.ones(2, 16), *[torch.ones(32)] * 2, True),
        "weight",
    ),
]


@pytest.mark.parametrize("name, arguments, message", BAD_BATCH_NORM)
def test_bad_arguments_of_batch_norm(name, arguments, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        getattr(library.ops, name)(*arguments)


# ---- The gradients of plain parameters are plain


@pytest.mark.parametrize("size", [(17, 1, 1), (2, 17, 5, 6), (5, 6), (1, 5, 6)], ids=str)
@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])
def test_gradient_of_a_plain_factor(size, compiling):
    x, factor = torch.randn(2, 17, 5, 6), torch.randn(size, requires_grad=True)
    (x * factor).square().sum().backward()
    expected, factor.grad = factor.grad, None
    function = lambda x, factor: (x.to(tb.blocked) * factor).square().sum()  # noqa: E731
    (torch.compile(function, backend="torch_blocked", fullgraph=True) if compiling else function)(x, factor).backward()
    torch.testing.assert_close(dense(factor.grad), expected, rtol=1e-4, atol=1e-4)
    assert compiling or type(factor.grad) is torch.Tensor or factor.shape == x.shape


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 17, 1, 1), (1, 17, 5, 6)], ids=str)
def test_gradient_of_a_plain_factor_in_a_compiled_model(size):
    """What the backend makes blocked itself gives plain parameters, whatever their axes, plain gradients."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.factor = torch.nn.Conv2d(3, 17, 1), torch.nn.Parameter(torch.randn(size))

        def forward(self, x):
            return (self.conv(x) * self.factor).square().mean()

    for n in (1, 2):
        model, x = Scaled(), torch.randn(n, 3, 5, 6)
        model(x).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        torch.compile(model, backend="torch_blocked", fullgraph=True)(x).backward()
        for name, p in model.named_parameters():
            assert type(p.grad) is torch.Tensor
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-4)


class AnyMode(TorchDispatchMode):
    """Its operators take Python's way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# What two leaves get one gradient through, and whether it is one tensor of both or two of the same bytes.
SHARED_GRADIENTS = {
    "sum": lambda a, b, c: (a + b) * c,
    "permutations": lambda a, b, c: (a.transpose(0, 1) + b.transpose(0, 1)) * c,
    "one permuted": lambda a, b, c: (a.transpose(0, 1) + b) * c,
    "views": lambda a, b, c: (a.view_as(a) + b.view_as(b)) * c,
    "a view more": lambda a, b, c: (a.unsqueeze(0) + b.unsqueeze(0)).squeeze(0) * c,
    "halves": lambda a, b, c: torch.cat([a, b]) * torch.cat([c, c]),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, AnyMode], ids=["", "dispatch mode"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("channels", [16, 20])
@pytest.mark.parametrize("function", SHARED_GRADIENTS.values(), ids=SHARED_GRADIENTS)
def test_gradients_share_no_bytes(function, channels, create_graph, mode):
    values = torch.randn(3, channels, channels, 3, 3)
    fmt = weight_format(values[0].shape, 8)

    a, b, c = (value.to(fmt) for value in values)
    a.requires_grad_(), b.requires_grad_()
    for _ in range(2):  # the second is added to the first
        with mode():
            function(a, b, c).sum().backward(create_graph=create_graph)
    a_, b_, c_ = (value.clone().requires_grad_() for value in values)
    expected = torch.autograd.grad(function(a_, b_, c_).sum(), (a_, b_))
    for actual, once in zip((a.grad, b.grad), expected, strict=True):
        assert isinstance(actual, tb.BlockedTensor) or channels % 8
        assert_same(actual.detach(), 2 * once)
