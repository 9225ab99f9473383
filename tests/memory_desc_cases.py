"""A slow reference of memory descriptors, drawn layouts, and what a refusal must say."""

import itertools
import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

f32, s8 = torch.float32, torch.int8

property_test = settings(max_examples=100, deadline=None, derandomize=True, database=None)


# ---- The slow reference: loops over the rules, nothing shared with the code under test


def slow_tag(dims, order, blocks):
    """padded_dims and strides of a tag."""
    block = [1] * len(dims)
    for axis, size in blocks:
        block[axis] *= size
    padded = list(dims)
    for d in range(len(dims)):
        while padded[d] % block[d]:
            padded[d] += 1
    stride = math.prod(block)
    strides = [None] * len(dims)
    for d in order[::-1]:
        strides[d] = stride
        if padded[d] // block[d] != 0:
            stride *= padded[d] // block[d]
    return tuple(padded), tuple(strides)


def slow_off_v(index, strides, blocks, offset0=0):
    pos, off, bs = list(index), offset0, 1
    for i in range(len(blocks) - 1, -1, -1):
        d, size = blocks[i]
        off += (pos[d] % size) * bs
        pos[d] = pos[d] // size
        bs *= size
    for d in range(len(pos)):
        off += pos[d] * strides[d]
    return off


def slow_nbytes(padded, strides, blocks, itemsize):
    if 0 in padded:
        return 0
    largest = 0
    for d in range(len(padded)):
        n = padded[d]
        for axis, size in blocks:
            n = n // size if axis == d else n
        largest = max(largest, n * (1 if n == 1 else strides[d]))
    if largest == 1 and blocks:
        largest = math.prod(size for _, size in blocks)
    return largest * itemsize


def indices(dims):
    return itertools.product(*map(range, dims))


def addresses(desc):
    """The offset of every element, in row-major order of its logical index."""
    return [desc.offset(index) for index in indices(desc.dims)]


def canonical(order, blocks):
    """A tag spelled by hand."""
    blocked = {axis for axis, _ in blocks}
    outer = "".join(chr(ord("A" if d in blocked else "a") + d) for d in order)
    return outer + "".join(f"{size}{chr(ord('a') + axis)}" for axis, size in blocks)


@st.composite
def layouts(draw, min_dim=0, max_ndim=4):
    """(dims, order, blocks): a small tensor and the content of a tag."""
    ndim = draw(st.integers(1, max_ndim))
    dims = tuple(draw(st.integers(min_dim, 5)) for _ in range(ndim))
    order = tuple(draw(st.permutations(range(ndim))))
    block = st.tuples(st.integers(0, ndim - 1), st.integers(2, 4))
    return dims, order, tuple(draw(st.lists(block, max_size=3)))


def refused(kind, given_text, call, *args, **kwargs):
    """Checks that a call is refused with one line that shows what was given; returns the line."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message and "\n" not in message
    assert given_text in message
    return message
