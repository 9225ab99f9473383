"""`tb.explain` of compiled models: what the graphs' own code ran, by graph."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
import torch.nn.functional as F
from explain_cases import Fallback, Three, explained, network
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("two_passes")


@pytest.mark.parametrize("backend", ["torch_blocked", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()  # else sizes that earlier tests changed are symbolic here
    model = nn.Sequential(network(nn.BatchNorm2d(32), nn.ReLU(), Fallback(), Three()), nn.ReLU()).eval()
    try:
        report = explained(torch.compile(model, backend=backend))
    finally:
        torch._dynamo.reset()
    assert report.run.how == "compiled"
    convolutions = [c for c in report.run.calls if c.operator == "convolution"]
    assert [c.outputs[0].size[1] for c in convolutions] == [32, 3, 32, 32]
    assert all(c.seconds > 0 and c.module.startswith("graph ") for c in convolutions)
    assert any(c.operator == "Inductor's own" for c in report.run.calls)
    kinds = {f.kind for f in report.findings}
    (graph,) = report.run.graphs
    if backend == "torch_blocked":
        assert kinds == {"fallback", "padding"} and "fallbacks: aten.cummax.default" in graph
        assert "4 convolutions, 3 operators fused" in graph
        assert convolutions[0].algorithm == "conv+norm"
    else:
        assert kinds == {"padding"} and "another backend" in graph
    assert "graph " in str(report) and json.dumps(report.to_dict())


def compiled_report(model, x, backend):
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            return tb.explain(torch.compile(model, backend=backend), x)
    finally:
        torch._dynamo.reset()


class Beside(nn.Module):
    """Two convolutions, one of them transposed, whose answers are one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 48, 3, padding=4)

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x)], 1)


def test_compiled_convolutions_into_one_tensor():
    report = compiled_report(Beside().eval(), torch.randn(1, 16, 12, 12), "torch_blocked")
    found = {c.operator: (c.inputs[0].size, c.outputs[0].size) for c in report.run.calls if c.is_convolution}
    assert found == {
        "convolution_out": ((1, 16, 12, 12), (1, 32, 6, 6)),
        "convolution_transpose_out": ((1, 16, 12, 12), (1, 48, 6, 6)),
    }


def test_compiled_chain_of_convolutions_and_linear():
    layers = nn.Conv2d(3, 24, 3, stride=2), nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 17, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(17, 5)
    report = compiled_report(nn.Sequential(*layers, *head).eval(), torch.randn(1, 3, 13, 12), "torch_blocked")
    (call,) = [c for c in report.run.calls if c.is_convolution]
    assert (call.operator, call.inputs[0].size, call.outputs[0].size) == (
        "convolution_chain", (1, 3, 13, 12), (1, 17, 6, 5),
    )  # fmt: skip
    assert call.convolutions == 3 and report.totals()["convolutions"]["count"] == 3
    assert any(line.startswith("3 convolutions: ") for line in report.summary())
    assert "3 convolutions, " in report.run.graphs[0]
    (call,) = [c for c in report.run.calls if c.operator == "linear"]
    assert [(o.size, o.is_blocked) for o in call.inputs] == [((1, 17), False), ((5, 17), False), ((5,), False)]


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def test_compiled_fallbacks_are_not_our_own_operators():
    model = nn.Sequential(nn.Conv2d(16, 32, 3), Double(), nn.Conv2d(32, 16, 3).double()).eval()
    report = compiled_report(model, torch.randn(1, 16, 12, 12), "torch_blocked")
    (finding,) = report.findings
    assert finding.kind == "fallback"
    found = [(c.is_blocked, bool(c.fallback)) for c in report.run.calls if c.is_convolution]
    assert found == [(True, False), (False, True)]


def test_compiled_half_precision():
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ConvTranspose2d(32, 16, 3, stride=2)).bfloat16().to(tb.blocked)
    report = compiled_report(model, torch.randn(1, 16, 12, 12).bfloat16(), "inductor")
    operands = [(x.size, x.dtype) for c in report.run.calls if c.is_convolution for x in c.inputs[:1] + c.outputs]
    sizes = ((1, 16, 12, 12), (1, 32, 10, 10), (1, 32, 10, 10), (1, 16, 21, 21))
    assert operands == [(size, "bfloat16") for size in sizes]


class Broken(nn.Module):
    """Two convolutions, a fallback in the graph after the break."""

    def __init__(self, at_once=False):
        super().__init__()
        self.a, self.b, self.at_once = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3), at_once

    def forward(self, x):
        if self.at_once:
            torch._dynamo.graph_break()
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x).cummax(1).values


