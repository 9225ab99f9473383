"""Chains: the convolutions around a depthwise one run with it as one operator, `convolution_chain`.

That computes them some rows at a time, so that what lies between stays in the cache, where it is too large for it.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_blocked import library
from torch_blocked.compile.fusion import CONVOLUTIONS, PostOps, post_ops
from torch_blocked.compile.nodes import keep_strides


def chain(gm: fx.GraphModule) -> int:
    """Does so, in place, in a graph for inference; how many convolutions went into another one's operator."""
    joined = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=library.convolution_op)):
        if not _is_depthwise(node):
            continue
        links = [*_before(node), node, *_after(node)]
        if len(links) == 1:
            continue
        with gm.graph.inserting_before(links[-1]):
            whole = gm.graph.call_function(library.convolution_chain_op, _arguments(links))
        whole.meta["val"] = links[-1].meta["val"]
        keep_strides(whole)
        links[-1].replace_all_uses_with(whole)
        for link in reversed(links):
            gm.graph.erase_node(link)
        joined += len(links) - 1
    gm.recompile()
    return joined


def _is_depthwise(node: fx.Node) -> bool:
    size, groups = node.args[3], node.args[9]
    return _can_be_link(node) and groups == size[0] > 1 and size[1] == 1


def _before(node: fx.Node) -> list[fx.Node]:
    """The convolution that `node` alone reads, where it is 1x1 or that of a plain image."""
    src = node.args[0]
    fits = _can_be_link(src) and len(src.users) == 1 and _reads_once(node, src) and post_ops(src).residual is None
    return [src] if fits and (_is_pointwise(src) or not src.args[1]) else []


def _after(node: fx.Node) -> list[fx.Node]:
    """The 1x1 convolution that alone reads `node`."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    fits = user is not None and _can_be_link(user) and _is_pointwise(user) and _reads_once(user, node)
    return [user] if fits and post_ops(node).residual is None else []


def _reads_once(node: fx.Node, src: fx.Node) -> bool:
    return [a for a in node.args if a is src] == [node.args[0]]


def _is_pointwise(node: fx.Node) -> bool:
    size, stride, padding, groups = (node.args[i] for i in (3, 6, 7, 9))
    return list(size[2:]) == [1, 1] == list(stride) and not any(padding) and groups == 1


def _can_be_link(node: fx.Node) -> bool:
    """Whether it is a convolution of two spatial dims, in float32, its weight blocked as `model.to(blocked)` does."""
    if node.target is not library.convolution_op or node.meta["val"].dtype is not torch.float32:
        return False
    size, blocking, block = (node.args[i] for i in (3, 4, 10))
    plain = CONVOLUTIONS[node.target] + len(PostOps._fields) >= len(node.args)  # no src_scale
    return plain and len(size) == 4 and list(blocking or ()) in ([0, block], [1, block, 0, block])


def _arguments(links: list[fx.Node]) -> tuple:
    src, blocking, *_ = links[0].args
    weights, sizes, biases, strides, paddings, dilations, groups = (
        [link.args[i] for link in links] for i in (2, 3, 5, 6, 7, 8, 9)
    )
    after = [post_ops(link) for link in links]
    scales, shifts, names, alphas = ([getattr(ops, field) for ops in after] for field in _EACH)
    flat = [[number for pair in pairs for number in pair] for pairs in (strides, paddings, dilations)]
    channels = [sizes[0][1] * groups[0], *(size[0] for size in sizes)]
    last = after[-1]
    return (
        src, blocking, weights, channels, biases, *flat, groups, links[0].args[10], scales, shifts, ",".join(names),
        alphas, last.residual, last.residual_last,
    )  # fmt: skip


_EACH = ("scale", "shift", "activation", "alpha")
