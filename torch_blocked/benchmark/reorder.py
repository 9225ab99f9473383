"""`bench reorder`: the reorder operator against a plain copy of as many bytes and PyTorch's own conversions.

- ``blocked``: ``torch_blocked::reorder``, its dst a new tensor from the pool of freed outputs, that is, memory that has
  been touched before.
- ``memcpy``: ``dst.copy_(src)`` of contiguous float32 that reads and writes as many bytes in all, by the same threads.
  Its dst is allocated once: as warm as the pool's.
- ``ordered``: the same traffic in the order of memory, without what makes a reorder of it. Where dst is as large as src
  the operator gives dst its own format; else the smaller of the two is copied, and the rest of the larger only read
  (``sum``) or only written (``zero_``).
- ``clone``: ``src.clone()`` of as many bytes: what PyTorch takes to copy them to a new tensor.
- ``torch``: ``x.contiguous(memory_format=...)`` where both sides are plain. Its dst is a new tensor of PyTorch's.

A call costs some time before any byte moves, more for an operator with lists of numbers than for ``copy_``; that is
measured on one element, and ``kernel`` is what is left without it, in GB/s and as the ratio to memcpy without its own,
where that leaves anything.

``tile`` is what the kernel's instructions permit: GB/s of the reorder's first tiles again and again, in the first
cache, times the threads. Its ratio to memcpy's GB/s is the most that ``/memcpy`` can be; above 1, memory is the limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import torch_blocked as tb
from torch_blocked import _python, library
from torch_blocked.benchmark.measure import Run, medians
from torch_blocked.benchmark.report import Column, Row, add_options, geometric_mean, positive, run_cases, throughput
from torch_blocked.formats import Format

COLUMNS = (
    Column("name", "reorder", -50),
    Column("ms", "ms", 9, ".3f"),
    Column("gbytes_per_s", "GB/s", 8, ".1f"),
    Column("vs_memcpy", "/memcpy", 8, ".2f"),
    Column("vs_ordered", "/ordered", 8, ".2f"),
    Column("kernel_gbytes_per_s", "kernel", 8, ".1f"),
    Column("kernel_vs_memcpy", "/memcpy", 8, ".2f"),
    Column("tile_gbytes_per_s", "tile", 8, ".1f"),
    Column("tile_vs_memcpy", "/memcpy", 8, ".2f"),
    Column("vs_clone", "/clone", 8, ".2f"),
    Column("vs_torch", "/torch", 8, ".2f"),
)

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "s8": torch.int8,
    "u8": torch.uint8,
    "f64": torch.float64,
}

Size = tuple[int, ...]

# Formats between which every reorder is measured, both ways; sizes; data types. Empty types: all.
TABLE: tuple[tuple[tuple[str, ...], tuple[Size, ...], tuple[str, ...]], ...] = (
    (
        ("nchw", "nhwc", "nChw8c", "nChw16c"),
        ((32, 64, 56, 56), (1, 2048, 7, 7), (32, 3, 224, 224), (1, 64, 56, 56)),
        (),
    ),
    (("oihw", "OIhw16i16o"), ((512, 512, 3, 3),), ()),
    (("oihw", "OIhw8i8o"), ((512, 512, 3, 3),), ()),
    (("oihw", "Ohwi16o"), ((512, 512, 3, 3),), ()),
    (("oihw", "OIhw8i16o2i"), ((512, 512, 3, 3), (512, 512, 1, 1)), ("bf16", "f16")),
    (("oihw", "OIhw4i16o4i"), ((512, 512, 3, 3), (512, 512, 1, 1)), ("s8", "u8")),
    (("oihw", "Oihw16o"), ((512, 1, 3, 3),), ()),
)

_MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


class Case(NamedTuple):
    """One reorder."""

    src: str
    dst: str
    size: Size
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.src} -> {self.dst} {'x'.join(map(str, self.size))} {self.dtype}"


def cases(dtypes: list[str], images: Sequence[Size] = (), weights: Sequence[Size] = ()) -> list[Case]:
    """The rows of `TABLE` for these data types; with sizes, `images` (n, c, h, w) or `weights` (oc, ic, kh, kw), its
    formats of those."""
    rows = [(formats, weights if formats[0] == "oihw" else images, only) for formats, _, only in TABLE]
    return [
        Case(src, dst, size, dtype)
        for formats, sizes, only in (rows if images or weights else TABLE)
        for dtype in dtypes
        if not only or dtype in only
        for size in sizes
        for src in formats
        for dst in formats
        if src != dst
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench reorder`."""
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["f32"], help="data types (default f32)")
    for option, what, sizes in (("--size", "images", "NxCxHxW"), ("--weight-size", "weights", "OxIxHxW")):
        text = f"{what} of these sizes, not the table's"
        parser.add_argument(option, nargs="+", type=_size, default=[], metavar=sizes, help=text)
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Measures the reorders, then prints the geometric mean and the minimum of the ratio to memcpy.

    GB/s are 1e9 bytes read plus written, padding included, a second. A ratio is the peer's median over ours: above 1,
    ours is faster.
    """
    asked = cases(args.dtype, args.size, args.weight_size)
    values = [row["vs_memcpy"] for row in run_cases(asked, measure, COLUMNS, args)]
    print(f"\ngeometric mean / minimum to memcpy {geometric_mean(values):.2f} / {min(values):.2f}")


def measure(case: Case, rounds: int) -> Row:
    """The row of one reorder."""
    runs, nbytes = contestants(case)
    row = {"name": case.name, **case._asdict(), "bytes": nbytes}
    times = medians(runs | calls(case), rounds)
    call, copy_call = times.pop("call"), times.pop("copy_call")
    copied, moved = times["memcpy"] - copy_call, times["blocked"] - call
    row |= {"call_us": 1e6 * call, **throughput(times, nbytes), **tile_limit(case, nbytes, times["memcpy"])}
    if copied <= 0 or moved <= 0:  # a small reorder takes no longer than a call
        return row
    return row | {"kernel_gbytes_per_s": nbytes / moved / 1e9, "kernel_vs_memcpy": copied / moved}


def contestants(case: Case) -> tuple[dict[str, Run], int]:
    """What is timed, by name, and the bytes that each reads and writes."""
    src, dst = _ends(case)
    arguments = _arguments(src, dst)
    physical, answer = arguments[0], _python.reorder(*arguments)
    nbytes = (physical.numel() + answer.numel()) * answer.element_size()
    copy_src, copy_dst = (torch.zeros(nbytes // 2 // 4) for _ in range(2))
    runs: dict[str, Run] = {
        "blocked": lambda: _python.reorder(*arguments),
        "memcpy": lambda: copy_dst.copy_(copy_src),
        "ordered": in_order(physical, answer, dst, src.shape),
        "clone": lambda: copy_src.clone(),
    }
    if case.src in _MEMORY_FORMATS and case.dst in _MEMORY_FORMATS:
        runs["torch"] = lambda: src.contiguous(memory_format=_MEMORY_FORMATS[case.dst])
    return runs, nbytes


def tile_limit(case: Case, nbytes: int, memcpy: float) -> Row:
    """What the instructions of a reorder's tiles permit, of `nbytes` read and written; `memcpy`: seconds of that."""
    physical, size, blocking, order, dst_blocking = _arguments(*_ends(case))
    flat = [[number for block in blocks for number in block] for blocks in (blocking, dst_blocking)]
    rate = torch.get_num_threads() * library.ops.reorder_tile_rate(physical, size, flat[0], order, flat[1])
    seconds = (nbytes - physical.nbytes) / rate
    return {"tile_gbytes_per_s": nbytes / seconds / 1e9, "tile_vs_memcpy": memcpy / seconds}


