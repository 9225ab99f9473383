"""A permutation and the way back drop where only pointwise operators lie between, which then run on what was permuted.

So does what follows a convolution of channels that lie last, as in ConvNeXt, become its post-op. Copies drop, too, as
dropout leaves them: nothing is written to in such a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_blocked.compile.fusion import ACTIVATIONS
from torch_blocked.compile.hoist import returned_nodes
from torch_blocked.compile.nodes import call, is_read_by_strides

aten = torch.ops.aten


def cancel_permutations(gm: fx.GraphModule) -> None:
    """Drops such pairs, in place, from a graph of physical tensors."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.permute.default):
        if is_read_by_strides(node):
            continue
        with gm.graph.inserting_before(node):
            same = _permuted(*node.args)
        if same is not None:
            node.replace_all_uses_with(same)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def drop_copies(gm: fx.GraphModule) -> None:
    """Drops the copies of what the graph has computed, in place, but for those that it returns."""
    returned = returned_nodes(gm)
    for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
        src = node.args[0]
        computed = not node.kwargs and src.op == "call_function"
        if computed and node not in returned and not is_read_by_strides(node):
            node.replace_all_uses_with(src)
            gm.graph.erase_node(node)
    gm.recompile()


def _permuted(node: fx.Node, dims: list[int]) -> fx.Node | None:
    """A node that is `node` permuted by `dims`, without permutations of images; None where there is none."""
    if _shape(node) is None or len(_shape(node)) != len(dims):
        return None
    if node.target is aten.permute.default and [node.args[1][d] for d in dims] == [*range(len(dims))]:
        return node.args[0]
    if not _is_pointwise(node) or len(node.users) > 1:
        return None
    operands = [_operand(a, dims) if _is_vector(a) else _permuted(a, dims) for a in node.args]
    return None if None in operands else call(node.graph, node.target, *operands, **node.kwargs)


def _is_pointwise(node: fx.Node) -> bool:
    of_tensors = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    known = node.target in ACTIVATIONS or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return of_tensors and known and not any(isinstance(v, fx.Node) for v in node.kwargs.values())


def _is_vector(operand: object) -> bool:
    """Whether it is a number or, at most, a vector in blocks: its permutation costs nothing."""
    shape = _shape(operand) or ()
    return all(isinstance(n, int) for n in shape) and all(n == 1 for n in shape[:-2])


def _operand(operand: object, dims: list[int]) -> object:
    """What broadcasts against the permuted as `operand` does against what is permuted."""
    shape = _shape(operand)
    if not shape:  # of no dimension it broadcasts as it is, and with dimensions it would decide on the data type
        return operand
    whole = call(operand.graph, aten.reshape.default, operand, [1] * (len(dims) - len(shape)) + list(shape))
    return call(operand.graph, aten.permute.default, whole, dims)


def _shape(operand: object) -> torch.Size | None:
    """Of a tensor; None of a number, sizes among them."""
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None
