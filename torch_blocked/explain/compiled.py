"""The same of a compiled model: the operators that its graphs call, timed by PyTorch's profiler.

What Inductor makes itself, pointwise chains and reorders fused into them, has no time of its own: it is one row a
graph, the graph's time less that of the operators it calls. What runs beside the graphs of this backend, in eager mode
or in another backend's, is told by our operators below PyTorch's and by heard.py; the format of the rest is not known.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from torch_blocked.compile.facts import GRAPHS, Facts
from torch_blocked.counting import listen
from torch_blocked.equivalents import convolution_size, pairs
from torch_blocked.explain import heard
from torch_blocked.explain.findings import Finding, find
from torch_blocked.explain.heard import Marks
from torch_blocked.explain.passes import Runner, merged
from torch_blocked.explain.record import Call, Operand, Reorder
from torch_blocked.explain.report import Report, Run
from torch_blocked.formats import format_of
from torch_blocked.memory_desc import Blocking

RUN = "torch_blocked.explain"
REGION, GRAPH = "Torch-Compiled Region: ", "## Call CompiledFxGraph "
EAGER = "(eager)"  # what runs outside of all regions
GENERATED = "Inductor's own"
LOG_LEVEL = "KINETO_LOG_LEVEL"  # of the profiler
# The backend leaves graphs without such a convolution to Inductor as they are.
OTHERWISE = (
    "without a convolution that can be blocked, or compiled by another backend, which does not tell its fallbacks and "
    "fused reorders"
)


def runs_compiled(runner: Runner) -> bool:
    """Whether a run runs what `torch.compile` made, whatever holds it: the profiler has a name for each region."""
    if "torch._dynamo" not in sys.modules:  # not imported here: it takes longer than all of torch_blocked
        return False
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        runner.run()
    return any(event.name.startswith((REGION, GRAPH)) for event in profiled.events())


def as_written() -> contextlib.AbstractContextManager:
    """Runs without what `torch.compile` made: under a dispatch mode Dynamo gives up the code it meets for good."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def explain(runner: Runner) -> Report:
    """The report of a compiled model; the first run may compile it."""
    for _ in range(3):  # a graph may be compiled again for sizes that have changed
        runner.run()
    total, _ = runner.passes(list)
    passes = _profiled(runner)
    calls = merged([p.calls for p in passes])
    graphs = [(module, GRAPHS.get(name)) for module, names in passes[0].graphs.items() for name in names or [""]]
    run = Run("compiled", total, calls, graphs=[f"{module}: {facts or OTHERWISE}" for module, facts in graphs])
    untimed = [f for module, facts in graphs if facts for f in _fallbacks(module, facts, calls, run.whole)]
    return Report(run, sorted(find(calls, run.whole) + untimed, key=lambda finding: -finding.seconds))


class Pass(NamedTuple):
    """One profiled run: its calls, and of each compiled region the names that Inductor gave the graphs it ran."""

    calls: list[Call]
    graphs: dict[str, list[str]]


def _profiled(runner: Runner) -> list[Pass]:
    activities = [ProfilerActivity.CPU]
    with _quiet_profiler(), listen(Marks()), profile(activities=activities, record_shapes=True) as profiled:
        runner.passes(lambda: runner.run(record_function(RUN)), plain=False)
    return [_pass(event) for event in profiled.events() if event.name == RUN]


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Else the profiler writes two lines to stderr."""
    given = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "6")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(LOG_LEVEL, None)


def _pass(run: FunctionEvent) -> Pass:
    calls = _calls(run, EAGER)
    graphs = {call.module: [] for call in calls if call.module != EAGER}
    for module, name in dict.fromkeys(_graphs(run, EAGER)):
        graphs.setdefault(module, []).append(name)
    return Pass(calls, graphs)


def _module(event: FunctionEvent, outer: str) -> str:
    """The compiled region that an event runs in, or `EAGER`; `outer` is that of the event around it.

    A graph outside of all regions, such as that of a backward pass, is a region of its own.
    """
    if event.name.startswith(REGION):
        return f"graph {event.name.removeprefix(REGION)}"
    return f"graph {_graph_name(event)[:12]}" if event.name.startswith(GRAPH) and outer == EAGER else outer


def _graph_name(event: FunctionEvent) -> str:
    return event.name.removeprefix(GRAPH).split()[0]


def _graphs(event: FunctionEvent, outer: str) -> list[tuple[str, str]]:
    """The region and the name of each of Inductor's graphs that ran within an event."""
    module = _module(event, outer)
    own = [(module, _graph_name(event))] if event.name.startswith(GRAPH) else []
    return own + [graph for child in event.cpu_children for graph in _graphs(child, module)]


