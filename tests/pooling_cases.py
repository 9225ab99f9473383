"""Windows, modes and images for the tests of pooling and up-sampling."""

from __future__ import annotations

import math

import torch

import torch_blocked as tb
from torch_blocked.formats import activation_format

BLOCKS = (8, 16, 5)


def image(n, channels, h, w, special=False):
    x = torch.randn(n, channels, h, w)
    if special:
        x[0, 0, h // 2, w // 2] = x[-1, -1, 0] = math.nan
        x[0, -1, -1, -1], x[-1, 0, 0, 0], x[0, channels // 2] = math.inf, -math.inf, -math.inf
    return x


def wrap(physical, like, block):
    size = (*like.shape[:2], *physical.shape[2:4])
    return tb.BlockedTensor(physical, activation_format(4, block).blocking, torch.Size(size))


# ---- Pooling: (h, w), kernel, stride, padding, dilation, ceil_mode

WINDOWS = [
    ((1, 1), (1, 1), (1, 1), (0, 0), (1, 1), False),
    ((7, 9), (3, 3), (2, 2), (1, 1), (1, 1), False),
    ((8, 8), (3, 3), (2, 2), (1, 1), (1, 1), True),
    ((8, 7), (2, 2), (2, 2), (0, 0), (1, 1), False),
    ((7, 8), (2, 2), (2, 2), (1, 1), (1, 1), True),
    ((6, 5), (3, 2), (1, 3), (1, 0), (1, 1), True),  # the last window would start in the padding
    ((5, 5), (2, 2), (3, 3), (1, 1), (1, 1), True),
    ((9, 9), (5, 1), (1, 2), (2, 0), (1, 1), False),
    ((3, 40), (3, 13), (1, 1), (1, 6), (1, 1), False),
]

DILATED = [
    ((9, 8), (3, 3), (1, 1), (0, 0), (2, 3), False),
    ((9, 8), (2, 3), (2, 1), (1, 1), (3, 2), True),
    ((4, 4), (2, 2), (1, 1), (1, 1), (5, 1), False),  # windows that see only padding
    ((4, 4), (2, 2), (1, 1), (1, 1), (5, 5), False),
]


# ---- Up-sampling

MODES = {
    "nearest": lambda x, size, **how: torch.ops.aten.upsample_nearest2d(x, size, **how),
    "nearest-exact": lambda x, size, **how: torch.ops.aten._upsample_nearest_exact2d(x, size, **how),
    "bilinear": lambda x, size, **how: torch.ops.aten.upsample_bilinear2d(x, size, False, **how),
    "aligned": lambda x, size, **how: torch.ops.aten.upsample_bilinear2d(x, size, True, **how),
}
