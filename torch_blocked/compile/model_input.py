"""One input in place of all parameters: the model that holds them.

Before each call Dynamo's bytecode reads every parameter out of the model, AOTAutograd passes them on, and the compiled
graph finds that none has changed: of MobileNetV2 260 tensors, a twentieth of its time. The guard on the model's modules
(guards.py) has just looked at them all. So the bytecode is made to pass the model, whose parameters are read after a
change only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._guards import Source, TracingContext
from torch.autograd import profiler

from torch_blocked._python import Contents, Entry
from torch_blocked.compile.entry import entry_of
from torch_blocked.compile.guards import can_guard
from torch_blocked.compile.hoist import Hoisted, Run, recorded
from torch_blocked.tensor import BlockedTensor

if TYPE_CHECKING:
    from torch._dynamo.codegen import PyCodegen

    from torch_blocked.compile.guards import Seen

# The modules that Dynamo's call of a backend goes through.
_CALLERS = {"torch", "torch._dynamo.repro.after_dynamo"}


def pass_model(gm: fx.GraphModule, compiled: Callable) -> ModelCall | None:
    """Has the bytecode that Dynamo will write for `gm` pass the model in place of its parameters.

    Called by a backend. None, and nothing done, where the parameters come from no single model, or where others than
    Dynamo may see the arguments: another backend that calls this one, a debugger.
    """
    context = TracingContext.try_get()
    fake_mode = context and context.fake_mode
    if fake_mode is None or fake_mode.shape_env.specializations or not _called_by_dynamo(gm) or not can_guard():
        return None
    arguments = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    roots = [_root(argument.source) if argument is not None and argument.is_tensor else None for argument in arguments]
    models = {root for root in roots if root is not None}
    held = [i for i, root in enumerate(roots) if root is not None]
    if len(models) != 1 or len(held) < 2:
        return None
    (root,) = models
    sources = [arguments[i].source for i in held]
    for i in held:
        arguments[i].source = root if i == held[0] else _Nothing()
    return ModelCall(compiled, root, held, sources, _is_plain(context))


def _called_by_dynamo(gm: fx.GraphModule) -> bool:
    """Whether what called the backend is Dynamo, which calls what it gets with what its bytecode passes."""
    from torch._dynamo import config

    if config.verify_correctness or config.repro_after:
        return False
    frame = sys._getframe(3)  # of this function, `pass_model` and the backend
    while frame is not None and frame.f_globals.get("__name__") in _CALLERS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_call_user_compiler" and frame.f_locals.get("gm") is gm


def _root(source: Source) -> Source | None:
    """Where the model comes from that `source` leads into, through its modules; None: it does not."""
    from torch._dynamo.source import AttrSource, DictGetItemSource, GlobalSource, LocalSource, NNModuleSource

    inside = False
    while isinstance(source, (AttrSource, DictGetItemSource, NNModuleSource)):
        inside = inside or isinstance(source, NNModuleSource)
        source = source.base
    return source if inside and isinstance(source, (GlobalSource, LocalSource)) else None


def _is_plain(context: TracingContext) -> bool:
    """Whether the graph's answers are all there is: it writes to none of its inputs, and AOTAutograd sets nothing."""
    metadata = context.fw_metadata
    if metadata is None or torch._C._is_any_autocast_enabled():
        return False
    return not any(i.mutates_data or i.mutates_metadata for i in metadata.input_info)


class _Nothing(Source):
    """None, in place of a parameter."""

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.append_output(codegen.create_load_const(None))

    def reconstruct_pycode(self, codegen: PyCodegen) -> str:
        return "None"

    @property
    def _name_template(self) -> str:
        return "None"


class Known(NamedTuple):
    """A model whose parameters have been read.

    Attributes:
        parameters: what was in them.
        graph, number: the compiled graph, and what it has computed from the parameters.
        others: its other inputs: positions among the arguments, or parameters that it takes as they are.
        entry: the graph's function in C++, with what it has computed from the parameters, if it has one.
    """

    parameters: Contents
    graph: Hoisted
    number: int
    others: list[int | weakref.ref]
    entry: Entry | None

    def __call__(self, values: tuple, args: Sequence) -> Sequence:
        """The graph's answers; `values`: what it has computed from the parameters."""
        others = [args[other] if type(other) is int else other() for other in self.others]
        if self.entry is None or profiler._is_profiler_enabled:  # a profiler sees the graph by its name
            return self.graph.compiled([*values, *others])
        return self.entry(others)


