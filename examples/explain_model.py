"""`tb.explain` on a model with three faults, and what a stopwatch says of each of them, side by side.

The watch is stopped around the part in the running model, as the caches would flatter one that runs alone; but around
the conversions alone, since explain tells what the reorders take, without the Python around them. `--check` fails where
a cost differs by more than 20 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter

import torch
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.benchmark.measure import medians


class Renormalized(nn.Module):
    """An operator that has no blocked implementation and runs on plain tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.renorm(2, 1, 10.0).to(tb.blocked)


class Bottleneck(nn.Module):
    """Three channels in the middle of the network: blocks of 16 are mostly padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, 3, 3, padding=1)
        self.widen = nn.Conv2d(3, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(self.narrow(x))


class Plain(nn.Module):
    """Makes the tensor plain for no reason."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous().to(tb.blocked)


def make_model(channels: int = 128) -> nn.Module:
    """Takes (n, 3, h, w) images."""

    def conv(ic: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(ic, channels, 3, padding=1), nn.ReLU())

    model = nn.Sequential()
    parts = {
        "stem": conv(3), "renorm": Renormalized(), "body": conv(channels), "bottleneck": Bottleneck(channels),
        "neck": conv(channels), "plain": Plain(), "head": conv(channels),
    }  # fmt: skip
    for name, part in parts.items():
        model.add_module(name, part)
    return model.eval()


def by_stopwatch(model: nn.Module, image: Tensor, rounds: int) -> dict[str, float]:
    """Fault -> the median of its seconds."""
    parts = {"fallback": model.renorm, "padding": model.bottleneck}
    starts, times = {}, {fault: [] for fault in parts}
    handles = []
    for fault, part in parts.items():
        before = lambda *_, fault=fault: starts.update({fault: perf_counter()})  # noqa: E731
        after = lambda *_, fault=fault: times[fault].append(perf_counter() - starts[fault])  # noqa: E731
        handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
    for _ in range(rounds):
        model(image)
    for handle in handles:
        handle.remove()
    x = model.stem(image)
    alone = medians({"lost format": lambda: model.plain(x)}, rounds)
    return {fault: statistics.median(taken) for fault, taken in times.items()} | alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="of the stopwatch")
    parser.add_argument("--check", action="store_true", help="fail where a cost differs by more than 20 %%")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, image = make_model().to(tb.blocked), torch.randn(1, 3, 56, 56)
    with torch.no_grad(), tb.fallback("allow"):
        report = tb.explain(model, image)
        print(report)
        measured = by_stopwatch(model, image, args.rounds)
    told = {finding.kind: finding.seconds for finding in report.findings}
    print(f"\n{'fault':12s} {'explained, ms':>14s} {'stopwatch, ms':>14s} {'ratio':>6s}")
    for fault, seconds in measured.items():
        print(f"{fault:12s} {1e3 * told[fault]:14.3f} {1e3 * seconds:14.3f} {told[fault] / seconds:6.2f}")
    return int(args.check and any(abs(told[fault] / seconds - 1) > 0.2 for fault, seconds in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
