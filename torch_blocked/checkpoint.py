"""Checkpoints that need torch_blocked no more."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from torch_blocked.reorder import to_plain


def dense_state_dict(source: torch.nn.Module | torch.optim.Optimizer | Mapping) -> dict:
    """The state dict of a model or optimizer with plain, contiguous tensors only: it loads without torch_blocked.

    Same keys, shapes and dtypes, in the same order, in dicts, lists, tuples and deques of the same types. What was
    blocked or otherwise strided is copied; the rest shares memory, as in `state_dict()`. A tensor that occurs twice
    (tied weights) is one tensor in the answer, too.

    Args: a `torch.nn.Module`, whatever else has a `state_dict()`, or such a dict. Raises TypeError for anything else.
    """
    if isinstance(source, torch.nn.Module):
        state = source.state_dict(keep_vars=True)  # the parameters themselves: tied ones are one object
    elif isinstance(source, Mapping):
        state = source
    elif callable(getattr(source, "state_dict", None)):
        state = source.state_dict()
    else:
        raise TypeError(
            f"dense_state_dict takes a module, an optimizer or a state dict, got {type(source).__name__}; "
            "a single tensor has .to_dense()"
        )
    return _dense(state, {})


def _dense(x: object, done: dict[int, tuple[Tensor, Tensor]]) -> object:
    """`x` with each tensor in it plain; `done` holds the tensors seen and their answers, by their identity."""
    if isinstance(x, Tensor):
        if id(x) not in done:
            done[id(x)] = x, to_plain(x.detach()).contiguous() if x.layout == torch.strided else x.detach()
        return done[id(x)][1]
    if isinstance(x, Mapping):
        # A copy keeps what the dict has beside its items, such as the versions of modules for load_state_dict.
        state = copy.copy(x) if isinstance(x, MutableMapping) else dict(x)
        for key, value in x.items():
            state[key] = _dense(value, done)
        return state
    if isinstance(x, (list, deque)):
        state = copy.copy(x)  # keeps a deque's bound and what a subclass has beside its items
        for i, value in enumerate(x):
            state[i] = _dense(value, done)
        return state
    if isinstance(x, tuple):
        values = [_dense(value, done) for value in x]
        if all(value is before for value, before in zip(values, x, strict=True)):
            return x  # such as a torch.Size: not every subclass is made of its items
        return getattr(type(x), "_make", type(x))(values)
    return x
