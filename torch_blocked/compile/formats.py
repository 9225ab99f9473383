"""Formats of a graph that Dynamo traced: blocked weights for its convolutions, and outputs as they were."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from torch_blocked.dispatch.traced_views import lies_in_a_copy
from torch_blocked.formats import blocked
from torch_blocked.reorder import to_dense
from torch_blocked.tensor import BlockedTensor

CONVOLUTIONS = {
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.convolution,
}  # fmt: skip


def block_weights(gm: fx.GraphModule) -> bool:
    """Makes the weight of each float32 convolution on the CPU blocked; whether there was one.

    The answer of a convolution by a blocked weight is blocked, and so is what follows it. Outputs that were plain are
    made plain again, their axes in memory in the order they had and views of each other where they were, and so are
    the gradients of plain inputs.
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
    """Makes plain outputs plain again. Those that share memory are views of one plain tensor, as they were."""
    (output,) = gm.graph.find_nodes(op="output")
    outputs = [node for node in output.all_input_nodes if isinstance(_example(node), Tensor) and _memory(node)]
    counts = Counter(memory for node in outputs for memory in _memory(node))
    shared = {memory for memory, count in counts.items() if count > 1}
    plain: dict[fx.Node, fx.Node] = {}

    def make_plain(node: fx.Node) -> fx.Node:
        if node not in plain:
            viewed = _viewed(node) if _memory(node) & shared else None
            if viewed is None:
                plain[node] = _call_to_plain(gm.graph, node)
            elif _example(viewed) is _example(node):  # it was written to in place
                plain[node] = make_plain(viewed)
            else:
                arguments = {viewed: make_plain(viewed)}
                plain[node] = gm.graph.node_copy(node, lambda n: arguments.get(n, n))
        return plain[node]

    with gm.graph.inserting_before(output):
        for node in outputs:
            output.replace_input_with(node, make_plain(node))


def _call_to_plain(graph: fx.Graph, node: fx.Node) -> fx.Node:
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    like = _example(node)
    if has_free_unbacked_symbols(like):  # sizes that data decide: nothing can be asked of its strides
        return graph.call_function(to_dense, (node,))
    return graph.call_function(to_plain, (node, *_layout(like)))


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that this one is a view of, or one of several views; None of a tensor with memory of its own."""
    for source in node.all_input_nodes:
        if _memory(source) & _memory(node) and (isinstance(_example(source), Tensor) or _viewed(source)):
            return source
    return None


def _memory(node: fx.Node) -> set[int]:
    """Which storages a plain node's tensors have."""
    example = _example(node)
    tensors = example if isinstance(example, (tuple, list)) else [example]
    plain = [x for x in tensors if isinstance(x, Tensor) and not isinstance(x, BlockedTensor)]
    return {x.untyped_storage()._cdata for x in plain if x.layout is torch.strided}


def _example(node: fx.Node) -> object:
    return node.meta.get("example_value")


def _layout(like: Tensor) -> tuple[tuple[int, ...], int]:
    """The axes from outermost to innermost in memory, and the innermost one's stride, 1 where that may vary."""
    order = range(like.dim())
    if not like.is_contiguous():
        order = sorted(order, key=like.stride, reverse=True)
    stride = (_strides(like, order) or [1])[-1]
    return tuple(order), stride if isinstance(stride, int) else 1


def _strides(x: Tensor, order: Iterable[int]) -> list[int]:
    """Of the axes that have more than one index."""
    return [x.stride(d) for d in order if x.size(d) != 1]


def to_blocked(weight: Tensor) -> Tensor:
    """`weight` in the format of convolutions of its shape."""
    return weight if isinstance(weight, BlockedTensor) else weight.to(blocked.for_module())


def to_plain(x: Tensor, order: tuple[int, ...], stride: int) -> Tensor:
    """`x` plain, its axes in memory as `order` says: itself where they lie so, the innermost with this stride.

    So do views of the graph's inputs. A part of a blocked tensor is a view of a copy, which would be kept whole.
    """
    if not isinstance(x, BlockedTensor) and _lies_in(x, order, stride) and not lies_in_a_copy(x):
        return x
    return x.permute(order).to_dense().contiguous().permute([order.index(d) for d in range(x.dim())])


def _lies_in(x: Tensor, order: tuple[int, ...], stride: int) -> bool:
    strides = _strides(x, order)
    return strides[-1:] in ([], [stride]) and all(outer >= inner for outer, inner in itertools.pairwise(strides))


def with_plain_gradient(x: Tensor) -> Tensor:
    """`x`, whose gradient is made plain. By a hook: what the graph writes to `x` is no view's."""
    if x.requires_grad:
        x.register_hook(to_dense)
    return x
