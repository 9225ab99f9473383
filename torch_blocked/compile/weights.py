"""Weights that are plain, as linear layers have them, are reordered beside the convolution that takes them, once."""

from __future__ import annotations

import functools

from torch import fx

from torch_blocked import library
from torch_blocked.compile.nodes import insert, keep_strides
from torch_blocked.equivalents import reorder_aten
from torch_blocked.formats import weight_format


def block_plain_weights(gm: fx.GraphModule) -> None:
    """Puts reorders to the format of convolution weights, in place, into a graph of physical tensors."""
    for node in gm.graph.find_nodes(op="call_function", target=library.convolution_op):
        _, _, weight, size, blocking, *_ = node.args
        fmt = None if blocking else weight_format(size, node.args[10])
        if fmt is None:
            continue
        flat = sum(fmt.blocking, ())
        reorder = functools.partial(reorder_aten, size=size, src_blocking=(), dst_order=fmt.order, dst_blocking=flat)
        node.update_arg(2, insert(node, reorder, [weight]))
        node.update_arg(4, list(flat))
        keep_strides(node)
    gm.recompile()
