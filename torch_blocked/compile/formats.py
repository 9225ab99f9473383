"""Formats of a graph that Dynamo traced: blocked weights for its convolutions, and outputs as they were."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_blocked.formats import blocked
from torch_blocked.reorder import to_dense
from torch_blocked.tensor import BlockedTensor, Function

CONVOLUTIONS = {
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.convolution,
}  # fmt: skip


def block_weights(gm: fx.GraphModule) -> bool:
    """Makes the weight of each float32 convolution on the CPU blocked; whether there was one.

    The answer of a convolution by a blocked weight is blocked, and so is what follows it. Outputs that were plain are
    made plain again, with the strides they had, and so are the gradients of plain inputs.
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
    if found or any(isinstance(_example(node), BlockedTensor) for node in gm.graph.nodes):
        _keep_gradients(gm)
        _keep_outputs(gm)
        gm.recompile()
    return found


def _has_kernel(weight: object) -> bool:
    return isinstance(weight, Tensor) and weight.dtype is torch.float32 and weight.device.type == "cpu"


def _keep_gradients(gm: fx.GraphModule) -> None:
    """Makes the gradients of plain inputs plain. Of two axes or fewer they are."""
    inputs = gm.graph.find_nodes(op="placeholder")
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in inputs:
        like = _example(node)
        plain = isinstance(like, Tensor) and not isinstance(like, BlockedTensor)
        if plain and like.requires_grad and like.dim() > 2:
            with gm.graph.inserting_before(first):
                same = gm.graph.call_function(with_plain_gradient, (node,))
            node.replace_all_uses_with(same, lambda user, same=same: user is not same)
            same.meta["example_value"] = like


def _keep_outputs(gm: fx.GraphModule) -> None:
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        for node in output.all_input_nodes:
            like = _example(node)
            if isinstance(like, Tensor) and not isinstance(like, BlockedTensor):
                output.replace_input_with(node, gm.graph.call_function(to_plain, (node, _order(like))))


def _example(node: fx.Node) -> object:
    return node.meta.get("example_value")


def _order(like: Tensor) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory."""
    if like.is_contiguous():
        return tuple(range(like.dim()))
    return tuple(sorted(range(like.dim()), key=like.stride, reverse=True))


def to_blocked(weight: Tensor) -> Tensor:
    """`weight` in the format of convolutions of its shape."""
    return weight if isinstance(weight, BlockedTensor) else weight.to(blocked.for_module())


def to_plain(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """`x` plain, if it is blocked, its axes in memory as `order` says."""
    if not isinstance(x, BlockedTensor):
        return x
    return x.permute(order).to_dense().contiguous().permute([order.index(d) for d in range(x.dim())])


def with_plain_gradient(x: Tensor) -> Tensor:
    """`x`, whose gradient is made plain."""
    return PlainGradient.apply(x)


class PlainGradient(Function):
    """The same tensor; the gradient is made plain."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # noqa: ANN001
        return to_dense(grad)
