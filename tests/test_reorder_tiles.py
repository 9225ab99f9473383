"""Reorders by tiles of every shape: against ATen's operations, at each ISA tier, between guard bytes."""

import pytest
import torch
from reorder_cases import TAGS, same_bits

import torch_blocked as tb
from torch_blocked import equivalents, library

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def flat(tag):
    return list(sum(tb.format(tag).blocking, ()))


def random_bits(size, dtype):
    numel = torch.Size(size).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(size)


def assert_reordered(x, src_tag, dst_tag):
    """x, plain and contiguous, from one format to another: the bytes and the strides are ATen's."""
    src = equivalents.plain_to_blocked(x, tb.format(src_tag).order, flat(src_tag))
    expected = equivalents.plain_to_blocked(x, tb.format(dst_tag).order, flat(dst_tag))
    dst = library.reorder_op(src, x.shape, flat(src_tag), tb.format(dst_tag).order, flat(dst_tag))
    assert same_bits(dst, expected) and dst.stride() == expected.stride(), (src_tag, dst_tag)


def assert_blocked(x, tag):
    """x, plain with any strides, to a format: the bytes are ATen's."""
    dst = library.reorder_op(x, x.shape, [], tb.format(tag).order, flat(tag))
    assert same_bits(dst, equivalents.plain_to_blocked(x.contiguous(), tb.format(tag).order, flat(tag)))


# What is left beside whole tiles, of pixels: nothing, one, as many as a narrow or a short tile, one more; alone or not.
PIXELS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 21, 31, 33, 34, 36, 48, 49, 50, 52, 63, 64, 65, 68, 196]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [16, 35, 64, 68])
def test_each_remainder(isa, caches, guarded, channels, dtype):
    for pixels in PIXELS:
        x = random_bits((2, channels, 1, pixels), dtype)
        for tag in ("nhwc", "nChw8c", "nChw16c"):
            assert_reordered(x, "nchw", tag)
            assert_reordered(x, tag, "nchw")


SIDES = [32, 33, 47, 63, 64, 65, 97, 130]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", SIDES)
def test_squares_of_tiles(isa, caches, guarded, channels, dtype):
    """One tile, two, and more on each side, with and without a last one that overlaps; of rows that follow each other
    and of some channels, and some pixels, of more."""
    for pixels in SIDES:
        x = random_bits((2, channels, 1, pixels), dtype)
        assert_reordered(x, "nchw", "nhwc")
        assert_reordered(x, "nhwc", "nchw")
    assert_blocked(random_bits((2, 1, 70, channels + 7), dtype)[..., :channels].permute(0, 3, 1, 2), "nchw")
    assert_blocked(random_bits((2, channels, 1, 75), dtype)[..., 3:73], "nhwc")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_short_rows_that_follow_each_other(isa, guarded, channels, dtype):
    for pixels in PIXELS:
        x = random_bits((2, channels, 1, pixels), dtype)
        assert_reordered(x, "nhwc", "nchw")
        assert_reordered(x, f"nChw{channels}c", "nchw")
    if dtype == torch.uint8:  # past the caches
        x = random_bits((3, channels, 1201, 1500), dtype)
        assert_reordered(x, "nhwc", "nchw")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [2, 5, 6, 41])
def test_small_tiles_that_repeat(isa, guarded, blocks, dtype):
    """Blocks of channels of so few pixels that several are moved a call: all of them, a part, one left over. Those of
    bytes are 64 to 256 bytes, of one to four vectors, and shorter and longer."""
    for pixels in (1, 4, 5, 7, 8, 9, 16, 20, 21, 25, 33, 40, 49):
        for batch in (1, 3):
            x = random_bits((batch, 16 * blocks, 1, pixels), dtype)
            for pair in ("nchw nChw16c", "nchw nChw8c", "nChw16c nchw", "nChw8c nchw", "nChw8c nChw16c", "nhwc nChw8c"):
                assert_reordered(x, *pair.split())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tiles_that_repeat_in_padding(isa, guarded, dtype):
    """Of a batch of three in blocks of four, the fourth image is padding: whole blocks of it."""
    assert_blocked(random_bits((3, 8, 16, 4), dtype), "AbCD4a4d16c")


