"""What a call on a blocked tensor costs beside the same on a plain one: tiny tensors, so that only overhead is left."""

from __future__ import annotations

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


def main() -> None:
    torch.set_num_threads(1)
    x, w = torch.randn(1, 16, 2, 2), torch.randn(16, 16, 1, 1)
    norm = torch.nn.BatchNorm2d(16).eval()
    calls = {
        "relu": lambda x, w: torch.relu(x),
        "relu_": lambda x, w: torch.relu_(x),
        "add": lambda x, w: x + x,
        "sub": lambda x, w: x - x,  # in Python, as all that is not in torch_blocked/dispatch/quick.py
        "conv2d": lambda x, w: F.conv2d(x, w),
        "batch_norm": lambda x, w: norm(x),
    }
    print("us a call        plain  blocked  overhead")
    with torch.no_grad():
        for name, call in calls.items():
            plain = microseconds(lambda call=call: call(x, w))
            bx, bw = x.to(tb.blocked), w.to(tb.OIhw16i16o)
            blocked = microseconds(lambda call=call, bx=bx, bw=bw: call(bx, bw))
            print(f"{name:14s} {plain:7.2f} {blocked:8.2f} {blocked - plain:9.2f}")


if __name__ == "__main__":
    main()