def _calls(event: FunctionEvent, outer: str, told: bool = False) -> list[Call]:
    """The outermost operators within an event; `told`: of a graph whose facts this backend keeps.

    After a graph break a region runs the next one within itself.
    """
    if _is_operator(event.name):
        return [_call(outer, event, told)]
    module = _module(event, outer)
    told = told or (event.name.startswith(GRAPH) and _graph_name(event) in GRAPHS)
    calls = [call for child in event.cpu_children for call in _calls(child, module, told)]
    return calls if module == outer else _with_rest(event, module, calls)


def _with_rest(event: FunctionEvent, module: str, calls: list[Call]) -> list[Call]:
    """The calls of a region followed by what is left of its time, then those of the regions within it."""
    own, inner = [c for c in calls if c.module == module], [c for c in calls if c.module != module]
    if inner and not own and all(of != module for of, _ in _graphs(event, EAGER)):
        return inner  # it does nothing before the graph breaks
    left = _seconds(event) - sum(call.seconds for call in calls)
    return [*own, Call(module, GENERATED, seconds=max(left, 0.0), why="kernels that it fused, and calls"), *inner]


@functools.cache
def _is_operator(name: str) -> bool:
    """Whether an event of this name is a call of an operator, of any library: others may have a "::", too."""
    return "::" in name and bool(torch._C._jit_get_schemas_for_operator(name))


def _seconds(event: FunctionEvent) -> float:
    return event.time_range.elapsed_us() / 1e6


def _call(module: str, event: FunctionEvent, told: bool) -> Call:
    call = Call(module, event.name.partition("::")[2], seconds=_seconds(event))
    describe = _ours if _is_ours(event) else _plain if told else _eager
    describe(call, event)
    return call


def _is_ours(event: FunctionEvent) -> bool:
    return event.name.startswith("torch_blocked::")


def _ours(call: Call, event: FunctionEvent) -> None:
    DESCRIBE.get(call.operator, _physical)(call, event)


def _eager(call: Call, event: FunctionEvent) -> None:
    """PyTorch's, of tensors of any format: by our operators that it comes to, and by what was heard within it."""
    below = list(_below(event))
    ours = [e for e in below if _is_ours(e)]
    _plain(call, event, "blocked" if ours else "")
    kernels = [e for e in ours if e.name != "torch_blocked::reorder"]
    if len(kernels) == 1:
        call.operator = kernels[0].name.partition("::")[2]
        _ours(call, kernels[0])
    heard.apply(call, below)


