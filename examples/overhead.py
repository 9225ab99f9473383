"""What a call on a blocked tensor costs beside the same on a plain one: tiny tensors, so that only overhead is left.

Again and again, and "cold", once the core's own caches have been read over, as the weights of a network's convolutions
do from call to call: then the interpreter's code, PyTorch's and ours come from the last level cache.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import torch_blocked as tb


def microseconds(call: Callable[[], object], calls: int = 2000, rounds: int = 7) -> float:
    """The fastest round's mean time of one call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / calls


def cold_microseconds(call: Callable[[], object], calls: int = 200) -> float:
    """The median time of one call after 16 MB were read."""
    others = torch.ones(4 << 20)
    times = []
    for _ in range(calls):
        others.sum()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    x, w = torch.randn(1, 16, 2, 2), torch.randn(16, 16, 1, 1)
    norm = torch.nn.BatchNorm2d(16).eval()
    plain_layer = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 1, bias=False), norm, torch.nn.ReLU(inplace=True)).eval()
    blocked_layer = copy.deepcopy(plain_layer).to(tb.blocked)
    bx, bw = x.to(tb.blocked), w.to(tb.OIhw16i16o)
    calls = {
        "relu": (lambda: torch.relu(x), lambda: torch.relu(bx)),
        "relu_": (lambda: torch.relu_(x), lambda: torch.relu_(bx)),
        "add": (lambda: x + x, lambda: bx + bx),
        "floor": (lambda: x.floor(), lambda: bx.floor()),  # in Python, as all that is not in dispatch/quick.py
        "conv2d": (lambda: F.conv2d(x, w), lambda: F.conv2d(bx, bw)),
        "batch_norm": (lambda: norm(x), lambda: norm(bx)),
        "conv, bn, relu": (lambda: plain_layer(x), lambda: blocked_layer(bx)),  # modules
    }
    print("us a call        plain  blocked  overhead    cold: plain  blocked  overhead")
    with torch.no_grad():
        for name, pair in calls.items():
            plain, blocked = map(microseconds, pair)
            cold_plain, cold_blocked = map(cold_microseconds, pair)
            print(f"{name:14s} {plain:7.2f} {blocked:8.2f} {blocked - plain:9.2f}"
                  f"{cold_plain:15.1f} {cold_blocked:8.1f} {cold_blocked - cold_plain:9.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
