"""`bench memory`: each kind in a process of its own, and what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torch_blocked.__main__ import main
from torch_blocked.benchmark import apart, machine, memory, model
from torch_blocked.benchmark.model import Case
from torch_blocked.benchmark.models import factory


@pytest.fixture
def children_import_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
def test_memory(bench, children_import_tests):
    text, found = bench("memory", "--model", "test_benchmark:tiny", "--batch", "2", "--input", "3x9x8")
    (row,) = found["rows"]
    assert (row["name"], row["n"], row["input"]) == ("test_benchmark:tiny", 2, "3x9x8")
    assert row["parameters_mb"] == pytest.approx(4 * (3 * 17 * 9 + 17 + 2 * 17 + 17 * 5 + 5) / 1e6)
    assert row["never_vs_plain"] == row["never_mb"] / row["plain_mb"]
    assert all(row[f"{kind}_mb"] is not None for kind in ("traced", "inductor", "auto"))
    assert "/plain" in text and "traced" in text


def test_memory_beside_that_of_an_earlier_run(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "measured", lambda module, kind, *_: {f"{kind}_mb": {"never": 6.0}.get(kind, 9.0)})
    row = {"name": "test_benchmark:tiny", "n": 2, "input": "3x9x8", "never_mb": 8.0, "auto_mb": 4.0}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"rows": [{**row, "n": 1, "never_mb": 0.0}, row]}))
    command = "memory", "--model", "test_benchmark:tiny", "--batch", "1", "2", "--threads", "1", "--before", str(file)
    text, found = bench(*command, "--input", "3x9x8")
    nothing, half = found["rows"]
    assert "never_vs_before" not in nothing and nothing["auto_vs_before"] == 9 / 4  # nothing was counted
    assert (half["never_vs_before"], half["auto_vs_before"]) == (6 / 8, 9 / 4)
    assert re.search(r"auto +/before +auto's", text) and re.search(r"0\.75 +2\.25 *$", text, re.MULTILINE)
    _, found = bench(*command, "--input", "3x8x8")
    assert not any("never_vs_before" in row for row in found["rows"])


@pytest.mark.slow
def test_what_a_model_refuses_is_one_line(children_import_tests, capsys):
    with pytest.raises(SystemExit, match="2"):
        main("bench memory --model test_benchmark:tiny --batch 1 --input 4x9x8".split())
    error = capsys.readouterr().err
    assert "tiny" in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.slow
def test_memory_of_a_contestant(children_import_tests):
    case = Case("test_benchmark:tiny", factory("test_benchmark:tiny"), 4, (3, 900, 800))
    row = apart.measured(model.__name__, "nchw", *model.words_of(case))
    assert row.keys() == {"peak_mb"}
    convolved = 4 * 4 * 17 * 898 * 798 / 1e6
    assert convolved < row["peak_mb"] < 5 * convolved


@pytest.mark.parametrize("kind", ["plain", "never"])
def test_without_figures_of_the_system(kind, monkeypatch):
    monkeypatch.setattr(machine, "peak_memory", lambda: None)
    monkeypatch.setattr(machine, "trim_memory", lambda: None)
    case = Case("tiny", factory("test_benchmark:tiny"), 1, (3, 9, 8))
    assert memory.peak_of(kind, case, 1).keys() == {"parameters_mb"}


def test_contestant_without_figures_of_the_system(monkeypatch):
    monkeypatch.setattr(machine, "peak_memory", lambda: None)
    monkeypatch.setattr(machine, "trim_memory", lambda: None)
    assert model.peak_of("blocked", Case("tiny", factory("test_benchmark:tiny"), 1, (3, 9, 8))) == {}
