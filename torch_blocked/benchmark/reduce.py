"""`bench reduce`: reductions of blocked tensors, and softmax, against the same call on NCHW and channels_last ones.

What heads and attention of CNNs call: a class a pixel, its probability, channels normalized, the mean of an image.
Measured and printed as `bench pool`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from torch_blocked.benchmark.pool import Table, add_arguments, run_table

__all__ = ["add_arguments", "run"]

_MAP, _FEATURES, _SMALL = (21, 256, 256), (64, 56, 56), (512, 7, 7)

TABLE: Table = (
    ("segmentation", torch.softmax, {"dim": 1}, _MAP),
    ("segmentation", torch.log_softmax, {"dim": 1}, _MAP),
    ("segmentation", torch.argmax, {"dim": 1}, _MAP),
    ("segmentation", torch.logsumexp, {"dim": 1}, _MAP),
    ("attention", torch.softmax, {"dim": 1}, _FEATURES),
    ("attention", torch.mean, {"dim": 1, "keepdim": True}, _FEATURES),
    ("attention", torch.amax, {"dim": 1, "keepdim": True}, _FEATURES),
    ("attention", torch.mean, {"dim": (2, 3)}, _FEATURES),
    ("attention", torch.amax, {"dim": (2, 3)}, _FEATURES),
    ("norm", torch.sum, {"dim": 1}, _FEATURES),
    ("norm", torch.var, {"dim": 1, "keepdim": True}, _FEATURES),
    ("norm", torch.linalg.vector_norm, {"dim": 1}, _FEATURES),
    ("norm", F.normalize, {}, _FEATURES),
    ("norm", torch.sum, {"dim": (0, 2, 3)}, _FEATURES),
    ("norm", torch.var, {"dim": (2, 3)}, _FEATURES),
    ("head", torch.mean, {"dim": (2, 3)}, _SMALL),
    ("head", torch.softmax, {"dim": 1}, _SMALL),
)


def run(args: argparse.Namespace) -> None:
    """Measures the rows of `TABLE`."""
    run_table(TABLE, args)
