"""The fallback law: without a blocked implementation the plain tensor's answer, counted, and as loud as asked for."""

import copy
import faulthandler
import multiprocessing
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, dense
from torch import Tensor, nn

import torch_blocked as tb

FORMATS = [tb.nChw16c, tb.nChw8c, tb.format("acdB4b"), tb.format("aBcd2b4b")]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are too small to share between threads, which would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def image(channels=17, fmt=tb.nChw16c):
    return torch.randn(2, channels, 4, 5).to(fmt)


def cases(table):
    """A parametrised argument `case` over the values of a table, named by its keys."""
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))


def plain_copies(args):
    """The arguments with a plain copy of each tensor, also within lists; the same tensor has one copy."""
    copies = {}

    def copied(a):
        if isinstance(a, (list, tuple)):
            return type(a)(map(copied, a))
        return copies.setdefault(id(a), dense(a).clone()) if isinstance(a, Tensor) else a

    return [copied(a) for a in args]


def check(f, *args, **tolerances):
    """Plain and blocked arguments get the plain ones' answer, and are afterwards what those are; returns the answer."""
    plain = plain_copies(args)
    expected, actual = f(*plain), f(*args)
    assert_same(actual, expected, equal_nan=True, **tolerances)
    assert_same(list(args), plain, equal_nan=True, **tolerances)
    return actual


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
    "list": lambda x: torch._foreach_norm([x, x]),
    "out": lambda x: torch.cumsum(x, 1, out=x),
    "inference": lambda x: torch.inference_mode()(torch.logcumsumexp)(x, 1),
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
    "list": lambda x: torch._foreach_norm([x, x]),
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


# ---- What is written to

IN_PLACE = {
    "cumsum": lambda x: x.cumsum_(1),
    "masked_fill": lambda x: x.masked_fill_(torch.arange(5) > 2, 3.0),
    "masked_fill by a blocked mask": lambda x: x.masked_fill_(x > 0, 3.0),
    "index_fill": lambda x: x.index_fill_(1, torch.tensor([0, 16]), 2.0),
    "index_add": lambda x: x.index_add_(1, torch.tensor([3]), torch.ones(2, 1, 4, 5)),
    "index_put": lambda x: x.index_put_((torch.tensor([0]), torch.tensor([16])), torch.tensor(5.0)),
    "scatter": lambda x: x.scatter_(1, torch.full((2, 1, 4, 5), 16), 9.0),
    "tril": lambda x: x.tril_(),
    "hardshrink": lambda x: x.lerp_(F.hardshrink(x), 0.5),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "rrelu": lambda x: F.rrelu(x, inplace=True),
    "prelu": lambda x: x.copy_(F.prelu(x, torch.full((17,), 0.3))),
    "floor_divide by keyword": lambda x: x.div_(other=x.abs() + 1, rounding_mode="floor"),
    "sub by keyword": lambda x: x.sub_(other=torch.ones(5)),
    "index_copy": lambda x: x.index_copy_(2, torch.tensor([1]), torch.ones(2, 17, 1, 5)),
    "put": lambda x: x.put_(torch.tensor([1, 400]), torch.tensor([3.0, 4.0])),
    "erfinv of bounded": lambda x: x.tanh_().erfinv_(),
    "sqrt": lambda x: x.abs_().sqrt_(),
    "resize to the same size": lambda x: x.resize_(x.shape),
    "requires_grad": lambda x: x.requires_grad_().requires_grad_(False),
}


@cases(IN_PLACE)
def test_in_place_writes_into_the_blocked_tensor(case):
    for fmt in FORMATS:
        x = image(fmt=fmt)
        physical, version = x.physical, x.physical._version
        y = check(case, x)
        if y.shape == x.shape:
            assert y is x
        assert x.physical is physical
        assert x.format == image(fmt=fmt).format
        if case not in (IN_PLACE["requires_grad"], IN_PLACE["resize to the same size"]):
            assert x.physical._version > version


@cases(
    {
        "transpose": lambda x: x.transpose_(2, 3),
        "transpose of a view": lambda x: (x[:, :, :3, :3].transpose_(2, 3), x)[1],
        "swapaxes": lambda x: x.swapaxes_(-1, -2),
        "squeeze nothing": lambda x: x.squeeze_(2),
    }
)
def test_in_place_change_of_shape_moves_no_values(case):
    """Or is refused; of a view it leaves the tensor that it is of."""
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c)
    alias, before = x.detach(), x.to_dense()
    try:
        check(case, x)
    except RuntimeError:
        assert_same(x, before)
    assert_same(alias, before)


