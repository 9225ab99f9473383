"""Copies, conversions, tensors alike, and answers that are no tensors."""

import contextlib
import itertools
import math

import pytest
import torch
from conftest import CHANNELS, assert_same
from dispatch_cases import blocked, cases, check, check_error, check_in_place, each_channels, formats, from_seed, image
from torch import Tensor

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")

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
    "as many channels as blocks": lambda x: x.copy_(torch.ones(2, 2, 5, 6)),
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
    "rand_like": (True, from_seed(torch.rand_like)),
    "randn_like": (True, from_seed(lambda x: torch.randn_like(x, dtype=torch.float64))),
    "randn_like channels last": (False, from_seed(lambda x: torch.randn_like(x, memory_format=torch.channels_last))),
    "randint_like": (True, from_seed(lambda x: torch.randint_like(x, 9))),
    "randint_like from": (True, from_seed(lambda x: torch.randint_like(x, -3, 9))),
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
