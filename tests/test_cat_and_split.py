"""Joining and splitting: along blocks without a copy of the whole, elsewhere on plain tensors."""

import contextlib
import itertools

import pytest
import torch
from conftest import CHANNELS, assert_same, dense
from dispatch_cases import blocked, cases, check, check_error, each_channels, falls_back, image, native

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dim", range(-4, 4))
@each_channels
def test_cat(isa, channels, dim):
    size = [2, channels, 5, 6]
    for lengths in ((1, 2), (3, 0, 3)) if dim % 4 != 1 else ((16, 32, 3), (16, channels), (3, 16), (0, 16, 0, 5)):
        tensors = [torch.randn(*size[: dim % 4], n, *size[dim % 4 + 1 :]) for n in lengths]
        for formats in ((tb.nChw16c,), (tb.nChw16c, None), (None, tb.nChw16c), (tb.nChw16c, tb.nChw8c)):
            given = [blocked(x, fmt) if fmt else x for x, fmt in zip(tensors, itertools.cycle(formats), strict=False)]
            whole = dim % 4 != 1 or (all(n % 16 == 0 for n in lengths[:-1]) and 0 not in lengths)
            y = check(lambda *xs: torch.cat(xs, dim), *given, expects=native if whole else falls_back)
            assert isinstance(y, tb.BlockedTensor) or not whole


CATS = {
    "one": lambda x: torch.cat([x]),
    "itself": lambda x: torch.cat([x, x, x], 2),
    "an empty vector": lambda x: torch.cat([torch.empty(0), x, torch.empty(0)], 3),
    "an empty vector of another dtype": lambda x: torch.cat([torch.empty(0), x.char()], 1),
    "an empty vector of a smaller dtype": lambda x: torch.cat([x, torch.empty(0, dtype=torch.int8)], 1),
    "another dtype": lambda x: torch.cat([x, x.double()], 0),
    "integers": lambda x: torch.cat([x.int(), x.int()], 0),
    "stack": lambda x: torch.stack([x, x], 1),
    "stack last": lambda x: torch.stack([x, x], -1),
    "hstack": lambda x: torch.hstack([x, x]),
    "channels": lambda x: torch.cat([x[:, :16], x], 1),
    "permuted": lambda x: torch.cat([x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)], 2),
}


@cases(CATS)
def test_cat_of_odd_lists(case):
    check(case, image(53).to(tb.nChw16c), expects=contextlib.nullcontext)


def test_cat_of_weights():
    for tag in ("OIhw16i16o", "OIhw4i16o4i", "Ohwi16o"):
        x, y = torch.randn(17, 16, 3, 3).to(tb.format(tag)), torch.randn(17, 5, 3, 3).to(tb.format(tag))
        check(lambda x, y: torch.cat([x, y], 1), x, y)
        check(lambda x, y: torch.cat([x, y, x], 3), x, dense(x))
        check(lambda x, y: torch.cat([x, y], 0), x, x, expects=falls_back)


def test_cat_of_blocked_vectors():
    for n in (0, 1, 16, 17):
        check(
            lambda x, y: torch.cat([x, y]), torch.randn(n).to(tb.blocked), torch.ones(3), expects=contextlib.nullcontext
        )
        check(lambda x: torch.cat([x, torch.empty(0)]), torch.randn(n).to(tb.blocked), expects=contextlib.nullcontext)


SPLITS = {
    "split of blocks": lambda x, dim: x.split(16, dim),
    "split of two blocks": lambda x, dim: x.split(32, dim),
    "split of all": lambda x, dim: x.split(100, dim),
    "chunk": lambda x, dim: x.chunk(2, dim),
    "chunk of many": lambda x, dim: x.chunk(5, dim),
    "split in the block": lambda x, dim: x.split(3, dim),
    "sizes": lambda x, dim: x.split([min(16, x.size(dim)), 0, max(0, x.size(dim) - 16)], dim),
    "sizes of blocks": lambda x, dim: x.split([min(16, x.size(dim)), max(0, x.size(dim) - 16)], dim),
    "tensor_split": lambda x, dim: x.tensor_split(3, dim),
    "unbind": lambda x, dim: x.unbind(dim),
}  # fmt: skip


@cases(SPLITS)
@pytest.mark.parametrize("dim", range(-4, 4))
def test_split(isa, case, dim):
    for channels, spatial in itertools.product(CHANNELS, (1, 5, 20)):
        x = torch.randn(2, channels, spatial, 3).to(tb.nChw16c)
        lengths = [0, *itertools.accumulate(part.size(dim) if part.dim() == 4 else 1 for part in case(dense(x), dim))]
        whole = dim % 4 != 1 or (all(n % 16 == 0 for n in lengths[:-1]) and len(set(lengths)) == len(lengths))
        is_native = whole and case is not SPLITS["unbind"]
        parts = check(lambda x: case(x, dim), x, expects=native if is_native else contextlib.nullcontext)
        if is_native:
            storage = x.physical.untyped_storage().data_ptr()
            assert all(part.physical.untyped_storage().data_ptr() == storage for part in parts)


@cases(
    {
        "split": lambda x: x.split(3, 1),
        "chunk": lambda x: x.chunk(2, 1),
        "sizes": lambda x: x.split([16, 1, 36], 1),
        "an empty part": lambda x: x.split([16, 0, 37], 1),
        "slice": lambda x: x[:, 1:17],
        "every other": lambda x: x[:, ::2],
        "cat": lambda x: torch.cat([x, x], 1),
    }
)
def test_off_the_block_borders_falls_back(case):
    check(case, image(53).to(tb.nChw16c), expects=falls_back)


def test_split_reassembled_by_cat():
    x = image(53).to(tb.nChw16c)
    with native():
        y = torch.cat(x.split(16, 1), 1)
    assert y.format == x.format
    assert_same(y, x.to_dense())


def test_cat_of_other_blocked_channels_in_the_same_block():
    x, y = torch.ones(2, 17, 4, 4).to(tb.nChw16c), torch.ones(2, 18, 4, 4).to(tb.nChw16c)
    for dim, order in itertools.product((0, 2, 3), ((x, y), (y, x))):
        check_error(lambda *xs, d=dim: torch.cat(xs, d), *order)
