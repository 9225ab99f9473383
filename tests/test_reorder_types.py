"""Reorders of every dtype, and from one dtype to another."""

import math

import pytest
import torch
from conftest import assert_same
from reorder_cases import TAGS, bits, lay_out, memory, random_bits, reorder, same_bits

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.reorder import to_dense


def can_be_copied(dtype):
    try:
        torch.zeros(2, 3, dtype=dtype).t().clone(memory_format=torch.contiguous_format)
    except (RuntimeError, NotImplementedError):
        return False
    return True


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and can_be_copied(d)}, key=str)


def test_dtypes_are_all_there():
    names = "float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
    names += " complex64 complex128 float8_e4m3fn float8_e5m2"
    assert {getattr(torch, name) for name in names.split()} <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype(isa, dtype):
    size = (3, 19, 2, 5)
    x = random_bits(size, dtype)
    for tag in TAGS[4].split():
        physical = reorder(x, size, "nchw", tag)
        n = physical.numel()
        # The same moves on numbers that name the elements: 0 is the padding.
        names = memory(lay_out(torch.arange(1, 1 + x.numel()).view(size), tag))
        element = torch.zeros(1 + x.numel(), dtype.itemsize, dtype=torch.uint8)
        element[1:] = bits(x).view(-1, dtype.itemsize)
        assert torch.equal(bits(memory(physical)).view(n, -1), element[names])
        y = x.to(tb.format(tag))
        assert y.dtype == dtype and same_bits(to_dense(y), x)
        assert same_bits(reorder(physical, size, tag, "nchw"), x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("lazy", ["conj", "imag of conj", "neg view"])
def test_lazy_conjugates_and_negatives(dtype, lazy):
    x = torch.randn(2, 19, 3, 2, dtype=dtype)
    x = {"conj": x.conj(), "imag of conj": x.conj().imag, "neg view": x._neg_view()}[lazy]
    y = x.to(tb.nChw16c)
    assert_same(y, x.resolve_conj().resolve_neg(), rtol=0, atol=0)
    assert not y.physical.is_conj() and not y.physical.is_neg()


# ---- Conversion of dtypes by the operator

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 0.51, math.nan, math.inf, -math.inf, 1e-30]
SPECIAL += [
    s * (2.0**b + d) for s in (1, -1) for b in (7, 8, 15, 16, 31, 32, 63, 64, 100) for d in (-1, -0.5, 0, 0.5, 1)
]


def nearest_even_saturated(value, dtype):
    if math.isnan(value):
        return 0
    info = torch.iinfo(dtype)
    if math.isinf(value):
        return info.max if value > 0 else info.min
    return min(max(round(value), info.min), info.max)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_floating_point_to_integer(source, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(source)
    expected = torch.tensor([nearest_even_saturated(v, dtype) for v in x.tolist()], dtype=dtype)
    for op in (library.reorder_op, equivalents.reorder_aten):
        for tag in ("a", "A16a"):
            dst = reorder(x, (len(x),), "a", tag, dtype, op)
            assert dst.dtype == dtype
            assert dst.flatten()[: len(x)].tolist() == expected.tolist()
            assert not dst.flatten()[len(x) :].tolist().count(1)


OTHER_PAIRS = [
    (src, dst)
    for src in [*FLOATS, *INTEGERS[:5], torch.bool, torch.complex64]
    for dst in [*FLOATS, *INTEGERS[:5], torch.bool, torch.complex64]
    if not (src.is_floating_point and dst in INTEGERS)
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("source", "dtype"), OTHER_PAIRS, ids=str)
def test_other_pairs_convert_as_in_pytorch(source, dtype):
    x = random_bits((2, 19, 3), torch.int16).to(source)
    if source.is_floating_point or source.is_complex:
        x = x / 7 + 0.1
    for op in (library.reorder_op, equivalents.reorder_aten):
        dst = reorder(x, tuple(x.shape), "ncw", "nCw16c", dtype, op)
        assert dst.dtype == dtype
        expected = equivalents.plain_to_blocked(x.to(dtype), (0, 1, 2), (1, 16))
        assert torch.equal(dst, expected) and dst.stride() == expected.stride()
