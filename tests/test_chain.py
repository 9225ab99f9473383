"""Chains of convolutions: some rows of all are computed before the next, and every bit is that of one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, compiled, conv, fresh, randomized  # noqa: F401
from conftest import hold_free_memory
from kernel_cases import between_nans
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, weight_format

# A convolution: output channels, or None for a depthwise one, kernel, stride, padding, dilation.
EXPAND, PROJECT = (97, 1, 1, 0, 1), (24, 1, 1, 0, 1)
# name -> n, input channels, height, width, convolutions
CHAINS = {
    "inverted residual": (2, 24, 61, 57, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "stride 2": (1, 17, 75, 70, [EXPAND, (None, 3, 2, 1, 1), PROJECT]),
    "depthwise, then 1x1": (3, 97, 53, 59, [(None, 5, 2, 2, 1), PROJECT]),
    "1x1, then depthwise": (2, 24, 53, 59, [EXPAND, (None, 5, 1, 2, 1)]),
    "an image": (1, 3, 151, 149, [(33, 3, 2, 1, 1), (None, 3, 1, 1, 1), PROJECT]),
    "an image, 7x7": (1, 3, 151, 149, [(33, 7, 2, 3, 1), (None, 3, 2, 1, 1)]),
    "dilation": (2, 24, 61, 57, [EXPAND, (None, 3, 1, 3, 3), PROJECT]),
    "no padding": (2, 24, 61, 57, [EXPAND, (None, 3, 1, 0, 1), PROJECT]),
    "rows beyond the kernel": (2, 24, 61, 57, [EXPAND, (None, 2, 3, 0, 1), PROJECT]),
    "rows of padding alone": (2, 24, 61, 57, [EXPAND, (None, 2, 2, 3, 1), PROJECT]),
    "one column": (2, 97, 4000, 1, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "three depthwise": (1, 97, 61, 57, [(None, 3, 1, 1, 1)] * 3),
    "dense between": (1, 33, 90, 85, [(None, 3, 1, 1, 1), (97, 3, 1, 1, 1), (None, 3, 1, 1, 1)]),
    "half an image a thread": (1, 24, 14, 14, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "odd rows": (1, 24, 7, 7, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "one row": (1, 24, 1, 30, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "small": (2, 24, 5, 4, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
    "empty batch": (0, 24, 5, 4, [EXPAND, (None, 3, 1, 1, 1), PROJECT]),
}


def operands(name, residual_last=None):
    """The operator's arguments, and those of each convolution but its src."""
    n, ic, h, w, convolutions = CHAINS[name]
    block, fmt = library.isa_block(), activation_format(4, library.isa_block())
    plain, each, channels, x = ic < 4, [], [ic], torch.randn(n, ic, h, w)
    src = x if plain else between_nans(x.to(fmt).physical)
    blocking, shape = () if plain else sum(fmt.blocking, ()), x.to("meta")
    for i, (oc, k, stride, padding, dilation) in enumerate(convolutions):
        groups, oc = (ic, ic) if oc is None else (1, oc)
        weight = torch.randn(oc, ic // groups, k, k)
        shape = F.conv2d(shape, weight.to("meta"), None, stride, padding, dilation, groups)
        wei = weight.to(weight_format(weight.shape, block))
        given = blocking if i == 0 else sum(fmt.blocking, ())
        post_ops = [None, None, None, ("relu6", "none", "leaky_relu")[i % 3], 0.25, False]
        if i != 1:
            post_ops[:2] = torch.rand(oc) + 0.5, torch.randn(oc)
        bias = torch.randn(oc) if i == 1 else None
        window = [stride] * 2, [padding] * 2, [dilation] * 2, groups
        each.append([given, wei.physical, weight.shape, sum(wei.blocking, ()), bias, *window, block, *post_ops])
        channels.append(oc)
        ic = oc
    if residual_last is not None:
        each[-1][12], each[-1][15] = torch.randn(shape.shape).to(fmt).physical, residual_last

    def all_of(i):
        return [arguments[i] for arguments in each]

    windows = [[number for pair in all_of(i) for number in pair] for i in (5, 6, 7)]
    names, residual = ",".join(all_of(13)), (each[-1][12], each[-1][15])
    first = src, blocking, all_of(1), channels, all_of(4), *windows, all_of(8), block
    return src, each, (*first, all_of(10), all_of(11), names, all_of(14), *residual)


def one_by_one(src, each):
    for arguments in each:
        src = library.convolution_op(src, *arguments)
    return src


@pytest.mark.parametrize("threads", [1, 2, 7])  # of more than there are cores, some do the work of others
@pytest.mark.parametrize("name", CHAINS)
def test_bits(isa, name, threads):
    src, each, arguments = operands(name)
    with num_threads(threads):
        for _ in range(3):
            assert torch.equal(library.convolution_chain_op(*arguments), one_by_one(src, each))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["inverted residual", "1x1, then depthwise", "small"])
