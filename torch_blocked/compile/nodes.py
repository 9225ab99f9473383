"""Nodes of a graph of physical tensors: made with what a pass and Inductor know them by, their fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx


def values(arguments: object) -> object:
    """What the arguments, nodes among them, are when the graph is traced."""
    return fx.map_arg(arguments, lambda node: node.meta["val"])


def call(graph: fx.Graph, function: Callable, *args: object, **kwargs: object) -> fx.Node:
    """A new node that calls an operator."""
    node = graph.call_function(function, args, kwargs)
    node.meta["val"] = function(*values(args), **values(kwargs))
    keep_strides(node)
    return node


def keep_strides(node: fx.Node) -> None:
    """Makes Inductor give an operator inputs with the strides that they have now."""
    node.meta["eager_input_vals"] = values(node.args), values(node.kwargs)


def is_read_by_strides(node: fx.Node) -> bool:
    """Whether an operator reads it by the strides that it had when it was traced, and by no others."""
    targets = [getattr(user.target, "overloadpacket", user.target) for user in node.users]
    return any(isinstance(t, HigherOrderOperator) or t is torch.ops.aten.as_strided for t in targets)


def insert(before: fx.Node, function: Callable, inputs: list[fx.Node], decompositions: dict | None = None) -> fx.Node:
    """Puts what `function` does to `inputs` before a node, operator by operator; the answer's node."""
    parts = make_fx(function, decomposition_table=decompositions)(*values(inputs)).graph
    arguments = dict(zip(parts.find_nodes(op="placeholder"), inputs, strict=True))
    with before.graph.inserting_before(before):
        return before.graph.graph_copy(parts, arguments)
