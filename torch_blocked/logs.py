"""Logging: what costs time without being asked for, as it happens, with the user's line.

The logger is ``torch_blocked``, with a child a topic: ``torch_blocked.reorders`` at DEBUG, ``torch_blocked.fallbacks``
at INFO. ``TORCH_BLOCKED_LOGS=reorders,fallbacks`` in the environment sets levels and a handler to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import FrameType

import torch

LOGGER = logging.getLogger("torch_blocked")
TOPICS = {"reorders": logging.DEBUG, "fallbacks": logging.INFO}
REORDERS, FALLBACKS = (LOGGER.getChild(topic) for topic in TOPICS)

# Code that users did not write: PyTorch's, ours, and what torch.fx makes of theirs.
_FOREIGN = (*(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__)), "<eval_with_key>")


def user_frame() -> tuple[FrameType, int]:
    """The nearest caller outside torch and torch_blocked, the outermost where there is none; and how far away it is.

    The distance is the `stacklevel` for a warning that the caller of this function gives.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_foreign(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_foreign(frame: FrameType) -> bool:
    """Also what has no module: the functions that PyTorch makes by `eval`. `python -c` is a module."""
    return frame.f_code.co_filename.startswith(_FOREIGN) or "__name__" not in frame.f_globals


def user_line() -> str:
    """``file.py:12``, the nearest line outside torch and torch_blocked."""
    frame, _ = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def set_up(topics: str) -> None:
    """Writes these topics, separated by commas, to stderr, and no others; one line for names that are none."""
    names = [name.strip() for name in topics.split(",") if name.strip()]
    if not names:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.propagate = False  # else a handler of the root says it again
    for name in names:
        if name in TOPICS:
            LOGGER.getChild(name).setLevel(TOPICS[name])
        else:
            LOGGER.warning("TORCH_BLOCKED_LOGS: unknown topic %r, known: %s", name, ", ".join(TOPICS))


set_up(os.environ.get("TORCH_BLOCKED_LOGS", ""))
