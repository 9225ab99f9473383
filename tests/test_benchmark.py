"""The command line and its benchmarks: rows, JSON, ratios of known times, errors. Speed itself is never asserted."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, one_line

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.__main__ import main
from torch_blocked.benchmark import conv, machine, pool, reduce, reorder, report, train
from torch_blocked.benchmark.shapes import SETS, parse_layer

ROOT = Path(__file__).parent.parent
PLAIN_IMAGE, SQUARE = "ic3ih9oc20kh3sh2ph1", "ic17ih8oc16kh3ph1"


# ---- the commands


def test_info(capsys):
    main(["info"])
    out = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["torch_blocked"] == tb.__version__
    assert lines["isa"] == tb.isa()
    assert lines["threads"] == str(torch.get_num_threads())
    assert re.fullmatch(r"round trip +(unknown|\d+ ns from core to core and back)", out.splitlines()[-2])


def test_conv(bench, isa):
    text, found = bench("conv", "--layer", PLAIN_IMAGE, SQUARE, "g16ic16ih5oc16kh3dh1", "--batch", "1,2")
    assert [(row["name"], row["n"]) for row in found["rows"]] == [
        (name, n) for n in (1, 2) for name in (PLAIN_IMAGE, SQUARE, "g16ic16ih5oc16kh3dh1")
    ]
    for row in found["rows"]:
        assert row["ms"] > 0 and row["of_peak"] > 0
        assert row["vs_best"] == min(row["vs_mkldnn"], row["vs_channels_last"])
        assert row["name"] in text
    assert [row["algorithm"] for row in found["rows"][:3]] == ["first", "direct", "depthwise"]
    assert found["machine"] == machine.describe() and found["machine"]["isa"] == isa
    assert re.search(r"\nlayers +N=2 ", text)


def test_conv_by_every_algorithm(bench):
    """The fastest that was not chosen, beside the chosen one in its own mode, or alone where no mode chooses that."""
    layers = ("ic16ih12oc16kh3ph1", "ic16ih8oc16kh1")
    text, found = bench("conv", "--layer", *layers, "--algorithms", "--threads", "1")
    row, alone = found["rows"]
    assert row["algorithm"] == "direct" and row["other"] in ("winograd_f2", "winograd_f4", "winograd_f4_unpacked")
    assert row["vs_other"] > 0 and "fastest other" in text
    assert "other" not in alone and re.search(r"direct +- - *$", text, re.MULTILINE)
    times = {"blocked": 2.0, "direct": 4.0, "winograd_f2": 3.0, "winograd_f4": 6.0}
    choices = ("direct", "winograd_f2", "winograd_f4")
    assert conv.beside_others(times, "direct", choices) == {"other": "winograd_f2", "vs_other": 0.75}
    assert conv.beside_others(times, "winograd_f4_unpacked", choices) == {"other": "winograd_f2", "vs_other": 1.5}
    assert conv.beside_others(times, "direct", ("direct",)) == {}
    assert "other" not in bench("conv", "--layer", layers[0], "--threads", "1")[1]["rows"][0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_rows_tell_how_far_the_cores_are(bench, monkeypatch):
    text, found = bench("conv", "--layer", SQUARE, "--threads", "2")
    assert 1 < found["rows"][0]["round_trip_ns"] < 1e6 and "trip ns" in text
    trips = iter((3e-7, 6e-8))
    monkeypatch.setattr(library, "core_round_trip", lambda: next(trips))
    text, found = bench("conv", "--layer", SQUARE, "--threads", "2")
    assert found["rows"][0]["round_trip_ns"] == pytest.approx(300) and re.search(r" 300 *$", text, re.MULTILINE)
    text, found = bench("conv", "--layer", SQUARE, "--threads", "1")
    assert "round_trip_ns" not in found["rows"][0] and "trip ns" not in text


def test_rows_beside_those_of_an_earlier_run(bench, tmp_path):
    _, earlier = bench("conv", "--layer", SQUARE, PLAIN_IMAGE, "--threads", "1")
    was = earlier["rows"][0]
    was["ms"], was["vs_mkldnn"] = 10 * was["ms"], was["vs_mkldnn"] / 2
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"rows": [was, {"name": PLAIN_IMAGE, "note": "skipped"}]}))
    text, found = bench("conv", "--layer", SQUARE, PLAIN_IMAGE, "--threads", "1", "--before", str(file))
    row, other = found["rows"]
    ours, peer = was["ms"] / row["ms"], was["ms"] * was["vs_mkldnn"] / (row["ms"] * row["vs_mkldnn"])
    assert (row["vs_before"], row["mkldnn_vs_before"]) == pytest.approx((ours, peer))
    assert re.search(r"/before +mkldnn's", text) and re.search(rf"{ours:.2f} +{peer:.2f} *$", text, re.MULTILINE)
    assert "vs_before" not in other and re.search(r" - +- *$", text, re.MULTILINE)
    text, found = bench("pool", "--match", "bilinear", "--threads", "1", "--before", str(file))
    assert "mkldnn's" not in text and not any("vs_before" in row for row in found["rows"])


@pytest.mark.parametrize("key", report.SAME)
def test_rows_of_other_sizes_are_not_compared(key):
    row = {"set": "s", "name": "net", "n": 1, "contestant": "blocked", "input": "3x9x8", "image": 9, "autocast": False}
    now, earlier = {**row, "ms": 2.0}, {**row, "ms": 3.0}
    assert report.compared(now, [earlier]) == {"vs_before": 1.5}
    assert report.compared(now, [{**earlier, key: "another"}]) == {}
    assert report.compared(now, [{name: value for name, value in earlier.items() if name != key}]) == {}


def test_no_round_trip_on_one_core():
    def on_one_core():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # this thread's alone
        return library.core_round_trip()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(on_one_core).result() is None


def test_conv_sets(bench, monkeypatch):
    monkeypatch.setitem(SETS, "tiny", [PLAIN_IMAGE, SQUARE])
    text, found = bench("conv", "--set", "tiny", "--match", "ic17")
    assert [(row["set"], row["name"]) for row in found["rows"]] == [("tiny", SQUARE)]
    assert re.search(r"\ntiny +N=1 ", text)
    monkeypatch.setitem(SETS, "other", [PLAIN_IMAGE])
    _, found = bench("conv", "--set", "tiny", "--set", "other")  # given one by one as well as together
    assert [row["set"] for row in found["rows"]] == ["tiny", "tiny", "other"]


def test_conv_list(capsys):
    main(["bench", "conv", "--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SETS)


def test_conv_skips_what_does_not_fit(bench, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    text, found = bench("conv", "--layer", SQUARE)
    assert "ms" not in found["rows"][0] and "skipped" in found["rows"][0]["note"] and "skipped" in text


@pytest.mark.parametrize("dtype", reorder.DTYPES)
def test_reorder(bench, dtype, monkeypatch):
    monkeypatch.setattr(reorder, "TABLE", ((("nchw", "nhwc", "nChw16c"), ((1, 17, 3, 3),), ()), *reorder.TABLE[-2:]))
    text, found = bench("reorder", "--dtype", dtype, "--match", "n")
    pairs = [(row["src"], row["dst"]) for row in found["rows"]]
    assert pairs == list(itertools.permutations(("nchw", "nhwc", "nChw16c"), 2))
    for row in found["rows"]:
        plain = {row["src"], row["dst"]} == {"nchw", "nhwc"}
        assert row["gbytes_per_s"] > 0 and row["vs_memcpy"] > 0 and row["vs_clone"] > 0 and ("vs_torch" in row) == plain
        assert row["vs_ordered"] > 0
        tile = row["gbytes_per_s"] / row["vs_memcpy"] * row["tile_vs_memcpy"]
        assert row["tile_gbytes_per_s"] == pytest.approx(tile) and tile > 0
        elements = 2 * 17 * 9 if plain else (17 + 32) * 9
        assert row["bytes"] == elements * torch.empty(0, dtype=reorder.DTYPES[dtype]).element_size()
    assert "to memcpy" in text


def test_pool(bench, monkeypatch):
    monkeypatch.setattr(pool, "TABLE", (("net", F.max_pool2d, {"kernel_size": 2}, (17, 4, 4)),))
    text, found = bench("pool", "--batch", "2")
    (row,) = found["rows"]
    assert row["name"] == "net max_pool k2 17x4x4" and row["fallbacks"] == {}
    assert row["bytes"] == 4 * 2 * 17 * (16 + 4) and "fallback" not in text


def test_reduce(bench, monkeypatch):
    monkeypatch.setattr(reduce, "TABLE", (("head", torch.argmax, {"dim": 1}, (17, 4, 4)),))
    text, found = bench("reduce", "--batch", "2")
    (row,) = found["rows"]
    assert row["name"] == "head argmax d1 17x4x4" and row["fallbacks"] == {} and row["vs_nchw"] > 0
    assert row["bytes"] == 4 * 2 * 17 * 16 + 8 * 2 * 16 and "geometric mean" in text


def test_every_reduction_of_the_table_runs_blocked():
    for _, function, arguments, (channels, *_) in reduce.TABLE:
        x = torch.randn(2, channels, 3, 2)
        with tb.fallback("error"):
            y = function(x.to(tb.blocked), **arguments)
        assert_same(y.to_dense() if isinstance(y, tb.BlockedTensor) else y, function(x, **arguments))


def test_pool_marks_fallbacks(bench, monkeypatch):
    monkeypatch.setattr(
        pool, "TABLE", (("net", F.fractional_max_pool2d, {"kernel_size": 2, "output_size": 2}, (4, 5, 5)),)
    )
    text, found = bench("pool")
    assert found["rows"][0]["fallbacks"] and re.search(r"fractional_max_pool .* fallback\n", text)


def tiny():
    """What `bench train --model test_benchmark:tiny` makes."""
    norm, pool = torch.nn.BatchNorm2d(17), torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 17, 3), norm, pool, torch.nn.Flatten(), torch.nn.Linear(17, 5))


def test_train(bench):
    text, found = bench("train", "--model", "test_benchmark:tiny", "resnet18", "--batch", "2", "--image", "32")
    assert [(row["name"], row["n"]) for row in found["rows"]] == [("test_benchmark:tiny", 2), ("resnet18", 2)]
    for row in found["rows"]:
        assert row["name"] in text and "vs_channels_last" in row
        assert (row["image"], row["autocast"]) == (32, False)
        for name, times in row["peers"].items():
            assert set(times) == {"step", *train.PHASES} and min(times.values()) > 0, name
        assert row["ms"] == row["peers"]["blocked"]["step"]
        assert row["vs_nchw"] == pytest.approx(row["peers"]["nchw"]["step"] / row["ms"])


def test_train_under_autocast(bench):
    how = "--batch", "2", "--image", "32", "--autocast"
    text, found = bench("train", "--model", "test_benchmark:tiny", *how)
    (row,) = found["rows"]
    assert set(row["peers"]) == {"blocked", "nchw", "channels_last", "float32"} and not row["fallbacks"]
    assert row["autocast"]
    assert row["vs_float32"] == pytest.approx(row["peers"]["float32"]["step"] / row["ms"]) and "/float32" in text


def test_threads_are_restored(bench):
    before = torch.get_num_threads()
    _, found = bench("conv", "--layer", SQUARE, "--threads", "1")
    assert found["machine"]["threads"] == 1 and torch.get_num_threads() == before


@pytest.mark.parametrize("fallbacks, note", [(["aten.b", "aten.a"], "fallback: aten.a, aten.b"), ([], None)])
def test_train_names_fallbacks(monkeypatch, fallbacks, note):
    def step():
        for name in fallbacks:
            train.tb.counting.record_fallback(name)
        return (1.0, 2.0, 3.0)

    monkeypatch.setattr(train, "contestants", lambda case: {"blocked": step, "nchw": lambda: (2.0, 3.0, 4.0)})
    row = train.measure(train.Case("net", tiny, 1, 8), rounds=1)
    assert row.get("note") == note and row["fallbacks"] == dict.fromkeys(fallbacks, 1)
    assert (row["ms"], row["backward_ms"], row["vs_nchw"]) == (6000, 2000, 1.5)


@pytest.mark.parametrize("autocast, tolerance", [(False, 1e-4), (True, 1e-2)])
def test_train_contestants_take_the_same_step(autocast, tolerance):
    steps = train.contestants(train.Case("tiny", tiny, 3, 9, autocast))
    losses = {name: [] for name in steps}
    cross_entropy = F.cross_entropy
    for name, step in steps.items():
        with pytest.MonkeyPatch.context() as patch:
            kept = losses[name]
            patch.setattr(train.F, "cross_entropy", lambda *a, kept=kept: kept.append(cross_entropy(*a)) or kept[-1])
            for _ in range(3):
                assert len(step()) == len(train.PHASES)
    for name in losses:
        torch.testing.assert_close(losses[name], losses["nchw"], rtol=tolerance, atol=1e-5, check_dtype=False)
    assert losses["nchw"][2] < losses["nchw"][0]


@pytest.mark.parametrize("terminal, shown", [(True, "\r\x1b[Kworking"), (False, "")])
def test_progress(terminal, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    report.progress("working")
    assert capsys.readouterr().err == shown


# ---- every row that ships can be run


def test_layers():
    for layers in SETS.values():
        assert layers and len(set(layers)) == len(layers)
        for layer in map(parse_layer, layers):
            x, w = (torch.empty(size, device="meta") for size in ((1, layer.ic, *layer.src), layer.weight_size))
            y = F.conv2d(x, w, None, layer.stride, layer.padding, layer.dilation, layer.groups)
            assert y.shape[2:] == layer.dst and y.shape[1] == layer.oc


def test_layer_notation():
    layer = parse_layer("g2ic8ih9iw7oc4kh3kw1sh2sw1ph1pw0dh1dw0")
    assert layer[1:] == (2, 8, 4, (9, 7), (3, 1), (2, 1), (1, 0), (2, 1))
    assert layer.dst == (4, 7) and layer.flops(3) == 2 * 3 * 4 * 4 * 7 * 4 * 3
    assert parse_layer("ic4ih6oc8kh3")[4:] == ((6, 6), (3, 3), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("blocked, memcpy, kernel", [(4, 3, 1.0), (2, 3, None), (4, 0.5, None)])
def test_the_kernel_of_a_reorder_is_what_a_call_leaves(blocked, memcpy, kernel, monkeypatch):
    times = {"call": 2, "copy_call": 1, "blocked": blocked, "memcpy": memcpy}
    monkeypatch.setattr(reorder, "medians", lambda *_: dict(times))
    row = reorder.measure(reorder.cases(["f32"])[0], 1)
    assert row.get("kernel_vs_memcpy") == kernel
    assert row.get("kernel_gbytes_per_s") == (row["bytes"] / (blocked - 2) / 1e9 if kernel else None)


def test_sizes_of_reorders(bench):
    _, found = bench("reorder", "--size", "1x17x3x2", "2x3x4x5", "--match", "nchw -> nhwc")
    assert [row["size"] for row in found["rows"]] == [[1, 17, 3, 2], [2, 3, 4, 5]]
    assert [row["bytes"] for row in found["rows"]] == [2 * 4 * 17 * 6, 2 * 4 * 6 * 20]
    _, found = bench("reorder", "--weight-size", "17x3x3x2", "--match", "i8o")
    assert {(row["src"], row["dst"], *row["size"]) for row in found["rows"]} == {
        ("oihw", "OIhw8i8o", 17, 3, 3, 2),
        ("OIhw8i8o", "oihw", 17, 3, 3, 2),
    }


def test_reorder_and_pool_tables():
    cases = reorder.cases(list(reorder.DTYPES))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        for tag in (case.src, case.dst):
            assert tb.format(tag).ndim == len(case.size)
    for row in pool.TABLE:
        case = pool.Case(*row, 1)
        assert case.function(torch.empty(1, *case.image, device="meta"), **case.arguments).dim() == 4


@pytest.mark.parametrize("text", [PLAIN_IMAGE, SQUARE, "g32ic64ih5oc96kh3dh1", "g17ic17ih6iw9oc17kh3kw5ph1pw2sh2"])
def test_contestants_give_one_answer(text):
    layer = parse_layer(text)
    runs, _ = conv.contestants(layer, 2)
    with torch.inference_mode():
        answers = {name: run() for name, run in runs.items()}
    assert isinstance(answers["blocked"], tb.BlockedTensor)
    for name in ("blocked", "channels_last", "mkldnn"):
        torch.testing.assert_close(answers[name].to_dense(), answers["nchw"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", reorder.cases(["f32", "bf16", "s8"])[::7], ids=lambda case: case.name)
def test_reorders_give_the_format(case):
    runs, _ = reorder.contestants(case._replace(size=tuple(min(n, 40) for n in case.size)))
    assert runs["blocked"]().dim() == 4 + len(tb.format(case.dst).blocking)


def test_the_same_traffic_in_order():
    """As many bytes read as src has, and written as dst has."""
    equal, padded = tb.format("nChw8c"), tb.format("nChw16c")
    x = torch.randn(2, 24, 3, 3)
    small, large = x.to(equal).physical, x.to(padded).physical
    assert torch.equal(reorder.in_order(x, small, equal, x.shape)(), small)
    copied, rest = reorder.in_order(large, small, equal, x.shape)()
    assert copied.numel() == small.numel() and rest.shape == ()  # a sum
    copied, rest = reorder.in_order(small, large, padded, x.shape)()
    assert copied.numel() == small.numel() and rest.numel() == large.numel() - small.numel()


# ---- errors: one line, status 2


def particular():
    class Particular(torch.nn.Conv2d):
        def forward(self, x):
            assert x.size(1) == 1, "only gray images"

    return Particular(1, 2, 3)


WRONG = {
    "": "required: command",
    "bench": "required: what",
    "nothing": "invalid choice: 'nothing'",
    "bench conv --set nothing": "unknown set 'nothing'",
    "bench conv --batch 1,0": "'0' is not a positive number",
    "bench conv --rounds x": "'x' is not a positive number",
    "bench conv --layer ic3ih8": "lacks oc, kh",
    "bench conv --layer ic3ih8oc4kh9": "no output",
    "bench conv --layer g2ic3ih8oc4kh3": "do not split into groups",
    "bench conv --layer ic3id8ih8oc4kh3": "has id",
    "bench conv --layer 7": "is not a layer",
    "bench conv --layer ic3ih8oc4kh3sh0": "is not a convolution",
    "bench reorder --dtype f8": "invalid choice: 'f8'",
    "bench reorder --size 3x4": "'3x4' is not four numbers like 1x64x56x56",
    "bench reorder --size 1x2x3x0": "'0' is not a positive number",
    "bench reorder --match nothing": "no row's name contains 'nothing'",
    "bench train --model nothing": "unknown model 'nothing'",
    "bench train --model no.module:f": "No module named 'no'",
    "bench train --model torch.nn:nothing": "no attribute 'nothing'",
    "bench train --model torch:float32": "is no function",
    "bench train --model json:dumps": "TypeError: dumps() missing",
    "bench train --model torch.nn:Identity": "no torch.nn.Module with parameters",
    "bench train --model resnet18 --image 7 --batch 0": "'0' is not a positive number",
    "bench train --model vgg16_bn --image 8": "does not make logits of 3x8x8 images",
    "bench train --model test_benchmark:particular": "does not make logits of 3x224x224 images: only gray images",
    "bench model --input 3x224": "'3x224' is not CxHxW",
    "bench model --model nothing": "unknown model 'nothing'",
    "bench model --model torch.nn:Dropout2d --plot no/such/folder/file": "is not a file in a folder that exists",
    "bench model --model resnet18 --input 4x32x32": "does not take 4x32x32 images",
    "bench model --model torch.nn:Identity --match other": "no row's name contains 'other'",
    "bench pool --json no/such/folder/file": "is not a file in a folder that exists",
    "bench pool --before no/such.json": "is not a file that --json wrote",
    "bench conv --before README.md": "is not a file that --json wrote",
    "bench reorder --size 1x99999999x9999x9999": "1x99999999x9999x9999 f32 does not fit into memory: ",
    "bench reorder --size 99999999x99999999x9999x9999": "does not fit into memory: Storage size calculation overflowed",
    "bench pool --batch 2147483647": "N=2147483647 does not fit into memory: ",
    "bench reduce --batch 2147483647": "N=2147483647 does not fit into memory: ",
    "bench model --model test_benchmark:tiny --batch 2147483647": "N=2147483647 does not fit into memory: ",
    "bench train --model test_benchmark:tiny --batch 2147483647": "N=2147483647 does not fit into memory: ",
}


@pytest.mark.parametrize("command", WRONG)
def test_errors(command, error_of):
    assert WRONG[command] in error_of(command)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("torch_blocked: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
        RuntimeError("numel: integer multiplication overflow"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_what_does_not_fit_into_memory_is_one_line(error):
    def measure(case, rounds):
        raise error

    case = pool.Case(*pool.TABLE[0], 7)
    with pytest.raises(report.UsageError, match=r"^resnet max_pool .*, N=7 does not fit into memory: .") as raised:
        report.rows_of(case, measure, 1)
    assert one_line(raised)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), KeyError("name"), report.UsageError("wrong")])
def test_other_errors_of_a_benchmark_are_not_hidden(error):
    def measure(case, rounds):
        raise error

    with pytest.raises(type(error)) as raised:
        report.rows_of(pool.Case(*pool.TABLE[0], 7), measure, 1)
    assert raised.value is error


def test_a_file_that_cannot_be_written_is_told_before_the_run(error_of, tmp_path, monkeypatch):
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    (tmp_path / "folder").mkdir()
    command = "bench pool --json"
    assert "argument --json" in (error := error_of(f"{command} {'x' * 300}")) and "File name too long" in error
    assert "is not a file in a folder" in error_of(f"{command} {tmp_path / 'folder'}")
    assert "is not a file in a folder" in error_of(f"{command} {kept / 'in_a_file'}")
    for refused, file in ((kept, kept), (tmp_path, tmp_path / "new.json")):
        # Not by permissions: root may write everywhere.
        monkeypatch.setattr(report.os, "access", lambda path, mode, refused=refused: path != refused)
        error = error_of(f"{command} {file}")
        assert "argument --json" in error and "cannot be written: Permission denied" in error
    assert kept.read_text() == "{}" and not (tmp_path / "new.json").exists()


def test_a_file_that_cannot_be_written_after_the_run(error_of, tmp_path, monkeypatch):
    file = tmp_path / "rows.json"

    def measure(case, rounds):
        file.mkdir(exist_ok=True)
        return {"name": case.name}

    monkeypatch.setattr(pool, "measure", measure)
    error = error_of(f"bench pool --json {file}")
    assert "error: --json: " in error and "Is a directory" in error


def test_a_pipe_that_is_closed_while_rows_are_written(tmp_path, monkeypatch):
    """It is no wrong file: `main` ends without a word."""

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(Path, "write_text", closed)
    with pytest.raises(BrokenPipeError):
        report.write_json(tmp_path / "rows.json", {})


@pytest.mark.parametrize("command", ["info", "show nChw16c 2x16x5x4"])
def test_a_pipe_that_is_closed_ends_a_command_without_a_word(command):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_blocked", *command.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


# ---- the package


def test_an_installed_package_has_it_all(tmp_path):
    # egg_info of its own: one that is left from an earlier build remembers files that are no longer named.
    base, lib = tmp_path / "egg", tmp_path / "lib"
    base.mkdir()
    commands = ["egg_info", "--egg-base", str(base), "build_py", "--build-lib", str(lib)]
    subprocess.run([sys.executable, "setup.py", "-q", *commands], cwd=ROOT, capture_output=True, check=True)
    ours = {p.relative_to(ROOT) for suffix in ("py", "json") for p in (ROOT / "torch_blocked").rglob(f"*.{suffix}")}
    assert {p.relative_to(lib) for p in lib.rglob("*.*")} == ours
