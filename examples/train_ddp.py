"""Trains the network of train_digits.py in several processes, DistributedDataParallel over gloo.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py [--blocked parameters|activations] [--epochs E]

"parameters": the model is converted, then wrapped; its gradients are summed up as plain tensors. "activations": the
parameters stay plain, and blocked images make the activations blocked; each convolution then reorders its weight.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import TRAINING_IMAGES, accuracy, load_digits, make_model

import torch_blocked as tb


def mean_of_all(value: Tensor) -> float:
    """The mean of the processes' values."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(ddp: nn.Module, args: argparse.Namespace) -> None:
    """Each process takes its share of every batch; the first one prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data, test = load_digits(args.seed)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(args.seed)  # the same order of images in every process
    for epoch in range(1, args.epochs + 1):
        ddp.train()
        total = torch.zeros(())
        for batch in torch.randperm(TRAINING_IMAGES, generator=generator).split(args.batch):
            mine = batch[rank::world]
            images = data.images[mine]
            if args.blocked == "activations":
                images = images.to(tb.blocked)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), data.labels[mine])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch) / TRAINING_IMAGES
        loss = mean_of_all(total)
        if rank == 0:
            print(
                f"epoch {epoch:2d}/{args.epochs}   loss {loss:.4f}   test {accuracy(ddp.module, test):7.2%}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocked", choices=("parameters", "activations"), default="parameters")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="images of all processes together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("run it by torchrun: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py")

    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, os.cpu_count() // dist.get_world_size()))
    model = make_model(args.seed)
    if args.blocked == "parameters":
        model.to(tb.blocked)
    train(DistributedDataParallel(model), args)
    # DistributedDataParallel keeps gloo's threads alive, and one that lets go of a tensor while Python ends aborts.
    # Nothing waits for them (pytorch/pytorch#190489), so they get the time.
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
