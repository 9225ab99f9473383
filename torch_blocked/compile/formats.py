"""Formats of a graph that Dynamo traced: blocked weights for its convolutions, and outputs as they were."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_blocked.formats import blocked
from torch_blocked.tensor import BlockedTensor

CONVOLUTIONS = {
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.convolution,
}  # fmt: skip


def block_weights(gm: fx.GraphModule) -> bool:
    """Makes the weight of each float32 convolution on the CPU blocked; whether there was one.

    The answer of a convolution by a blocked weight is blocked, and so is what follows it. Outputs that were plain are
    made plain again, with the strides they had.
    """
    found = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in CONVOLUTIONS:
            continue
        weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(weight, fx.Node) or not _has_kernel(_example(weight)):
            continue
        found = True
        with gm.graph.inserting_before(node):
            node.replace_input_with(weight, gm.graph.call_function(to_blocked, (weight,)))
    if found:
        _keep_outputs(gm)
        gm.recompile()
    return found


def _has_kernel(weight: object) -> bool:
    return isinstance(weight, Tensor) and weight.dtype is torch.float32 and weight.device.type == "cpu"


def _keep_outputs(gm: fx.GraphModule) -> None:
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        for node in output.all_input_nodes:
            like = _example(node)
            if isinstance(like, Tensor) and not isinstance(like, BlockedTensor) and like.dim() >= 3:
                output.replace_input_with(node, gm.graph.call_function(to_plain, (node, _memory_format(like))))


def _example(node: fx.Node) -> object:
    return node.meta.get("example_value")


def _memory_format(like: Tensor) -> torch.memory_format:
    """channels_last where the strides say so and do not say contiguous too."""
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if like.dim() == dims and like.is_contiguous(memory_format=memory_format) and not like.is_contiguous():
            return memory_format
    return torch.contiguous_format


def to_blocked(weight: Tensor) -> Tensor:
    """`weight` in the format of convolutions of its shape."""
    return weight if isinstance(weight, BlockedTensor) else weight.to(blocked.for_module())


def to_plain(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """`x` plain, if it is blocked."""
    return x.contiguous(memory_format=memory_format) if isinstance(x, BlockedTensor) else x
