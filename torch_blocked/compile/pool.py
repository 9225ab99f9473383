"""Maxima whose indices no one reads: AOTAutograd takes max_pool2d apart into an operator that delivers both."""

from __future__ import annotations

import operator

from torch import fx

from torch_blocked import library


def drop_unread_indices(gm: fx.GraphModule) -> None:
    """Has such maxima computed alone, in place: less than half of the work, and nothing written beside them."""
    for node in gm.graph.find_nodes(op="call_function", target=library.pool_op):
        *arguments, with_indices = node.args
        if with_indices is not True or any(not _is_value(user) for user in node.users):
            continue
        node.args = (*arguments, False)
        dst, indices = node.meta["val"]
        node.meta["val"] = dst, indices.new_empty(0)
        values, names = node.meta["eager_input_vals"]
        node.meta["eager_input_vals"] = (*values[:-1], False), names
    gm.recompile()


def _is_value(user: fx.Node) -> bool:
    return user.target is operator.getitem and user.args[1] == 0
