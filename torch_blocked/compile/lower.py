"""The backend itself: the steps in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from torch_blocked.compile.concat import concatenate_in_place
from torch_blocked.compile.formats import block_weights
from torch_blocked.compile.fusion import decompose, decompositions, fuse
from torch_blocked.compile.hoist import Hoisted, hoist


def backend(gm: fx.GraphModule, example_inputs: Sequence[object], **options: object) -> Callable:
    """The backend of `torch.compile(model, backend="torch_blocked")`.

    Takes plain models and those after `model.to(tb.blocked)`, for inference and for training. A graph without a
    convolution that can be blocked goes to Inductor as it is.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its inputs, parameters among them.
        options: `torch.compile(..., options={...})`: Inductor's settings.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    settings = dict(options.get("options") or {})
    if not block_weights(gm):
        return compile_fx(gm, example_inputs, config_patches=settings)
    settings = {"cpp_wrapper": True} | settings
    training = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs)
    # What this backend makes of a graph is no entry of AOTAutograd's cache; Inductor's own keeps working.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(
            gm, example_inputs, inner_compile=_compile_graph, config_patches=settings,
            decompositions=None if training else decompositions(),
        )  # fmt: skip


def _compile_graph(gm: fx.GraphModule, example_inputs: Sequence[object], **how: object) -> Callable:
    """Step 3 to 6, on the graph of physical tensors."""
    from torch._inductor.compile_fx import compile_fx_inner

    inference = bool(how.get("is_inference"))
    if inference:
        fuse(gm)
        concatenate_in_place(gm)
    decompose(gm, inference)
    if not inference:
        return compile_fx_inner(gm, example_inputs, **how)
    taken = hoist(gm, set(how.get("static_input_idxs", ())))
    if taken is None:
        return compile_fx_inner(gm, example_inputs, **how)
    prologue, used, kept, values = taken
    static = [len(values) + new for new, old in enumerate(kept) if old in how["static_input_idxs"]]
    how["static_input_idxs"] = [*range(len(values)), *static]
    inputs = [*(v.meta["val"] for v in values), *(example_inputs[i] for i in kept)]
    return Hoisted(prologue, used, kept, compile_fx_inner(gm, inputs, **how))
