"""Trains a small network on handwritten digits, plain and blocked, from the same weights in the same order.

    python examples/train_digits.py [--epochs E] [--batch N] [--seed S] [--plot FILE]

The two curves agree to rounding at first; training then amplifies it, as it does any rounding.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked as tb

TRAINING_IMAGES = 1437  # the other 360 are for the test


class Digits(NamedTuple):
    """Images (n, 1, 8, 8), float32 from 0 to 1, and their digits (n,), int64."""

    images: Tensor
    labels: Tensor


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def make_model(seed: int) -> nn.Module:
    """(n, 1, 8, 8) images -> (n, 10) logits; the weights are drawn from `seed`."""
    torch.manual_seed(seed)
    stem = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    wider = [nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, Residual(32), nn.MaxPool2d(2), *wider, Residual(64), *head)


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The images to train on and those to test with, shuffled by `seed`; digits.txt says where they come from."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order, None].float() / 16, labels[order]
    n = TRAINING_IMAGES
    return Digits(images[:n], labels[:n]), Digits(images[n:], labels[n:])


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of the images that the model, in eval mode, tells right."""
    model.eval()
    with torch.no_grad():
        right = model(data.images).argmax(1) == data.labels
    return right.float().mean().item()


class Epoch(NamedTuple):
    """Mean loss over the training images, share of the test images told right, seconds."""

    loss: float
    accuracy: float
    seconds: float


def train(name: str, model: nn.Module, args: argparse.Namespace) -> list[Epoch]:
    """Trains the model and prints a line an epoch."""
    data, test = load_digits(args.seed)
    steps = args.epochs * -(-TRAINING_IMAGES // args.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=steps)
    generator, epochs = torch.Generator().manual_seed(args.seed), []
    for epoch in range(1, args.epochs + 1):
        start, total = time.perf_counter(), 0.0
        model.train()
        for batch in torch.randperm(TRAINING_IMAGES, generator=generator).split(args.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.images[batch]), data.labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        seconds = time.perf_counter() - start
        epochs.append(Epoch(total / TRAINING_IMAGES, accuracy(model, test), seconds))
        print(f"{name:8s} epoch {epoch:2d}/{args.epochs}   loss {epochs[-1].loss:.4f}   "
              f"test {epochs[-1].accuracy:7.2%}   {seconds:.2f} s", flush=True)  # fmt: skip
    return epochs


def show_curves(curves: dict[str, list[Epoch]]) -> None:
    """Both curves side by side as text; a bar is the loss on a logarithmic scale."""
    losses = [epoch.loss for epochs in curves.values() for epoch in epochs]
    lowest, highest = math.log(min(losses)), math.log(max(losses))

    def cell(epoch: Epoch) -> str:
        length = (math.log(epoch.loss) - lowest) / max(highest - lowest, 1e-9)
        return f"{epoch.loss:.4f} {epoch.accuracy:7.2%}  {'█' * (1 + round(24 * length))}".ljust(42)

    print("\nepoch  " + "    ".join(f"{name}: loss, test accuracy".ljust(42) for name in curves).rstrip())
    for number, epochs in enumerate(zip(*curves.values(), strict=True), start=1):
        print(f"{number:5d}  " + "    ".join(map(cell, epochs)).rstrip())
    for name, epochs in curves.items():
        print(f"{name}: {epochs[-1].accuracy:.2%} of the test images in {sum(e.seconds for e in epochs):.1f} s")


def plot_curves(curves: dict[str, list[Epoch]], file: Path) -> None:
    """The losses and the accuracies, drawn with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, what in zip(axes, ("loss", "accuracy"), strict=True):
        for style, (name, epochs) in zip(("-", "--"), curves.items(), strict=True):
            axis.plot(range(1, len(epochs) + 1), [getattr(epoch, what) for epoch in epochs], style, label=name)
        axis.set(xlabel="epoch", ylabel=what)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves to FILE (.png, .svg ...)")
    args = parser.parse_args()
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.exit(2, "--plot needs matplotlib: pip install matplotlib\n")
        if not args.plot.absolute().parent.is_dir():
            parser.exit(2, f"--plot: the folder of {args.plot} does not exist\n")

    model = make_model(args.seed)
    models = {"plain": model, "blocked": copy.deepcopy(model).to(tb.blocked)}
    curves = {name: train(name, model, args) for name, model in models.items()}
    show_curves(curves)
    if args.plot is not None:
        plot_curves(curves, args.plot)


if __name__ == "__main__":
    main()
