"""`tb.explain` on a model with three faults, and what a stopwatch says of each of them, side by side.

The watch runs while the part alone does, but in the running model, as the caches would flatter a part that is run over
and over; the image is large, so that they hold little of it anyhow. Explaining and timing take turns, so that both see
the same machine. `--check` fails where a cost differs by more than 20 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter

import torch
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.explain import Report

RUNS = 20  # of the model under the stopwatch, in a round


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


FAULTS = {"fallback": "renorm", "padding": "bottleneck", "lost format": "plain"}  # kind of finding -> module


def by_explain(model: nn.Module, image: Tensor) -> tuple[Report, dict[str, float]]:
    """The report, and fault -> its seconds as the report says."""
    report = tb.explain(model, image)
    return report, {fault: sum(f.seconds for f in report.findings if f.kind == fault) for fault in FAULTS}


def by_stopwatch(model: nn.Module, image: Tensor) -> dict[str, float]:
    """Fault -> the median of the seconds of its module."""
    times = {fault: [] for fault in FAULTS}
    handles = []
    for fault, name in FAULTS.items():
        part, taken = model.get_submodule(name), times[fault]
        handles.append(part.register_forward_pre_hook(lambda *_, taken=taken: taken.append(-perf_counter())))
        handles.append(part.register_forward_hook(lambda *_, taken=taken: taken.append(taken.pop() + perf_counter())))
    for _ in range(RUNS):
        model(image)
    for handle in handles:
        handle.remove()
    return {fault: statistics.median(taken) for fault, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of explaining and timing; medians are printed")
    parser.add_argument("--check", action="store_true", help="fail where a cost differs by more than 20 %%")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, image = make_model().to(tb.blocked), torch.randn(1, 3, 224, 224)
    explained, measured = [], []
    with torch.no_grad(), tb.fallback("allow"):
        for _ in range(args.rounds):
            report, costs = by_explain(model, image)
            explained.append(costs)
            measured.append(by_stopwatch(model, image))
    print(report)
    print(f"\n{'fault':12s} {'explained, ms':>14s} {'stopwatch, ms':>14s} {'ratio':>6s}")
    ratios = []
    for fault in FAULTS:
        told, taken = (statistics.median(costs[fault] for costs in rounds) for rounds in (explained, measured))
        pairs = zip(explained, measured, strict=True)
        ratios.append(statistics.median(costs[fault] / times[fault] for costs, times in pairs))
        print(f"{fault:12s} {1e3 * told:14.3f} {1e3 * taken:14.3f} {ratios[-1]:6.2f}")
    return int(args.check and not all(0.8 <= ratio <= 1.2 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
