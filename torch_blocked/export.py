"""`tb.export`: torch.export's program of a model, its convolutions blocked and fused, to be packaged or saved."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torch_blocked.formats import blocked
from torch_blocked.tensor import BlockedTensor


def export(
    model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any | None = None
) -> torch.export.ExportedProgram:
    """`torch.export.export` of a model for inference, blocked and fused as by `torch.compile(backend="torch_blocked")`.

    The program consists of ATen's and torch_blocked's operators on physical tensors; packed weights and folded
    normalization are its constants. Make a package of it, `torch._inductor.aoti_compile_and_package(program,
    package_path="model.pt2")`, which runs without Python and is the fastest for small images and batches, or save it,
    `torch.export.save`. Who loads either loads torch_blocked's operators first.

    Packages made in this process from then on call these operators through pointers, not by name: Inductor's setting
    `aot_inductor.custom_ops_to_c_shims` names them.

    Args:
        model: plain or after `model.to(tb.blocked)`, in eval mode; left as it is.
        args, kwargs: example inputs, plain tensors among them.
        dynamic_shapes: which sizes may vary, as `torch.export.export` takes it.

    Returns:
        A program that takes what the model takes and gives what it gives, plain where that is blocked.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model is in training mode or writes to its buffers, or an input is blocked.
    """
    from torch._inductor import config
    from torch._inductor.constant_folding import constant_fold

    from torch_blocked.compile.calls import calls
    from torch_blocked.compile.channels_last import convolve_linear_modules
    from torch_blocked.compile.fusion import decompose, decompositions
    from torch_blocked.compile.lower import optimize

    _check(model, args, kwargs)
    config.aot_inductor.custom_ops_to_c_shims = calls(config.aot_inductor.custom_ops_to_c_shims)
    model = copy.deepcopy(model).to(blocked)
    convolve_linear_modules(model)
    model.register_forward_hook(_plain)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch.export's own
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        program = program.run_decompositions(decompositions())
        if written := program.graph_signature.buffers_to_mutate:
            name = next(iter(written.values()))
            raise ValueError(f"tb.export makes constants of buffers and the model writes to {name}: use torch.export")
        gm = program.module(check_guards=False)
        _describe_constants(gm)
        optimize(gm)
        decompose(gm, inference=True)
        constant_fold(gm)
        _drop_unused(gm)
        return torch.export.export(gm, args, kwargs, dynamic_shapes=_of_each_argument(dynamic_shapes, model))


def _check(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"tb.export takes a torch.nn.Module and got {type(model).__name__}: wrap a function in one")
    if model.training:
        raise ValueError("tb.export is for inference and the model is in training mode: call model.eval() first")
    if any(isinstance(x, BlockedTensor) for x in pytree.tree_leaves((args, kwargs))):
        raise ValueError("tb.export takes plain example inputs and one is blocked: give its to_dense()")


def _plain(model: nn.Module, args: tuple, outputs: object) -> object:
    # By an operator: in the first graph that torch.export makes, not all blocked tensors are known as such.
    return pytree.tree_map_only(Tensor, torch.ops.torch_blocked.to_dense, outputs)


def _of_each_argument(dynamic_shapes: Any | None, model: nn.Module) -> Any | None:
    """`dynamic_shapes` for a program's module, where each of the `*args` of the model is an argument with a name."""
    parameters = inspect.signature(model.forward).parameters
    several = {name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL}
    if not dynamic_shapes or not several:
        return dynamic_shapes
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(parameters, dynamic_shapes, strict=False))
    each = {}
    for name, shapes in dynamic_shapes.items():
        each |= {f"{name}_{i}": shape for i, shape in enumerate(shapes)} if name in several else {name: shapes}
    return each


def _describe_constants(gm: fx.GraphModule) -> None:
    """Gives parameters and buffers, too, what every other node has: the fake tensor that they are while tracing."""
    known = [node.meta.get("val") for node in gm.graph.nodes]
    fakes = torch._guards.detect_fake_mode([value for value in known if isinstance(value, Tensor)])
    for node in gm.graph.find_nodes(op="get_attr"):
        module, _, name = node.target.rpartition(".")
        constant = getattr(gm.get_submodule(module), name)
        if isinstance(constant, Tensor):  # not a branch of torch.cond
            node.meta["val"] = fakes.from_tensor(constant, static_shapes=True)


def _drop_unused(gm: fx.GraphModule) -> None:
    """Drops the parameters and buffers that only went into constants."""
    used = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    named = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    for name, _ in named:
        if name not in used:
            module, _, name = name.rpartition(".")
            delattr(gm.get_submodule(module), name)
