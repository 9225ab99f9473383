"""`torch._foreach_...` on lists that hold blocked tensors."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_same

import torch_blocked as tb

SIZES = [(2, 17, 3, 4), (3, 5), (2, 9, 4), (1, 33, 2, 1, 2)]
FORMATS = [tb.nChw16c, None, tb.format("aBc4b"), tb.format("acdeB8b")]


def tensors():
    return [torch.rand(size) * 0.9 + 0.1 for size in SIZES]


def blocked(plain):
    return [x.to(fmt) if fmt else x.clone() for x, fmt in zip(plain, FORMATS, strict=True)]


UNARY = """
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
    rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
""".split()
BINARY = "add sub mul div maximum minimum clamp_min clamp_max pow".split()
TERNARY = "addcmul addcdiv lerp".split()

CASES = {
    **{name: lambda f, a, b, c: f(a) for name in UNARY},
    **{name: lambda f, a, b, c: f(a, b) for name in BINARY},
    **{f"{name} of a number": lambda f, a, b, c: f(a, 2.0) for name in BINARY},
    **{f"{name} of numbers": lambda f, a, b, c: f(a, [0.5, 1.0, 2.0, 3.0]) for name in BINARY},
    **{name: lambda f, a, b, c: f(a, b, c) for name in TERNARY},
    "add of a tensor for all": lambda f, a, b, c: f(a, torch.tensor(2.0)),
    "addcmul of a number": lambda f, a, b, c: f(a, b, c, value=0.5),
    "sub with alpha": lambda f, a, b, c: f(a, b, alpha=0.5),
}


@pytest.mark.parametrize("arrangement", ["all blocked", "first blocked", "first plain"])
@pytest.mark.parametrize("case", CASES)
def test_foreach(isa, case, arrangement):
    a, b, c = tensors(), tensors(), tensors()
    first = blocked(a) if arrangement != "first plain" else [x.clone() for x in a]
    others = [blocked(x) if arrangement != "first blocked" else x for x in (b, c)]
    name = case.split()[0]
    call, f, f_ = CASES[case], getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    with tb.fallback("error"), torch.no_grad():
        assert_same(list(call(f, first, *others)), list(call(f, a, b, c)))
        kept, versions = list(first), [x._version for x in first]
        call(f_, first, *others)
        call(f_, a, b, c)
        assert_same(first, a)
        assert all(x is y for x, y in zip(first, kept, strict=True))
        assert all(x._version > v for x, v in zip(first, versions, strict=True))


def test_powers_of_a_number():
    exponents = tensors()
    with tb.fallback("error"):
        answers = torch._foreach_pow(2.0, blocked(exponents))
    assert_same(list(answers), list(torch._foreach_pow(2.0, exponents)))


ORDERS = [0, 0.5, 1, 2, 3.5, -1, math.inf, -math.inf]
REDUCTIONS = {
    **{f"norm {p}": lambda x, p=p: torch._foreach_norm(x, p) for p in ORDERS},
    **{f"powsum {p}": lambda x, p=p: torch._foreach_powsum(x, p) for p in ORDERS},
    "norm in double": lambda x: torch._foreach_norm(x, 2, torch.float64),
    "norm by default": lambda x: torch._foreach_norm(x),
    "max": lambda x: torch._foreach_max(x),
    "max of negative": lambda x: torch._foreach_max(torch._foreach_neg(x)),
    "max of integers": lambda x: torch._foreach_max([t.mul(-9).sub(1).int() for t in x]),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_foreach_reductions(case):
    a = tensors()
    with tb.fallback("allow" if case == "powsum 0" else "error"):  # there every element counts, so padding would
        assert_same(list(REDUCTIONS[case](blocked(a))), list(REDUCTIONS[case](a)))


def test_foreach_reductions_of_nothing_and_of_no_number():
    empty = torch.empty(0, 17, 3)
    assert_same(list(torch._foreach_norm([empty.to(tb.nCw16c)])), list(torch._foreach_norm([empty])))
    for x in (empty, torch.ones(2, 17, 3, dtype=torch.int32)):
        reduce = torch._foreach_max if x.is_floating_point() else torch._foreach_norm
        with pytest.raises(RuntimeError) as expected:
            reduce([x])
        with pytest.raises(RuntimeError) as actual:
            reduce([x.to(tb.nCw16c)])
        assert str(actual.value) == str(expected.value)


def test_clipping_gradients_does_not_fall_back():
    weights = [torch.randn(17, 9, 3, 3), torch.randn(17)]
    norms = []
    for fmt in (tb.OIhw16i16o, None):
        parameters = [
            torch.nn.Parameter(weights[0].to(fmt) if fmt else weights[0].clone()),
            torch.nn.Parameter(weights[1]),
        ]
        for p in parameters:
            p.grad = p.detach() * 3
        with tb.fallback("error"):
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True))
        assert_same([p.grad for p in parameters], [w * 3 / norms[0] for w in weights])
    torch.testing.assert_close(norms[0], norms[1])


@pytest.mark.parametrize("number", [1.0, 2])
def test_integers_and_other_lengths_are_pytorchs(number):
    x = torch.arange(2 * 17 * 4).view(2, 17, 4)
    assert_same(torch._foreach_mul([x.to(tb.nCw16c)], number), torch._foreach_mul([x], number))
    with pytest.raises(RuntimeError):
        torch._foreach_add([x.to(tb.nCw16c)], [x, x])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_run_blocked(optimizer):
    weights = [torch.randn(17, 9, 3, 3), torch.randn(17)]
    ours = [torch.nn.Parameter(weights[0].to(tb.OIhw16i16o)), torch.nn.Parameter(weights[1].clone())]
    plain = [torch.nn.Parameter(w.clone()) for w in weights]
    for parameters in (ours, plain):
        torch.manual_seed(0)
        steps = optimizer(parameters, lr=0.1, foreach=True)
        for _ in range(3):
            for p in parameters:
                grad = torch.randn(p.shape)
                p.grad = grad.to(tb.OIhw16i16o) if isinstance(p, tb.BlockedTensor) else grad
            with tb.fallback("error"):
                steps.step()
    assert_same([p.detach() for p in ours], [p.detach() for p in plain])


FUSED = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, nesterov=True, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, torch.tensor(0.1), eps=0.0, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}


@pytest.mark.parametrize("grads", ["blocked", "in other blocks"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers(name, grads):
    """In blocks where all lie alike: not of a gradient in others. No padding is left, and writes are counted."""
    weights = [torch.randn(17, 9, 3, 3), torch.randn(17)]
    ours = [torch.nn.Parameter(weights[0].to(tb.OIhw16i16o)), torch.nn.Parameter(weights[1].clone())]
    plain = [torch.nn.Parameter(w.clone()) for w in weights]
    fmt = tb.OIhw16i16o if grads == "blocked" else tb.format("OIhw8i8o")
    for parameters in (ours, plain):
        torch.manual_seed(0)
        steps = FUSED[name](parameters)
        for _ in range(3):
            for p in parameters:
                grad = torch.randn(p.shape)
                p.grad = grad.to(fmt) if isinstance(p, tb.BlockedTensor) else grad
            versions = [p._version for p in parameters]
            with tb.fallback("error" if grads == "blocked" else "allow"):
                steps.step()
            assert all(p._version > v for p, v in zip(parameters, versions, strict=True))
    assert_same([p.detach() for p in ours], [p.detach() for p in plain])


@pytest.mark.parametrize("tag", ["OIhw16i16o", "Ohwi16o"])
def test_gradients_are_unscaled_and_stepped_where_they_lie(tag):
    """As `torch.amp.GradScaler` does; infinities are found."""
    results = []
    for fmt in (tb.format(tag), None):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(17, 3, 3, 3).to(fmt) if fmt else torch.randn(17, 3, 3, 3))
        steps, scaler = torch.optim.AdamW([p], 0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for value in (1.0, math.inf):
            scaler.scale(torch.zeros(()))
            grad = torch.randn(p.shape) * 1024
            grad[3, 1, 1, 2] = value
            p.grad = grad.to(fmt) if fmt else grad
            with tb.fallback("error"):
                scaler.unscale_(steps)
                scaler.step(steps)
            scaler.update()
        results.append([p.detach(), p.grad.nan_to_num(7.0, 8.0) if not fmt else p.grad.to_dense().nan_to_num(7.0, 8.0)])
    assert_same(results[0], results[1])


def test_fused_optimizers_refuse_what_pytorch_refuses():
    p = torch.nn.Parameter(torch.randn(17, 9, 3, 3).to(tb.OIhw16i16o))
    with pytest.raises(RuntimeError):
        torch._fused_sgd_(
            [p], [], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False,
            is_first_step=True,
        )  # fmt: skip