def _below(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        yield child
        yield from _below(child)


# Data types as the profiler calls them, which has C++'s names.
DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16,
    "unsigned char": torch.uint8, "signed char": torch.int8, "short int": torch.int16, "int": torch.int32,
    "long int": torch.int64, "bool": torch.bool, "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}  # fmt: skip


def _dtype_name(event: FunctionEvent, argument: int) -> str:
    """Of a tensor among the arguments; "" where it is not known."""
    return str(DTYPES.get(event.input_dtypes[argument], "")).removeprefix("torch.")


def _tag(ndim: int, blocks: Sequence[int]) -> str:
    return format_of(tuple(range(ndim)), tuple(pairs(blocks))).tag


def _activation(channels: int, size: Sequence[int], block: int, dtype: str) -> Operand:
    """A tensor of `channels` in blocks, whose physical tensor has this size."""
    padding, tag = math.ceil(channels / block) * block / channels, _tag(len(size) - 1, (1, block))
    return Operand((size[0], channels, *size[2:-1]), dtype, tag, True, padding, block)


def _plain(call: Call, event: FunctionEvent, kind: str = "plain") -> None:
    tensors = [i for i, size in enumerate(event.input_shapes) if size and isinstance(size[0], int)]
    sizes = [(tuple(event.input_shapes[i]), _dtype_name(event, i)) for i in tensors]
    call.inputs = [Operand(size, dtype, kind, kind == "blocked") for size, dtype in sizes]


def _physical(call: Call, event: FunctionEvent) -> None:
    """Of ours: the sizes are those of physical tensors."""
    _plain(call, event, "blocked")


def _convolution(call: Call, event: FunctionEvent) -> None:
    """Ours, transposed ones among them; what is done as it writes its answer is its algorithm here."""
    transposed, first = "transpose" in call.operator, 2 if call.operator.endswith("_out") else 0  # after dst
    shapes, values, dtype = event.input_shapes[first:], event.concrete_inputs[first:], _dtype_name(event, first)
    src, blocking, weight_size, stride, padding = shapes[0], values[1], values[3], values[6], values[7]
    rest = 9 if transposed else 8  # after output_padding
    dilation, groups, block = values[rest : rest + 3]
    ic, oc = weight_size[1] * groups, weight_size[0]
    if transposed:
        ic, oc = oc, ic
        window = zip(zip(src[2:], weight_size[2:], stride, padding, dilation, strict=False), values[8], strict=True)
        spatial = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + out for (n, k, s, p, d), out in window]
    else:
        spatial = convolution_size(src[2 : len(weight_size)], weight_size[2:], stride, padding, dilation)
    plain = Operand(tuple(src), dtype, _tag(len(src), ()))
    call.inputs = [_activation(ic, src, block, dtype) if blocking else plain]
    call.outputs = [_activation(oc, (src[0], 0, *spatial, block), block, dtype)]
    fused = [name for name, at in (("norm", rest + 3), ("add", rest + 5)) if shapes[at]]
    call.algorithm = "+".join(["conv", *fused]) if fused else ""


def _chain(call: Call, event: FunctionEvent) -> None:
    """`convolution_chain`: its src and its last dst."""
    shapes, values, dtype = event.structured_input_shapes, event.concrete_inputs, _dtype_name(event, 0)
    src, blocking, weights, channels, block = shapes[0], values[1], shapes[2], values[3], values[9]
    windows = ([values[i][at : at + 2] for i in (5, 6, 7)] for at in range(0, 2 * len(weights), 2))
    spatial = src[2:4]
    for weight, window in zip(weights, windows, strict=True):
        spatial = convolution_size(spatial, weight[2:4], *window)
    plain = Operand(tuple(src), dtype, _tag(len(src), ()))
    call.inputs = [_activation(channels[0], src, block, dtype) if blocking else plain]
    call.outputs = [_activation(channels[-1], (src[0], 0, *spatial, block), block, dtype)]
    call.convolutions = len(weights)


def _reorder(call: Call, event: FunctionEvent) -> None:
    """`torch_blocked::reorder`, where Inductor calls it as it is."""
    _, size, src_blocking, _, dst_blocking, *_ = event.concrete_inputs
    tags = [_tag(len(size), blocking) for blocking in (src_blocking, dst_blocking)]
    call.inputs, call.outputs = (
        [Operand(tuple(size), _dtype_name(event, 0), tag, bool(blocking))]
        for tag, blocking in zip(tags, (src_blocking, dst_blocking), strict=True)
    )
    written = math.prod(Blocking(pairs(dst_blocking)).physical_shape(tuple(size)))
    dtype = DTYPES.get(event.input_dtypes[0])
    nbytes = dtype.itemsize * (math.prod(event.input_shapes[0]) + written) if dtype else 0
    call.reorders = [Reorder(*tags, nbytes, call.seconds)]


_CONVOLUTIONS = ("convolution", "convolution_out", "convolution_transpose", "convolution_transpose_out")
DESCRIBE = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution), "convolution_chain": _chain, "reorder": _reorder, "linear": _plain,
}  # fmt: skip


def _fallbacks(module: str, facts: Facts, calls: list[Call], whole: float) -> list[Finding]:
    """Marks the calls of operators that the graph was traced with on plain tensors; answers those without a call."""
    found, own = [], [c for c in calls if c.module == module]
    for name, why in facts.fallbacks.items():
        operator = name.split(".")[1]
        same = [c for c in own if not c.is_blocked and c.operator.strip("_") == operator.strip("_")]  # not ours
        for call in same:
            call.fallback = why
        if not same:
            seconds = sum(c.seconds for c in own if c.operator == GENERATED)
            found.append(Finding("fallback", operator, [module], seconds, *why, at_most=True, share=seconds / whole))
    return found