# Rows of channels that begin a multiple of 4096 bytes apart, or of a part of that, or that spread over the first cache;
# few and short ones.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pixels", [8, 9, 17, 49, 70])
@pytest.mark.parametrize("bytes_of_channels", [192, 640, 1024, 1920, 2048, 4096, 8192])
def test_rows_of_whole_cache_lines(isa, caches, guarded, bytes_of_channels, pixels, dtype):
    x = random_bits((1, bytes_of_channels // dtype.itemsize, 1, pixels), dtype)
    assert_reordered(x, "nchw", "nhwc")
    assert_reordered(x, "nhwc", "nchw")


# Blocks of a quarter of a cache line, of half of one and of a whole one, of rows of all channels that alias or do not;
# few and many, of pixels that are whole steps and that are not.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_bytes", [16, 32, 64])
@pytest.mark.parametrize(("blocks", "pixels"), [(2, 9), (3, 49), (9, 8), (15, 15), (17, 33), (64, 17), (128, 49)])
def test_wide_blocks(isa, caches, guarded, blocks, pixels, block_bytes, dtype):
    block = max(2, block_bytes // dtype.itemsize)
    x = random_bits((2, block * blocks, 1, pixels), dtype)
    assert_reordered(x, "nhwc", f"nChw{block}c")
    assert_reordered(x, f"nChw{block}c", "nhwc")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_bytes", [16, 32, 64])
@pytest.mark.parametrize(("blocks", "pixels"), [(1, 9), (2, 1), (3, 3), (4, 49), (9, 8)])
def test_pairs_of_blocks(isa, caches, guarded, blocks, pixels, block_bytes, dtype):
    """To blocks of twice as many channels, and back; an odd number leaves half a block of padding."""
    block = max(2, block_bytes // dtype.itemsize)
    for channels in (block * blocks, block * blocks - block // 2):
        x = random_bits((2, channels, 1, pixels), dtype)
        assert_reordered(x, f"nChw{block}c", f"nChw{2 * block}c")
        assert_reordered(x, f"nChw{2 * block}c", f"nChw{block}c")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_bytes", [16, 32, 64])
def test_pairs_of_blocks_that_are_apart(isa, guarded, block_bytes, dtype):
    """Two blocks of each pixel's three."""
    block = max(2, block_bytes // dtype.itemsize)
    for pixels in (4, 49):
        x = random_bits((2, 1, pixels, 3 * block), dtype)[..., : 2 * block].permute(0, 3, 1, 2)
        assert_blocked(x, f"nChw{block}c")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_bytes", [32, 64])
def test_wide_blocks_of_uneven_rows(isa, guarded, block_bytes, dtype):
    """Pixels of planes of which every second column is taken: their distances are in a table."""
    block = block_bytes // dtype.itemsize
    x = random_bits((2, 5, 14, 9 * block), dtype)[:, :, ::2].permute(0, 3, 1, 2)
    assert_blocked(x, f"nChw{block}c")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [9, 17, 24, 65, 70, 130])
def test_aliased_rows_of_a_part(isa, caches, guarded, channels, dtype):
    """Some channels of rows that alias: the last lines of each are fewer than are read at a time."""
    for pixels in (33, 37):
        whole = random_bits((1, 1, pixels, 4096), dtype)
        x = whole[..., 5 : 5 + channels].permute(0, 3, 1, 2)
        for tag in ("nchw", "nChw8c", "nChw16c"):
            assert_blocked(x, tag)


def test_plans_are_told_apart():
    """By strides, by the size of elements, by each side's format; and more of them than are kept, twice."""
    for _ in range(2):
        for channels in range(1, 40):
            for dtype in (torch.uint8, torch.float32):
                x = random_bits((2, channels, 3, 4), dtype)
                for pair in ("nchw nChw8c", "nchw nChw16c", "nhwc nChw8c", "nChw8c nchw", "nChw16c nchw"):
                    assert_reordered(x, *pair.split())
    whole = torch.arange(2 * 32 * 3 * 8).view(2, 32, 3, 8).float()
    for x in (whole[..., :4], whole[..., ::2], whole[:, :, :, 4:], whole[..., :4].contiguous()):
        dst = library.reorder_op(x, x.shape, [], (0, 1, 2, 3), [1, 16])
        assert torch.equal(dst, equivalents.plain_to_blocked(x.contiguous(), (0, 1, 2, 3), (1, 16)))


# Fewer pixels than one vector has of a channel, as many, some more, several vectors; one left over or not.
PIXELS_OF_IMAGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 6, 12])
def test_three_channels(isa, guarded, channels, dtype):
    """And six or twelve, which are three elements of two or four times the size."""
    tags = ["nchw", "nhwc", "nChw4c", "nChw8c", "nChw16c"]
    for pixels in PIXELS_OF_IMAGES:
        x = random_bits((2, channels, 1, pixels), dtype)
        for src in tags:
            for dst in tags:
                assert_reordered(x, src, dst)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("apart", [4, 5, 8, 9, 16])
def test_three_channels_of_more(isa, guarded, apart, dtype):
    """Pixels that lie `apart` elements apart, of which three are there: nothing is read after the last."""
    for pixels in PIXELS_OF_IMAGES:
        elements = random_bits((pixels * apart - (apart - 3),), dtype)
        x = elements.as_strided((1, 3, 1, pixels), (0, 1, 0, apart))
        for tag in ("nchw", "nhwc", "nChw8c", "nChw16c"):
            assert_blocked(x, tag)


PLACES = [(16, 256, 3, 3), (20, 512, 3, 3), (40, 256, 5, 5), (16, 768, 1, 9), (16, 2048, 3, 3), (32, 64, 7, 7)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", PLACES, ids=str)
def test_places_of_weights_that_alias(isa, caches, guarded, size, dtype):
    """Many of them that share a few places of the first cache, or one."""
    for tag in ("Ohwi16o", "Ohwi8o"):
        assert_reordered(random_bits(size, dtype), "oihw", tag)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tag", ["Adcb16a", "Acdb12a", "Acdb2a"])
@pytest.mark.parametrize("size", [(48, 256, 3, 3), (48, 64, 7, 7)], ids=str)
def test_places_of_weights_in_other_orders(isa, caches, guarded, size, tag, dtype):
    """The places of a window's columns before its rows, so that they are not evenly apart; blocks of other sizes."""
    assert_reordered(random_bits(size, dtype), "oihw", tag)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(32, 128, 3, 3), (20, 256, 3, 3), (16, 256, 5, 5), (48, 512, 3, 1)], ids=str)
def test_weights_of_many_periods(isa, guarded, size, dtype):
    """Rows of so many input channels that their places in a block are a loop of short tables."""
    x = random_bits(size, dtype)
    for tag in ("OIhw16i16o", "OIhw8i8o", "Ohwi16o", "OIhw8i16o2i"):
        assert_reordered(x, "oihw", tag)
        assert_reordered(x, tag, "oihw")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bytes_of_row", [2048, 4096, 4096 + 512, 3 * 4096])
def test_rows_of_weights_that_alias(isa, caches, guarded, bytes_of_row, dtype):
    """Rows of half a page, a page, a page and eight lines, three pages."""
    x = random_bits((48, bytes_of_row // dtype.itemsize, 1, 1), dtype)
    for tag in ("OIhw16i16o", "OIhw8i8o", "Ohwi16o", "Oihw16o"):
        assert_reordered(x, tag, "oihw")
        assert_reordered(x, "oihw", tag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(30, 33, 1, 65), (9, 8, 37, 18), (41, 64, 4, 8)], ids=str)
def test_padding_of_rows_that_alias(isa, caches, guarded, size, dtype):
    """Blocks of a large window: rows of dst that push each other out of the first cache, with padding."""
    x = random_bits(size, dtype)
    for tag in ("OIhw16i16o", "OIhw8i8o", "Ohwi16o"):
        assert_reordered(x, "oihw", tag)
        assert_reordered(x, tag, "oihw")


# Many columns that share a place of the first cache, but those of one place in the next period are elsewhere.
PERIODS_APART = [
    ((20, 16, 16, 16), (0, 1, 2, 3), "Adcb16a"),
    ((20, 64, 16, 16), (0, 1, 2, 3), "Adcb16a"),
    ((20, 16, 16, 16), (0, 1, 3, 2), "Ohwi16o"),
    ((32, 24, 16, 16), (0, 1, 3, 2), "OIhw16i16o"),
    ((64, 12, 16, 12), (3, 1, 2, 0), "nChw8c"),
    ((64, 20, 9, 16), (3, 1, 2, 0), "nChw16c"),
    ((64, 20, 9, 16), (3, 2, 1, 0), "nChw16c"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "order", "tag"), PERIODS_APART)
def test_places_whose_periods_are_apart(isa, caches, guarded, size, order, tag, dtype):
    assert_blocked(random_bits(size, dtype).permute(order), tag)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("src_tag", ["OIhw8i16o2i", "OIhw4i16o4i"])
def test_groups_to_other_blocks(isa, guarded, src_tag, dtype):
    """Some of which have padding, for which src has nothing."""
    for size in ((20, 16, 2, 4), (33, 32, 5, 3)):
        for dst_tag in TAGS[4].split():
            assert_reordered(random_bits(size, dtype), src_tag, dst_tag)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_of_16_bytes_past_the_caches(isa, guarded, dtype):
    x = random_bits((3, 16 // dtype.itemsize, 601, 1500), dtype)
    assert_reordered(x, "nhwc", "nchw")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tags", ["nchw nhwc", "nhwc nchw", "nchw nChw16c", "nChw8c nhwc", "oihw OIhw8i16o2i"], ids=str)
@pytest.mark.parametrize("size", [(1, 17, 5, 7), (512, 512, 3, 3), (0, 3, 4, 4)], ids=str)
def test_the_rate_of_tiles_in_the_first_cache(isa, guarded, size, tags, dtype):
    src, dst = tags.split()
    physical = library.reorder_op(torch.zeros(size, dtype=dtype), size, [], tb.format(src).order, flat(src))
    rate = library.ops.reorder_tile_rate(physical, size, flat(src), tb.format(dst).order, flat(dst))
    assert rate > 1e7 if physical.numel() else rate == 0
