"""The table of operators: aten overload -> handler.

A handler is called as ``handler(func, *args, **kwargs)`` with the overload it stands for, below autograd, when at least
one argument is a BlockedTensor; it returns what `func` would. An overload without an entry is decomposed if it is
composite (`inference_mode` delivers those whole) and falls back to plain tensors otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from torch_blocked import library

Handler = Callable[..., object]

HANDLERS: dict[OpOverload, Handler] = {}


def register(*overloads: OpOverload) -> Callable[[Handler], Handler]:
    """Makes the decorated function the handler of these overloads. ValueError if one has a handler."""

    def add(handler: Handler) -> Handler:
        for overload in overloads:
            if overload in HANDLERS:
                raise ValueError(f"{overload} has the handler {HANDLERS[overload].__name__} already")
            HANDLERS[overload] = handler
        return handler

    return add


def register_otherwise(handler: Handler) -> Handler:
    """Makes the decorated function the handler of every overload that has none and is not composite."""
    _otherwise.append(handler)
    return handler


def look_up(func: OpOverload) -> Handler:
    """The handler of an overload; what becomes of an unknown one is decided once and remembered."""
    handler = _resolved.get(func)
    if handler is None:
        handler = HANDLERS.get(func) or (_decompose if func._can_decompose() else _otherwise[0])
        if func.is_view:
            handler = _as_views(handler)
        _resolved[func] = handler
    return handler


def _decompose(func: OpOverload, *args: object, **kwargs: object) -> object:
    return func.decompose(*args, **kwargs)


def _as_views(handler: Handler) -> Handler:
    """Of a view operator: the physical tensors of its results count their versions with that of the argument.

    In `inference_mode` a view of an ordinary tensor is an ordinary tensor; autograd cannot track any other.
    """

    @functools.wraps(handler)
    def as_views(func: OpOverload, x: object, *args: object, **kwargs: object) -> object:
        if torch.is_inference_mode_enabled() and isinstance(x, torch.Tensor) and not x.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return as_views(func, x, *args, **kwargs)
        result = handler(func, x, *args, **kwargs)
        base = getattr(x, "_physical", None)
        if base is not None:
            for view in result if isinstance(result, (list, tuple)) else (result,):
                physical = getattr(view, "_physical", None)
                if physical is not None and physical is not base:
                    library.share_version(physical._cdata, base._cdata)
                    library.share_version(view._cdata, base._cdata)
        return result

    return as_views


_resolved: dict[OpOverload, Handler] = {}
_otherwise: list[Handler] = []
