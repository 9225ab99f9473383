"""`bench conv`: the convolution operator against F.conv2d in NCHW and channels_last and PyTorch's oneDNN operator.

All are float32, without bias, in inference mode. Timed is what a network of that format pays for one layer:

- ``blocked``: ``torch_blocked::convolution``, blocked src (plain NCHW of up to 4 channels, as an image is read),
  weights as ``model.to(tb.blocked)`` makes them.
- ``nchw``, ``channels_last``: ``F.conv2d``, src and weights in that format.
- ``mkldnn``: ``torch.mkldnn_convolution`` on ``x.to_mkldnn()`` and prepacked weights.

Ours takes its dst from the pool of freed outputs. The others' is PyTorch's: of more than 32 MB it comes fresh from the
system, as in a new process, in every run (`machine.large_blocks_mapped`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark import machine
from torch_blocked.benchmark.measure import Run, medians, mkldnn_weight, num_threads, peak_gflops
from torch_blocked.benchmark.report import (
    Column,
    Row,
    add_options,
    geometric_mean,
    positive,
    ratios,
    run_cases,
)
from torch_blocked.benchmark.shapes import SETS, Layer, parse_layer
from torch_blocked.formats import weight_format

COLUMNS = (
    Column("name", "layer", -36),
    Column("n", "N", 4),
    Column("gflops", "GFLOP/s", 8, ".0f"),
    Column("of_peak", "of peak", 8, ".0%"),
    Column("ms", "ms", 9, ".3f"),
    Column("vs_nchw", "/nchw", 8, ".2f"),
    Column("vs_channels_last", "/ch_last", 8, ".2f"),
    Column("vs_mkldnn", "/mkldnn", 8, ".2f"),
    Column("vs_memcpy", "/memcpy", 8, ".2f"),
    Column("algorithm", "algorithm", -20),
)
# With --algorithms: the fastest of those that could run instead, and its time over ours.
ALGORITHM_COLUMNS = (Column("vs_other", "/other", 8, ".2f"), Column("other", "fastest other", -20))

# Modes of `tb.winograd`, which together have a convolution run by all its algorithms.
MODES = ("never", "f2", "f4")


class Case(NamedTuple):
    """One layer of a set, for a batch of n images."""

    set: str
    layer: Layer
    n: int

    @property
    def name(self) -> str:
        return self.layer.name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench conv`."""
    parser.add_argument(
        "--set", nargs="+", action="extend", type=_set, default=[], metavar="NAME", help="shape sets, see --list"
    )
    parser.add_argument("--layer", nargs="+", type=_layer, default=[], help="such as ic64ih56oc64kh3ph1")
    parser.add_argument("--batch", type=_batches, default=[1], metavar="N,N", help="batch sizes (default 1)")
    help_of_algorithms = "compare with the algorithms that the cost model did not choose, too"
    parser.add_argument("--algorithms", action="store_true", help=help_of_algorithms)
    parser.add_argument("--list", action="store_true", help="print the sets and stop")
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Measures the layers asked for (without --set and --layer: the set resnet_50), then prints the means of each set.

    A ratio is the peer's median over ours: above 1, blocked is faster. GFLOP/s are those of the direct algorithm, and
    `of peak` is their share of `measure.peak_gflops`: Winograd's algorithms, which multiply less, may pass 100 %.
    `memcpy` is a copy that reads and writes as many bytes as src, dst and weights have: near 1 memory is the limit.
    `/other`, with --algorithms, is the time of the fastest algorithm that was not chosen over the chosen one's.
    """
    if args.list:
        for name, layers in SETS.items():
            print(f"{name:24s} {len(layers):3d} layers, such as {layers[0]}")
        return
    names = args.set or ([] if args.layer else ["resnet_50"])
    sets = {name: [parse_layer(text) for text in SETS[name]] for name in names}
    if args.layer:
        sets["layers"] = args.layer
    with num_threads(args.threads):
        peak = peak_gflops()
    print(f"FMA peak, measured: {peak:.0f} GFLOP/s")
    cases = [Case(name, layer, n) for name, layers in sets.items() for n in args.batch for layer in layers]
    columns = COLUMNS + ALGORITHM_COLUMNS if args.algorithms else COLUMNS
    rows = run_cases(cases, lambda case, rounds: measure(case, rounds, peak, args.algorithms), columns, args)
    for line in summaries(rows):
        print(line)


def measure(case: Case, rounds: int, peak: float, algorithms: bool = False) -> Row:
    """The row of one case; `peak` in GFLOP/s; with `algorithms` beside the fastest one that was not chosen."""
    row = {"set": case.set, "name": case.name, "n": case.n}
    needed, available = _bytes_needed(case), machine.available_bytes()
    if available is not None and needed > available:
        return row | {"note": f"skipped: needs {needed / 2**30:.0f} GiB, {available / 2**30:.0f} are free"}
    runs, algorithm = contestants(case.layer, case.n)
    choices = in_modes(runs["blocked"], algorithm) if algorithms else {}
    with tb.fuse("never"), machine.large_blocks_mapped():  # each call is one of the operator
        times = medians(runs | choices, rounds)
    chosen = algorithm()
    row |= {"algorithm": chosen, **beside_others(times, chosen, choices)}
    of_contestants = {name: seconds for name, seconds in times.items() if name not in choices}
    return row | figures(of_contestants, case.layer.flops(case.n), peak)


def in_modes(run: Run, algorithm: Callable[[], str]) -> dict[str, Run]:
    """A convolution by each algorithm that can run it, by name; `algorithm()` tells which one a mode chooses."""
    found: dict[str, Run] = {}
    for mode in MODES:
        with tb.winograd(mode):
            found.setdefault(algorithm(), _in_mode(mode, run))
    return found


def beside_others(times: dict[str, float], chosen: str, choices: Collection[str]) -> Row:
    """The fastest of `choices` but the chosen one, and its time over that one's; {} where there is no other.

    Setting the mode takes some microseconds, so the chosen algorithm's time is that of its own mode, too.
    """
    other = min((name for name in choices if name != chosen), key=times.__getitem__, default=None)
    return {"other": other, "vs_other": times[other] / times.get(chosen, times["blocked"])} if other else {}


def _in_mode(mode: str, run: Run) -> Run:
    def run_in_mode() -> object:
        with tb.winograd(mode):
            return run()

    return run_in_mode


def figures(times: dict[str, float], flops: int, peak: float) -> Row:
    """Times in seconds -> milliseconds, GFLOP/s, share of the peak (GFLOP/s), ratios to each peer."""
    gflops = flops / times["blocked"] / 1e9
    row = {"gflops": gflops, "of_peak": gflops / peak, "ms": 1e3 * times["blocked"], **ratios(times)}
    return row | {"vs_best": min(row["vs_mkldnn"], row["vs_channels_last"])}


def contestants(layer: Layer, n: int) -> tuple[dict[str, Run], Callable[[], str]]:
    """What is timed, by name, and what tells, afterwards, which algorithm ours ran.

    Made outside inference mode: Winograd's transformed weights are kept for tensors that count their versions only.
    """
    x, w = torch.randn(n, layer.ic, *layer.src), torch.randn(layer.weight_size)
    window = [list(pair) for pair in (layer.stride, layer.padding, layer.dilation)]
    stride, padding, dilation = window
    nhwc, ohwi = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    opaque, packed = x.to_mkldnn(), mkldnn_weight(w, padding, stride, dilation, layer.groups, x.shape)
    src = x if layer.ic <= 4 and layer.groups == 1 else x.to(tb.blocked)
    wei = w.to(weight_format(w.shape, library.isa_block()))
    copy_src, copy_dst = (torch.zeros((n * _pixels(layer) + w.numel()) // 2) for _ in range(2))
    runs = {
        "blocked": lambda: F.conv2d(src, wei, None, *window, layer.groups),
        "nchw": lambda: F.conv2d(x, w, None, *window, layer.groups),
        "channels_last": lambda: F.conv2d(nhwc, ohwi, None, *window, layer.groups),
        "mkldnn": lambda: torch.mkldnn_convolution(opaque, packed, None, padding, stride, dilation, layer.groups),
        "memcpy": lambda: copy_dst.copy_(copy_src),
    }
    options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
    return runs, lambda: tb.algorithm(src, wei, **options).name


def summaries(rows: list[Row]) -> list[str]:
    """For each set and batch: the geometric mean and the minimum of the ratio to mkldnn and to the better peer.

    The better peer of a layer is the faster of mkldnn and channels_last.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if "ms" in row:
            groups.setdefault((row["set"], row["n"]), []).append(row)
    lines = ["", "geometric mean / minimum     to mkldnn    to the better of mkldnn, channels_last"] if groups else []
    for (name, n), group in groups.items():
        cells = [[row[key] for row in group] for key in ("vs_mkldnn", "vs_best")]
        shown = "   ".join(f"{geometric_mean(values):5.2f} / {min(values):4.2f}" for values in cells)
        lines.append(f"{name:20s} N={n:<4d} {shown}")
    return lines


def _pixels(layer: Layer, block: int = 1) -> int:
    """Elements of an image of src and of dst together, their channels padded to blocks."""
    ic, oc = (-(-channels // block) * block for channels in (layer.ic, layer.oc))
    return ic * math.prod(layer.src) + oc * math.prod(layer.dst)


def _bytes_needed(case: Case) -> int:
    """Of six src, dst and weights, one a contestant and one in the making."""
    return 4 * 6 * (case.n * _pixels(case.layer, 16) + math.prod(case.layer.weight_size))


def _set(text: str) -> str:
    if text not in SETS:
        raise argparse.ArgumentTypeError(f"unknown set {text!r}; --list prints the sets")
    return text


def _layer(text: str) -> Layer:
    try:
        return parse_layer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _batches(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]
