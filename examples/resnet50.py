"""ResNet-50 on a photograph, plain, channels_last and blocked: same answer, less time.

    python examples/resnet50.py [--weights FILE] [--batch N] [--threads T] [--rounds R]

FILE is a checkpoint with torchvision's parameter names (resnet50-*.pth). Without one the weights are random, from a
seed, and the class numbers mean nothing; the arithmetic is the same.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.benchmark.networks import Bottleneck, ResNet


def make_model(weights: Path | None, seed: int = 0) -> ResNet:
    """The model in eval mode, with a checkpoint's weights or seeded ones."""
    torch.manual_seed(seed)
    model = ResNet(Bottleneck, (3, 4, 6, 3)).eval()
    if weights is not None:
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        return model
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):  # as a trained network's: no two channels alike
            nn.init.uniform_(module.weight, 0.3, 0.7)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def load_image(batch: int) -> Tensor:
    """The photograph, 224x224, normalized as ImageNet is; shape (batch, 3, 224, 224).

    cat.npy is cut from "Chelsea" by Stefan van der Walt, CC0, as shipped with scikit-image.
    """
    pixels = np.load(Path(__file__).with_name("cat.npy"))
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((image - mean.view(3, 1, 1)) / std.view(3, 1, 1)).repeat(batch, 1, 1, 1)


def measure(runs: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each run, interleaved, so that what disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(rounds + 1):
        for name, (model, x) in runs.items():
            model(x)  # the caches are this model's
            start = time.perf_counter()
            model(x)
            if done:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
        print(f"\r  measuring, round {done}/{rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 40, end="\r", file=sys.stderr, flush=True)
    return times


def show_answers(plain: Tensor, blocked: Tensor) -> None:
    print("top-5        plain                 blocked")
    for p, b in zip(plain[0].topk(5).indices.tolist(), blocked[0].topk(5).indices.tolist(), strict=True):
        print(f"       class {p:4d} {plain[0, p]:10.4f}    class {b:4d} {blocked[0, b]:10.4f}")
    difference = (plain - blocked).abs().max() / plain.abs().max()
    print(f"largest difference: {difference:.1e} of the largest logit\n")


def show_times(times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    slowest = max(medians.values())
    for name, ms in medians.items():
        print(f"{name:14s} {ms:8.1f} ms  {'█' * round(40 * ms / slowest)}")
    print(f"\nblocked is {medians['channels_last'] / medians['blocked']:.2f}x as fast as channels_last, "
          f"{medians['plain'] / medians['blocked']:.2f}x as plain")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a checkpoint with torchvision's parameter names")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model, x = make_model(args.weights), load_image(args.batch)
    channels_last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    blocked = copy.deepcopy(model).to(tb.blocked)

    print(f"ResNet-50, batch {args.batch}, {args.threads} threads, kernels: {tb.isa()}\n")
    with torch.inference_mode():
        with tb.count() as counts:
            y = blocked(x)
        show_answers(model(x), y)
        print(f"reorders {sum(counts.reorders.values())}, fallbacks {sum(counts.fallbacks.values())}, "
              f"tensors that left the blocked format {counts.left} (pooling → linear)\n")  # fmt: skip
        show_times(
            measure(
                {
                    "plain": (model, x),
                    "channels_last": (channels_last, x.contiguous(memory_format=torch.channels_last)),
                    "blocked": (blocked, x),
                },
                args.rounds,
            )
        )


if __name__ == "__main__":
    main()
