"""Linear layers of the channels of a permuted image are convolutions of 1x1, as ConvNeXt has them.

They multiply the channels of each pixel. As convolutions they run blocked, with what lies around them: nothing is
reordered, and what follows a linear layer becomes its post-op (permutations.py drops the permutations).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_blocked.tensor import BlockedTensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; of (n, h, w, c) in float32 and blocked by the channels a convolution."""
    is_image = isinstance(input, BlockedTensor) and input.dim() == 4 and input.blocking.axes == (3,)
    if not is_image or input.dtype is not torch.float32 or not input.is_cpu or weight.dim() != 2:
        return F.linear(input, weight, bias)
    return F.conv2d(input.permute(0, 3, 1, 2), weight[:, :, None, None], bias).permute(0, 2, 3, 1)


def convolve_linears(gm: fx.GraphModule) -> None:
    """Makes the linear layers of a graph that Dynamo traced such ones, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=F.linear):
        node.target = linear
    gm.recompile()


class Linear(nn.Linear):
    """A layer that is such a one."""

    def forward(self, input: Tensor) -> Tensor:
        """Of (..., in_features)."""
        return linear(input, self.weight, self.bias)


def convolve_linear_modules(model: nn.Module) -> None:
    """Makes the linear layers of a model such ones, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