def test_residual(isa, name, last):
    src, each, arguments = operands(name, residual_last=last)
    assert torch.equal(library.convolution_chain_op(*arguments), one_by_one(src, each))


@pytest.mark.parametrize("name", CHAINS)
def test_stays_within_its_answer(isa, name):
    _, _, arguments = operands(name)
    library.guard_outputs(True)
    try:
        answer = library.convolution_chain_op(*arguments)
        assert not answer.isnan().any()
        del answer
    finally:
        assert library.guard_outputs(False) == 0


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_one_that_is_not_computed_by_rows(isa, mode):
    src, each, arguments = operands("dense between")
    with tb.winograd(mode):
        assert torch.equal(library.convolution_chain_op(*arguments), one_by_one(src, each))


# name -> threads, and whether each computes rows of the last answer
BY_ROWS = {
    "inverted residual": [(1, True), (2, True), (3, True)],
    "half an image a thread": [(1, False), (2, True)],  # which one core's cache holds whole
    "odd rows": [(2, False)],  # 4 and 3, and of the middle ones 5 and 4
    "one row": [(2, False)],
    "small": [(2, True), (3, False)],
}


@pytest.mark.parametrize(
    "name, threads, by_rows",
    [(name, *case) for name, cases in BY_ROWS.items() for case in cases],
)
def test_what_lies_between_is_not_in_memory(name, threads, by_rows):
    """Computed by rows, the pool holds the answer afterwards; else a whole tensor of those between, too."""
    _, _, arguments = operands(name)
    n, _, h, w, _ = CHAINS[name]
    between = n * 112 * h * w * 4
    with num_threads(threads):
        library.convolution_chain_op(*arguments)  # weights are packed
        held = hold_free_memory()
        library.convolution_chain_op(*arguments)
        assert (library.cached_bytes() < between) == by_rows
        del held


def changed(**change):
    """Arguments of the small chain with some of them replaced."""
    names = (
        "src src_blocking weights channels biases strides paddings dilations groups block scales shifts activations "
        "alphas residual residual_last"
    ).split()
    return {**dict(zip(names, operands("small")[2], strict=True)), **change}


BAD = [
    ({"weights": []}, ValueError, "for 0 weights"),
    ({"channels": [24, 97, 97]}, ValueError, "4 numbers of channels"),
    ({"channels": [24, 97, 97, 40]}, ValueError, "weight"),
    ({"channels": [24, 96, 97, 24]}, ValueError, "weight"),
    ({"groups": [1, 0, 1]}, ValueError, "groups"),
    ({"strides": [1] * 5}, ValueError, "for 3 weights"),
    ({"strides": [1, 1, 0, 1, 1, 1]}, ValueError, "stride"),
    ({"paddings": [0, 0, -1, 1, 0, 0]}, ValueError, "padding"),
    ({"activations": "relu"}, ValueError, "for 3 weights"),
    ({"activations": "relu,tanh,relu"}, ValueError, "activation"),
    ({"weights": [torch.zeros(7, 2, 1, 1)] * 3}, ValueError, "a weight has four dims"),
    ({"src": torch.zeros(2, 2, 5, 4, 16, dtype=torch.bfloat16)}, TypeError, "float32 only"),
    ({"residual": torch.zeros(2, 2, 5, 5, 16)}, ValueError, "residual"),
    ({"scales": [torch.zeros(3), None, None]}, ValueError, "scale"),
]


