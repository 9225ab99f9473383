"""The handlers in C++: the answers of those in Python, and only to the arguments that are theirs."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import one_line, padding_is_zero
from quick_cases import LEFT, TAKEN, conv, image, weight

import torch_blocked as tb
from torch_blocked import _python, library
from torch_blocked.benchmark.models import make_model
from torch_blocked.dispatch import registry

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@contextlib.contextmanager
def asked(handlers=None):
    """Records which operators ask a handler in C++, and whether it answers; only those of `handlers` do."""
    seen = Seen()
    try:
        for func, quick in registry.QUICK.items():
            quick.enabled = handlers is None or func in handlers
        yield seen
        seen.stop()
    finally:
        for quick in registry.QUICK.values():
            quick.enabled = True


class Seen:
    """How often handlers were asked since `clear`, and answered, till `stop`."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.before, self.after = self._counts(), None

    def stop(self):
        self.after = self._counts()

    def _counts(self):
        return {func: (quick.answered, quick.asked) for func, quick in registry.QUICK.items()}

    def __iter__(self):
        """(overload, whether it answered), once a call; not in their order."""
        after = self.after or self._counts()
        for func, (answered, calls) in self.before.items():
            now_answered, now_calls = after[func]
            yield from [(func, True)] * (now_answered - answered)
            yield from [(func, False)] * (now_calls - calls - (now_answered - answered))


def answers(call, mode, handlers):
    """The answer and the arguments after the call; which handlers were asked."""
    draw, function = call
    torch.default_generator.manual_seed(1)
    with MODES[mode](), asked(handlers) as seen:
        args = draw()
        versions = [None if x is None or x.is_inference() else x._version for x in args]
        seen.clear()
        y = function(*args)
        seen.stop()
    written = [v is not None and x._version != v for x, v in zip(args, versions, strict=True)]
    return y, args, written, list(seen)


def alike(y, expected):
    """Whether two tensors, or tuples of them, are the same in all that PyTorch and users see."""
    if isinstance(expected, tuple):
        for one, other in zip(y, expected, strict=True):
            alike(one, other)
        return
    if not isinstance(expected, tb.BlockedTensor):
        assert y is expected is None or (
            torch.equal(y.nan_to_num(7), expected.nan_to_num(7)) and y.dtype == expected.dtype
        )
        return
    assert type(y) is type(expected) and y.shape == expected.shape and y.dtype == expected.dtype
    assert torch.equal(y.physical.nan_to_num(7), expected.physical.nan_to_num(7))
    assert y.memory_desc == expected.memory_desc and y.blocking is not None and padding_is_zero(y)
    keys = torch._C._dispatch_keys
    assert keys(y) == keys(expected) and keys(y.physical) == keys(expected.physical)
    for name in ("stride", "storage_offset", "is_inference", "is_contiguous"):
        assert getattr(y, name)() == getattr(expected, name)()
    assert y.requires_grad == expected.requires_grad and (y.is_inference() or y._version == expected._version)
    assert vars(y).keys() == vars(expected).keys()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TAKEN)
def test_answers_are_those_of_the_handlers_in_python(name, mode):
    y, args, written, seen = answers(TAKEN[name], mode, None)
    expected, expected_args, expected_written, unseen = answers(TAKEN[name], mode, ())
    assert not unseen
    assert seen and all(answered for _, answered in seen)
    alike(y, expected)
    assert written == expected_written
    alike(tuple(args), tuple(expected_args))


@pytest.mark.parametrize("name", LEFT)
def test_other_arguments_are_left_to_the_handlers_in_python(name):
    def outcome(handlers):
        try:
            y, args, written, seen = answers(LEFT[name], "no_grad", handlers)
        except Exception as error:
            return type(error), str(error), None, None
        return y, args, written, seen

    y, args, written, seen = outcome(None)
    expected, expected_args, expected_written, _ = outcome(())
    if isinstance(y, type):
        assert (y, args) == (expected, expected_args)
        return
    assert not any(answered for _, answered in seen)
    assert written == expected_written
    alike(y, expected)


@pytest.mark.parametrize("made_in", ["no_grad", "inference_mode"])
def test_detached_tensors_are_views(made_in):
    with MODES[made_in]():
        x = image()
    with asked() as seen:
        y = x.detach()
    assert list(seen) == [(aten.detach.default, made_in == "no_grad")]  # those of inference tensors are ones, too
    with asked(()):
        alike(y, x.detach())
    assert y.is_inference() == x.is_inference()
    assert y is not x and y.data_ptr() == x.data_ptr()
    if made_in == "no_grad":
        x.relu_()
        assert y._version == x._version > 0 and torch.equal(y.physical, x.physical)
    with torch.inference_mode(), asked() as seen:
        x.detach()
    assert list(seen) == [(aten.detach.default, False)]


