"""`fuse`: whether what follows a convolution is computed with it, without torch.compile."""

from __future__ import annotations

from torch_blocked import _python

_MODES = ("auto", "never")


class fuse:  # noqa: N801
    """Sets whether convolutions wait for the operators that follow them; also a context manager that restores it.

    "auto" (default): without gradients (`torch.no_grad`, `torch.inference_mode`) a convolution on blocked tensors runs
    when its answer is first looked at. A batch normalization in eval mode, an addition of a tensor in the same format
    and an activation (ReLU, ReLU6, leaky ReLU, sigmoid, SiLU, hardsigmoid, hardswish, GELU), called on it before and in
    this order or the last two exchanged, are computed with it: nothing passes through memory in between. At most two
    wait in a thread, and both run before any other operator of blocked tensors, so that nothing that is written later
    is seen. The answers are those of the operators one by one, to the last bits.

    An answer in between that is still held when the last one is needed, by a variable or by a hook, is computed, and
    what follows it by itself. So is everything where a plain tensor shares the memory of src or weight (`.physical`,
    `view_blocked` or another view), and under a dispatch mode, as `explain` and profilers of operators are. A hook or a
    clock around a module sees its time in the module that needs its answer: measure with "never".

    "never": every operator runs when it is called.

    Args:
        mode: one of the above; ValueError for any other.
    """

    _now = "auto"

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"fuse: mode is one of {', '.join(_MODES)}, got {mode!r}")
        self._before = fuse._now
        self._set(mode)

    @staticmethod
    def _set(mode: str) -> None:
        _python.enable_deferred(mode == "auto")
        fuse._now = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._set(self._before)
