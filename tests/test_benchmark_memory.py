"""`bench memory`: each kind in a process of its own, and what it prints."""

from __future__ import annotations

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
    assert (row["name"], row["n"]) == ("test_benchmark:tiny", 2)
    assert row["parameters_mb"] == pytest.approx(4 * (3 * 17 * 9 + 17 + 2 * 17 + 17 * 5 + 5) / 1e6)
    assert row["never_vs_plain"] == row["never_mb"] / row["plain_mb"]
    assert all(row[f"{kind}_mb"] is not None for kind in ("traced", "inductor", "auto"))
    assert "/plain" in text and "traced" in text


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
