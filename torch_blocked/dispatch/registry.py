"""The table of operators: aten overload -> handler.

A handler is called as ``handler(func, *args, **kwargs)`` with the overload it stands for, below autograd, when at least
one argument is a BlockedTensor; it returns what `func` would. An overload without an entry is handled by the rule of a
family that knows its kind; else it is decomposed if it is composite (`inference_mode` delivers those whole) and falls
back to plain tensors otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch._ops import OpOverload

from torch_blocked import _python

Handler = Callable[..., object]

HANDLERS: dict[OpOverload, Handler] = {}
QUICK: dict[OpOverload, _python.Quick] = {}  # asked before __torch_dispatch__: see quick.py
HANDLE_FIRST: set[type] = set()
LEVEL: list[Callable[[], None]] = []  # called before and after every handler: see traced_views.py


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


def register_rule(rule: Callable[[OpOverload], Handler | None]) -> Callable[[OpOverload], Handler | None]:
    """Makes the decorated function one that names the handlers of overloads without an entry; None: not of its kind."""
    _rules.append(rule)
    return rule


def register_view_rule(rule: Callable[[Handler], Handler]) -> Callable[[Handler], Handler]:
    """Makes the decorated function the one that every view operator's handler is passed through."""
    _view_rule.append(rule)
    return rule


def handle_first(cls: type) -> type:
    """Makes the decorated tensor class handle the operators that have both it and BlockedTensor as arguments."""
    HANDLE_FIRST.add(cls)
    return cls


def level() -> None:
    """Brings traced tensors and their copies level."""
    for each in LEVEL:
        each()


def look_up(func: OpOverload) -> Handler:
    """The handler of an overload; what becomes of an unknown one is decided once and remembered."""
    handler = _resolved.get(func)
    if handler is None:
        handler = HANDLERS.get(func) or next(filter(None, (rule(func) for rule in _rules)), None)
        handler = handler or (_decompose if func._can_decompose() else _otherwise[0])
        if func.is_view and handler is not _decompose:  # the views within answer for themselves
            handler = _view_rule[0](handler)
        _resolved[func] = handler
    return handler


def _decompose(func: OpOverload, *args: object, **kwargs: object) -> object:
    with lazy_bits():
        # Not `func.decompose`: for some operators that prefers a decomposition for tracing, which rounds otherwise.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            return func._op_dk(_COMPOSITE, *args, **kwargs)
        return func.decompose(*args, **kwargs)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def lazy_bits() -> AbstractContextManager:
    """Plain tensors that are conjugate or negative by a bit are heeded inside, as handlers are called without that."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(torch._C.DispatchKey.Conjugate).remove(torch._C.DispatchKey.Negative)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


_resolved: dict[OpOverload, Handler] = {}
_rules: list[Callable[[OpOverload], Handler | None]] = []
_otherwise: list[Handler] = []
_view_rule: list[Callable[[Handler], Handler]] = []