def test_lowered_tiers_take_their_own_blocks(isa):
    y, _, _, seen = answers(conv(), "no_grad", None)
    assert y.blocking == ((1, library.isa_block()),) and all(answered for _, answered in seen)
    sixteen = lambda: [image(fmt=tb.nChw16c), torch.randn(24, 20, 3, 3).to(tb.OIhw16i16o)], F.conv2d
    y, _, _, seen = answers(sixteen, "no_grad", None)
    assert [answered for _, answered in seen] == [isa == "avx512"]
    alike(y, answers(sixteen, "no_grad", ())[0])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_b0", "densenet121"])
def test_networks_leave_nothing_to_python_that_has_a_handler(name, mode):
    model = make_model(name).eval().to(tb.blocked)
    with MODES[mode](), asked() as seen:
        model(torch.randn(1, 3, 64, 64))
    left = {func for func, answered in seen if not answered}
    # The last average loses its dims: a plain vector comes out.
    assert len(list(seen)) > 50 and left <= {aten.mean.dim}


def test_gradients_flow_through(models):
    plain, blocked = models
    x = torch.randn(2, 20, 9, 9)
    plain(x).sum().backward()
    with asked() as seen:
        blocked(x.to(tb.blocked)).sum().backward()
    assert any(answered for _, answered in seen)
    for p, q in zip(plain.parameters(), blocked.parameters(), strict=True):
        torch.testing.assert_close(q.grad.to_dense() if isinstance(q.grad, tb.BlockedTensor) else q.grad, p.grad)


def test_weights_reordered_within_are_counted():
    x, w = image(32), torch.randn(24, 32, 3, 3)
    with torch.no_grad(), asked() as seen, tb.count() as counts:
        F.conv2d(x, w)
    assert [answered for _, answered in seen] == [True] and counts.reorders.total() == 1
    with torch.no_grad(), asked(()), tb.count() as expected:
        F.conv2d(x, w)
    assert counts.reorders == expected.reorders and counts.reorder_bytes == expected.reorder_bytes


def test_modes_see_every_operator():
    x, seen = image(), []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching(), asked() as asking:
        torch.relu(x)
    assert aten.relu.default in seen and len(list(asking)) <= 1


def test_memory_goes_with_the_answer():
    y = torch.relu(image())
    gone = weakref.ref(y), weakref.ref(y.physical)
    del y
    assert [r() for r in gone] == [None, None]


