"""What a convolution ran, and why: ours by `torch_blocked.algorithm`, on plain tensors PyTorch's."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torch_blocked.dispatch.convolution import algorithm
from torch_blocked.dispatch.physical import bound
from torch_blocked.dispatch.reasons import blocked

aten = torch.ops.aten

# What `inference_mode` delivers whole: unbatched images, paddings by name and all.
WHOLE = {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
}  # fmt: skip


def chosen(func: OpOverload, args: tuple, kwargs: dict) -> tuple[str, str]:
    """Name and reason of the algorithm that `func`, if it is a convolution, has run; ("", "") for other operators."""
    if func is not aten.convolution.default and func not in WHOLE:
        return "", ""
    try:
        return _of(_decomposed(func, args, kwargs) if func in WHOLE else bound(func, args, kwargs))
    except Exception as error:  # the convolution has run: the rest of the report is worth having
        return "", f"not known: {type(error).__name__}: {error}"


class _Decomposition(TorchDispatchMode):
    """Keeps the arguments of the convolution that it comes to, which does not run."""

    def __torch_dispatch__(
        self, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is aten.convolution.default:
            self.values = bound(func, args, kwargs)
            return self.values["input"]  # in place of the answer: it is batched as that is
        with self:
            answer = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer


def _decomposed(func: OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments of aten.convolution that `func` becomes outside of `inference_mode`."""
    with _Decomposition() as decomposition:
        func(*args, **kwargs)
    return decomposition.values


def _of(values: dict[str, object]) -> tuple[str, str]:
    x, weight, transposed, groups = (values[name] for name in ("input", "weight", "transposed", "groups"))
    window = {name: _expanded(values[name], x.dim() - 2) for name in ("stride", "padding", "dilation")}
    if blocked([x, weight]):
        if transposed:
            return "transposed", "done as an ordinary convolution"
        return tuple(algorithm(x, weight, **window, groups=groups))
    output_padding = _expanded(values["output_padding"], x.dim() - 2)
    backend = torch._C._select_conv_backend(
        x, weight, values["bias"], *window.values(), transposed, output_padding, groups
    )
    return str(backend).rpartition(".")[2].lower(), "PyTorch's, on plain tensors"


def _expanded(value: list[int], spatial: int) -> list[int]:
    """One number stands for all of the `spatial` dims, as in PyTorch."""
    return list(value) * spatial if len(value) == 1 else list(value)
