"""Linear layers between ``x.permute(0, 2, 3, 1)`` and the way back are convolutions of 1x1, as ConvNeXt has them.

They multiply the channels of each pixel. As convolutions they run blocked, with what lies around them: nothing is
reordered, and what follows a linear layer becomes its post-op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_blocked.compile.formats import CONVOLUTIONS

_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)

# Of one tensor, whatever its axes; their further arguments are no tensors.
_POINTWISE = {
    F.dropout, F.elu, F.gelu, F.hardswish, F.leaky_relu, F.relu, F.silu, torch.relu, torch.sigmoid, torch.tanh,
}  # fmt: skip
_BINARY = {operator.add, operator.mul, torch.add, torch.mul}


def convolve_linears(gm: fx.GraphModule) -> None:
    """Makes convolutions of such linear layers, in place, in a graph that Dynamo traced and that has others."""
    if not any(node.target in CONVOLUTIONS for node in gm.graph.nodes):
        return
    if not any(node.target is F.linear for node in _inside(gm.graph)):
        return
    regions = _Regions(gm.graph)
    for node in list(gm.graph.nodes):
        regions.take(node)
    regions.drop_views()
    gm.recompile()


def _inside(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose channels are last, and come from where they were first."""
    inside: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _permutation(node) == _TO_LAST or (_rule(node) and any(a in inside for a in node.all_input_nodes)):
            inside[node] = None
    return list(inside)


def _permutation(node: fx.Node) -> tuple[int, ...] | None:
    """The dims of a permutation of a float32 image on the CPU."""
    is_permutation = (node.op, node.target) == ("call_method", "permute") or node.target is torch.permute
    value = node.meta.get("example_value")
    if not is_permutation or node.kwargs or not _is_image(value):
        return None
    dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    return tuple(d % 4 for d in dims) if all(isinstance(d, int) for d in dims) else None


def _is_image(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.dtype is torch.float32 and value.is_cpu


def _rule(node: fx.Node) -> Callable[[_Regions, fx.Node], None] | None:
    if node.op != "call_function" or not _is_image(node.meta.get("example_value")) or node.kwargs.get("inplace"):
        return None
    return _RULES.get(node.target)


class _Regions:
    """What is known of a graph's nodes whose channels are last: the same with the channels first."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.first: dict[fx.Node, fx.Node] = {}
        self.views: list[fx.Node] = []

    def take(self, node: fx.Node) -> None:
        """Puts what follows from `node` beside it, or in its place."""
        dims, rule = _permutation(node), _rule(node)
        if dims == _TO_LAST:
            self.first[node] = node.args[0]
            self.views.append(node)
        elif dims == _TO_FIRST and node.args[0] in self.first:
            node.replace_all_uses_with(self.first[node.args[0]])
            self.views.append(node)
        elif rule and any(a in self.first for a in node.all_input_nodes):
            rule(self, node)

    def drop_views(self) -> None:
        """Erases the permutations that nothing uses any more."""
        for node in reversed(self.views):
            if not node.users:
                self.graph.erase_node(node)

    def call(self, function: Callable | str, args: tuple, value: Tensor, kwargs: dict | None = None) -> fx.Node:
        """A new node with this example value."""
        make = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        node = make(function, args, kwargs)
        node.meta["example_value"] = value
        return node

    def replace(self, node: fx.Node, function: Callable, args: tuple, kwargs: dict | None = None) -> None:
        """Puts a call with the channels first, and its permutation, in the place of a node."""
        value = node.meta["example_value"]
        with self.graph.inserting_before(node):
            first = self.call(function, args, value.permute(_TO_FIRST), kwargs)
            last = self.call("permute", (first, *_TO_LAST), value)
        node.replace_all_uses_with(last)
        self.graph.erase_node(node)
        self.first[last] = first
        self.views.append(last)


def _linear(regions: _Regions, node: fx.Node) -> None:
    src, weight, bias = (*node.args, *(node.kwargs[k] for k in ("weight", "bias") if k in node.kwargs), None)[:3]
    matrix = weight.meta.get("example_value") if isinstance(weight, fx.Node) else None
    if src not in regions.first or not isinstance(matrix, Tensor) or matrix.dim() != 2:
        return
    with regions.graph.inserting_before(node):
        for _ in range(2):
            matrix = matrix.unsqueeze(-1)
            weight = regions.call("unsqueeze", (weight, -1), matrix)
    regions.replace(node, torch.conv2d, (regions.first[src], weight, bias))


def _layer_norm(regions: _Regions, node: fx.Node) -> None:
    """Stays: a blocked tensor's takes the channels where they are."""
    with regions.graph.inserting_after(node):
        first = regions.call("permute", (node, *_TO_FIRST), node.meta["example_value"].permute(_TO_FIRST))
    regions.first[node] = first
    regions.views.append(first)


def _pointwise(regions: _Regions, node: fx.Node) -> None:
    src, *rest = node.args
    if src in regions.first and not any(isinstance(a, fx.Node) for a in rest):
        regions.replace(node, node.target, (regions.first[src], *rest), node.kwargs)


def _binary(regions: _Regions, node: fx.Node) -> None:
    """Of such tensors, numbers, and vectors with a value a channel."""
    if len(node.args) != 2 or node.kwargs:
        return
    values = [a.meta.get("example_value") if isinstance(a, fx.Node) else a for a in node.args]
    taken = [a in regions.first or isinstance(v, (int, float)) for a, v in zip(node.args, values, strict=True)]
    vectors = [isinstance(v, Tensor) and v.dim() == 1 for v in values]
    if not all(t or v for t, v in zip(taken, vectors, strict=True)):
        return
    args = [regions.first.get(a, a) for a in node.args]
    with regions.graph.inserting_before(node):
        for i, vector in enumerate(values):
            for _ in range(2 * vectors[i]):
                vector = vector.unsqueeze(-1)
                args[i] = regions.call("unsqueeze", (args[i], -1), vector)
    regions.replace(node, node.target, tuple(args))


_RULES: dict[object, Callable[[_Regions, fx.Node], None]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_BINARY, _binary),
}
