"""Fusion: what follows a convolution becomes its post-ops, so that nothing passes through memory in between.

A pattern is one entry of PATTERNS: the operator that follows a convolution, alone, and a function that gives the
convolution's new arguments, or None where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_blocked import library

aten = torch.ops.aten
CONVOLUTION = library.convolution_op


class PostOps(NamedTuple):
    """The last arguments of `torch_blocked::convolution`, applied in this order."""

    scale: fx.Node | None = None
    shift: fx.Node | None = None
    residual: fx.Node | None = None
    activation: str = "none"


_FIRST_POST_OP = 11  # arguments of the operator before them


def post_ops(convolution: fx.Node) -> PostOps:
    """Those that the convolution has."""
    return PostOps(*convolution.args[_FIRST_POST_OP:])


def _value(argument: object) -> object:
    """What an argument is when the graph is traced: of a node, its shape-only tensor."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def batch_norm(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """(x - mean) / sqrt(var + eps) * weight + bias, as a scale and a shift a channel."""
    src, weight, bias, mean, var, eps = node.args
    if src is not convolution or post_ops(convolution) != PostOps():
        return None

    def call(function: Callable, *args: object) -> fx.Node:
        result = graph.call_function(function, args)
        result.meta["val"] = function(*map(_value, args))
        return result

    scale = call(aten.rsqrt.default, call(aten.add.Tensor, var, eps))
    scale = scale if weight is None else call(aten.mul.Tensor, scale, weight)
    shift = call(aten.neg.default, call(aten.mul.Tensor, mean, scale))
    shift = shift if bias is None else call(aten.add.Tensor, shift, bias)
    return PostOps(scale, shift)


def add(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """Of a tensor laid out as the answer."""
    before = post_ops(convolution)
    if len(node.args) != 2 or node.kwargs or before.residual is not None or before.activation != "none":
        return None
    others = [a for a in node.args if a is not convolution]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    value, own = others[0].meta.get("val"), convolution.meta["val"]
    if not isinstance(value, Tensor) or value.shape != own.shape or value.dtype != own.dtype:
        return None
    return before._replace(residual=others[0])


def relu(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """max(x, 0)."""
    before = post_ops(convolution)
    return before._replace(activation="relu") if before.activation == "none" else None


def clamp_min(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """max(x, 0), the first half of a relu6 as it comes."""
    return relu(graph, convolution, node) if node.args[1] == 0 else None


def clamp_max(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """min(relu(x), 6), the second half."""
    before = post_ops(convolution)
    return before._replace(activation="relu6") if before.activation == "relu" and node.args[1] == 6 else None


PATTERNS: dict[object, Callable[[fx.Graph, fx.Node, fx.Node], PostOps | None]] = {
    library.batch_norm_op: batch_norm,
    aten.add.Tensor: add,
    aten.relu.default: relu,
    aten.clamp_min.default: clamp_min,
    aten.clamp_max.default: clamp_max,
}


def fuse(gm: fx.GraphModule) -> int:
    """Fuses all that PATTERNS finds, in place; how many operators went into convolutions."""
    fused = 0
    for node in list(gm.graph.nodes):
        pattern = PATTERNS.get(node.target) if node.op == "call_function" else None
        # The later of two: its other operand is there when it runs.
        for convolution in reversed([a for a in node.all_input_nodes if a.target is CONVOLUTION] if pattern else []):
            if len(convolution.users) > 1:
                continue
            with gm.graph.inserting_before(node):
                found = pattern(gm.graph, convolution, node)
                if found is None:
                    continue
                arguments = (*convolution.args[:_FIRST_POST_OP], *found)
                whole = gm.graph.call_function(CONVOLUTION, arguments)
            whole.meta = {"val": node.meta["val"], "eager_input_vals": (tuple(map(_value, arguments)), {})}
            node.replace_all_uses_with(whole)
            gm.graph.erase_node(node)
            gm.graph.erase_node(convolution)
            fused += 1
            break
    gm.recompile()
    return fused
