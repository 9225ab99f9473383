"""Why an operator falls back, and what would avoid it, for people."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.dispatch.fallback import fallback
from torch_blocked.dispatch.registry import look_up
from torch_blocked.tensor import BlockedTensor


class Reason(NamedTuple):
    """Why an operator ran on plain tensors, and what would avoid it."""

    why: str
    remedy: str


# What the handlers of a family, a file beside this one, do not take.
FAMILIES = {
    "along": Reason("it runs along the blocked axis, channels", "run it along another axis, or after pooling"),
    "convolution": Reason("the kernels take 1-D to 3-D tensors of one dtype", "give input and weight that form"),
    "indexing": Reason("it takes single elements of the blocked axis, channels", "index another axis, or whole blocks"),
    "normalization": Reason(
        "the kernels take, in groups, whole blocks of channels", "make the groups multiples of the block"
    ),
    "pooling": Reason("the kernels take channels in one block", "use such a format"),
    "pooling_backward": Reason("the kernels take channels in one block", "use such a format"),
    "reduction": Reason("it takes no such dtype or dims", "reduce floats, over dims that are not empty"),
    "shape": Reason("no blocked format holds the answer", "do it where the tensor is plain anyway"),
    "shuffle": Reason("it takes images whose channels fit the factor", "use such a factor"),
}
UNKNOWN = Reason(
    "it has no blocked implementation",
    "replace it by one that has (python -m torch_blocked operators), or move it to where tensors are plain",
)
OTHERWISE = Reason("its blocked implementation does not take these arguments", "call it on x.to_dense()")
DTYPES = {"convolution", "normalization", "pooling", "pooling_backward"}  # families of `KERNEL_DTYPES` alone


def reason(func: OpOverload, args: tuple) -> Reason:
    """Why `func` of these arguments has no blocked implementation; `args` may hold lists of tensors."""
    handler = look_up(func)
    if getattr(handler, "__wrapped__", handler) is fallback:
        return UNKNOWN
    family = handler.__module__.rpartition(".")[2]
    others = sorted({str(x.dtype) for x in tensors(args) if x.dtype not in library.KERNEL_DTYPES})
    if family in DTYPES and others:
        return Reason(
            f"the kernels take float32, bfloat16 and float16, it got {', '.join(others)}", "x.float() and model.float()"
        )
    if family in ("along", "indexing") and not any(x.blocking.block(1) > 1 for x in blocked(args)):
        return OTHERWISE
    return FAMILIES.get(family, OTHERWISE)


def tensors(values: object) -> list[Tensor]:
    """The tensors among nested lists, tuples and dicts of arguments, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [x for value in values for x in tensors(value)]


def blocked(values: object) -> list[BlockedTensor]:
    """The blocked ones among `tensors`."""
    return [x for x in tensors(values) if isinstance(x, BlockedTensor)]
