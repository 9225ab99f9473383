"""What the tests of reorders share: formats, an oracle of `MemoryDesc.offset`, and checks of physical tensors."""

from __future__ import annotations

import functools
import itertools
import math

import torch

import torch_blocked as tb
from torch_blocked import equivalents, library

TAGS = {
    1: "a A16a A4a A2a3a",
    2: "ab ba aB16b Ab8a AB4b8a BA3a5b",
    3: "ncw nwc cwn nCw16c nCw8c Cwn4c OIw8i16o2i",
    4: "nchw nhwc chwn hwio nChw4c nChw8c nChw16c nChw64c Chwn4c nhwC16c OIhw16i16o OIhw8i16o2i OIhw4i16o4i Ohwi16o "
    "Oihw8o hwIO4i3o ABCd3b2a2b5c aBCD2d3c2b2d",
    5: "ncdhw ndhwc nCdhw8c nCdhw16c goihw gOIhw4i16o4i Goihw16g aBcDe2d3b",
    6: "abcdef fedcba aBcdef16b AbCdeF2f3a2c",
}


# ---- The oracle: a buffer, and the address of each element in it


@functools.cache
def desc_of(tag, size):
    return tb.MemoryDesc(size, torch.float32, tag)


@functools.cache
def addresses(tag, size):
    """The place in memory of each element, in row-major order."""
    desc = desc_of(tag, size)
    return torch.tensor([desc.offset(i) for i in itertools.product(*map(range, size))], dtype=torch.int64)


def physical_shape(tag, size):
    return tb.format(tag).blocking.physical_shape(size)


def physical_strides(tag, size):
    inner = tb.format(tag).blocking.inner_blks
    return desc_of(tag, size).strides + tuple(math.prod(inner[i + 1 :]) for i in range(len(inner)))


def lay_out(x, tag, padding=0):
    """The physical tensor of a contiguous one, written element by element; `padding` lies between."""
    size = tuple(x.shape)
    buffer = torch.full((math.prod(physical_shape(tag, size)),), padding, dtype=x.dtype)
    buffer[addresses(tag, size)] = x.flatten()
    return buffer.as_strided(physical_shape(tag, size), physical_strides(tag, size))


def memory(physical):
    """All elements of a dense tensor, in the order of their addresses."""
    return physical.as_strided((physical.numel(),), (1,))


def bits(x):
    """The bytes of a tensor, so that NaNs and exotic dtypes compare."""
    return x.contiguous().flatten().view(torch.uint8)


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def flat(tag):
    """The blocking of a tag as the operators take it."""
    return list(sum(tb.format(tag).blocking, ()))


def reorder(src, size, src_tag, dst_tag, dtype=None, op=library.reorder_op):
    return op(src, size, flat(src_tag), tb.format(dst_tag).order, flat(dst_tag), dtype)


def assert_lies_as(physical, tag, x):
    """`physical` is x in the format of a tag: shape, strides, values, zeros in the padding."""
    size = tuple(x.shape)
    assert type(physical) is torch.Tensor
    assert tuple(physical.shape) == physical_shape(tag, size)
    assert physical.stride() == physical_strides(tag, size)
    assert same_bits(memory(physical), memory(lay_out(x, tag))), f"wrong values or padding in {tag}, size {size}"


def random_bits(size, dtype):
    if dtype == torch.bool:
        return torch.randint(0, 2, size).to(torch.bool)
    return torch.randint(0, 256, (math.prod(size) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(size)


def assert_reordered(x, src_tag, dst_tag):
    """The operator does what ATen operations do, between any two formats of the values of a plain tensor."""
    src = equivalents.plain_to_blocked(x, tb.format(src_tag).order, flat(src_tag))
    dst = reorder(src, tuple(x.shape), src_tag, dst_tag)
    expected = equivalents.plain_to_blocked(x, tb.format(dst_tag).order, flat(dst_tag))
    assert same_bits(dst, expected) and dst.stride() == expected.stride()
