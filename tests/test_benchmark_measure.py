"""The benchmarks' figures, of known times: samples, medians, ratios, means."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import pytest

from torch_blocked.benchmark import conv, measure, report


class Clock:
    """A clock that stands still but where a run moves it."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def run(self, name: str, *seconds: float) -> measure.Run:
        """Takes the given times in turn."""
        turn = itertools.cycle(seconds)

        def call() -> None:
            self.now += next(turn)
            self.log.append(name)

        return call


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1.0)
    monkeypatch.setattr(measure, "WARMED_SECONDS", 10.0)
    monkeypatch.setattr(measure, "perf_counter", lambda: made.now)
    return made


# Short calls are timed together and after one untimed, lasting ones alone and at once.
@pytest.mark.parametrize("seconds, calls", [(0.01, 101), (0.3, 4), (0.9, 2), (7.0, 2), (12.0, 1)])
def test_calls_of_a_sample(clock, seconds, calls):
    run = clock.run("a", seconds)
    assert measure.calibrate(run) == pytest.approx(seconds)
    before = len(clock.log)
    assert measure.samples({"a": run}, rounds=1)["a"] == [pytest.approx(seconds)]
    assert len(clock.log) == 2 * before + calls


def test_all_are_warmed_or_none(clock):
    runs = {"short": clock.run("s", 7), "long": clock.run("l", 12)}
    measure.samples(runs, rounds=2)
    assert "".join(clock.log[6:]) == "ssllllss"


def test_medians_of_interleaved_rounds(clock):
    # Three calls calibrate; the rounds take what is left of the cycle.
    runs = {"a": clock.run("a", 20, 20, 20, 50, 90, 40), "b": clock.run("b", 30), "c": clock.run("c", 80)}
    assert measure.medians(runs, rounds=3) == {"a": 50, "b": 30, "c": 80}
    assert "".join(clock.log[9:]) == "acbcabcba"


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde", "abcdef", "abcdefg"])
def test_each_follows_every_other_equally_often(names):
    squares = 1 if len(names) % 2 == 0 else 2
    order = "".join(measure.in_turn(names, squares * len(names)))
    rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(turn) == list(names) for turn in rounds)
    pairs = Counter(pair for turn in rounds for pair in itertools.pairwise(turn))
    assert pairs == {pair: squares for pair in itertools.permutations(names, 2)}


def test_ratios_of_fake_times(bench, monkeypatch):
    times = {"blocked": 2e-3, "nchw": 8e-3, "channels_last": 3e-3, "mkldnn": 5e-3}
    monkeypatch.setattr(conv, "medians", lambda runs, rounds: times)
    monkeypatch.setattr(conv, "peak_gflops", lambda: 0.5)
    text, found = bench("conv", "--layer", "ic16ih8oc16kh1")
    expected = {"ms": 2.0, "vs_nchw": 4.0, "vs_channels_last": 1.5, "vs_mkldnn": 2.5, "vs_best": 1.5}
    assert {key: found["rows"][0][key] for key in expected} == pytest.approx(expected)
    gflops = 2 * 16 * 16 * 64 / 2e-3 / 1e9
    assert found["rows"][0]["gflops"] == pytest.approx(gflops)
    assert found["rows"][0]["of_peak"] == pytest.approx(gflops / 0.5)
    assert re.search(r"layers +N=1 +2\.50 / 2\.50 +1\.50 / 1\.50", text)


def test_summaries():
    rows = [
        {"set": "s", "n": n, "ms": 1.0, "vs_mkldnn": a, "vs_best": b}
        for n, a, b in ((1, 1, 0.5), (1, 4, 2), (16, 3, 3))
    ]
    lines = conv.summaries([*rows, {"set": "s", "n": 16, "note": "skipped"}])
    assert [line.split() for line in lines[2:]] == [
        ["s", "N=1", "2.00", "/", "1.00", "1.00", "/", "0.50"],
        ["s", "N=16", "3.00", "/", "3.00", "3.00", "/", "3.00"],
    ]
    assert math.isclose(report.geometric_mean([2, 4, 8]), 4)
    assert conv.summaries([]) == []


def test_throughput():
    row = report.throughput({"blocked": 0.5, "memcpy": 0.25}, 10**9)
    assert row == {"ms": 500.0, "gbytes_per_s": 2.0, "vs_memcpy": 0.5}
