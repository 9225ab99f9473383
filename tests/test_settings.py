"""Settings of the process: `tb.fallback`, `tb.fuse` and `tb.winograd`, by plain calls and in blocks that overlap."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import torch_blocked as tb
from torch_blocked import settings

# A setting, how its value is read, its default, two others and bad arguments.
CASES = {
    "fallback": (tb.fallback, lambda: tb.dispatch.fallback._State.policy, ("warn", "error", "allow"), ("loud",)),
    "fuse": (tb.fuse, lambda: tb.fuse._now, ("auto", "never", "auto"), ("always",)),
    "winograd": (tb.winograd, lambda: tb.winograd._now[0], ("auto", "never", "f4"), ("auto", -1)),
}


@pytest.fixture(params=CASES)
def case(request):
    """A case; the setting has its default, and afterwards nothing is left of what blocks set."""
    setting, now, (default, first, second), bad = CASES[request.param]
    with setting(default):
        entries = list(setting._entries)
        yield setting, now, (default, first, second), bad
        assert [e for e in setting._entries if e.is_block] == [e for e in entries if e.is_block]
    assert not [e for e in setting._entries if e.is_block and e not in entries]


@pytest.fixture
def elsewhere():
    """Calls in another thread: `elsewhere(f, *args)`."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda f, *args: pool.submit(f, *args).result(60)


@pytest.mark.parametrize("same", [True, False], ids=["same value", "others"])
def test_blocks_of_two_threads(case, elsewhere, same):
    """The thread that enters first leaves first: neither loses its value meanwhile, and nothing is left of them."""
    setting, now, (default, first, second), _ = case
    mine, theirs = setting(first), elsewhere(setting, first if same else second)
    mine.__enter__()
    elsewhere(theirs.__enter__)
    mine.__exit__(None, None, None)
    assert now() == (first if same else second)
    elsewhere(theirs.__exit__, None, None, None)
    assert now() == default


def test_one_object_in_two_threads(case, elsewhere):
    """Each thread takes out what it entered itself, and the last that entered stays in force."""
    setting, now, (default, first, second), _ = case
    shared = setting(first)
    with shared:
        other = elsewhere(setting, second)
        elsewhere(other.__enter__)
        elsewhere(shared.__enter__)
    assert now() == first
    elsewhere(shared.__exit__, None, None, None)
    assert now() == second
    elsewhere(other.__exit__, None, None, None)
    assert now() == default


def test_left_in_another_thread(case, elsewhere):
    setting, now, (default, first, _), _ = case
    block = setting(first)
    block.__enter__()
    elsewhere(block.__exit__, None, None, None)
    assert now() == default
    block.__exit__(None, None, None)  # there is nothing to leave
    assert now() == default


def test_nested_and_entered_again(case):
    setting, now, (default, first, second), _ = case
    block = setting(first)
    for _ in range(2):
        with block:
            with setting(second):
                with block:
                    assert now() == first
                assert now() == second
            assert now() == first
        assert now() == default


def test_plain_calls(case):
    """Within a block they are undone with it; outside they set for good, also after an object that waits its turn."""
    setting, now, (default, first, second), _ = case
    with setting(first):
        setting(second)
        assert now() == second
        with setting(first):
            setting(default)
        assert now() == second
        setting(default)
    assert now() == default
    block = setting(first)
    setting(second)
    with block:
        assert now() == first
    assert now() == second


def test_plain_calls_in_two_threads(case, elsewhere):
    """They go with the block of their own thread, else with the last."""
    setting, now, (default, first, second), _ = case
    mine, theirs = setting(first), elsewhere(setting, first)
    mine.__enter__()
    elsewhere(theirs.__enter__)
    elsewhere(setting, second)
    mine.__exit__(None, None, None)
    assert now() == second
    elsewhere(theirs.__exit__, None, None, None)
    assert now() == default
    with setting(first):
        elsewhere(setting, second)
    assert now() == default


def test_an_exception_within(case):
    setting, now, (default, first, second), _ = case
    with pytest.raises(ZeroDivisionError), setting(first):
        setting(second)
        raise ZeroDivisionError
    assert now() == default


def test_bad_values_change_nothing(case):
    setting, now, (_, first, _), bad = case
    with setting(first):
        entries = list(setting._entries)
        with pytest.raises(ValueError):
            setting(*bad)
        assert now() == first and setting._entries == entries


def test_many_plain_calls(case):
    """The list of them has an end; blocks around them are left as ever."""
    setting, now, (default, first, second), _ = case
    with setting(first):
        for _ in range(3 * settings._PLAIN_CALLS_KEPT):
            setting(second)
        assert len(setting._entries) < 2 * settings._PLAIN_CALLS_KEPT and now() == second
    assert now() == default


def test_what_waits_fails_when_a_block_is_left(monkeypatch):
    """The setting is restored all the same."""

    def fail():
        raise MemoryError

    before = tb.fuse._now
    block = tb.fuse("never")
    block.__enter__()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(tb.fuse, "_prepare", staticmethod(fail))
        block.__exit__(None, None, None)
    assert tb.fuse._now == before
