"""Formats, views and checks for the tests of torch_blocked/dispatch: the plain answer, zero padding, no fallback."""

import contextlib

import pytest
import torch
from conftest import AVAILABLE, CHANNELS, assert_same, dense, seed
from torch import Tensor

import torch_blocked as tb

aten = torch.ops.aten

# Around the CPU's own: other blocks, other orders of the outer axes, two blocks along one axis, batch in the block.
FORMATS = [tb.blocked, *map(tb.format, "nChw4c nChw8c nChw16c acdB8b BcdA4a4b aBcd2b4b cAdb4a".split())]

# Two blocks along one axis and another order of the outer axes as well.
FEW_FORMATS = [tb.blocked, *map(tb.format, "nChw8c acdB16b aBcd2b4b".split())]


def formats(tier, fmts=FORMATS):
    """All of them on the best tier; the lower ones differ in the CPU's own block alone."""
    return fmts[:1] if tier in AVAILABLE[:-1] else fmts


def image(channels, n=2, h=5, w=6):
    return torch.randn(n, channels, h, w)


def images(channels, fmts=None):
    """The same small image in every format, by default in the few of the tier; no two of its elements are equal."""
    numbers = torch.randperm(2 * channels * 20).view(2, channels, 4, 5).float()
    return [(numbers / numbers.numel() - 0.4).to(fmt) for fmt in fmts or formats(tb.isa(), FEW_FORMATS)]


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


def plain_copies(args):
    """The arguments with a plain copy of each tensor, also within lists; the same tensor has one copy."""
    copies = {}

    def copied(a):
        if isinstance(a, (list, tuple)):
            return type(a)(map(copied, a))
        return copies.setdefault(id(a), dense(a).clone()) if isinstance(a, Tensor) else a

    return [copied(a) for a in args]


def check(f, *args, expects=native, **tolerances):
    """Plain and blocked arguments get the plain ones' answer, and are afterwards what those are; returns the answer."""
    plain = plain_copies(args)
    expected = f(*plain)
    with expects():
        actual = f(*args)
    assert is_well_formed(actual)
    assert_same(actual, expected, equal_nan=True, **tolerances)
    assert_same(list(args), plain, equal_nan=True, **tolerances)
    return actual


def check_in_place(f, x, *args, **how):
    """`f(x, ...)` writes into the bytes of `x`, which keeps its format, and says so to who watches the version."""
    physical, fmt, version = x.physical, x.format, x.physical._version
    assert check(f, x, *args, **how) is x
    assert x.physical is physical
    assert x.format == fmt
    assert x.physical._version > version


def check_gradient(f, x, weight_of=lambda y: torch.linspace(-1, 1, y.numel()).view(y.shape), **how):
    """The gradient of each of the answers, every element weighed otherwise."""

    def gradient(x):
        leaf = x.detach().requires_grad_()
        answers = f(leaf)
        answers = answers if isinstance(answers, (tuple, list)) else (answers,)
        differentiable = [y for y in answers if y.requires_grad]
        return torch.autograd.grad(sum((y * weight_of(y)).sum() for y in differentiable), leaf)[0]

    check(gradient, x, **how)


def check_error(f, *args):
    """What plain tensors refuse is refused with the same type of error, the blocked arguments untouched."""
    before = plain_copies(args)
    with pytest.raises(Exception) as expected:
        f(*plain_copies(args))
    with pytest.raises(expected.type):
        f(*args)
    assert_same(list(args), before)


def cases(table):
    """A parametrised argument `case` over the values of a table, named by its keys."""
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))


each_channels = pytest.mark.parametrize("channels", CHANNELS)


def from_seed(f):
    """`f` from the same state of the generator at every call."""

    def seeded(*args, **kwargs):
        seed(7)
        return f(*args, **kwargs)

    return seeded


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
