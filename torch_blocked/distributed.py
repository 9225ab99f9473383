"""DistributedDataParallel over blocked parameters.

It gathers gradients in flat buckets and asks whether each shares memory with its bucket, which only a tensor with bytes
of its own can answer. So a module that it takes over gets plain gradients; the parameters stay blocked.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torch_blocked.reorder import to_plain
from torch_blocked.tensor import BlockedTensor


def make_gradients_plain(module: nn.Module) -> None:
    """From here on the blocked parameters of `module` get plain gradients, those that they have included."""
    for parameter in _blocked_parameters(module):
        if parameter.requires_grad:
            if _plain_gradient not in (parameter._backward_hooks or {}).values():
                parameter.register_hook(_plain_gradient)
            if parameter.grad is not None:
                parameter.grad = to_plain(parameter.grad)


class _Copied:
    """An attribute of DistributedDataParallel: copied or unpickled with it, it takes the copied module over.

    Copies of parameters do not have their hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        make_gradients_plain(self.module)


def _blocked_parameters(module: nn.Module) -> list[BlockedTensor]:
    return [p for p in module.parameters() if isinstance(p, BlockedTensor)]


def _plain_gradient(grad: Tensor) -> Tensor:
    return grad.to_dense() if isinstance(grad, BlockedTensor) else grad  # differentiable, for double backward


def _on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        make_gradients_plain(submodule)
        if _blocked_parameters(submodule):  # pickles of plain models need no torch_blocked
            module._torch_blocked_copied = _Copied(submodule)


register_module_module_registration_hook(_on_registration)
