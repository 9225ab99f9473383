"""Blocked tensors printed, and compared by `assert_close`, which prints what differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import torch_blocked as tb

SIZE = (2, 20, 3, 4)


@pytest.mark.parametrize("fmt", [None, tb.nChw16c, tb.nChw8c], ids=repr)
def test_assert_close(x, fmt):
    y, other = x.to(tb.nChw16c), x if fmt is None else x.to(fmt)
    for a, b in ((y, other), (other, y), ([y], [other]), ({"a": other}, {"a": y}), (nn.Parameter(y), other)):
        torch.testing.assert_close(a, b)
    wrong = x.clone()
    wrong[1, 17, 2, 3] += 1
    wrong = wrong if fmt is None else wrong.to(fmt)
    for pair in ((y, wrong), (wrong, y)):
        with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 480[^$]*index \(1, 17, 2, 3\)"):
            torch.testing.assert_close(*pair)
    with pytest.raises(AssertionError, match="dtype"):
        torch.testing.assert_close(y, other.double())
    with pytest.raises(AssertionError, match="shape"):
        torch.testing.assert_close(y, other[:1])


def words(text):
    return text[text.index("[") : text.rindex("]") + 1].split()


@pytest.mark.parametrize("size", [SIZE, (1, 1, 1, 1), (3, 40, 9, 9), (7, 8, 7, 6), (300, 17, 1, 1)], ids=str)
@pytest.mark.parametrize("tag", ["nChw16c", "Chwn4c", "OIhw4i16o4i"])
@pytest.mark.parametrize("options", [{}, {"threshold": 5, "edgeitems": 1, "precision": 2}, {"sci_mode": True}], ids=str)
def test_values_print_as_plain_ones(size, tag, options):
    x = torch.randn(size)
    try:
        torch.set_printoptions(**options)
        with tb.count() as counts:
            assert words(repr(x.to(tb.format(tag)).permute(0, 1, 3, 2))) == words(repr(x.permute(0, 1, 3, 2)))
        assert sum(counts.reorders.values()) == 1  # the conversion; nothing for printing
        assert torch._tensor_str.PRINT_OPTS.sci_mode == options.get("sci_mode")
    finally:
        torch.set_printoptions(profile="default")


def test_printing_reads_what_it_shows():
    """64 GB of zeros that are one element."""
    data = torch.zeros(1).expand(1024, 16, 1024, 1024, 16)
    y = tb.BlockedTensor(data, tb.nChw16c.blocking, torch.Size((1024, 256, 1024, 1024)))
    assert len(repr(y)) < 20000 and "size=(1024, 256, 1024, 1024)" in repr(y)


def test_printing_inside_transforms(x):
    seen = []
    vmap(lambda t: seen.append(repr(t)) or t)(x.to(tb.nChw16c))
    grad(lambda t: seen.append(repr(t)) or t.sum())(x.to(tb.nChw16c))
    assert all("BlockedTensor(" in text and "format=nChw16c" in text for text in seen)


def test_printing_what_has_no_values(x):
    y = x.to(tb.nChw16c)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tb.BlockedTensor(mode.from_tensor(y.physical), y.blocking, y.shape)
    half = torch.Tensor._make_wrapper_subclass(tb.BlockedTensor, SIZE)
    for t in (fake, half, y.to("meta"), y.double().to("meta")):
        text = repr(t)
        assert text.startswith("BlockedTensor(") and text.count("(") == text.count(")") and f"size={SIZE}" in text
