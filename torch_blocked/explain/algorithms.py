"""What a convolution ran, and why: ours by `torch_blocked.algorithm`, on plain tensors PyTorch's."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from torch_blocked.dispatch.convolution import algorithm
from torch_blocked.dispatch.physical import bound
from torch_blocked.dispatch.reasons import blocked

aten = torch.ops.aten

# What `inference_mode` delivers has no argument `transposed`.
FORWARD = {aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
WINDOW = {"stride": 1, "padding": 0, "dilation": 1}


def chosen(func: OpOverload, args: tuple, kwargs: dict) -> tuple[str, str]:
    """Name and reason of the algorithm that `func`, if it is a convolution, has run; ("", "") for other operators."""
    if func not in FORWARD | TRANSPOSED:
        return "", ""
    values = bound(func, args, kwargs)
    x, weight, groups = values["input"], values["weight"], values.get("groups", 1)
    if not blocked([x, weight]):
        return _of_pytorch(func, values)
    if func in TRANSPOSED or values.get("transposed"):
        return "transposed", "done as an ordinary convolution"
    window = {name: _expanded(values.get(name, default), x.dim() - 2) for name, default in WINDOW.items()}
    return tuple(algorithm(x, weight, **window, groups=groups))


def _of_pytorch(func: OpOverload, values: dict[str, object]) -> tuple[str, str]:
    spatial = values["input"].dim() - 2
    window = [_expanded(values.get(name, default), spatial) for name, default in WINDOW.items()]
    transposed = values.get("transposed", func in TRANSPOSED)
    output_padding = _expanded(values.get("output_padding", 0), spatial)
    backend = torch._C._select_conv_backend(
        values["input"], values["weight"], values.get("bias"), *window, transposed, output_padding,
        values.get("groups", 1),
    )  # fmt: skip
    return str(backend).rpartition(".")[2].lower(), "PyTorch's, on plain tensors"


def _expanded(value: int | list[int], spatial: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * spatial if len(value) == 1 else value