def test_in_place_of_a_view_reaches_the_tensor():
    def write(x):
        x[:, 16:].cumsum_(2)
        x[1:, :, ::2].masked_fill_(torch.ones(5) > 0, 7.0)
        return x

    check(write, image())


OUTS = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "mul of plain ones": lambda x, out: torch.mul(dense(x), 2, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out),
    "onto itself": lambda x, out: torch.exp(out, out=out),
    "onto its input": lambda x, out: torch.cumsum(x, 1, out=x),
    "clamp": lambda x, out: torch.clamp(x, 0, 1, out=out),
    "cat": lambda x, out: torch.cat([x[:1], x[1:]], out=out),
    "where": lambda x, out: torch.where(x > 0, x, out, out=out),
    "sigmoid": lambda x, out: torch.sigmoid(x, out=out),
    "promoted": lambda x, out: torch.add(x.int(), 1, out=out),
    "avg_pool": lambda x, out: torch._C._nn.avg_pool2d(x, 1, out=out),
}


@cases(OUTS)
def test_out_writes_into_the_blocked_tensor(case):
    for fmt in FORMATS:
        x, out = image(), image(fmt=fmt)
        physical, version = out.physical, out.physical._version
        y = check(case, x, out)
        assert y is (x if case is OUTS["onto its input"] else out)
        assert out.physical is physical
        assert (out.physical._version > version) == (y is out)


@cases({name: f for name, f in OUTS.items() if name != "onto itself"})
def test_plain_out_of_blocked_inputs(case):
    x, out = image(), torch.randn(2, 17, 4, 5)
    assert not isinstance(check(case, x, out), tb.BlockedTensor) or case is OUTS["onto its input"]


def test_several_outs():
    def sort(x, values, indices):
        return torch.sort(x, 1, out=(values, indices))

    x, values, indices = image(), image(), image().long()
    y = check(sort, x, values, indices)
    assert y[0] is values
    assert y[1] is indices

    x, values, indices = image(), torch.zeros(2, 4, 5), torch.zeros(2, 4, 5).to(tb.nCw16c).long()
    check(lambda x, v, i: torch.max(x, 1, out=(v, i)), x, values, indices)


def test_out_of_another_size_is_refused():
    x, out = image(), image(16)
    before = out.to_dense()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="resize"):
        warnings.simplefilter("ignore")
        torch.cumsum(x, 1, out=out)
    assert_same(out, before)
    for write in (lambda: x.resize_(3, 4), lambda: x.unsqueeze_(0), lambda: x.transpose_(1, 2), lambda: x.squeeze_(0)):
        before = x.to_dense()
        try:
            write()
        except RuntimeError:
            assert_same(x, before)
        else:
            assert x.physical.shape == x.blocking.physical_shape(tuple(x.shape))


# ---- Lists

LISTS = {
    "foreach add": lambda *xs: torch._foreach_add(list(xs), 1.0),
    "foreach add of lists": lambda *xs: torch._foreach_add(list(xs), list(reversed(xs)), alpha=2),
    "foreach add in place": lambda *xs: torch._foreach_add_(list(xs), 1.0),
    "foreach mul in place": lambda *xs: torch._foreach_mul_(list(xs), [1.0, 2.0, 3.0]),
    "foreach zero": lambda *xs: torch._foreach_zero_(list(xs)),
    "foreach copy": lambda *xs: torch._foreach_copy_(list(xs), list(reversed(xs))),
    "foreach lerp": lambda *xs: torch._foreach_lerp_(list(xs), [x + 1 for x in xs], 0.3),
    "foreach norm": lambda *xs: torch._foreach_norm(list(xs)),
    "stack": lambda *xs: torch.stack(xs),
    "stack of channels": lambda *xs: torch.stack(xs, 2),
    "block_diag": lambda *xs: torch.block_diag(*(x[0, 0] for x in xs)),
    "einsum": lambda *xs: torch.einsum("nchw,nchw,nchw->nc", *xs),
    "dstack": lambda *xs: torch.dstack(xs),
    "broadcast_tensors": lambda *xs: torch.broadcast_tensors(*xs),
    "meshgrid": lambda *xs: torch.meshgrid(*(x[0, 0, 0] for x in xs), indexing="ij"),
    "index by blocked tensors": lambda *xs: xs[0][xs[1] > 0],
    "index by some": lambda *xs: xs[0][:, torch.tensor([1, 16]), None, torch.tensor([0, 2])],
    "index_put": lambda *xs: xs[0].index_put_((xs[1] > 0,), torch.tensor(3.0)),
    "parameters to vector": lambda *xs: nn.utils.parameters_to_vector(xs),
    "clip_grad_norm": lambda *xs: nn.utils.get_total_norm(list(xs)),
    "cdist": lambda *xs: torch.cdist(xs[0], xs[1]),
    "histogram": lambda *xs: torch.histogram(xs[0], torch.linspace(-2, 2, 5)),
    "split and cat": lambda *xs: torch.cat([*xs[0].split(3, 1), *xs[1].split(2, 1)], 1),
}