@pytest.mark.parametrize("change, error, words", BAD, ids=[f"{next(iter(c))}{i}" for i, (c, _, _) in enumerate(BAD)])
def test_refuses(change, error, words):
    with pytest.raises(error, match=words):
        library.convolution_chain_op(**changed(**change))


def test_opcheck():
    torch.library.opcheck(
        library.convolution_chain_op, list(changed().values()), test_utils=("test_schema", "test_faketensor")
    )


# ---- In the backend


def block(oc, ic, k=1, groups=1, act=nn.ReLU6, **window):
    return nn.Sequential(nn.Conv2d(ic, oc, k, groups=groups, bias=False, **window), nn.BatchNorm2d(oc), act())


def inverted_residual(act=nn.ReLU6):
    parts = block(96, 16, act=act), block(96, 96, 3, 96, act, padding=1), block(16, 96, act=nn.Identity)
    return dict(zip("abc", parts, strict=True))


# name -> a model of (n, 16, h, w) images, and how many convolutions each chain has
NETWORKS = {
    "inverted residual": (lambda: Lambda(lambda m, x: x + m.c(m.b(m.a(x))), **inverted_residual()), [3]),
    "activation after the sum": (
        lambda: Lambda(lambda m, x: F.relu(x + m.c(m.b(m.a(x)))), **inverted_residual(nn.Hardswish)), [3],
    ),
    "between is used twice": (
        lambda: Lambda(lambda m, x: (y := m.b(m.a(x))).mean() * m.c(y), **inverted_residual()), [2],
    ),
    "sum between": (lambda: Lambda(lambda m, x: m.c((y := m.a(x)) + m.b(y)), **inverted_residual()), []),
    "the residual is what it reads": (
        lambda: Lambda(
            lambda m, x: (y := m.b(x)) + m.c(y), b=block(16, 16, 3, 16, padding=1), c=block(16, 16, act=nn.Identity)
        ), [],
    ),
    "separable": (
        lambda: nn.Sequential(
            block(16, 16, 3, 16, padding=1), block(32, 16), block(32, 32, 3, 32, stride=2, padding=1), block(16, 32)
        ), [2, 2],
    ),
    "no depthwise": (lambda: nn.Sequential(block(32, 16), block(32, 32, 3, 2, padding=1), block(16, 32)), []),
    "3x3 before": (lambda: nn.Sequential(block(32, 16, 3), block(32, 32, 3, 32)), []),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_networks(name, dynamic, graphs):
    make, chains = NETWORKS[name]
    model, x = randomized(make()), torch.randn(2, 16, 8, 12)
    want = model(x)
    if dynamic:
        torch._dynamo.mark_dynamic(x, (0, 2, 3))
    with tb.fallback("error"):
        assert_close(compiled(model)(x), want)
    assert [len(node.args[2]) for node in graphs.nodes(library.convolution_chain_op)] == chains


@torch.no_grad()
def test_large_images_compiled_by_inductor():
    model = randomized(NETWORKS["inverted residual"][0]())
    function = compiled(model)
    for size in ((1, 16, 112, 100), (3, 16, 57, 61)):
        x = torch.randn(size)
        assert_close(function(x), model(x))


def test_training_has_no_chains(graphs):
    model, x = randomized(NETWORKS["separable"][0]()).train(), torch.randn(2, 16, 8, 12)
    compiled(model)(x).sum().backward()
    assert graphs.count(library.convolution_chain_op) == 0
