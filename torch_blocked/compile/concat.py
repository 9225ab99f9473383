"""Concatenation without a copy: convolutions write into their part of the result.

What is concatenated along the blocks of channels, and the parts of those that are concatenated again, as in DenseNet,
lie in one tensor from the start: each part is written there, and read there too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_blocked import library
from torch_blocked.compile.fusion import CONVOLUTIONS, post_ops
from torch_blocked.compile.hoist import returned_nodes
from torch_blocked.compile.nodes import call, keep_strides
from torch_blocked.compile.sizes import Sizes

aten = torch.ops.aten

# What writes an answer, and what writes it into a part of a tensor.
INTO = {
    library.convolution_op: library.convolution_out_op,
    library.convolution_transpose_op: library.convolution_transpose_out_op,
}


class Part(NamedTuple):
    """A tensor that is to lie in another, from channel block `first` on."""

    node: fx.Node
    first: int

    @property
    def blocks(self) -> int:
        return self.node.meta["val"].shape[1]


def concatenate_in_place(gm: fx.GraphModule) -> None:
    """Rewrites the graph: where a convolution's answer is concatenated, it is written into its part of the whole."""
    keep, gone, sizes = returned_nodes(gm), set(), Sizes(gm.graph)
    for node in reversed(list(gm.graph.nodes)):  # what is concatenated again comes after its parts
        if node in gone or node in keep or not _is_concatenation(node):
            continue
        leaves, inner = _parts(Part(node, 0), keep)
        shape = [sizes.node(n) for n in node.meta["val"].shape]
        if None not in shape and any(_writes_in_place(leaf, leaves, keep) for leaf in leaves):
            _build(gm.graph, shape, leaves, [Part(node, 0), *inner], keep)
            gone.update([node, *(part.node for part in inner)])
    gm.recompile()


def _is_concatenation(node: fx.Node) -> bool:
    """Along the blocks of channels, of float32 tensors."""
    value = node.meta.get("val")
    if node.target is not aten.cat.default or len(node.args) != 2 or node.args[1] != 1 or not isinstance(value, Tensor):
        return False
    sources = [source.meta["val"] for source in node.args[0]]
    return (
        all(isinstance(v.shape[1], int) and all(n for n in v.shape if isinstance(n, int)) for v in sources)
        and all(v.dtype is torch.float32 and v.device.type == "cpu" and v.dim() == value.dim() for v in sources)
    )  # fmt: skip


def _parts(whole: Part, keep: set[fx.Node]) -> tuple[list[Part], list[Part]]:
    """The parts of a concatenation, those of the concatenations in it instead of these; and these."""
    leaves, inner, first = [], [], whole.first
    for source in whole.node.args[0]:
        part = Part(source, first)
        if _is_concatenation(source) and source not in keep and source not in (p.node for p in inner):
            more_leaves, more_inner = _parts(part, keep)
            leaves += more_leaves
            inner += [part, *more_inner]
        else:
            leaves.append(part)
        first += part.blocks
    return leaves, inner


def _writes_in_place(leaf: Part, leaves: list[Part], keep: set[fx.Node]) -> bool:
    """Whether it is a convolution's answer and lies in this place alone."""
    return (
        leaf.node.target in INTO
        and post_ops(leaf.node).residual is None
        and leaf.node not in keep
        and [p.node for p in leaves].count(leaf.node) == 1
    )


def _build(graph: fx.Graph, shape: list, leaves: list[Part], concatenations: list[Part], keep: set[fx.Node]) -> None:
    """The whole tensor, written part by part, and views of it for all that read the parts and the concatenations."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    leaves = sorted(leaves, key=lambda leaf: position[leaf.node])
    in_place = [leaf for leaf in leaves if _writes_in_place(leaf, leaves, keep)]
    first = leaves[0].node
    like = first.all_input_nodes[0] if leaves[0] in in_place else first
    with graph.inserting_before(first if leaves[0] in in_place else _following(graph, first)):
        whole = call(graph, library.new_empty_op, like, shape)
    for leaf in in_place:
        with graph.inserting_before(leaf.node):
            before, post = leaf.node.args[: CONVOLUTIONS[leaf.node.target]], post_ops(leaf.node)
            into, last = INTO[leaf.node.target], (post.scale, post.shift, post.activation, post.alpha)
            call(graph, into, whole, leaf.first, *before, *last)
            _replace(graph, leaf, whole)
    for leaf in leaves:
        if leaf not in in_place:
            after = whole if leaf.node is first or leaf.node.op == "placeholder" else leaf.node
            with graph.inserting_before(_following(graph, after)):
                call(graph, library.copy_out_op, whole, leaf.first, leaf.node)
    for part in concatenations:
        with graph.inserting_before(part.node):
            _replace(graph, part, whole)


def _following(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node after this one, and after all inputs."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _replace(graph: fx.Graph, part: Part, whole: fx.Node) -> None:
    """A view of the whole tensor in the place of a part; a copy for views of that, which its strides may not fit."""
    view = whole
    if part.blocks < whole.meta["val"].shape[1]:
        view = call(graph, aten.slice.Tensor, whole, 1, part.first, part.first + part.blocks)
    for user in list(part.node.users):
        of_strides = view is not whole and getattr(user.target, "is_view", False)
        dense = {"memory_format": torch.contiguous_format}
        user.replace_input_with(part.node, call(graph, aten.clone.default, view, **dense) if of_strides else view)
        if "eager_input_vals" in user.meta:  # the strides that it is to get
            keep_strides(user)
    graph.erase_node(part.node)