@cases(LISTS)
def test_lists_of_tensors(case):
    check(case, image(), image(fmt=tb.nChw8c), torch.randn(2, 17, 4, 5))
    check(case, torch.randn(2, 17, 4, 5), image(), image())


def test_a_list_that_holds_a_tensor_twice():
    x = image()
    check(lambda x, y: torch._foreach_add_([x, y, x], 1.0), x, image())


# ---- Composite operators: inference_mode delivers them whole

WEIGHT = torch.randn(17, 17, 3, 3) / 10
COMPOSITES = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "conv2d same": lambda x: F.conv2d(x, WEIGHT, padding="same"),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHT),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17)),
    "batch_norm train": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17), training=True),
    "instance_norm": lambda x: F.instance_norm(x),
    "group_norm": lambda x: F.group_norm(x, 17),
    "layer_norm": lambda x: F.layer_norm(x, (4, 5)),
    "linear": lambda x: F.linear(x, torch.ones(3, 5)),
    "matmul": lambda x: x @ torch.ones(5, 2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(-1, 5),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "relu6": F.relu6,
    "selu": F.selu,
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "chunk": lambda x: x.chunk(2, 1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "contiguous": lambda x: x.contiguous(),
    "std": lambda x: x.std(),
    "softmax": lambda x: x.softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 4, 5).long()),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(2, 17, 4, 5)),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :4], 2),
    "to": lambda x: x.to(torch.float64),
    "ones_like": torch.ones_like,
    "item": lambda x: x.sum().item() * 0,
    "square": torch.square,
    "in place": lambda x: x.square_().add_(1),
    "set item": lambda x: x.__setitem__((slice(None), 3), 5.0),
}


