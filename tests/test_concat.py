"""Convolutions that write into a part of a larger tensor, and the backend's concatenations without a copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, compiled, conv, fresh, randomized  # noqa: F401
from kernel_cases import between_nans
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

aten = torch.ops.aten

# name -> (n, ic, oc, src, kernel, stride, padding, groups), Winograd's mode, whether src is plain
CONVOLUTIONS = {
    "direct": ((2, 20, 37, (9, 8), (3, 3), (2, 1), (1, 1), 1), "never", False),
    "direct 1x1": ((3, 20, 53, (9, 17), (1, 1), (1, 1), (0, 0), 1), "never", False),
    "1-D": ((2, 17, 33, (20,), (3,), (1,), (1,), 1), "never", False),
    "3-D": ((2, 17, 33, (3, 4, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1), 1), "never", False),
    "winograd f2": ((2, 20, 37, (9, 7), (3, 3), (1, 1), (1, 1), 1), "f2", False),
    "winograd f4": ((2, 20, 37, (9, 7), (3, 3), (1, 1), (1, 1), 1), "f4", False),
    "depthwise": ((2, 37, 37, (9, 17), (3, 3), (1, 1), (1, 1), 37), "never", False),
    "grouped": ((2, 20, 40, (9, 8), (3, 3), (1, 1), (1, 1), 5), "never", False),
    "first": ((2, 3, 37, (9, 17), (3, 3), (2, 2), (1, 1), 1), "never", True),
    "reference": ((2, 6, 20, (9, 7), (3, 3), (1, 1), (1, 1), 2), "never", True),
    "empty batch": ((0, 20, 37, (9, 8), (3, 3), (1, 1), (1, 1), 1), "never", False),
}  # fmt: skip

# name -> (n, ic, oc, src, kernel, stride, padding, output padding, groups)
TRANSPOSED = {
    "phases": (2, 17, 33, (5, 7), (3, 3), (2, 2), (1, 1), (1, 0), 1),
    "one phase": (2, 17, 33, (5, 7), (3, 3), (1, 1), (1, 1), (0, 0), 1),
    "pixels that no tap reaches": (2, 20, 5, (4, 3), (2, 1), (4, 3), (0, 0), (3, 2), 1),
    "depthwise": (2, 20, 20, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), 20),
}


def check_part(op, out_op, arguments, before, after):
    """`out_op` writes what `op` returns into its channel blocks, and no byte beside them."""
    want = op(*arguments)
    shape = [want.size(0), before + want.size(1) + after, *want.shape[2:]]
    dst = torch.randn(shape)
    expected = dst.clone()
    expected[:, before : before + want.size(1)] = want
    out_op(dst, before, *arguments)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("before, after", [(0, 0), (0, 2), (3, 0), (1, 1)])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution_out(isa, kind, before, after):
    (n, ic, oc, src, kernel, stride, padding, groups), mode, plain = CONVOLUTIONS[kind]
    x, w, b, block = (
        torch.randn(n, ic, *src),
        torch.randn(oc, ic // groups, *kernel),
        torch.randn(oc),
        library.isa_block(),
    )
    fmt, wei = activation_format(x.dim(), block), w.to(weight_format(w.shape, block))
    given = (x, ()) if plain else (between_nans(x.to(fmt).physical), sum(fmt.blocking, ()))
    window = stride, padding, (1,) * len(src), groups
    with tb.winograd(mode):
        arguments = *given, wei.physical, w.shape, sum(wei.blocking, ()), b, *window, block, b, b
        check_part(library.convolution_op, library.convolution_out_op, arguments, before, after)


@pytest.mark.parametrize("before, after", [(0, 0), (0, 2), (3, 0), (1, 1)])
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_out(isa, kind, before, after):
    n, ic, oc, src, kernel, stride, padding, output_padding, groups = TRANSPOSED[kind]
    x, w, b, block = (
        torch.randn(n, ic, *src),
        torch.randn(ic, oc // groups, *kernel),
        torch.randn(oc),
        library.isa_block(),
    )
    fmt = activation_format(x.dim(), block)
    arguments = (
        x.to(fmt).physical, sum(fmt.blocking, ()), w, w.shape, (), b, stride, padding, output_padding,
        (1,) * len(src), groups, block, b, b,
    )  # fmt: skip
    check_part(library.convolution_transpose_op, library.convolution_transpose_out_op, arguments, before, after)


def test_copy_out():
    check_part(
        torch.clone, lambda dst, first, src: library.copy_out_op(dst, first, src), [torch.randn(2, 3, 4, 5, 16)], 2, 1
    )


GOOD = {
    "dst": torch.zeros(1, 3, 4, 4, 8), "first_block": 1, "src": torch.zeros(1, 8, 4, 4), "src_blocking": [],
    "weight": torch.zeros(16, 8, 1, 1), "weight_size": [16, 8, 1, 1], "weight_blocking": [], "bias": None,
    "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, "block": 8,
}  # fmt: skip
SHARED = torch.zeros(1, 3, 4, 4, 8)
BAD = [
    ({"dst": SHARED, "src": SHARED[:, 1:2], "src_blocking": [1, 8]}, RuntimeError, "memory"),
    ({"first_block": 2}, ValueError, "room for 2"),
    ({"first_block": -1}, ValueError, "from block -1"),
    ({"first_block": 2**62}, ValueError, "room for 2"),
    ({"dst": torch.zeros(1, 1, 4, 4, 8), "first_block": 0}, ValueError, "room for 2"),
    ({"dst": torch.zeros(2, 3, 4, 4, 8)}, ValueError, "dst is dense"),
    ({"dst": torch.zeros(1, 3, 4, 5, 8)}, ValueError, "dst is dense"),
    ({"dst": torch.zeros(1)}, ValueError, "dst is dense"),
    ({"dst": torch.zeros(1, 3, 4, 4, 16)[..., :8]}, ValueError, "dst is dense"),
    ({"dst": torch.zeros(1, 3, 4, 4, 8, dtype=torch.float64)}, TypeError, "float32 only"),
    ({"activation": "tanh"}, ValueError, "activation"),
]


@pytest.mark.parametrize("change, error, words", BAD, ids=[f"{next(iter(c))}{i}" for i, (c, _, _) in enumerate(BAD)])
def test_convolution_out_refuses(change, error, words):
    library.convolution_out_op(**GOOD)
    with pytest.raises(error, match=words):
        library.convolution_out_op(**{**GOOD, **change})


def test_copy_out_refuses():
    dst, src = torch.zeros(1, 3, 4, 4, 8), torch.zeros(1, 2, 4, 4, 8)
    for bad in ((dst, 2, src), (dst, -1, src), (dst, 0, src[0]), (torch.zeros(3), 0, torch.zeros(3))):
        with pytest.raises(ValueError, match="no room"):
            library.copy_out_op(*bad)
    for other in (torch.zeros(1, 2, 4, 1, 8), torch.zeros(2, 2, 4, 4, 8)):
        with pytest.raises(ValueError, match="no room"):
            library.copy_out_op(dst, 0, other)
    with pytest.raises(TypeError, match="dst's dtype"):
        library.copy_out_op(dst, 0, src.half())


@pytest.mark.parametrize("name", ["convolution_out", "copy_out"])
def test_opcheck(name):
    arguments = list(GOOD.values()) if name == "convolution_out" else [GOOD["dst"], 0, torch.randn(1, 2, 4, 4, 8)]
    torch.library.opcheck(getattr(torch.ops.torch_blocked, name).default, [arguments[0].clone(), *arguments[1:]])


def dense_block(m, x):
    """As in DenseNet; and its result is pooled."""
    y = F.max_pool2d(m.a(x), 2)
    for layer in (m.b, m.c, m.d):
        y = torch.cat([y, layer(F.relu(m[f"n{y.size(1)}"](y)))], 1)
    return m.e(F.avg_pool2d(y, 2))


def dense_block_layers():
    layers = {name: conv(16 + 16 * i, 16) for i, name in enumerate("bcd")}
    norms = {f"n{c}": nn.BatchNorm2d(c) for c in (16, 32, 48)}
    return {"a": conv(3, 16), "e": conv(64, 5), **layers, **norms}


# name -> (model, concatenations that stay, convolutions that write in place)
NETWORKS = {
    "two convolutions": (
        lambda: Lambda(
            lambda m, x: m.c(torch.cat([F.relu(m.a(x)), m.b(x)], 1)), a=conv(3, 16), b=conv(3, 32), c=conv(48, 5)
        ),
        0, 2,
    ),
    "a tail in the last": (
        lambda: Lambda(
            lambda m, x: m.c(torch.cat([m.a(x), F.silu(m.b(x))], 1)), a=conv(3, 16), b=conv(3, 23), c=conv(39, 5)
        ),
        0, 2,
    ),
    "off the block borders": (
        lambda: Lambda(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(3, 17), b=conv(3, 16), c=conv(33, 5)),
        None, 0,
    ),
    "part of it used twice": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.c(torch.cat([y, m.b(F.max_pool2d(y, 3, 1, 1))], 1)) + y.mean())(m.a(x)),
            a=conv(3, 16), b=conv(16, 16), c=conv(32, 5),
        ),
        0, 2,
    ),
    "the same twice": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.c(torch.cat([y, m.b(x), y], 1)))(m.a(x)),
            a=conv(3, 16), b=conv(3, 16), c=conv(48, 5),
        ),
        0, 1,
    ),
    "in two concatenations": (
        lambda: Lambda(
            lambda m, x: (lambda y, z: m.c(torch.cat([y, z], 1)) + m.c(torch.cat([z, y], 1)))(m.a(x), m.b(x)),
            a=conv(3, 16), b=conv(3, 16), c=conv(32, 5),
        ),
        1, 2,
    ),
    "a residual": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.c(torch.cat([m.b(y) + y, m.d(x)], 1)))(m.a(x).sin()),
            a=conv(3, 16), b=conv(16, 16), d=conv(3, 16), c=conv(32, 5),
        ),
        0, 1,
    ),
    "transposed": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.c(torch.cat([y, m.u(m.b(F.max_pool2d(y, 2)))], 1)))(m.a(x)),
            a=conv(3, 16), b=conv(16, 32), u=nn.ConvTranspose2d(32, 16, 2, 2), c=conv(32, 5),
        ),
        0, 2,
    ),
    "no convolution": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.c(torch.cat([y.sin(), y.cos()], 1)))(m.a(x)), a=conv(3, 16), c=conv(32, 5)
        ),
        1, 0,
    ),
    "returned": (
        lambda: Lambda(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), a=conv(3, 16), b=conv(3, 16)), None, None,
    ),
    "a constant": (
        lambda: Lambda(
            lambda m, x: m.c(torch.cat([m.a(m.p.weight[:, :, :1, :1].expand(x.size(0), 3, 8, 12)), m.b(x)], 1)),
            a=conv(3, 16), b=conv(3, 16), c=conv(32, 5), p=conv(3, 1),
        ),
        0, 2,
    ),
    "dense block": (lambda: Lambda(dense_block, **dense_block_layers()), 0, 3),
}  # fmt: skip


@pytest.mark.parametrize("n, dynamic", [(1, ()), (2, ()), (2, (0, 2, 3))], ids=["1", "2", "dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_concatenation(name, n, dynamic, graphs):
    make, stay, in_place = NETWORKS[name]
    if dynamic and name == "a constant":
        dynamic = (0,)  # its expanded size is 8x12
    model, x = randomized(make()), torch.randn(n, 3, 8, 12)
    want = model(x)
    if dynamic:
        torch._dynamo.mark_dynamic(x, dynamic)
    with tb.fallback("error" if in_place else "allow"):
        assert_close(compiled(model)(x), want)
    if stay is not None:
        assert graphs.count(aten.cat.default) == stay
    if in_place is not None:
        outs = graphs.count(library.convolution_out_op) + graphs.count(library.convolution_transpose_out_op)
        assert outs == in_place


@torch.no_grad()
def test_compiled_by_inductor():
    """The graphs above run as they are; here Inductor orders their operators, of three networks in one graph."""
    parts = [randomized(NETWORKS[name][0]()) for name in ("part of it used twice", "transposed", "dense block")]
    model, x = (
        Lambda(lambda m, x: [m[name](x) for name in "abc"], **dict(zip("abc", parts, strict=True))),
        torch.randn(2, 3, 8, 12),
    )
    function = compiled(model)
    for _ in range(3):
        for actual, expected in zip(function(x), model(x), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("returned", ["blocked input", "both"])
@torch.no_grad()
def test_blocked_arguments_and_answers(returned, graphs):
    """What is concatenated is an argument, or goes to the caller, who may write to it."""

    def function(m, x, other):
        y = m.a(x)
        whole = torch.cat([other, y, m.b(x)], 1)
        return (m.c(whole), y, whole) if returned == "both" else (m.c(whole),)

    model = Lambda(function, a=conv(3, 16), b=conv(3, 16), c=conv(48, 5)).eval().to(tb.blocked)
    x, other = torch.randn(2, 3, 8, 12), torch.randn(2, 16, 8, 12).to(tb.blocked)
    got, want = compiled(model)(x, other), model(x, other)
    for actual, expected in zip(got, want, strict=True):
        assert_close(actual, expected)
        actual.zero_()
        assert not any(torch.equal(a, actual) for a in got if a is not actual)


@pytest.mark.parametrize("n", [1, 2])
def test_convolution_out_of_what_it_writes(n):
    """Src may be other blocks of dst, as in a concatenation, but none that are written; and a write is counted."""
    dst, weight = torch.randn(n, 3, 12, 12, 8), torch.randn(16, 8, 3, 3)
    given = [[1, 8], weight, list(weight.shape), [], None, [1, 1], [1, 1], [1, 1], 1, 8]
    for block in (1, 2):
        with pytest.raises(RuntimeError, match=r"single memory location|part of what is written"):
            library.convolution_out_op(dst, 1, dst[:, block : block + 1], *given)
    src, version = dst[:, :1].clone(), dst._version
    library.convolution_out_op(dst, 1, dst[:, :1], *given)
    assert dst._version == version + 1
    assert torch.equal(dst[:, 1:], library.convolution_op(src, *given)) and torch.equal(dst[:, :1], src)
    batches = torch.randn(2 * n, 2, 12, 12, 8)  # images of their own
    library.convolution_out_op(batches[:n], 0, batches[n:, :1], *given)
