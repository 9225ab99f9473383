"""Interleaved timing: every contestant in every round, in balanced order, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import library

Run = Callable[[], object]

# A sample is as many calls as last about so long: far longer than the clock's step, far shorter than a disturbance.
SAMPLE_SECONDS = 0.01
# Where a contestant's call is shorter, each is first made once untimed, so that the caches are its own and not those of
# the contestant before it.
WARMED_SECONDS = 10 * SAMPLE_SECONDS
PEAK_ROUNDS = 15


def time_calls(run: Run, calls: int) -> float:
    """Seconds a call, the mean of `calls` calls one after the other."""
    start = perf_counter()
    for _ in range(calls):
        run()
    return (perf_counter() - start) / calls


def calibrate(run: Run) -> float:
    """Seconds a call, about. Warms up on the way."""
    run()  # what only the first call does: weights transformed, memory allocated
    calls = 1
    # The faster of two: one that was disturbed would leave too few calls in a sample.
    while (seconds := min(time_calls(run, calls), time_calls(run, calls))) * calls < SAMPLE_SECONDS / 2:
        calls *= 2
    return seconds


def samples(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of each run, one sample a round, in the order of `in_turn`."""
    seconds = {name: calibrate(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    warmed = any(seconds_a_call < WARMED_SECONDS for seconds_a_call in seconds.values())
    for name in in_turn(runs, rounds):
        if warmed:
            runs[name]()
        times[name].append(time_calls(runs[name], max(1, round(SAMPLE_SECONDS / seconds[name]))))
    return times


def in_turn(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Each name once a round, each after every other equally often, as far as the rounds reach.

    What one leaves in the caches and in memory's queues slows the next one down: by a fifth, where a copy of 35 MB came
    before every sample of a convolution that writes past the caches. The rows of a Latin square balanced for such
    effects: E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.
    """
    names = tuple(names)
    zigzag = [i // 2 if i % 2 == 0 else -(i + 1) // 2 for i in range(len(names))]  # 0, -1, 1, -2, 2 ...
    for turn in range(rounds):
        order = [names[(place + turn) % len(names)] for place in zigzag]
        # Of an odd number one square has half of the pairs, its mirror image the others.
        yield from reversed(order) if len(names) % 2 and turn % 2 else order


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds a call of each run, the median of `rounds` interleaved samples, in inference mode."""
    with torch.inference_mode():
        return {name: statistics.median(values) for name, values in samples(runs, rounds).items()}


def peak_gflops() -> float:
    """The machine's FMA peak in float32, GFLOP/s, measured: an estimate from below, by this process's threads.

    It is the best sample of four products whose data lie in the caches and that are known to run near the peak:
    ``torch.mm`` of 512x512 and of 1024x1024, and direct 3x3 convolutions of 128 channels of 28x28, oneDNN's and ours.
    ATEN_CPU_CAPABILITY, which lowers our kernels, does not lower the others. Tiles (AMX) are no FMA and left out: what
    multiplies on them may run above the peak.
    """
    a, b = torch.randn(512, 512), torch.randn(1024, 1024)
    x, w = torch.randn(1, 128, 28, 28), torch.randn(128, 128, 3, 3)
    src, wei = x.to_mkldnn(), mkldnn_weight(w, [1, 1], [1, 1], [1, 1], 1, x.shape)
    ours, images = nn.Conv2d(128, 128, 3, padding=1, bias=False).to(tb.blocked), x.to(tb.blocked)
    products = {  # name -> floating-point operations, run
        "conv": (2 * 9 * 128**2 * 28**2, lambda: torch.mkldnn_convolution(src, wei, None, [1, 1], [1, 1], [1, 1], 1)),
        "blocked": (2 * 9 * 128**2 * 28**2, lambda: ours(images)),
        "mm 512": (2 * 512**3, lambda: torch.mm(a, a)),
        "mm 1024": (2 * 1024**3, lambda: torch.mm(b, b)),
    }
    with torch.inference_mode(), tb.winograd("never"), tb.fuse("never"), vectors():
        times = samples({name: run for name, (_, run) in products.items()}, PEAK_ROUNDS)
    return max(flops / min(times[name]) for name, (flops, _) in products.items()) / 1e9


@contextlib.contextmanager
def vectors() -> Iterator[None]:
    """Our kernels leave an Intel CPU's tiles unused inside the ``with`` block."""
    best = tb.isa()
    library.set_isa("avx512" if best == "amx" else best)
    try:
        yield
    finally:
        library.set_isa(best)


def mkldnn_weight(
    weight: torch.Tensor, padding: list[int], stride: list[int], dilation: list[int], groups: int, size: torch.Size
) -> torch.Tensor:
    """`weight`, (oc, ic / groups, kh, kw) float32, packed as oneDNN wants it for a src of size `size`."""
    return torch._C._nn.mkldnn_reorder_conv2d_weight(weight.to_mkldnn(), padding, stride, dilation, groups, list(size))


@contextlib.contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """PyTorch runs on `count` threads inside the ``with`` block; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
