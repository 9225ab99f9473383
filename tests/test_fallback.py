"""The fallback law: what has no blocked implementation is counted, and as loud as asked for."""

import copy
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same
from dispatch_cases import cases
from fallback_cases import image
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


def caught(f):
    """The fallback warnings of `f()`."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    return [w for w in found if issubclass(w.category, tb.FallbackWarning)]


# ---- Policies


def test_allow_is_silent():
    with tb.fallback("allow"):
        assert caught(lambda: image().logcumsumexp(1)) == []


def test_warn_says_each_operator_of_a_line_once():
    x, names = image(), ["logcumsumexp", "cummax"]

    def run():
        for _ in range(3):
            x.logcumsumexp(1)
            x.cummax(1)

    with tb.fallback("warn"):
        found = caught(run)
        assert caught(run) == []
    assert [name for w in found for name in names if name in str(w.message)] == names


def test_each_line_is_warned_at_once():
    x = image()

    def run():
        for _ in range(2):
            x.logcumsumexp(1)
            x.logcumsumexp(1)

    with tb.fallback("warn"):
        first = run.__code__.co_firstlineno
        assert [w.lineno for w in caught(run)] == [first + 2, first + 3]


def test_a_new_policy_warns_anew():
    x = image()
    for _ in range(2):
        with tb.fallback("warn"):
            assert len(caught(lambda: x.logcumsumexp(1))) == 1


def test_an_inner_policy_does_not_make_the_outer_one_repeat_itself():
    x = image()

    def run():
        x.logcumsumexp(1)

    with tb.fallback("warn"):
        assert len(caught(run)) == 1
        with tb.fallback("allow"):
            run()
        assert caught(run) == []


def test_one_line_that_falls_back_by_two_operators_warns_of_both():
    x = image()
    with tb.fallback("warn"):
        assert len(caught(lambda: (x.logcumsumexp(1), x.cummax(1)))) == 2


class Sorted(nn.Module):
    def forward(self, x):
        return x.sort(1).values


# Functions that fall back, and the line of this file that the warning is to name, counted from that of the function.
WARNED_LINES = {
    "method": lambda x: x.logcumsumexp(1),
    "operator": lambda x: torch.ops.aten.logcumsumexp(x, 1),
    "through Python code of torch": lambda x: torch.cdist(x, x),
    "functional": lambda x: F.unfold(x, 2),
    "module of torch": lambda x: nn.Sequential(nn.Unfold(2))(x),
    "traced": lambda x: torch.fx.symbolic_trace(nn.Sequential(nn.Unfold(2)))(x),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(F.unfold, x, 2, use_reentrant=False),
    "indexing": lambda x: x[:, [0]],
    "composite": lambda x: torch.msort(x.transpose(0, 1)),
    "in place": lambda x: x.cumsum_(1),
    "list": lambda x: torch._foreach_mul([x.int(), x.int()], 2),
    "out": lambda x: torch.cumsum(x, 1, out=x),
    "inference": lambda x: torch.inference_mode()(torch.logcumsumexp)(x, 1),
    "made by eval": lambda x: eval("lambda x: f(x, 1)", {"f": torch.logcumsumexp})(x),
}


@cases(WARNED_LINES)
def test_the_warning_is_at_the_users_line(case):
    x = image()
    with tb.fallback("warn"):
        found = caught(lambda: case(x))
    assert found
    for w in found:
        assert (w.filename, w.lineno) == (__file__, case.__code__.co_firstlineno)


def test_the_warning_within_a_module_is_at_the_line_of_its_forward():
    x = image()
    with tb.fallback("warn"):
        found = caught(lambda: nn.Sequential(nn.ReLU(), Sorted())(x))
    assert [(w.filename, w.lineno) for w in found] == [(__file__, Sorted.forward.__code__.co_firstlineno + 1)]


def test_the_warning_of_a_backward_is_at_the_line_of_its_call():
    y = F.softshrink(image().requires_grad_()).sum()

    def run():
        y.backward()

    with tb.fallback("warn"):
        found = caught(run)
    assert {(w.filename, w.lineno) for w in found} == {(__file__, run.__code__.co_firstlineno + 1)}


@pytest.mark.slow
def test_compiling_warns_at_users_lines_alone():
    """PyTorch traces what it compiles through a lambda of its own, made by `eval`."""
    x = image()

    def run():
        return torch.compile(lambda v: v.cummax(1).values + 1, backend="aot_eager")(x)

    with tb.fallback("warn"):
        found = caught(run)
    assert [(w.filename, w.lineno) for w in found] == [(__file__, run.__code__.co_firstlineno + 1)]


def test_the_warning_can_be_made_an_error_and_leaves_the_input():
    x = image()
    before = x.to_dense()
    with tb.fallback("warn"), warnings.catch_warnings():
        warnings.simplefilter("error", tb.FallbackWarning)
        with pytest.raises(tb.FallbackWarning, match="cumsum_"):
            x.cumsum_(1)
    assert_same(x, before)


FORBIDDEN = {
    "out of place": lambda x: x.logcumsumexp(1),
    "in place": lambda x: x.cumsum_(1),
    "in place, no kernel": lambda x: x.index_fill_(1, torch.tensor([0, 16]), 2.0),
    "out": lambda x: torch.cumsum(x, 1, out=x),
    "list": lambda x: torch._foreach_mul([x.int(), x.int()], 2),
    "convolution": lambda x: F.conv2d(x.double(), torch.ones(1, 17, 1, 1).double()),
    "sort": lambda x: x.sort(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "split": lambda x: x.split(3, 1),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "pool": lambda x: F.max_pool3d(x, 2),
    "backward": lambda x: F.softshrink(x.detach().requires_grad_()).sum().backward(),
}


@cases(FORBIDDEN)
def test_error_refuses_and_leaves_the_input(case):
    x = image()
    before, version = x.to_dense(), x.physical._version
    with tb.fallback("error"), pytest.raises(RuntimeError, match=r"aten\.\w+.*fallback"):
        case(x)
    assert_same(x, before)
    assert x.physical._version == version


ALLOWED = {
    "convolution": lambda x: F.conv2d(x, torch.ones(3, 17, 3, 3)),
    "arithmetic": lambda x: (x + x).mul_(2).relu_(),
    "pool": lambda x: F.max_pool2d(x, 2),
    "mean": lambda x: x.mean((2, 3)),
    "flatten": lambda x: x.flatten(1),
    "to_dense": lambda x: x.to_dense(),
    "equal": lambda x: torch.equal(x, x),
    "repr": repr,
    "copy of a value a channel": lambda x: x.copy_(torch.ones(17, 1, 1)),
    "copy of a blocked value a channel": lambda x: x.copy_(torch.ones(1, 17, 1, 1).to(tb.nChw16c)),
    "deepcopy": copy.deepcopy,
    "print": lambda x: f"{x}",
}


@cases(ALLOWED)
def test_error_lets_blocked_implementations_run(case):
    x = image()
    with tb.fallback("error"):
        case(x)


def test_a_policy_is_a_word_of_three():
    with tb.fallback("error"):
        for word in ("ignore", "", None, "ALLOW"):
            with pytest.raises(ValueError, match="allow, warn, error"):
                tb.fallback(word)
        with pytest.raises(RuntimeError, match="fallback"):
            image().logcumsumexp(1)


def test_policies_nest_and_are_restored():
    x = image()

    def is_forbidden():
        try:
            x.logcumsumexp(1)
        except RuntimeError:
            return True
        return False

    with tb.fallback("allow"):
        with tb.fallback("error"):
            assert is_forbidden()
            with tb.fallback("allow"):
                assert not is_forbidden()
            assert is_forbidden()
        assert not is_forbidden()
        with pytest.raises(KeyError), tb.fallback("error"):
            raise KeyError
        assert not is_forbidden()
        tb.fallback("error")  # without `with` it stays
        assert is_forbidden()
    assert not is_forbidden()


def test_a_policy_holds_in_all_threads():
    outcome = []

    def run():
        try:
            image().logcumsumexp(1)
        except RuntimeError as error:
            outcome.append(error)

    with tb.fallback("error"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(outcome) == 1


def test_the_default_is_to_warn():
    code = "import torch, torch_blocked as tb; torch.ones(1, 17, 2, 2).to(tb.nChw16c).logcumsumexp(1)"
    root = str(Path(tb.__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert ran.stderr.count("FallbackWarning") == 1
    assert "<string>:1" in ran.stderr


# ---- Counters


def test_count_by_operator():
    x = image()
    with tb.count() as counts:
        x.logcumsumexp(1)
        x.logcumsumexp(1)
        x.sort(1)
        x.add(1)
    assert counts.fallbacks == {"aten.logcumsumexp.default": 2, "aten.sort.default": 1}
    assert counts.reorders == {"16b -> plain": 3}
    nbytes = (x.physical.numel() + x.numel()) * 4
    assert counts.reorder_bytes == 3 * nbytes


def test_counts_end_with_their_block():
    x = image()
    with tb.count() as counts:
        x.logcumsumexp(1)
    x.logcumsumexp(1)
    assert counts.fallbacks.total() == 1
    with pytest.raises(KeyError), tb.count() as counts:
        raise KeyError
    x.logcumsumexp(1)
    assert counts.fallbacks.total() == 0


def test_counts_nest():
    x = image()
    with tb.count() as outer:
        with tb.count() as first, tb.count() as second:
            x.logcumsumexp(1)
        x.logcumsumexp(1)
    assert [c.fallbacks.total() for c in (outer, first, second)] == [2, 1, 1]


def test_counters_count_until_they_are_reset():
    x, total = image(), tb.counters()
    tb.reset_counters()
    for n in (1, 2):
        x.logcumsumexp(1)
        assert total is tb.counters()
        assert total.fallbacks == {"aten.logcumsumexp.default": n}
    with tb.count() as counts:
        x.logcumsumexp(1)
        tb.reset_counters()
        assert (total.fallbacks, total.reorders, total.reorder_bytes, total.left) == ({}, {}, 0, 0)
    assert counts.fallbacks.total() == 1


def test_all_policies_count():
    x = image()
    with tb.count() as counts:
        for policy in ("allow", "warn", "error"):
            with tb.fallback(policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    x.logcumsumexp(1)
                except RuntimeError:
                    assert policy == "error"
    assert counts.fallbacks.total() == 3


def test_a_plain_argument_reordered_for_a_blocked_one_is_counted():
    x = image()
    with tb.count() as counts:
        x + x.to_dense()
    assert counts.reorders == {"16b -> plain": 1, "plain -> 16b": 1}
    assert counts.left == 1


def test_a_fallback_leaves_nothing_behind():
    """What it makes is freed when it is done, not when the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        y = torch.randn(2, 20, 3, 4).to(tb.nChw16c)
        alive = weakref.ref(y)
        torch.linalg.norm(y[:, 3:18].reshape(2, -1) @ torch.ones(180, 1))
        torch.fft.fft(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_settings_are_entered_again():
    """One object, twice: the second time as the first."""
    x = torch.randn(2, 16, 3, 3).to(tb.nChw16c)
    errors, never, direct = tb.fallback("error"), tb.fuse("never"), tb.winograd("always")
    for setting in (direct, never, errors):
        setting.__exit__()
    for _ in range(2):
        with errors, pytest.raises(RuntimeError, match="fallbacks are errors"):
            torch.cummax(x, 1)
        with tb.fallback("allow"):
            torch.cummax(x, 1)
        for setting, mode in ((never, "never"), (direct, ("always", None))):
            before = setting._now
            with setting:
                assert setting._now == mode
            assert setting._now == before