def seeded(f):
    def from_seed(*args):
        torch.manual_seed(7)
        return f(*args)

    return from_seed


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
@cases(COMPOSITES)
def test_composites_in_inference_mode(case, inside):
    for fmt in FORMATS:
        x = image(fmt=fmt)
        with torch.inference_mode():
            check(seeded(case), x.clone() if inside else x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_composites_of_a_network_do_not_fall_back(mode):
    names = (
        "conv2d",
        "batch_norm",
        "dropout",
        "flatten",
        "reshape",
        "max_pool2d",
        "adaptive_avg_pool2d",
        "relu6",
        "selu",
    )
    with mode(), tb.fallback("error"):
        for name in names:
            COMPOSITES[name](image())


# ---- Gradients


def small_network(channels=17, dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.Hardswish(),
        nn.Dropout(dropout),
        nn.Conv2d(2 * channels, 2 * channels, 3, groups=2 * channels, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 5),
    )


def assert_same_parameters(actual, expected, **tolerances):
    for (name, a), (_, e) in zip(actual.state_dict().items(), expected.state_dict().items(), strict=True):
        assert_same(a, e, msg=lambda m: f"{name}: {m}", **tolerances)  # noqa: B023


def assert_same_gradients(actual, expected, **tolerances):
    for (name, a), e in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert a.grad is not None, name
        assert_same(a.grad, e.grad, msg=lambda m: f"{name}: {m}", **tolerances)  # noqa: B023


CLOSE = dict(rtol=1e-4, atol=1e-5)  # gradients of sums in another order, through several layers


@pytest.mark.parametrize("channels", [1, 15, 16, 17])
@pytest.mark.parametrize("fmt", [tb.blocked, tb.nChw8c, tb.nChw16c], ids=repr)
def test_gradients_of_a_network(isa, fmt, channels):
    plain = small_network(channels)
    model = copy.deepcopy(plain).to(fmt)
    x = torch.randn(4, 3, 12, 12)
    inputs = []
    for net, convert in ((plain, False), (model, True)):
        leaf = x.clone().requires_grad_()
        F.cross_entropy(net(leaf.to(fmt) if convert else leaf), torch.tensor([0, 1, 2, 3])).backward()
        inputs.append(leaf)
    assert isinstance(model[4].weight, tb.BlockedTensor)
    assert_same(inputs[1].grad, inputs[0].grad, **CLOSE)
    assert_same_gradients(model, plain, **CLOSE)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


@pytest.mark.parametrize("built", ["before", "after"])
@cases(OPTIMIZERS)
def test_optimizer_steps(case, built):
    """In double precision: Adam divides by the size of gradients, and so enlarges differences of order of summation."""
    plain = small_network().double()
    model = copy.deepcopy(plain)
    early = case(model.parameters())
    model.to(tb.nChw16c)
    optimizers = {plain: case(plain.parameters()), model: early if built == "before" else case(model.parameters())}
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(4, 3, 12, 12).double(), torch.randint(5, (4,))
        for net, optimizer in optimizers.items():
            optimizer.zero_grad(set_to_none=step != 1)
            F.cross_entropy(net(x), target).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    assert isinstance(model[4].weight, tb.BlockedTensor)
    assert_same_parameters(model, plain)


def test_sgd_step_moves_the_version_of_the_weights():
    model = small_network().to(tb.nChw16c)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight = model[4].weight
    version = weight.physical._version
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    optimizer.step()
    assert weight.physical._version > version


def test_training_with_dropout_in_single_precision():
    plain = small_network(dropout=0.3)
    model = copy.deepcopy(plain).to(tb.nChw16c)
    x, target = torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 3])
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x), target).backward()
            optimizer.step()
    assert_same_parameters(model, plain, rtol=1e-3, atol=1e-4)
    plain.eval(), model.eval()
    assert_same(model(x), plain(x), rtol=1e-3, atol=1e-3)


GRADIENTS = {
    "convolution": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "convolution in groups": lambda x: F.conv2d(x, WEIGHT[:, :1], groups=17),
    "batch_norm": lambda x: F.batch_norm(x, None, None, torch.linspace(0.5, 2, 17), training=True),
    "batch_norm eval": lambda x: F.batch_norm(x, torch.zeros(17), torch.full((17,), 2.0)),
    "relu": F.relu,
    "relu in place": lambda x: (x * 1).relu_(),
    "relu6": lambda x: F.relu6(x * 5),
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": lambda x: F.hardswish(x * 3),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "pow": lambda x: x.abs().pow(1.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "dropout": seeded(lambda x: F.dropout(x, 0.4)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_avg_pool2d of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "add": lambda x: x + x * 2,
    "a value a channel": lambda x: x * torch.linspace(0, 1, 17).view(17, 1, 1),
    "itself broadcast": lambda x: x * x.mean((2, 3), keepdim=True),
    "div": lambda x: x / (x.abs() + 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "maximum": lambda x: torch.maximum(x, -x * 0.3),
    "cat": lambda x: torch.cat([x, x[:, :16]], 2 if x.size(1) == 16 else 1),
    "cat of rows": lambda x: torch.cat([x, x * 2], 2),
    "split": lambda x: x.split(16, 1)[1],
    "chunk": lambda x: x.chunk(2, 2)[0] * x.chunk(2, 2)[1],
    "slice": lambda x: x[:, 16:, ::2],
    "slice in a block": lambda x: x[:, 1:3],
    "image": lambda x: x[1],
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(0, 2, 3, 1) * torch.linspace(0, 1, 17),
    "transpose": lambda x: x.transpose(2, 3),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "mean": lambda x: x.mean((2, 3)),
    "sum of channels": lambda x: x.sum(1),
    "amax": lambda x: x.amax((2, 3)),
    "amax of all": lambda x: x.amax(),
    "softmax": lambda x: x.softmax(1),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "mse_loss of a blocked sum": lambda x: F.mse_loss(x, x.detach() * 2, reduction="sum"),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 4, 4).long()),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "copy in place": lambda x: torch.zeros_like(x).copy_(x),
    "written slice": lambda x: written(x * 1),
    "written rows": lambda x: written(x * 1, 2, 1),
    "multiplied in place": lambda x: (x * 1).mul_(x.sigmoid()),
    "zeroed slice": lambda x: written(x * 1, value=0),
}