def of_convolutions(report):
    """The module and channels of each."""
    return [(c.module, c.outputs[0].size[1]) for c in report.run.calls if c.is_convolution]


@pytest.mark.parametrize("at_once, first", [(False, 0), (True, 1)])
def test_compiled_with_a_graph_break(at_once, first):
    report = compiled_report(Broken(at_once).eval(), torch.randn(1, 3, 12, 12), "torch_blocked")
    names = [f"graph {i}/0" for i in (first, first + 1)]
    assert of_convolutions(report) == list(zip(names, (32, 16), strict=True))
    assert [c.module for c in report.run.calls if c.operator == "Inductor's own"] == names
    assert [line.partition(":")[0] for line in report.run.graphs] == names
    assert ["fallbacks: aten.cummax.default" in line for line in report.run.graphs] == [False, True]
    assert [(f.kind, f.modules) for f in report.findings] == [("fallback", names[1:])]
    assert [c.module for c in report.run.calls if c.fallback] == names[1:]
    assert sum(c.seconds for c in report.run.calls) < 10 * report.run.seconds


def test_compiled_by_another_backend_with_a_graph_break():
    report = compiled_report(Broken().eval(), torch.randn(1, 3, 12, 12), "aot_eager")
    assert [line.partition(":")[0] for line in report.run.graphs] == ["graph 0/0", "graph 1/0"]
    assert [c.module for c in report.run.calls if c.is_convolution] == ["graph 0/0", "graph 1/0"]


class Named(nn.Module):
    """Compiled and other parts under names of the user's own."""

    def __init__(self, part):
        super().__init__()
        self.part = torch.compile(part, backend="torch_blocked")

    def forward(self, x):
        with torch.profiler.record_function("backbone"), torch.profiler.record_function("stage::one"):
            x = self.part(x)
        with torch.profiler.record_function("head"):
            return torch.ops.explain_test.negative(x.exp())


@pytest.fixture
def negative():
    """An operator of another library."""
    with torch.library._scoped_library("explain_test", "DEF") as library:
        library.define("negative(Tensor x) -> Tensor")
        library.impl("negative", torch.neg, "CPU")
        yield


def test_compiled_within_names_of_the_users_own(negative):
    torch._dynamo.reset()
    try:
        report = explained(Named(nn.Conv2d(3, 32, 3).eval()))
    finally:
        torch._dynamo.reset()
    assert of_convolutions(report) == [("graph 0/0", 32)]
    assert [line.partition(":")[0] for line in report.run.graphs] == ["graph 0/0"]
    assert [c.operator for c in report.run.calls if c.module == "(eager)"] == ["exp", "negative"]


class Step(nn.Module):
    """A training step: the backward pass's graph is in no region."""

    def __init__(self):
        super().__init__()
        self.part = torch.compile(nn.Conv2d(16, 32, 3), backend="torch_blocked")

    def forward(self, x):
        self.part(x).sum().backward()


def test_compiled_backward():
    torch._dynamo.reset()
    try:
        report = tb.explain(Step(), torch.randn(1, 16, 12, 12))
    finally:
        torch._dynamo.reset()
    forward, backward = [c for c in report.run.calls if c.operator == "Inductor's own"]
    assert forward.module == "graph 0/0" != backward.module != "(eager)"
    (call,) = [c for c in report.run.calls if c.operator == "convolution_weight_gradient"]
    assert call.module == backward.module
    assert [line.split(" conv")[0].split()[-1] for line in report.run.graphs] == ["1", "0"]


@pytest.mark.parametrize("level", [None, "3"])
def test_the_profilers_log_level_is_as_it_was(level, monkeypatch):
    name = "KINETO_LOG_LEVEL"
    monkeypatch.delenv(name, raising=False) if level is None else monkeypatch.setenv(name, level)
    compiled_report(nn.ReLU(), torch.randn(2, 3), "torch_blocked")
    assert os.environ.get(name) == level


class Held(nn.Module):
    """Has a compiled model that is none of its submodules."""

    def __init__(self, model):
        super().__init__()
        self.__dict__["model"] = model

    def forward(self, x):
        return self.model(x)


def ran_compiled(model, x):
    with torch.no_grad(), torch.profiler.profile() as profiled:
        model(x)
    return any(event.name.startswith("Torch-Compiled Region: ") for event in profiled.events())


# What calls a compiled model without being one.
CALLERS = {
    "lambda": lambda model: lambda x: model(x),
    "partial": functools.partial,
    "attribute": Held,
    "method": lambda model: model.__call__,
}


