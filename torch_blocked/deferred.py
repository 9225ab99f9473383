"""Convolutions that wait for their post-ops (csrc/python/deferred.h): `fuse`, and what tensors need to know of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torch_blocked import _python
from torch_blocked.settings import Entry, Setting

_MODES = ("auto", "never")


class fuse(Setting):  # noqa: N801
    """Sets whether convolutions wait for the operators that follow them; also a context manager that restores it.

    "auto" (default): without gradients (`torch.no_grad`, `torch.inference_mode`) a convolution on blocked tensors runs
    when its answer is first looked at. A batch normalization in eval mode, an addition of a tensor in the same format
    and an activation (ReLU, ReLU6, leaky ReLU, sigmoid, SiLU, hardsigmoid, hardswish, GELU), called on it before and in
    this order or the last two exchanged, are computed with it: nothing passes through memory in between. At most two
    wait in a thread, and both run before any other operator of blocked tensors, so that nothing that is written later
    is seen. The answers are those of the operators one by one, within rounding.

    An answer in between that is still held when the last one is needed, by a variable or by a hook, is computed, and
    what follows it by itself. So is everything where a plain tensor shares the memory of src or weight (`.physical`,
    `view_blocked` or another view), and under a dispatch mode, as `explain` and profilers of operators are. A hook or a
    clock around a module sees its time in the module that needs its answer: measure with "never".

    "never": every operator runs when it is called.

    Args:
        mode: one of the above; ValueError for any other.
    """

    _now = "auto"
    _entries: ClassVar[list[Entry]] = [Entry(_now)]
    _prepare = staticmethod(_python.finish_deferred)  # as it was called

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"fuse: mode is one of {', '.join(_MODES)}, got {mode!r}")
        super().__init__(mode)

    @staticmethod
    def _apply(value: str) -> None:
        _python.enable_deferred(value == "auto")
        fuse._now = value


# ---- For tensor.py


class ToCome:
    """`_physical` of a tensor whose convolution waits to be run: it has no attribute of that name itself."""

    def __get__(self, x: Tensor | None, owner: type) -> object:
        if x is None:
            return self
        _python.finish(x)
        try:
            return vars(x)["_physical"]
        except KeyError:
            raise AttributeError("this BlockedTensor has no bytes: it was not made by `BlockedTensor(...)`") from None


def expose(physical: Tensor) -> None:
    """Notes that a plain tensor shares these bytes, so that no convolution waits that reads them."""
    if not torch.compiler.is_dynamo_compiling():
        _python.expose(physical)


def finish_deferred(func: OpOverload, args: tuple, kwargs: dict | None) -> None:
    """Runs the convolutions that wait, before `func` does: its arguments may be what they read."""
    if _python.finish_deferred() and func._schema.is_mutable:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                _python.finish_readers(x)