def written(x, dim=1, start=16, value=3):
    """`x` with a part multiplied in place."""
    x.narrow(dim, start, x.size(dim) - start).mul_(value)
    return x


@pytest.mark.parametrize("leaf", ["plain", "blocked"])
@cases(GRADIENTS)
def test_gradient(case, leaf):
    for fmt in (tb.nChw16c, tb.nChw8c, tb.format("acdB4b")):
        x = torch.randn(2, 17, 4, 4)
        weights, grads = None, []
        for is_blocked in (False, True):
            torch.manual_seed(5)
            start = (x.to(fmt) if is_blocked and leaf == "blocked" else x).detach().clone().requires_grad_()
            y = case(start.to(fmt) if is_blocked else start)
            weights = torch.randn(y.shape, dtype=y.dtype) if weights is None else weights
            (y * weights).sum().backward()
            grads.append(start.grad)
        assert_same(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def test_gradient_of_a_gradient():
    x = torch.randn(2, 17, 4, 4)
    answers = []
    for is_blocked in (False, True):
        start = x.clone().requires_grad_()
        y = F.silu(F.conv2d(start.to(tb.nChw16c) if is_blocked else start, WEIGHT, padding=1)).sum()
        (grad,) = torch.autograd.grad(y, start, create_graph=True)
        answers.append(torch.autograd.grad(grad.square().sum(), start)[0])
    assert_same(answers[1], answers[0], **CLOSE)


def test_gradient_accumulates_and_is_of_the_leaf():
    x = image().requires_grad_()
    for n in (1, 2):
        (x * 3).sum().backward()
        assert x.grad.shape == x.shape
        assert_same(x.grad, torch.full((2, 17, 4, 5), 3.0 * n))


def test_in_place_on_a_leaf_that_needs_a_gradient_is_refused():
    x = image().requires_grad_()
    before = x.detach().to_dense()
    for write in (lambda: x.add_(1), lambda: x.cumsum_(1), lambda: x.relu_(), lambda: x.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="leaf"):
            write()
    assert_same(x.detach(), before)
    with torch.no_grad():
        x.add_(1)
    assert_same(x.detach(), before + 1)


def test_what_is_needed_for_a_gradient_may_not_be_written():
    x = image().requires_grad_()
    y = (x * 1).sigmoid()
    z = y.sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_parts_of_a_tensor_that_needs_a_gradient_may_not_be_written():
    """As for plain tensors: several views made at once."""
    x = image(32).requires_grad_()
    for parts in (lambda: (x * 1).split(16, 1), lambda: (x * 1).chunk(2, 2)):
        with pytest.raises(RuntimeError, match="view"):
            parts()[0].mul_(2)


# ---- What reads memory itself, past the dispatcher

READERS = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "numpy function": lambda x: np.add(x, 1),
    "array on the right": lambda x: x + np.ones(5, dtype=np.float32),
    "dlpack": lambda x: torch.from_dlpack(x),
    "numpy by dlpack": lambda x: np.from_dlpack(x),
    "apply_": lambda x: x.apply_(lambda v: v + 1),
    "map_": lambda x: x.map_(x, lambda a, b: a + b),
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory of a module": lambda x: nn.Conv2d(17, 17, 1).to(tb.blocked).share_memory() and x,
    "tensor_split at a tensor": lambda x: x.tensor_split(torch.tensor([1, 2]), 1),
    "tensor_split at a blocked tensor": lambda x: x.tensor_split(torch.tensor([1, 2]).to(tb.blocked), 1),
    "item of a storage": lambda x: x.untyped_storage()[0] is not None and x,
    "memoryview": lambda x: memoryview(x),
}


@cases(READERS)
def test_what_reads_memory_itself_answers_or_refuses(case):
    """Never a crash: it runs in a child."""

    def run():
        faulthandler.disable()
        try:
            check(lambda x: list(y) if isinstance(y := case(x), tuple) else torch.as_tensor(y), image())
        except (RuntimeError, TypeError, NotImplementedError, BufferError) as error:
            assert str(error)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode == 0


# ---- Autocast


def test_autocast_runs_convolutions_in_bfloat16():
    x = image()
    with torch.autocast("cpu"):
        y = check(lambda x: F.conv2d(x, WEIGHT, padding=1), x)
    assert y.dtype == torch.bfloat16
