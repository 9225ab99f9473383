"""Blocked tensors for PyTorch: convolutional networks at full speed on x86 CPUs.

import torch_blocked as tb

model.to(tb.blocked)      # convolution weights repacked once; plain in, blocked inside
x.to(tb.blocked)          # a BlockedTensor in the fastest format for this CPU
"""

from torch_blocked import dispatch as _dispatch
from torch_blocked import distributed as _distributed  # noqa: F401 - what it registers on import
from torch_blocked import formats as _formats
from torch_blocked.checkpoint import dense_state_dict
from torch_blocked.counting import Counters, count, counters, reset_counters
from torch_blocked.deferred import fuse
from torch_blocked.dispatch.convolution import Algorithm, algorithm
from torch_blocked.dispatch.fallback import FallbackWarning
from torch_blocked.dispatch.fallback import fallback_policy as fallback
from torch_blocked.explain import explain
from torch_blocked.export import export
from torch_blocked.formats import Format, blocked, format
from torch_blocked.library import empty_cache, isa, winograd
from torch_blocked.memory_desc import Blocking, MemoryDesc
from torch_blocked.reorder import view_blocked, view_strided
from torch_blocked.show import show
from torch_blocked.tensor import BlockedTensor, from_physical

_dispatch.load()
globals().update(_formats.CONSTANTS)

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "BlockedTensor",
    "Blocking",
    "Counters",
    "FallbackWarning",
    "Format",
    "MemoryDesc",
    "algorithm",
    "blocked",
    "count",
    "counters",
    "dense_state_dict",
    "empty_cache",
    "explain",
    "export",
    "fallback",
    "format",
    "from_physical",
    "fuse",
    "isa",
    "show",
    "reset_counters",
    "view_blocked",
    "view_strided",
    "winograd",
    *_formats.CONSTANTS,
]
