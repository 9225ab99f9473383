"""`bench pool`: pooling and up-sampling on blocked tensors against the same call on NCHW and channels_last ones.

All are calls of ``torch.nn.functional`` on float32 in inference mode; a row whose blocked call fell back to plain
tensors says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_blocked as tb
from torch_blocked.benchmark.measure import Run, medians
from torch_blocked.benchmark.report import Column, Row, add_options, geometric_mean, positive, run_cases, throughput

COLUMNS = (
    Column("name", "call", -54),
    Column("n", "N", 4),
    Column("ms", "ms", 9, ".3f"),
    Column("gbytes_per_s", "GB/s", 8, ".1f"),
    Column("vs_nchw", "/nchw", 8, ".2f"),
    Column("vs_channels_last", "/ch_last", 8, ".2f"),
)

# Network, function, its keyword arguments, size of one image (c, h, w).
Table = tuple[tuple[str, Callable, dict, tuple[int, int, int]], ...]

TABLE: Table = (
    ("resnet", F.max_pool2d, {"kernel_size": 3, "stride": 2, "padding": 1}, (64, 112, 112)),
    ("resnet", F.adaptive_avg_pool2d, {"output_size": 1}, (2048, 7, 7)),
    ("vgg", F.max_pool2d, {"kernel_size": 2}, (64, 224, 224)),
    ("vgg", F.adaptive_avg_pool2d, {"output_size": 7}, (512, 7, 7)),
    ("inception", F.max_pool2d, {"kernel_size": 3, "stride": 2}, (64, 147, 147)),
    ("inception", F.max_pool2d, {"kernel_size": 3, "stride": 2}, (288, 35, 35)),
    ("inception", F.avg_pool2d, {"kernel_size": 3, "stride": 1, "padding": 1}, (192, 35, 35)),
    ("inception", F.avg_pool2d, {"kernel_size": 3, "stride": 1, "padding": 1}, (768, 17, 17)),
    ("inception", F.adaptive_avg_pool2d, {"output_size": 1}, (2048, 8, 8)),
    ("densenet", F.avg_pool2d, {"kernel_size": 2}, (128, 56, 56)),
    ("densenet", F.avg_pool2d, {"kernel_size": 2}, (512, 14, 14)),
    ("densenet", F.adaptive_max_pool2d, {"output_size": 1}, (1024, 7, 7)),
    ("unet", F.max_pool2d, {"kernel_size": 2}, (128, 128, 128)),
    ("unet", F.interpolate, {"scale_factor": 2, "mode": "nearest"}, (256, 32, 32)),
    ("unet", F.interpolate, {"scale_factor": 2, "mode": "bilinear"}, (256, 32, 32)),
    ("unet", F.interpolate, {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, (64, 128, 128)),
)


class Case(NamedTuple):
    """One row of the table, for a batch of n images."""

    network: str
    function: Callable
    arguments: dict
    image: tuple[int, int, int]
    n: int

    @property
    def name(self) -> str:
        values = " ".join(f"{key[0]}{value}" if value is not True else key for key, value in self.arguments.items())
        return f"{self.network} {self.function.__name__.removesuffix('2d')} {values} {'x'.join(map(str, self.image))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench pool`, and of `bench reduce`."""
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="batch size (default 1)")
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Measures the rows of `TABLE`, as `run_table`."""
    run_table(TABLE, args)


def run_table(table: Table, args: argparse.Namespace) -> None:
    """Measures the rows of a table, then prints the geometric means of the ratios.

    GB/s are 1e9 bytes of the logical src and dst, each once, a second. A ratio is the peer's median over ours: above 1,
    blocked is faster.
    """
    rows = run_cases([Case(*row, args.batch) for row in table], measure, COLUMNS, args)
    means = {key: geometric_mean([row[key] for row in rows]) for key in ("vs_nchw", "vs_channels_last")}
    print(f"\ngeometric mean to nchw {means['vs_nchw']:.2f}, to channels_last {means['vs_channels_last']:.2f}")


def measure(case: Case, rounds: int) -> Row:
    """The row of one case; `fallbacks` are the operators that ran on plain tensors in one blocked call."""
    x = torch.randn(case.n, *case.image)
    sources = {
        "blocked": x.to(tb.blocked),
        "nchw": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
    }
    runs: dict[str, Run] = {name: _call(case, src) for name, src in sources.items()}
    with torch.inference_mode(), tb.count() as counts:
        dst = runs["blocked"]()
    nbytes = x.nbytes + dst.numel() * dst.element_size()
    fallbacks = dict(counts.fallbacks)
    row = {"name": case.name, "n": case.n, "bytes": nbytes, "fallbacks": fallbacks}
    if fallbacks:
        row["note"] = "fallback"
    return row | throughput(medians(runs, rounds), nbytes)


def _call(case: Case, src: Tensor) -> Run:
    return lambda: case.function(src, **case.arguments)
