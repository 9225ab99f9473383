"""The fallback law: an operator without a blocked implementation runs on plain tensors, and says so.

Same answer, counted, and by the user's choice silent, a warning once per operator (default) or an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import counting, logs, reorder
from torch_blocked.dispatch.registry import lazy_bits, register_otherwise
from torch_blocked.settings import Entry, Setting
from torch_blocked.tensor import BlockedTensor

POLICIES = ("allow", "warn", "error")


class FallbackWarning(UserWarning):
    """An operator ran on plain tensors: right, but with reorders around it."""


class _State:
    """The policy, and what was warned about under it, where. One for all threads: backward runs in its own."""

    policy = "warn"
    warned: set[tuple[str, str, int]] = set()  # noqa: RUF012


class fallback_policy(Setting):  # noqa: N801
    """Sets what happens when an operator has no blocked implementation; also a context manager that restores it.

    "allow": it runs on plain tensors. "warn" (default): it does, with one `FallbackWarning` an operator and line of
    the user's. "error": it raises RuntimeError. ValueError for any other word.
    """

    _entries: ClassVar[list[Entry]] = [Entry((_State.policy, _State.warned))]

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"fallback policy is one of {', '.join(POLICIES)}, got {policy!r}")
        super().__init__((policy, set()))

    @staticmethod
    def _apply(value: tuple[str, set]) -> None:
        _State.policy, _State.warned = value


@register_otherwise
def fallback(func: OpOverload, *args: object, **kwargs: object) -> object:
    """Runs `func` on plain copies of its blocked arguments; what it writes to goes back into them.

    Raises: RuntimeError for operators such as `as_strided_` that would change a blocked tensor's own size.
    """
    if torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.resize_.default:
        raise RuntimeError(f"{func} cannot change the shape of a blocked tensor in place: call it on x.to_dense()")
    announce(func, args)
    return run_plain(func, args, kwargs)


def announce(func: OpOverload, args: tuple) -> None:
    """Counts and logs a fallback and, as the policy says, warns or raises."""
    name = str(func)
    counting.record_fallback(name)
    counting.tell_fallback(func, args)
    if _State.policy == "error":
        raise RuntimeError(
            f"{name} has no blocked implementation for these arguments and fallbacks are errors: "
            "call .to_dense() on them first, or torch_blocked.fallback('allow')"
        )
    if _State.policy == "warn":
        frame, level = logs.user_frame()
        site = name, frame.f_code.co_filename, frame.f_lineno
        if site not in _State.warned:
            _State.warned.add(site)
            warnings.warn(
                f"{name} has no blocked implementation for these arguments: it runs on plain tensors, reorders around "
                "it (said once a line; torch_blocked.fallback('allow') silences, 'error' forbids)",
                FallbackWarning,
                stacklevel=level,
            )


def run_plain(
    func: OpOverload,
    args: tuple,
    kwargs: dict,
    written: list[object] | None = None,
    wait: Callable[[object], None] | None = None,
) -> object:
    """`func` on plain tensors; blocked arguments that it writes to are written, and returned for their copies.

    `written`: the arguments that it writes to, where its schema does not say it. `wait`: is called with the result
    before, of operators that write later.
    """
    plain: dict[int, Tensor] = {}
    blocked: dict[int, BlockedTensor] = {}

    def to_plain(x: object) -> object:
        if isinstance(x, BlockedTensor):
            if id(x) not in plain:
                plain[id(x)] = dense = reorder.to_plain(x)
                blocked[id(dense)] = x
            return plain[id(x)]
        return x

    with lazy_bits():
        result = func(*map_nested(to_plain, args), **{k: map_nested(to_plain, v) for k, v in kwargs.items()})
    if wait is not None:
        wait(result)
    given = written_arguments(func, args, kwargs) if written is None else written
    written = [x for x in given if isinstance(x, BlockedTensor)]
    for x in written:
        _write_back(func, x, plain[id(x)])

    def to_blocked(out: object) -> object:
        x = blocked.get(id(out))
        return x if x is not None and any(x is w for w in written) else out

    return map_nested(to_blocked, result)


def map_nested(function: Callable[[object], object], x: object) -> object:
    """`function` of `x`, or of each element of a list or tuple, however nested.

    A closure that called itself would do, but it is a reference cycle: the tensors that it knows would live until the
    garbage collector runs.
    """
    if type(x) in (list, tuple):
        return type(x)([map_nested(function, v) for v in x])
    return function(x)


def written_arguments(func: OpOverload, args: tuple, kwargs: dict) -> list[object]:
    """The arguments that the schema says `func` writes to, those in lists one by one."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _write_back(func: OpOverload, x: BlockedTensor, plain: Tensor) -> None:
    if plain.shape != x.shape:
        raise RuntimeError(
            f"{func} would resize a blocked tensor from {tuple(x.shape)} to {tuple(plain.shape)}: "
            "call it on x.to_dense(), a plain tensor"
        )
    assign(x, plain)


def assign(x: BlockedTensor, value: Tensor) -> None:
    """Writes a tensor of the same size into the bytes of `x`, below autograd."""
    x._physical.copy_(reorder.to_blocking(value, x._blocking))
    bump_version(x)


def bump_version(x: BlockedTensor) -> None:
    """Marks the bytes as changed: in-place kernels below the dispatcher do not, and caches of packed weights ask."""
    physical = x._physical
    if not physical.is_inference():
        torch.autograd.graph.increment_version(physical)