def test_threads_call_them_at_once():
    x, w = image(32, size=(20, 20)), weight(32, 32, 3, 3)
    expected, found = F.conv2d(x, w).relu_(), [None] * 4

    def call(i):
        with torch.no_grad():
            for _ in range(50):
                found[i] = F.conv2d(x, w).relu_()

    threads = [threading.Thread(target=call, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y in found:
        alike(y, expected)


ODD = [(), (None,), (1,), ("relu",), (None,) * 9, (1,) * 9, ([],), ([None],), ([1], 0), ([], 0)]


@pytest.mark.parametrize("func", registry.QUICK, ids=str)
def test_odd_arguments_end_as_without_handlers(func):
    def outcome(args, handlers):
        with torch.no_grad(), asked(handlers):
            try:
                return func(*args)
            except Exception as error:
                return type(error), str(error)

    x = image(32)
    of_tensors = [(x,) * 9, (x, *ODD[4]), (x, x, None, *ODD[4]), (x, x, None, [1], [2, 3], "s"), ([x], None), ([x], 9)]
    for args in ODD + of_tensors:
        y, expected = outcome(args, None), outcome(args, ())
        if isinstance(expected, tuple) and isinstance(expected[0], type):
            assert y == expected
        else:
            alike(y, expected)
    assert padding_is_zero(x)


@pytest.mark.parametrize("blocking", [5, None, (1, 16), ((1, "16"),), ((1, 1 << 70),), ((1, 8, 3),)], ids=str)
def test_what_is_no_blocking_is_an_error(blocking):
    x = torch.ones(1, 16, 2, 2)
    for odd in ((x, x.shape, blocking, (0, 1, 2, 3), ()), (x, x.shape, (), (0, 1, 2, 3), blocking)):
        with pytest.raises((TypeError, RuntimeError)):
            _python.reorder(*odd)
    with pytest.raises((TypeError, ValueError)):
        tb.BlockedTensor(x, blocking, x.shape)


def test_a_subclass_is_left_to_python():
    class Other(tb.BlockedTensor):
        pass

    x = image()
    other = Other(x.physical, x.blocking, x.shape)
    with torch.no_grad(), asked() as seen:
        torch.relu(other)
        other.relu_()
    assert {func for func, _ in seen} == {aten.relu.default, aten.relu_.default}
    assert not any(answered for _, answered in seen)


def test_other_bytes_are_seen():
    x, other = image(), image()
    with torch.no_grad():
        x.data = other
        assert torch.equal(torch.relu(x).physical, torch.relu(other.physical))
        x.transpose_(2, 3)
        assert torch.equal(torch.relu(x).to_dense(), torch.relu(other.to_dense()).transpose(2, 3))


def test_plain_tensors_and_others_subclasses_are_pytorchs():
    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            logged.append(func)
            return torch.ones(())

    logged = []
    logging = torch.Tensor._make_wrapper_subclass(Logged, (2, 3))
    x = torch.randn(2, 3)
    with torch.no_grad(), asked() as seen:
        torch.relu(x)
        assert not list(seen)
        torch.relu(logging)
    assert logged == [aten.relu.default] and list(seen) == [(aten.relu.default, False)]


def test_answers_lie_as_their_format_says_where_operands_broadcast():
    x, vector = image(32, n=1).to(tb.nChw16c), torch.randn(32, 4).t()[:, :, None, None]
    y = x * vector
    torch.testing.assert_close(y.to_dense(), x.to_dense() * vector)
    assert y.memory_desc == (x.to_dense() * vector).to(tb.nChw16c).memory_desc


def test_nothing_is_asked_of_another_subclass():
    class Strict(torch.Tensor):
        @staticmethod
        def __new__(cls, size):
            return torch.Tensor._make_wrapper_subclass(cls, size, dispatch_sizes_strides_policy="sizes")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert func is aten.conv2d.default
            return torch.zeros(3)

    with torch.inference_mode():
        assert F.conv2d(Strict((2, 32, 6, 6)), torch.randn(32, 32, 3, 3)).shape == (3,)


def test_a_size_of_one_number_is_refused():
    x = image()
    for func in (aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default):
        for y in (x, x.to_dense()):
            with pytest.raises(RuntimeError, match="output_size"):
                func(y, [1])


def test_parts_without_channels_are_left_to_python():
    parts = [torch.zeros(2, 0, 3, 4).to(tb.nChw16c), image(1, size=(3, 4)).to(tb.nChw16c)]
    with asked():
        y = torch.cat(parts, 1)
    with asked(()):
        alike(y, torch.cat(parts, 1))


def test_a_tuple_of_blocks_becomes_a_blocking():
    physical, size = torch.randn(2, 8, 3, 3, 4), torch.Size((2, 32, 3, 3))
    of_a_tuple = tb.BlockedTensor(physical, ((1, 4),), size)
    x = tb.BlockedTensor(physical, tb.format("nChw4c").blocking, size)
    assert of_a_tuple.blocking == (x + of_a_tuple).blocking == x.blocking and repr(of_a_tuple) == repr(x)


@pytest.mark.parametrize("blocking", [((1, 0),), ((1, -8),), ((1, 1),), ((-1, 16),), ((4, 16),), ((7, 16),)], ids=str)
def test_blocks_that_no_tensor_has(blocking):
    with pytest.raises(ValueError, match="block") as error:
        tb.BlockedTensor(torch.zeros(1, 1, 2, 2, 16), blocking, torch.Size((1, 16, 2, 2)))
    one_line(error)


def test_bytes_in_a_cycle_are_collected():
    y = torch.relu(image())
    y.physical.owner = y
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


def test_assigned_bytes_are_seen():
    x, other = image(), image()
    x._physical = other.physical
    with torch.no_grad():
        assert torch.equal(torch.relu(x).physical, torch.relu(other).physical)


def test_a_convolution_of_two_dims_takes_no_line():
    x, w = torch.randn(2, 32, 9).to(tb.format("nCw16c")), torch.randn(24, 32, 3)
    for handlers in (None, ()):
        with torch.inference_mode(), asked(handlers), pytest.raises(RuntimeError):
            aten.conv2d.default(x, w, None, [1], [0], [1], 1)
