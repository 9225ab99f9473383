"""Reorders of sizes and types that reach every kernel, at every ISA tier, and with threads."""

import pytest
import torch
from reorder_cases import assert_reordered, random_bits, reorder, same_bits

from torch_blocked.benchmark.measure import num_threads

# Long enough for whole vectors of pixels: rows that are a vector, a part of one, and that end in the middle of one.
PIXELS = [(2, 16, 8, 16), (1, 8, 1, 67), (2, 3, 7, 19), (1, 21, 7, 19), (3, 40, 16, 16), (1, 64, 7, 7)]
PIXELS += [(2, 3, 8, 16), (1, 3, 1, 17), (1, 48, 3, 5), (2, 32, 1, 9), (1, 2048, 3, 7)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", PIXELS, ids=str)
def test_blocks_of_each_width(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    for tag in "nhwc nChw4c nChw8c nChw16c nChw32c".split():
        assert_reordered(x, "nchw", tag)
        assert_reordered(x, tag, "nchw")
        assert_reordered(x, "nhwc", tag)
        assert_reordered(x, tag, "nhwc")


# Too large for the caches: dst is written past them. Rows that begin within a cache line, and that do not.
STREAMED = [((2, 64, 208, 208), torch.float32), ((3, 67, 155, 155), torch.float32), ((40, 19, 151, 151), torch.uint8)]
STREAMED += [((3, 35, 210, 208), torch.float64), ((5, 48, 208, 208), torch.float16)]
STREAMED += [((12, 3, 300, 301), torch.float32), ((16, 3, 300, 300), torch.uint8)]  # a few channels, padded
STREAMED += [((70, 3, 210, 209), torch.uint8), ((24, 3, 300, 299), torch.float16)]


@pytest.mark.parametrize(("size", "dtype"), STREAMED, ids=str)
def test_larger_than_the_caches(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    pairs = "nchw nChw16c, nChw16c nchw, nhwc nChw16c, nChw16c nhwc, nchw nChw8c, nChw8c nchw, nhwc nchw, nchw nhwc"
    for pair in pairs.split(", "):
        assert_reordered(x, *pair.split())


@pytest.mark.parametrize("tag", ["OIhw8i16o2i", "OIhw16i16o", "OIhw8i8o", "OIhw4i16o4i", "Ohwi16o"])
@pytest.mark.parametrize(("size", "dtype"), [((520, 512, 5, 5), torch.float16), ((1025, 512, 5, 5), torch.uint8)])
def test_weights_larger_than_the_caches(isa, guarded, size, dtype, tag):
    x = random_bits(size, dtype)
    assert_reordered(x, "oihw", tag)
    assert_reordered(x, tag, "oihw")


@pytest.mark.parametrize("size", [(1000, 504, 3, 3), (512, 1016, 3, 3), (640, 4096, 1, 1)], ids=str)
def test_parts_of_lines_larger_than_the_caches(isa, guarded, size):
    """Blocks of 32 bytes a row that make whole cache lines together: of an axis with and without padding."""
    x = random_bits(size, torch.float32)
    assert_reordered(x, "oihw", "OIhw8i8o")
    assert_reordered(x.to(torch.bfloat16), "oihw", "OIhw16i16o")


RUNS = [((1020, 300, 3, 3), torch.float32, "OIhw8i8o", "OIhw4i16o4i")]
RUNS += [((1000, 1024, 3, 3), torch.bfloat16, tag, "OIhw8i16o2i") for tag in ("OIhw8i8o", "Ohwi8o")]
RUNS += [((8, 6074, 11, 11), torch.bfloat16, "OIhw4i16o4i", "OIhw8i8o")]
RUNS += [((1008, 1211, 3, 3), torch.uint8, "OIhw8i16o2i", "OIhw16i16o")]
RUNS += [((8, 12, 204, 203), torch.float32, "nChw4c", "OIhw8i8o")]


@pytest.mark.parametrize(("size", "dtype", "src", "dst"), RUNS, ids=str)
def test_runs_of_src_larger_than_the_caches(isa, guarded, size, dtype, src, dst):
    """Blocks of src whose runs are shorter than what makes whole cache lines of dst."""
    assert_reordered(random_bits(size, dtype), src, dst)


# Steps that are whole on both sides, that end within the rows or the columns of one, and with padding.
@pytest.mark.parametrize("size", [(528, 512, 3, 3), (515, 528, 3, 3), (1004, 260, 3, 3), (304, 160, 7, 7)], ids=str)
@pytest.mark.parametrize("tag", ["OIhw16i16o", "OIhw8i8o", "Ohwi16o", "Ohwi8o", "OIhw4i16o4i"])
def test_pieces_larger_than_the_caches(isa, guarded, size, tag):
    """Lines of weights that are put together before they are written: to blocks and back."""
    x = random_bits(size, torch.float32)
    assert_reordered(x, "oihw", tag)
    assert_reordered(x, tag, "oihw")
    assert_reordered(x, "ohwi", tag)


# Inner blocks of two axes: the columns end within a vector, lie alone, or form pairs that both sides keep together.
WEIGHTS = [(64, 64, 3, 3), (33, 70, 3, 3), (48, 64, 1, 1), (16, 32, 1, 5), (17, 2, 7, 7)]
# Runs of which several make a tile, that end in a part of one, that are no vectors or too long; output channels alone.
WEIGHTS += [(33, 112, 3, 3), (24, 32, 7, 7), (16, 16, 2, 1), (5, 16, 17, 17), (20, 64, 5, 5), (40, 96, 1, 11)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", WEIGHTS, ids=str)
def test_weights(isa, guarded, size, dtype):
    x = random_bits(size, dtype)
    for tag in "OIhw4i16o4i OIhw8i16o2i OIhw16i16o OIhw8i8o Ohwi16o Oihw16o".split():
        for plain in ("oihw", "ohwi"):
            assert_reordered(x, plain, tag)
            assert_reordered(x, tag, plain)
        assert_reordered(x, tag, "OIhw8i16o2i")


@pytest.mark.parametrize(("dtype", "tag"), [(torch.float16, "OIhw8i16o2i"), (torch.uint8, "OIhw4i16o4i")], ids=str)
def test_weights_that_overlap(isa, guarded, dtype, tag):
    """Rows of the kernel begin a few elements apart, within each other: as near as the groups of channels."""
    stride = 4 // dtype.itemsize
    x = random_bits((1000,), dtype).as_strided((17, 16, 3, 5), (40, 5, stride, 1))
    assert same_bits(reorder(x, x.shape, "oihw", tag), reorder(x.contiguous(), x.shape, "oihw", tag))


LARGE = [
    ((8, 64, 28, 28), "nchw", "nChw16c"),
    ((8, 64, 28, 28), "nChw16c", "nchw"),
    ((8, 67, 28, 28), "nhwc", "nChw8c"),
    ((8, 67, 28, 28), "nChw8c", "nhwc"),
    ((8, 67, 28, 28), "chwn", "nChw16c"),
    ((130, 67, 3, 3), "oihw", "OIhw16i16o"),
    ((130, 67, 3, 3), "OIhw16i16o", "oihw"),
    ((130, 67, 3, 3), "OIhw4i16o4i", "OIhw8i16o2i"),
    ((2, 3, 128, 128), "nchw", "nChw16c"),
    ((257, 1031), "ab", "BA16b4a"),
]


@pytest.mark.parametrize(("size", "src_tag", "dst_tag"), LARGE, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_with_threads(size, src_tag, dst_tag, threads):
    with num_threads(threads):
        assert_reordered(torch.randn(size), src_tag, dst_tag)
