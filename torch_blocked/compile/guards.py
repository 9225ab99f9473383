"""Dynamo's guards on a model's modules, answered by the versions of their dicts.

Before each call of compiled code Dynamo walks through the model and looks at whatever the trace has read there: for
MobileNetV2 2,500 guards on objects that the convolutions have put out of the caches, a tenth of its time. CPython
counts the changes of each dict. As long as those of a model's modules have had none, nor the tensors in them another
size, dtype or `requires_grad`, the guards on what they hold hold as they did; after a change Dynamo's own decide, and
from there on the new versions count.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._guards import Guard, GuardsSet, Source, TracingContext
from torch.utils._ordered_set import OrderedSet

from torch_blocked._python import ModuleVersions
from torch_blocked.tensor import BlockedTensor

if TYPE_CHECKING:
    from torch._C._dynamo.guards import RootGuardManager
    from torch._dynamo.guards import GuardBuilder

    from torch_blocked.compile.model_input import Known, ModelCall

# Of guards on what a dict holds. Others, such as those on the identity of a class's functions, stay Dynamo's.
_KINDS = {
    "CONSTANT_MATCH", "DICT_KEYS_MATCH", "EQUALS_MATCH", "NOT_PRESENT_IN_GENERIC_DICT", "SEQUENCE_LENGTH",
    "TENSOR_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH", "TYPE_MATCH",
}  # fmt: skip
_DICTS = ("_parameters", "_buffers", "_modules")
_CONSTANTS = {bool, bytes, complex, float, int, str, type(None), torch.device, torch.dtype, torch.Size}


def guard_by_versions(call: ModelCall | None = None) -> None:
    """Puts one guard for each model in place of those on its modules; called while Dynamo compiles.

    `call`, if given, is told which is that of its model.
    Does nothing unless `can_guard`. A user's `guard_filter_fn` is asked about a model, not about what is in it.
    """
    from torch._dynamo.source import GlobalSource, LocalSource, is_from_unspecialized_nn_module_source

    context = TracingContext.try_get()
    if context is None or not can_guard():
        return
    rest, taken = [], defaultdict(list)
    for guard in context.guards_context.dynamo_guards:
        source = guard.originating_source
        root = source.get_base() if is_from_unspecialized_nn_module_source(source) else None
        inside = isinstance(root, (LocalSource, GlobalSource)) and guard.create_fn_name() in _KINDS
        (taken[root] if inside else rest).append(guard)
    calls = {call.root: call} if call else {}
    ours = [Guard(root, partial(modules_unchanged, guards, calls.get(root))) for root, guards in taken.items()]
    context.guards_context.dynamo_guards = GuardsSet(OrderedSet([*rest, *ours]))


def can_guard() -> bool:
    """Whether CPython counts the changes of dicts, up to 3.11, and the guards are not to be written to a file."""
    from torch._dynamo import config

    return sys.version_info < (3, 12) and not config.caching_precompile


def modules_unchanged(guards: Sequence[Guard], call: ModelCall | None, builder: GuardBuilder, guard: Guard) -> None:
    """Installs one guard in place of those of `guards` that hold until a dict changes, and the others as they are."""
    model = _Model(builder, guard.originating_source)
    kept = defaultdict(list)
    for inner in guards:
        ours = model.keeps(inner.originating_source) and _is_of_value(builder, inner)
        kept[ours].append(inner)
    for other in kept[False]:
        other.create(builder)
    parameters_kept = call is not None and all([model.keeps(source) for source in call.sources])
    if kept[True]:
        checks, reasons = builder.check_fn_manager, [f"the modules of {guard.name} are as they were"]
        _, own = checks.build_guards(sorted(kept[True]), OrderedSet(), builder.f_code, checks.output_graph, False)
        unchanged = Unchanged(own.root, guard.originating_source, model.modules(), reasons)
        builder.get_guard_manager(guard).add_lambda_guard(unchanged, reasons, guard.user_stack)
        if parameters_kept:
            call.unchanged = unchanged


def _is_of_value(builder: GuardBuilder, guard: Guard) -> bool:
    """Whether it looks at nothing but what is there, and at no more of that than `ModuleVersions` does."""
    from torch._dynamo import config
    from torch._dynamo.source import is_from_unspecialized_builtin_nn_module_source

    source, kind = guard.originating_source, guard.create_fn_name()
    if kind == "TENSOR_SUBCLASS_METADATA_MATCH":  # others' may depend on anything
        return type(builder.get(source)) is BlockedTensor
    if kind != "TENSOR_MATCH":
        return True
    # Dynamo also checks that no argument is that tensor, but for parameters and PyTorch's modules.
    rare = type(builder.get(source)) is nn.Parameter or is_from_unspecialized_builtin_nn_module_source(source)
    return rare and config.skip_no_tensor_aliasing_guards_on_parameters


class _Model:
    """What Dynamo read of a model: its modules, and what stays as it is as long as their dicts do."""

    def __init__(self, builder: GuardBuilder, root: Source) -> None:
        self._builder, self._root = builder, root
        self._kept: dict[Source, bool] = {}

    def keeps(self, source: Source) -> bool:
        """Whether what `source` names changes only after a dict of the modules that lead to it."""
        if source not in self._kept:
            self._kept[source] = self._keeps(source)
        return self._kept[source]

    def modules(self) -> Callable[[dict], list[nn.Module]]:
        """Gets the modules from local variables."""
        names = [s.name for s, kept in self._kept.items() if kept and isinstance(self._builder.get(s), nn.Module)]
        return eval(f"lambda L: [{', '.join(dict.fromkeys(names))}]", {"G": self._builder.scope["G"]})

    def _keeps(self, source: Source) -> bool:
        from torch._dynamo.source import AttrSource, DictGetItemSource, NNModuleSource, SubclassAttrListSource

        if source == self._root:
            return isinstance(self._builder.get(source), nn.Module)
        if not self.keeps(source.base):
            return False
        if isinstance(source, NNModuleSource):  # the same module
            return True
        base, value = self._builder.get(source.base), self._builder.get(source)
        if type(base) is BlockedTensor and isinstance(source, SubclassAttrListSource):  # the names of its tensors
            return True
        if isinstance(base, nn.Module) and isinstance(source, AttrSource):
            attributes = vars(base)
            if source.member in _DICTS:
                return value is attributes.get(source.member)
            holders = [attributes, *(attributes[name] for name in _DICTS)]
            held = any(source.member in holder and holder[source.member] is value for holder in holders)
        elif type(base) is BlockedTensor and isinstance(source, AttrSource):
            held = vars(base).get(source.member) is value
        else:
            held = isinstance(base, dict) and isinstance(source, DictGetItemSource)
        return held and (_is_constant(value) or isinstance(value, (Tensor, nn.Module)))


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and all(map(_is_constant, value)))


@dataclass
class Seen:
    """A model that Dynamo's guards held for.

    Attributes:
        versions: of its modules, as they were.
        asked: how often Dynamo's guards were asked since it last was as before.
        known: what a `ModelCall` knows of it.
        checked: `known`, if the guard has just found that it holds.
    """

    versions: ModuleVersions
    asked: int = 1
    known: Known | None = None
    checked: Known | None = None


class Unchanged:
    """The guard: a model is one that Dynamo's own guards held for, and has not changed since.

    Args:
        guards: Dynamo's own.
        source: of the model.
        modules: gets the model's modules from local variables, itself first.
        reasons: a list of one string, where why the guards do not hold goes.
    """

    def __init__(
        self, guards: RootGuardManager, source: Source, modules: Callable[[dict], list[nn.Module]], reasons: list[str]
    ) -> None:
        self._guards, self._modules, self._reasons = guards, modules, reasons
        self._local = getattr(source, "local_name", None)
        # By the model's id: repeated layers compiled by themselves, for one, share a guard.
        self._seen: dict[int, Seen] = {}

    def __call__(self, model: nn.Module) -> bool:
        seen = self.seen(model)
        if seen is not None:
            known = seen.known
            same, known_holds = seen.versions.hold_with(model, known and known.parameters)
            seen.checked = known if known_holds else None
            if same:
                seen.asked = 0
                return True
        return self._check(model)

    def seen(self, model: object) -> Seen | None:
        """The model, if Dynamo's guards held for it."""
        return self._seen.get(id(model))

    def _check(self, model: object) -> bool:
        variables = {} if self._local is None else {self._local: model}
        if not self._guards.check(variables):
            self._reasons[:] = self._guards.check_verbose(variables).verbose_code_parts[:1]
            return False
        seen, asked = self._seen.get(id(model)), 1
        if seen is not None and seen.versions.alive():
            asked = seen.asked = seen.asked + 1
            # A model that changes from call to call: its versions, as dear as the guards, are of use ever less often.
            if asked & (asked - 1):
                return True
        try:
            versions = ModuleVersions(self._modules(variables))
        except TypeError:  # a module that holds its parameters otherwise
            return True
        if self._guards.check(variables):  # no other thread has changed it before its versions were taken
            alive = {key: seen for key, seen in self._seen.items() if seen.versions.alive()}
            self._seen = alive | {id(model): Seen(versions, asked)}
        return True
