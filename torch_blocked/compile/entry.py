"""A compiled graph's function in C++, called with tensors.

Inductor's wrapper makes a list of capsules of all inputs, which its module in C++ takes apart again: for MobileNetV2
of 165, which is 3 % of its time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from torch import Tensor

from torch_blocked._python import Entry

_NAME = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"  # inductor_entry_impl(AtenTensorOpaque**, AtenTensorOpaque**)


def entry_of(compiled: Callable, values: tuple, others: Sequence, answers: Sequence) -> Entry | None:
    """The function behind a graph that Inductor compiled; None where more is to be done, or it is none in C++.

    Args:
        compiled: the graph.
        values: the tensors that are its first inputs at every call.
        others, answers: its other inputs, and what it returned.
    """
    call = getattr(compiled, "current_callable", None)
    names = getattr(call, "__globals__", {})
    file = getattr(getattr(names.get("inductor_entry"), "__self__", None), "__file__", None)
    whole = names.get("call") is call and file is not None
    # Inductor passes what else the graph has, such as a table of numbers in the code of the model, after its inputs.
    if not whole or "constants_tensor" in call.__code__.co_varnames:
        return None
    if not all(isinstance(x, Tensor) for x in others) or not all(type(x) is Tensor for x in answers):
        return None
    try:
        function = getattr(ctypes.CDLL(file), _NAME)
    except (OSError, AttributeError):  # the file is there no more, or names it otherwise
        return None
    return Entry(ctypes.cast(function, ctypes.c_void_p).value, values, len(others), len(answers))
