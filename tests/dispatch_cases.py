"""Formats, views and checks for the tests of torch_blocked/dispatch: the plain answer, zero padding, no fallback."""

import contextlib

import pytest
import torch
from conftest import AVAILABLE, CHANNELS, assert_same, dense
from torch import Tensor

import torch_blocked as tb

aten = torch.ops.aten

# Around the CPU's own: other blocks, other orders of the outer axes, two blocks along one axis, batch in the block.
FORMATS = [tb.blocked, *map(tb.format, "nChw4c nChw8c nChw16c acdB8b BcdA4a4b aBcd2b4b cAdb4a".split())]


def formats(tier):
    """All of them on the best tier; the lower ones differ in the CPU's own block alone."""
    return FORMATS if tier == AVAILABLE[-1] else FORMATS[:1]


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


def from_seed(f):
    """`f` from the same state of the generator at every call."""

    def seeded(*args, **kwargs):
        torch.manual_seed(7)
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
