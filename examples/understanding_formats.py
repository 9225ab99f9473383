"""The examples of oneDNN's guide "Understanding memory formats", each checked element by element, then drawn.

python examples/understanding_formats.py                  # the pictures as text
python examples/understanding_formats.py --out pictures   # and as SVG files in a folder
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

import torch_blocked as tb

N, C, H, W = SIZE = 2, 16, 5, 4


def check(desc: tb.MemoryDesc, formula: Callable[[int, int, int, int], int]) -> None:
    """Every element of `desc`, padding included, lies where `formula` of (n, c, h, w) says."""
    for index in itertools.product(*map(range, desc.padded_dims)):
        assert desc.offset(index) == formula(*index), index


def plain() -> tb.MemoryDesc:
    """nchw, PyTorch's default: the images one after the other, in each its channels, in each the rows."""
    desc = tb.MemoryDesc(SIZE, torch.float32, "nchw")
    check(desc, lambda n, c, h, w: n * C * H * W + c * H * W + h * W + w)
    assert desc == tb.MemoryDesc.of(torch.empty(SIZE))
    return desc


def channels_last() -> tb.MemoryDesc:
    """nhwc, PyTorch's channels_last: all channels of a pixel side by side."""
    desc = tb.MemoryDesc(SIZE, torch.float32, "nhwc")
    check(desc, lambda n, c, h, w: n * H * W * C + h * W * C + w * C + c)
    assert desc == tb.MemoryDesc.of(torch.empty(SIZE).to(memory_format=torch.channels_last))
    return desc


def batch_last() -> tb.MemoryDesc:
    """chwn: the same pixel of all images side by side."""
    desc = tb.MemoryDesc(SIZE, torch.float32, "chwn")
    check(desc, lambda n, c, h, w: c * H * W * N + h * W * N + w * N + n)
    assert desc == tb.MemoryDesc.of(torch.empty(SIZE).to(tb.chwn))
    return desc


def strides_with_a_gap() -> tb.MemoryDesc:
    """Plain formats are strides. Rows 6 apart that hold 4 elements leave a gap of 2 behind each."""
    strides = n_stride, c_stride, h_stride, w_stride = 16 * 30, 30, 6, 1
    desc = tb.MemoryDesc(SIZE, torch.float32, strides)
    check(desc, lambda n, c, h, w: n * n_stride + c * c_stride + h * h_stride + w * w_stride)
    assert desc == tb.MemoryDesc.of(torch.empty(N, C, H, 6)[..., :W])
    assert desc.tag is None, "no format tag has gaps"
    return desc


def blocked() -> tb.MemoryDesc:
    """nChw8c: blocks of 8 channels side by side, one vector load; the blocks lie as a smaller nchw."""
    desc = tb.MemoryDesc(SIZE, torch.float32, "nChw8c")
    check(desc, lambda n, c, h, w: n * C * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8)
    x = torch.randn(SIZE)
    memory = x.to(tb.nChw8c).physical.flatten()
    assert memory[8:16].equal(x[0, :8, 0, 1]), "channels 0 to 7 of the second pixel"
    return desc


def padded() -> tb.MemoryDesc:
    """17 channels do not fill blocks of 8: they are padded to 24, in memory; the logical size stays 17."""
    desc = tb.MemoryDesc((N, 17, H, W), torch.float32, "nChw8c")
    assert desc.dims == (N, 17, H, W) and desc.padded_dims == (N, 24, H, W)
    assert desc.strides == (24 * H * W, H * W * 8, W * 8, 8)
    assert (desc.inner_nblks, desc.inner_idxs, desc.inner_blks) == (1, (1,), (8,))
    assert desc.nbytes == N * 24 * H * W * 4
    check(desc, lambda n, c, h, w: n * 24 * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8)
    return desc


def padding_stays_zero() -> tb.MemoryDesc:
    """A kernel may rely on padding being 0, as a sum over whole blocks does. exp(0) is 1, so exp must clear it."""
    x = torch.randn(N, 17, H, W)
    b = x.to(tb.nChw8c)
    assert b.physical[:, 2, :, :, 1:].eq(0).all(), "channels 17 to 23"
    over_memory = b.physical.exp()
    assert over_memory[:, 2, :, :, 1:].eq(1).all(), "what a loop over the bytes leaves"
    torch.testing.assert_close(over_memory.sum((1, 4)), x.exp().sum(1) + 7, msg="the 7 channels of padding count")
    y = b.exp()
    assert y.physical[:, 2, :, :, 1:].eq(0).all(), "what the operator leaves"
    torch.testing.assert_close(y.physical.sum((1, 4)), x.exp().sum(1))
    return y.memory_desc


def submemory() -> tb.MemoryDesc:
    """A part of a tensor is the same strides from another start: channels 8 to 15 of the second image."""
    whole = tb.MemoryDesc(SIZE, torch.float32, "nChw8c")
    part = whole.submemory((1, 8, H, W), (1, 8, 0, 0))
    assert part.strides == whole.strides and part.offset0 == whole.offset((1, 8, 0, 0))
    check(part, lambda n, c, h, w: whole.offset((1 + n, 8 + c, h, w)))
    assert part == torch.empty(SIZE).to(tb.nChw8c)[1:, 8:].memory_desc, "a view"
    return part


EXAMPLES = (plain, channels_last, batch_last, strides_with_a_gap, blocked, padded, padding_stays_zero, submemory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the pictures as SVG files there too")
    args = parser.parse_args()
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        picture = tb.show(example())
        print(f"{example.__doc__}\n\n{picture}\n\n")
        if args.out is not None:
            picture.save(args.out / f"{example.__name__}.svg")
    print(f"{len(EXAMPLES)} examples, all as the guide says")


if __name__ == "__main__":
    main()
