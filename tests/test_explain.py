"""`tb.explain`: what ran is what is told, faults are named, and the model is as it was."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked as tb
from torch_blocked.benchmark.models import make_model
from torch_blocked.explain import algorithms, palette, passes
from torch_blocked.explain import report as reports
from torch_blocked.explain.record import Call, Reorder

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Tests look at what is told, not at times: two passes do."""
    monkeypatch.setattr(passes, "PASSES", 2)


class Fallback(nn.Module):
    def forward(self, x):
        return x.cummax(1).values


class Plain(nn.Module):
    def forward(self, x):
        return x.contiguous()


class Three(nn.Module):
    """Three channels in the middle."""

    def __init__(self):
        super().__init__()
        self.narrow, self.widen = nn.Conv2d(32, 3, 3, padding=1), nn.Conv2d(3, 32, 3, padding=1)

    def forward(self, x):
        return self.widen(self.narrow(x))


def network(*middle: nn.Module) -> nn.Module:
    """Convolutions around a part; blocked, for inference."""
    parts = {"first": nn.Conv2d(3, 32, 3), "part": nn.Sequential(*middle), "last": nn.Conv2d(32, 32, 3)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model.eval().to(tb.blocked)


@torch.no_grad()
def explained(model, *inputs, **kwargs):
    return tb.explain(model, *(inputs or [torch.randn(1, 3, 12, 12)]), **kwargs)


# Part of a network -> the kind of finding, its modules, and what the verdict says of it.
FAULTS = {
    "fallback": (Fallback(), ["part.0"], r"cummax: it runs along the blocked axis"),
    "padding": (Three(), ["part.0.narrow", "part.0.widen"], r"3 channels in blocks of \d+, [\d.]+x as large"),
    "lost format": (Plain(), ["part.0"], r"a conversion makes it nchw: convolution in last brings it back"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named(kind, isa):
    part, modules, text = FAULTS[kind]
    report = explained(network(copy.deepcopy(part)))
    (finding,) = report.findings
    assert (finding.kind, finding.modules) == (kind, modules)
    assert finding.seconds > 0
    finding.share = 1.0
    verdict = " ".join(report.verdict.split())
    assert f"- {kind} in {', '.join(modules)} (" in verdict and re.search(text, verdict)


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_remedy_of_padding_fills_all_blocks(blocks):
    block = tb.blocked.resolve((1, 16, 8, 8)).blocking.block(1)
    model, x = nn.Conv2d(16, (blocks - 1) * block + 1, 3).to(tb.blocked), torch.randn(1, 16, 8, 8).to(tb.blocked)
    (finding,) = explained(model, x).findings
    assert (finding.kind, finding.remedy) == ("padding", f"{blocks * block} channels take no longer")


def test_all_faults_at_once():
    report = explained(network(*(copy.deepcopy(part) for part, *_ in FAULTS.values())))
    assert {f.kind for f in report.findings} == set(FAULTS)


def test_the_cost_of_a_fallback_has_the_reorder_back_in_it():
    report = explained(network(Fallback()))
    fallback = next(c for c in report.run.calls if c.fallback)
    (back,) = (r for c in report.run.calls for r in c.reorders if r.origin is not None)
    assert report.findings[0].seconds == fallback.seconds + back.seconds
    assert [r.dst for r in fallback.reorders] == ["nchw"] and back.src == "nchw"


def test_the_cost_of_a_conversion_has_the_python_around_it():
    def lost(x):
        return x.contiguous().to(tb.blocked).relu()

    report = explained(lost, torch.randn(1, 32, 4, 4).to(tb.blocked))
    away, back = (c for c in report.run.calls if c.operator == "reorder")
    assert report.findings[0].kind == "lost format"
    assert report.findings[0].seconds == away.seconds + back.seconds
    assert all(c.seconds > c.reorders[0].seconds for c in (away, back))


def test_nothing_to_mend():
    report = explained(network(nn.ReLU(), nn.BatchNorm2d(32)))
    assert report.findings == []
    assert report.verdict == "no reorders, no fallbacks: nothing to mend."


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_have_modules_formats_and_algorithms(how):
    model, x = network(nn.ReLU()), torch.randn(2, 3, 12, 12)
    with how():
        report = tb.explain(model, x)
    block = tb.blocked.resolve(x.shape).tag
    rows = [(c.module, c.operator, c.outputs[0].format) for c in report.run.calls if c.outputs and c.is_blocked]
    names = "conv2d" if how is torch.inference_mode else "convolution"
    assert [row for row in rows if row[1] != "detach"] == [
        ("first", names, block), ("part.0", "relu", block), ("last", names, block)
    ]  # fmt: skip
    first, last = (c for c in report.run.calls if c.is_convolution)
    assert (first.algorithm, last.algorithm) == ("first", "direct")
    assert last.why and last.outputs[0].size == (2, 32, 8, 8) and last.inputs[0].dtype == "float32"


# What `inference_mode` delivers whole: batched or not, transposed, with a padding by name.
WHOLE = {
    **{f"{name}{d}d": (f"{name}{d}d", d, {}) for name in ("Conv", "ConvTranspose") for d in (1, 2, 3)},
    **{f"same {d}d": (f"Conv{d}d", d, {"padding": "same"}) for d in (1, 2, 3)},
    "valid": ("Conv2d", 2, {"padding": "valid", "stride": 2}),
    "same, an odd number in all": ("Conv2d", 2, {"padding": "same", "kernel_size": 4, "dilation": (1, 2)}),
}


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("case", WHOLE)
def test_convolutions_have_their_algorithms_under_inference_mode(case, batch, blocked):
    name, d, window = WHOLE[case]
    model = getattr(nn, name)(16, 16, **{"kernel_size": 3, **window})
    model = model.to(tb.blocked) if blocked else model
    x, found = torch.randn(*batch, 16, *[9, 10, 11][:d]), []
    for how in (torch.no_grad, torch.inference_mode):
        with how():
            (call,) = (c for c in tb.explain(model, x).run.calls if c.is_convolution)
        found.append((call.algorithm, call.why, call.fallback))
    assert found[0][0] and found[0] == found[1]


def test_a_question_that_fails_does_not_end_the_report(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("as planned")

    monkeypatch.setattr(algorithms, "algorithm", fail)
    first, last = (c for c in explained(network()).run.calls if c.is_convolution)
    assert (first.algorithm, last.algorithm) == ("", "") and "as planned" in first.why


def test_reorders_are_those_that_are_counted():
    model = network(Fallback(), Plain())
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad(), tb.count() as counts:
        model(x)
    report = explained(model, x)
    found = [r for c in report.run.calls for r in c.reorders]
    assert len(found) == counts.reorders.total() and sum(r.nbytes for r in found) == counts.reorder_bytes
    assert sum(1 for c in report.run.calls if c.fallback) == counts.fallbacks.total()
    assert report.totals()["reorders"]["bytes"] == counts.reorder_bytes


def test_weights_that_are_packed_on_every_call():
    class Functional(nn.Module):
        def forward(self, x):
            return F.conv2d(x, torch.ones(32, 32, 1, 1))

    (finding,) = explained(network(Functional())).findings
    assert finding.kind == "weights" and finding.at_most and finding.modules == ["part.0"]


def test_a_plain_input_and_a_plain_parameter():
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.ones(1, 32, 10, 10))

        def forward(self, x):
            return x + self.position

    model = network(Embedding())
    model.part[0].position.data = model.part[0].position.data.to_dense()
    (finding,) = explained(model).findings
    assert finding.kind == "reorder" and "part.0.position is plain" in finding.why
    (finding,) = explained(nn.Conv2d(32, 32, 1).to(tb.blocked), torch.randn(1, 32, 4, 4)).findings
    assert finding.kind == "reorder" and finding.remedy == "give it as x.to(tb.blocked)"


@pytest.mark.parametrize(
    "model, text",
    [
        (make_model("squeezenet1_1"), r"^No tensor is blocked. model.to\(tb.blocked\) makes its 26 convolutions"),
        (nn.Flatten(), "nothing to mend"),
    ],
)
def test_a_plain_model(model, text):
    report = explained(model.eval(), torch.randn(1, 3, 64, 64))
    assert re.search(text, report.verdict) and report.findings == []
    assert all(c.outputs[0].format == "nchw" for c in report.run.calls if c.is_convolution)


def test_a_function():
    x = torch.randn(1, 17, 4, 4).to(tb.blocked)
    report = explained(lambda x, power: (x**power).sum(), x, power=3)
    assert [c.operator for c in report.run.calls] == ["pow", "sum"] and {c.module for c in report.run.calls} == {""}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_the_model_is_as_it_was(blocked, fails):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen = self.seen + x.numel()
            if fails and int(self.seen[0]) >= 1:
                raise RuntimeError("as planned")
            return F.dropout(x)

    model = network(nn.BatchNorm2d(32), Stateful()).train()
    if not blocked:
        model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    buffers, state = {k: b for k, b in model.named_buffers()}, copy.deepcopy(model.state_dict())
    before, random, policy = x.detach().clone(), torch.get_rng_state(), copy.copy(tb.dispatch.fallback._State.policy)
    hooks = nn.modules.module
    if fails:
        with pytest.raises(RuntimeError, match="as planned"):
            tb.explain(model, x)
    else:
        tb.explain(model, x)
    assert torch.equal(x, before) and x.grad is None and torch.equal(torch.get_rng_state(), random)
    assert model.training and tb.dispatch.fallback._State.policy == policy and not tb.counting._listeners
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert all(m._forward_hooks == {} and m._forward_pre_hooks == {} for m in model.modules())
    assert all(b is buffers[k] for k, b in model.named_buffers())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_an_input_that_the_model_writes_to():
    x = torch.randn(1, 3, 12, 12)
    before = x.clone()
    explained(nn.Sequential(nn.ReLU(inplace=True)), x)
    assert torch.equal(x, before)


def test_backward():
    model, x = network(Fallback()), torch.randn(1, 3, 12, 12)
    report = tb.explain(lambda x: model(x).sum().backward(), x)
    operators = [c.operator for c in report.run.calls]
    assert operators.count("convolution_backward") == 2 and "cummax" in operators


def test_peak_memory():
    size = 4 * 1024
    report = explained(lambda x: ((x + 1) + 1).sum(), torch.zeros(1024))
    assert 2 * size <= report.run.peak_bytes <= 2 * size + 64
    report = explained(lambda x: x.view(2, 512).sum(), torch.zeros(1024))
    assert report.run.peak_bytes <= 64


@pytest.mark.parametrize("model", [3, None, "resnet18"])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="explain takes a module or a function"):
        tb.explain(model)


def test_tensors_of_other_layouts():
    report = explained(lambda x: torch.sparse.mm(x.to_sparse(), x).to_mkldnn().to_dense(), torch.eye(4))
    assert report.run.calls


# ---- What is made of it


@pytest.fixture(scope="module")
def report():
    with tb.fallback("allow"):
        return explained(network(Fallback(), Three(), Plain()))


@pytest.mark.parametrize("whole", [False, True])
def test_the_table_is_for_a_terminal_of_100_columns(report, whole):
    lines = report.table(whole).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert str(report) == report.table() and lines[0] in report.verdict
    if whole:
        assert sum(line.startswith(c.module[:21]) for c in report.run.calls for line in lines) >= len(report.run.calls)


def test_long_names_are_cut():
    model = nn.Sequential()
    model.add_module("a_module_of_a_very_long_name", nn.Conv2d(3, 32, 1))
    assert "…" in str(explained(model.to(tb.blocked)))


def test_to_dict_is_json(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["verdict"] == report.verdict and len(found["calls"]) == len(report.run.calls)
    assert {f["kind"] for f in found["findings"]} == {f.kind for f in report.findings}
    row = next(c for c in found["calls"] if c["fallback"])
    assert row["module"] == "part.0" and row["reorders"][0]["nbytes"] > 0 and row["fallback"]["why"]


def test_html(report, monkeypatch):
    page = report._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") > 4 and "part.0" in page and "&lt;" not in page.split("<table>")[0]
    monkeypatch.setattr(reports, "FOLDED", 2.0)
    assert "... and" in report.table() and "... and" in report._repr_html_()


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_of_a_plot_follow_one_another(report, tmp_path, monkeypatch):
    figure = types.SimpleNamespace(Figure=mock.MagicMock())  # instead of matplotlib's, which may not be installed
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    report.plot(tmp_path / "report.png")
    axes = figure.Figure().subplots()
    bars = [(bar.args[0], bar.kwargs["left"], bar.args[1]) for bar in axes.barh.call_args_list]
    lanes = axes.set_yticks.call_args.args[1]
    assert [lanes[lane] for lane, *_ in bars] == [palette.kind(call) for call in report.run.calls]
    ends = [0.0, *(left + width for _, left, width in bars)]
    assert [left for _, left, _ in bars] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(report.totals()["calls"]["ms"])
    figure.Figure().savefig.assert_called_once_with(tmp_path / "report.png")


def test_a_plot_has_names_as_they_are(tmp_path, monkeypatch):
    figure = types.SimpleNamespace(Figure=mock.MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    run = reports.Run("eager", 1.0, [Call("$cost$_of", "convolution", seconds=1.0)])
    reports.Report(run, []).plot(tmp_path / "report.png")
    (text,) = figure.Figure().subplots().text.call_args_list
    assert text.args[2] == r"\$cost\$_of convolution"  # between two dollars matplotlib sees mathematics


def test_plot_without_matplotlib(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^report.plot needs matplotlib: pip install matplotlib$"):
        report.plot(tmp_path / "report.png")


def test_what_is_no_convolution():
    names = ("convolution", "conv_transpose2d", "_convolution", "_convert_indices_from_csr_to_coo")
    assert [Call("", name).is_convolution for name in names] == [True, True, True, False]


def test_times_are_merged_of_runs_that_did_the_same():
    def run(seconds, *reorders):
        return [Call("", "convolution", reorders=list(reorders), seconds=seconds)]

    moved, packed = Reorder("nchw", "nChw16c", 8, 3.0), Reorder("oihw", "packed", 8, None)
    first = run(9.0, copy.copy(moved))
    (call,) = passes.merged([first, run(1.0, moved), run(5.0, packed), run(7.0, packed), run(3.0, moved)])
    assert (call.seconds, call.reorders) == (2.0, [moved])


def test_inputs_that_are_one_tensor_stay_one():
    same = []
    tb.explain(lambda x, y, z: same.append((x is y, x is z)), *[torch.ones(2)] * 2, z=torch.ones(2))
    assert set(same) == {(True, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_can_be_blocked(dtype):
    report = tb.explain(nn.Conv2d(16, 16, 3).to(dtype), torch.ones(1, 16, 8, 8, dtype=dtype))
    assert "blocked where they are float32 or of half precision" in " ".join(report.verdict.split())


# ---- Compiled


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
