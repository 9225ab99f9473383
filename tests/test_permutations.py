"""Permutations that cancel around pointwise operators, in compiled graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dispatch_cases import cases
from torch.fx.experimental.proxy_tensor import make_fx

from torch_blocked.compile.permutations import cancel_permutations

aten = torch.ops.aten

LAST, FIRST = (0, 2, 3, 1, 4), (0, 3, 1, 2, 4)

# (x, a vector in blocks, another such image) -> the answer, of which no permutation is left but those of the vector.
CANCEL = {
    "nothing between": lambda x, v, y: x.permute(LAST).permute(FIRST),
    "from the end": lambda x, v, y: x.permute(LAST).relu().permute(0, -2, -4, -3, -1),
    "an activation": lambda x, v, y: F.gelu(x.permute(LAST)).permute(FIRST),
    "an activation with a number": lambda x, v, y: F.leaky_relu(x.permute(LAST), 0.3).permute(FIRST),
    "a number in a tensor": lambda x, v, y: (x.permute(LAST) * v[0, 0].double()).permute(FIRST),
    "several": lambda x, v, y: (x.permute(LAST).sigmoid() * 2 + 1).permute(FIRST),
    "a vector": lambda x, v, y: (v * x.permute(LAST)).permute(FIRST),
    "a vector that has all axes": lambda x, v, y: (x.permute(LAST) - v.view(1, 1, 1, 2, 16)).permute(FIRST),
    "two images": lambda x, v, y: (x.permute(LAST) * y.permute(LAST)).permute(FIRST),
    "the same image twice": lambda x, v, y: torch.maximum(x.permute(LAST), x.permute(LAST) * v).permute(FIRST),
    "used elsewhere": lambda x, v, y: x.permute(LAST).relu().permute(FIRST) + y,
}

STAY = {
    "another way back": lambda x, v, y: x.permute(LAST).relu().permute(0, 2, 1, 3, 4),
    "no way back": lambda x, v, y: x.permute(LAST).relu(),
    "read in between": lambda x, v, y: (lambda z: (z.permute(FIRST), z.sum(1)))(x.permute(LAST).relu()),
    "an image that is not permuted": lambda x, v, y: (x.permute(LAST) + y.reshape(2, 5, 4, 2, 16)).permute(FIRST),
    "fewer axes": lambda x, v, y: (x.permute(LAST) + y[0].permute(1, 2, 0, 3)).permute(FIRST),
    "no pointwise operator": lambda x, v, y: x.permute(LAST).cumsum(1).permute(FIRST),
    "a matrix": lambda x, v, y: (v.t() @ v).t(),
}


@pytest.fixture
def inputs():
    return torch.randn(2, 2, 5, 4, 16), torch.randn(2, 16), torch.randn(2, 2, 5, 4, 16)


def permuted(case, inputs):
    """How many permutations of images are left, of how many; the answer is the one before."""
    gm = make_fx(case, tracing_mode="fake")(*inputs)

    def count():
        nodes = gm.graph.find_nodes(op="call_function", target=aten.permute.default)
        return sum(node.meta["val"].numel() > 32 for node in nodes)

    before = count()
    cancel_permutations(gm)
    gm.graph.lint()
    actual, expected = gm(*inputs), case(*inputs)
    torch.testing.assert_close(actual, expected)
    return count(), before


@cases(CANCEL)
def test_cancel(inputs, case):
    left, before = permuted(case, inputs)
    assert before >= 2 and left == 0


@cases(STAY)
def test_stay(inputs, case):
    left, before = permuted(case, inputs)
    assert left == before
