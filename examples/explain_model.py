"""`tb.explain` on a model with three faults, and what a stopwatch around each of them says, side by side.

The stopwatch runs in the model, as the caches would flatter a part that runs alone. `--check` fails where a cost
differs by more than 20 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

import torch_blocked as tb


class Renormalized(nn.Module):
    """An operator that has no blocked implementation and runs on plain tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.renorm(2, 1, 10.0)


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
        return x.contiguous()


def make_model(channels: int = 64) -> nn.Module:
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


# Fault -> the part that has it, and what it makes there, which a conversion back to the blocked format is part of.
FAULTS: dict[str, tuple[str, Callable[[nn.Module, Tensor], tuple[Tensor, ...]]]] = {
    "fallback": ("renorm", lambda part, x: (y := part(x), y.to(tb.blocked))),
    "padding": ("bottleneck", lambda part, x: (y := part.narrow(x), part.widen(y))),
    "lost format": ("plain", lambda part, x: (y := part(x), y.to(tb.blocked))),
}


def by_stopwatch(model: nn.Module, image: Tensor, rounds: int) -> dict[str, float]:
    """Fault -> the median of its seconds while the model runs part by part."""
    runs = {part: (fault, run) for fault, (part, run) in FAULTS.items()}
    times: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for _ in range(rounds):
        x = image
        for name, part in model.named_children():
            if name not in runs:
                x = part(x)
                continue
            fault, run = runs[name]
            start = perf_counter()
            made = run(part, x)
            times[fault].append(perf_counter() - start)
            x = made[-1]  # only now is memory given back, which no operator's time has in it
    return {fault: statistics.median(taken) for fault, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="of the stopwatch")
    parser.add_argument("--check", action="store_true", help="fail where a cost differs by more than 20 %%")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, image = make_model().to(tb.blocked), torch.randn(1, 3, 112, 112)
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