@pytest.mark.parametrize("how", CALLERS)
def test_what_calls_a_compiled_model_is_compiled(how):
    torch._dynamo.reset()
    model, x = torch.compile(nn.Conv2d(3, 16, 3), backend="eager"), torch.randn(1, 3, 12, 12)
    assert explained(CALLERS[how](model), x).run.how == "compiled"
    assert ran_compiled(model, x)


def test_a_recorded_run_leaves_what_is_compiled():
    torch._dynamo.reset()
    model, x, recorded = torch.compile(torch.relu, backend="eager"), torch.randn(2, 3), []

    def only_recorded(x):
        recorded.append(torch.utils._python_dispatch._get_current_dispatch_mode() is not None)
        return model(x) if recorded[-1] else x

    assert ran_compiled(model, x)
    assert explained(only_recorded, x).run.how == "eager" and any(recorded)
    assert ran_compiled(model, x)


def test_a_compiled_model_that_runs_no_region_is_eager():
    torch._dynamo.reset()
    model, x = torch.compile(nn.Conv2d(3, 16, 3), backend="eager"), torch.randn(1, 3, 12, 12)
    with torch.compiler.set_stance("force_eager"):
        assert explained(model, x).run.how == "eager"
    assert explained(model, x).run.how == "compiled"


class Partly(nn.Module):
    """Compiled but for its first convolution, and an operator that falls back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3)

    @torch.compiler.disable
    def eager(self, x):
        return self.first(x.to(tb.blocked)).cummax(1).values

    def forward(self, x):
        return self.last(self.eager(x) + 1)


def test_what_runs_in_eager_mode_beside_graphs_is_told():
    model, x = Partly().eval().to(tb.blocked), torch.randn(1, 3, 12, 12)
    with torch.no_grad(), tb.count() as counts:
        model.eager(x)
    report = compiled_report(model, x, "torch_blocked")
    first, last = (c for c in report.run.calls if c.is_convolution)
    assert (first.operator, first.is_blocked, first.outputs[0].size) == ("convolution", True, (1, 32, 10, 10))
    assert last.is_blocked
    (fallback,) = (c for c in report.run.calls if c.fallback)
    assert fallback.operator == "cummax" and fallback.is_blocked and "blocked axis" in fallback.fallback.why
    assert [r.dst for r in fallback.reorders] == ["nchw"]
    totals = report.totals()
    assert totals["fallbacks"]["count"] == counts.fallbacks.total() == 1
    assert totals["reorders"]["count"] == counts.reorders.total()
    assert totals["reorders"]["bytes"] == counts.reorder_bytes
    assert not {f.kind for f in report.findings} & {"plain convolution"}


def test_a_graph_of_another_backend_has_the_formats_of_what_it_ran():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.ReLU()).eval().to(tb.blocked)
    report = compiled_report(model, torch.randn(1, 3, 12, 12), "eager")
    first, last, relu = (c for c in report.run.calls if c.inputs)
    assert first.is_blocked and last.is_blocked and not report.verdict.startswith("No tensor is blocked")
    assert relu.inputs[0].format == ""  # nothing tells it


def test_weights_packed_beside_graphs():
    class Packing(Partly):
        @torch.compiler.disable
        def eager(self, x):
            return F.conv2d(x, torch.ones(32, 32, 1, 1))

        def forward(self, x):
            return self.eager(self.first(x))

    report = compiled_report(Packing().eval().to(tb.blocked), torch.randn(1, 3, 12, 12), "torch_blocked")
    assert "weights" in {f.kind for f in report.findings}
    assert [r.dst for c in report.run.calls for r in c.reorders] == ["packed"]


class Along(nn.Module):
    """Falls back, and in its backward pass otherwise."""

    def forward(self, x):
        return (x * x.cummax(1).values).sum()


def graph_fallbacks(line):
    """Those that a line of facts has."""
    return set(line.partition("fallbacks: ")[2].split(", ")) - {"none"}


@pytest.mark.parametrize("both", [False, True])
def test_a_forward_pass_is_not_charged_with_what_its_backward_pass_does(both):
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3), Along()).to(tb.blocked), torch.randn(1, 16, 9, 9).to(tb.blocked)
    with tb.count() as forward:
        model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="torch_blocked")
    report = tb.explain((lambda x: compiled(x).backward()) if both else compiled, x)
    told = [graph_fallbacks(line) for line in report.run.graphs]
    assert len(told) == 1 + both and told[0] == set(forward.fallbacks)
    assert "reorders: 1 blocked -> plain, 1 plain -> blocked; " in report.run.graphs[0]
    assert not both or told[1] - told[0]