class ModelCall:
    """A compiled graph that takes the model in place of its parameters.

    Args:
        compiled: takes them all.
        root: where the model comes from.
        held: the positions of its parameters among the arguments of `compiled`.
        sources: where they are in the model.
        plain: the graph's answers are all that a call changes, as far as is known before one.

    Attributes:
        unchanged: the guard on the model, where it finds every change of what `sources` name.
    """

    def __init__(
        self, compiled: Callable, root: Source, held: Sequence[int], sources: Sequence[Source], plain: bool
    ) -> None:
        self.root, self.sources, self.unchanged = root, sources, None
        self._compiled, self._held, self._first, self._plain = compiled, set(held), held[0], plain
        statistics = [(at, counter) for at, source in zip(held, sources, strict=True) if (counter := _counter(source))]
        self._statistics = [at for at, _ in statistics]
        self._parameters = _reader(root, [source.name for source in sources])
        self._counters = _reader(root, [counter for _, counter in statistics])

    def __call__(self, *args: object) -> object:
        model = args[self._first]
        seen = self.unchanged and self.unchanged.seen(model)
        if seen and seen.checked:
            known, seen.checked = seen.checked, None
            values = known.graph.values(known.number)
            if values is not None:
                return known(values, args)
        return self._read(model, seen, args)

    def _read(self, model: object, seen: Seen | None, args: Sequence) -> object:
        """The call with all parameters; notes what was computed from them."""
        if isinstance(model, Tensor):  # called with them
            return self._compiled(*args)
        parameters, rest = iter(self._parameters(model)), enumerate(args)
        given = [next(parameters) if at in self._held else argument for at, argument in rest]
        counted = zip(self._statistics, self._counters(model), strict=True)
        counters = {id(given[at]): counter for at, counter in counted if counter is not None}
        if seen is not None:
            seen.known = None  # of the parameters as they were: it keeps what was computed from them
        # Of a model that changes from call to call nothing is known for long.
        noted = seen is not None and seen.asked <= 1 and self._plain
        physical = [_physical(given[at]) for at in self._held] if noted else []
        # Before the call: what another thread writes to them meanwhile is then seen at the next one.
        contents = Contents([*physical, *counters.values()]) if noted else None
        with recorded(counters) as runs:  # for the counters alone, where nothing is noted
            answers = self._compiled(*given)
        if noted:
            seen.known = self._known(contents, {id(p) for p in physical}, given, runs, answers)
            self._plain = seen.known is not None
        return answers

    def _known(
        self, contents: Contents, physical: set[int], given: Sequence, runs: Sequence[Run], answers: Sequence
    ) -> Known | None:
        """None where more was to be done than to run one graph on these parameters and arguments."""
        if len(runs) != 1 or not _same(answers, runs[0].answers):
            return None
        graph, number, inputs, _ = runs[0]
        if not physical.issuperset(id(inputs[i]) for i in graph.static):
            return None
        as_given = _same(inputs, given)  # else blocked parameters came apart
        at = {id(argument): i for i, argument in enumerate(given) if isinstance(argument, Tensor)}
        others = []
        for i in graph.kept:
            place = i if as_given else at.get(id(inputs[i]))
            other = weakref.ref(inputs[i]) if id(inputs[i]) in physical else place
            if other is None:
                return None
            others.append(other)
        values, kept = graph.values(number), [inputs[i] for i in graph.kept]
        entry = entry_of(graph.compiled.graph, values, kept, answers) if values is not None else None
        return Known(contents, graph, number, others, entry)


def _reader(root: Source, names: Sequence[str]) -> Callable[[nn.Module], list]:
    """Gets what is so named from the model that comes from `root`."""
    return eval(f"lambda model: [{', '.join(name.replace(root.name, 'model', 1) for name in names)}]")


def _counter(source: Source) -> str | None:
    """Of running statistics, what counts the batches that moved them: PyTorch counts no writes to themselves."""
    from torch._dynamo.source import DictGetItemSource

    if isinstance(source, DictGetItemSource) and source.index in ("running_mean", "running_var"):
        return f"{source.base.name}.get('num_batches_tracked')"
    return None


def _physical(parameter: Tensor) -> Tensor:
    return parameter._physical if isinstance(parameter, BlockedTensor) else parameter


def _same(these: Sequence, those: Sequence) -> bool:
    """Whether both hold the same objects."""
    return len(these) == len(those) and all(a is b for a, b in zip(these, those, strict=True))