def in_order(src: Tensor, dst: Tensor, dst_format: Format, size: Sequence[int]) -> Run:
    """Reads as many bytes as src has and writes as many as dst, in the order of memory. `size`: their logical one.

    Where dst is not as large as src it is two calls of PyTorch's: compare large ones.
    """
    if src.numel() == dst.numel():
        return lambda: _python.reorder(dst, size, dst_format.blocking, dst_format.order, dst_format.blocking)
    numel = [t.numel() * t.element_size() // 4 for t in (src, dst)]
    copy_src, copy_dst = (torch.zeros(min(numel)) for _ in range(2))
    rest = torch.zeros(max(numel) - min(numel))
    only = rest.sum if numel[0] > numel[1] else rest.zero_
    return lambda: (copy_dst.copy_(copy_src), only())


def calls(case: Case) -> dict[str, Run]:
    """The same reorder of one element, and a copy of one."""
    arguments = _arguments(*_ends(case._replace(size=(1,) * len(case.size))))
    copy_src, copy_dst = torch.zeros(1), torch.zeros(1)
    return {"call": lambda: _python.reorder(*arguments), "copy_call": lambda: copy_dst.copy_(copy_src)}


def _ends(case: Case) -> tuple[Tensor, Format]:
    """What is moved, of small whole numbers, which every data type has, and where to."""
    return torch.randint(-100, 100, case.size).to(DTYPES[case.dtype]).to(tb.format(case.src)), tb.format(case.dst)


def _arguments(src: Tensor, dst: Format) -> tuple[object, ...]:
    """What `.to(dst)` hands to the operator."""
    physical, blocking = (src.physical, src.blocking) if isinstance(src, tb.BlockedTensor) else (src, ())
    return physical, src.shape, blocking, dst.order, dst.blocking


def _size(text: str) -> Size:
    numbers = text.split("x")
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not four numbers like 1x64x56x56")
    return tuple(map(positive, numbers))
