"""The backend itself: the steps in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from torch_blocked import counting, library
from torch_blocked.compile.calls import calls
from torch_blocked.compile.chain import chain
from torch_blocked.compile.channels_last import convolve_linears
from torch_blocked.compile.concat import concatenate_in_place
from torch_blocked.compile.facts import Facts, keep
from torch_blocked.compile.formats import block_weights
from torch_blocked.compile.fusion import CONVOLUTIONS, decompose, decompositions, fuse
from torch_blocked.compile.guards import guard_by_versions
from torch_blocked.compile.hoist import Hoisted, hoist
from torch_blocked.compile.linear import multiply_few_rows
from torch_blocked.compile.model_input import pass_model
from torch_blocked.compile.permutations import cancel_permutations, drop_copies
from torch_blocked.compile.pool import drop_unread_indices
from torch_blocked.compile.sizes import realize_returned_copies, sizes_from_inputs
from torch_blocked.compile.src_scale import scale_weights
from torch_blocked.compile.weights import block_plain_weights


def backend(gm: fx.GraphModule, example_inputs: Sequence[object], **options: object) -> Callable:
    """The backend of `torch.compile(model, backend="torch_blocked")`.

    Takes plain models and those after `model.to(tb.blocked)`, for inference and for training. A graph without a
    convolution that can be blocked goes to Inductor as it is.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its inputs, parameters among them.
        options: `torch.compile(..., options={...})`: Inductor's settings.

    Raises:
        RuntimeError: no C++ compiler works.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    settings = dict(options.get("options") or {})
    training = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs)
    if not block_weights(gm):
        return compile_fx(gm, example_inputs, config_patches=settings)
    convolve_linears(gm)
    _check_compiler()
    settings = {"cpp_wrapper": True} | settings | _with_this_build(settings) | _with_calls(settings)
    # What this backend makes of a graph is no entry of AOTAutograd's cache; Inductor's own keeps working.
    graph = Facts()
    with functorch_config.patch(enable_autograd_cache=False), counting.listen(graph):
        compiled = compile_fx(
            gm, example_inputs, inner_compile=partial(_compile_graph, graph), config_patches=settings,
            decompositions=None if training else decompositions(),
        )  # fmt: skip
    call = None if training else pass_model(gm, compiled)
    guard_by_versions(call)
    return call or compiled


def _check_compiler() -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        cxx = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else [config.cpp.cxx]
        tried = ", ".join(filter(None, cxx))
        raise RuntimeError(
            f"torch.compile needs a C++ compiler and {tried} is none that works: install g++, or name one in CXX"
        ) from None


def _with_this_build(settings: dict[str, object]) -> dict[str, object]:
    """Makes this build a part of the key of Inductor's cache, whatever becomes of what `library.tag_caches` set."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    class ThisBuild(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return library.fingerprint()

    name = "post_grad_custom_post_pass"
    return {name: (*get_custom_graph_passes(settings.get(name, getattr(config, name))), ThisBuild())}


def _with_calls(settings: dict[str, object]) -> dict[str, object]:
    """Calls the operators through a pointer."""
    from torch._inductor import config

    name = "aot_inductor.custom_ops_to_c_shims"
    return {name: calls(settings.get(name, config.aot_inductor.custom_ops_to_c_shims))}


def _compile_graph(graph: Facts, gm: fx.GraphModule, example_inputs: Sequence[object], **how: object) -> Callable:
    """Steps 3 to 13, on the graph of physical tensors."""
    from torch._inductor.decomposition import select_decomp_table

    how["get_decomp_fn"] = select_decomp_table  # by name, for Inductor's cache: a table of functions is no key
    inference = bool(how.get("is_inference"))
    if how.get("is_backward"):
        graph = graph.backward
    graph.convolutions = sum(node.target in CONVOLUTIONS for node in gm.graph.nodes)
    if inference:
        graph.fused = optimize(gm)
    decompose(gm, inference)
    if not inference:
        realize_returned_copies(gm)
        return keep(graph, _inductor(gm, example_inputs, **how))
    taken = hoist(gm, set(how.get("static_input_idxs", ())))
    if taken is None:
        return BelowAutograd(keep(graph, _inductor(gm, example_inputs, **how)))
    prologue, used, kept, values = taken
    graph.hoisted = len(values)
    static = [len(values) + new for new, old in enumerate(kept) if old in how["static_input_idxs"]]
    how["static_input_idxs"] = [*range(len(values)), *static]
    inputs = [*(v.meta["val"] for v in values), *(example_inputs[i] for i in kept)]
    return Hoisted(prologue, used, kept, BelowAutograd(keep(graph, _inductor(gm, inputs, **how))))


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[object], **how: object) -> Callable:
    """For inference without assertions that tensors have the sizes they were traced with: a microsecond a convolution.

    They are for what Inductor neither generates nor knows; our operators check what they are given themselves.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.lowering import fallbacks, lowerings

    called = [node.target for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    unknown = [op for op in called if op.namespace != "torch_blocked" and (op in fallbacks or op not in lowerings)]
    asserted = config.size_asserts and (bool(unknown) or not how.get("is_inference"))
    with config.patch(size_asserts=asserted):
        return compile_fx_inner(gm, example_inputs, **how)


def optimize(gm: fx.GraphModule) -> int:
    """Steps 3 to 11 for inference, in place; how many operators went into convolutions."""
    sizes_from_inputs(gm)
    block_plain_weights(gm)
    drop_copies(gm)
    cancel_permutations(gm)
    fused = fuse(gm)
    concatenate_in_place(gm)
    multiply_few_rows(gm)
    drop_unread_indices(gm)
    return fused + scale_weights(gm) + chain(gm)


class BelowAutograd:
    """A compiled graph for inference, run below autograd: our operators' autograd is Python and costs 20 µs a call."""

    _boxed_call = True

    def __init__(self, graph: Callable) -> None:
        self.graph = graph

    def __call__(self, inputs: list) -> object:
        with torch._C._AutoDispatchBelowAutograd():
            return self.graph(inputs)
