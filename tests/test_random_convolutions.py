"""Random convolutions and transposed ones with their gradients, of sizes that nobody would choose, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import dense, padding_is_zero

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

PROBLEMS = 500


def draw(number):
    """Tensors and the arguments of `torch.convolution`."""
    rng = random.Random(number)
    rank, transposed = rng.choice((1, 2, 2, 2, 3)), rng.random() < 0.4
    groups = rng.choice((1, 1, 1, 1, 2, 3, 5, 16, 24))
    widths = [width for width in (1, 1, 2, 3, 4, 8, 16, 17, 33, 48) if width * groups <= 53]
    ic, oc = (rng.choice(widths) * groups for _ in range(2))
    kernel = [rng.choice((1, 1, 2, 3, 3, 4, 5, 7) if rank < 3 else (1, 1, 2, 3)) for _ in range(rank)]
    dilations = (1, 1, 1, 2, 3) if rank == 3 else (1, 1, 1, 2, 3, 13)
    stride, dilation = ([rng.choice(values) for _ in range(rank)] for values in ((1, 1, 2, 3, 4), dilations))
    padding = [rng.choice((0, 0, 1, 2, 3) if d < 13 else (0, 3, d)) for d in dilation]
    output_padding = [rng.randrange(max(s, d)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
    reaches = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:  # src is what dst of a pixel or more wants, else as large as the padded windows
        least = [max(1, -(-(2 * p - r + 1) // s) + 1) for p, r, s in zip(padding, reaches, stride, strict=True)]
    else:
        least = [max(1, r - 2 * p) for p, r in zip(padding, reaches, strict=True)]
    size = [n + rng.choice((0, 0, 1, 2, 5, 13)) for n in least]
    x = torch.randn(rng.choice((1, 1, 2, 3)), ic, *size)
    w = torch.randn(*((ic, oc // groups) if transposed else (oc, ic // groups)), *kernel)
    b = torch.randn(oc) if rng.random() < 0.5 else None
    return x, w, b, (stride, padding, dilation, transposed, output_padding, groups)


def answers(x, w, b, arguments, of=lambda t: t):
    """The convolution of what `of` makes of its tensors, and the gradients with respect to them."""
    tensors = [of(t.detach()).requires_grad_() for t in (x, w, b) if t is not None]
    y = torch.convolution(*tensors, *[None] * (b is None), *arguments)
    diff = of(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype))  # the same numbers in any precision
    return [y.detach(), *torch.autograd.grad(y, tensors, diff)]


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_random_convolution(isa, guarded, number):
    """Errors are measured by the sums of absolute products: the sums themselves may be next to nothing."""
    x, w, b, arguments = draw(number)
    doubles = [t if t is None else t.double() for t in (x, w, b)]
    expected, sums = answers(*doubles, arguments), answers(*doubles, arguments, torch.abs)
    for block in library.kernel_blocks():
        src, wei = x.to(activation_format(x.dim(), block)), w.to(weight_format(w.shape, block))
        with tb.winograd("never"):
            direct = answers(src, wei, b, arguments)
        with tb.winograd("always"):
            winograd = answers(src, wei, b, arguments)
        for y, z, e, scale in zip(direct, winograd, expected, sums, strict=True):
            assert padding_is_zero([y, z])
            assert y.shape == z.shape == e.shape
            assert bool(((dense(y) - e).abs() <= 1e-6 * scale).all())
            assert bool(((dense(z) - e).abs() <= 1e-5 * scale.max()).all())
