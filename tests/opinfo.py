"""PyTorch's operator database (OpInfo) on blocked tensors: every entry's samples, blocked against plain.

`check` runs one entry and reports what did not match and what fell back. As a program, ``python tests/opinfo.py``, this
file checks the whole database, each entry in a process of its own, and prints a table.

A sample concerns blocked tensors where one of its tensors has 3 to 5 dims; others are passed over. It is run with all
of them blocked ("all"), with only the first ("first") and with all but the first ("rest").
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from conftest import assert_same, padding_is_zero
from opinfo_exceptions import EXCEPTIONS, ROUNDED_ONCE, SUMS_OF_PRODUCTS, UNINITIALIZED
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import torch_blocked as tb

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool)

# Of each rank two formats, taken in turn: the blocks of AVX-512, and small ones that most samples have several of.
FORMATS = {
    3: (tb.format("aBc16b"), tb.format("acB4b")),
    4: (tb.format("aBcd16b"), tb.format("acdB4b")),
    5: (tb.format("aBcde16b"), tb.format("acdeB4b")),
}

MODES = ("all", "first", "rest")


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS: dict[str, OpInfo] = {name_of(op): op for op in op_db}


class Arguments(NamedTuple):
    """Of one call, as OpInfo's samples hold them: the input may be a list of tensors."""

    input: object
    args: tuple
    kwargs: dict

    @staticmethod
    def of(sample: SampleInput) -> Arguments:
        return Arguments(sample.input, sample.args, sample.kwargs)

    def call(self, function: Callable) -> object:
        """`function` of the arguments; random numbers are the same on every call."""
        torch.default_generator.manual_seed(0)  # torch.manual_seed looks for other devices, slowly
        return function(self.input, *self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(tuple(self)) if isinstance(x, Tensor)]


class Sample(NamedTuple):
    """A sample of an operator: which of its tensors become blocked, and in which format.

    `process` makes of an answer what has a definite gradient.
    """

    arguments: Arguments
    mode: str
    turn: int
    process: Callable[[object], object] = lambda answer: answer

    def plain(self, *, gradients: bool = False) -> Arguments:
        """Copies of the arguments, row-major."""
        return self._copies(lambda i, x: x, gradients)

    def blocked(self, *, gradients: bool = False) -> Arguments:
        """Copies of the arguments, those that the mode says blocked."""
        chosen = {"all": lambda i: True, "first": lambda i: i == 0, "rest": lambda i: i > 0}[self.mode]
        return self._copies(lambda i, x: to_blocked(x, self.turn) if chosen(i) else x, gradients)

    def _copies(self, convert: Callable[[int, Tensor], Tensor], gradients: bool) -> Arguments:
        copies: dict[int, Tensor] = {}  # a tensor given twice stays one
        places = itertools.count()

        def copy(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in copies:
                y = x.detach()
                y = y.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else y.clone()
                y = convert(next(places), y) if is_blockable(x) else y
                copies[id(x)] = y.requires_grad_(gradients and x.requires_grad)
            return copies[id(x)]

        return Arguments(*pytree.tree_map(copy, tuple(self.arguments)))


def is_blockable(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and x.dim() in FORMATS and not x.is_quantized


def to_blocked(x: Tensor, turn: int) -> Tensor:
    """`x` in a format of its rank, plain where it has none."""
    return x.to(FORMATS[x.dim()][turn % 2]) if is_blockable(x) else x


def samples(op: OpInfo, dtype: torch.dtype, limit: int, *, gradients: bool = False) -> Iterator[Sample]:
    """Up to `limit` samples in each of the modes."""
    torch.default_generator.manual_seed(0)
    inputs = op.sample_inputs_func(op, "cpu", dtype, gradients)  # op.sample_inputs looks for the test that calls it
    drawn = ((Arguments.of(s), s.output_process_fn_grad) for s in inputs)
    concerned = ((a, process) for a, process in drawn if any(map(is_blockable, a.tensors())))
    for turn, (arguments, process) in enumerate(itertools.islice(concerned, limit)):
        several = len({id(x) for x in arguments.tensors() if is_blockable(x)}) > 1
        for mode in MODES if several else ("all",):
            yield Sample(arguments, mode, turn, process)


# ---- One check a kind of call. Each compares a plain call with a blocked one, or raises `NotApplicable`.


class NotApplicable(Exception):  # noqa: N818
    """The sample has no such call, or PyTorch refuses it for plain tensors too."""


def check_values(op: OpInfo, sample: Sample, found: Counter) -> None:
    """The answer, and that the arguments are as they are after the plain call."""
    plain, blocked = sample.plain(), sample.blocked()
    with torch.no_grad():
        expected, actual = both(plain, blocked, op.op, op.op, found)
    compare(actual, expected, op)
    compare(blocked.tensors(), plain.tensors(), op)


def check_inference(op: OpInfo, sample: Sample, found: Counter) -> None:
    """The same in `inference_mode`, where composite operators arrive whole."""
    with torch.inference_mode():
        expected, actual = both(sample.plain(), sample.blocked(), op.op, op.op, found)
    compare(actual, expected, op)


def check_views(op: OpInfo, sample: Sample, found: Counter) -> None:
    """An answer that shares memory with an argument does so when blocked: a write to either shows in the other."""
    plain, blocked = sample.plain(), sample.blocked()
    with torch.no_grad():
        view, actual = both(plain, blocked, op.op, op.op, found)
        source = plain.input
        if not isinstance(view, Tensor) or not isinstance(source, Tensor) or not shares_memory(view, source):
            raise NotApplicable
        with counted(found):
            for written, through in ((view, actual), (source, blocked.input)):
                values = torch.arange(written.numel()).view(written.shape).add(1).to(written.dtype)
                try:
                    written.copy_(values)
                except RuntimeError:  # expanded: elements share memory
                    raise NotApplicable from None
                through.copy_(values)
                compare([actual, blocked.input], [view, source], op)


def check_inplace(op: OpInfo, sample: Sample, found: Counter) -> None:
    """The in-place variant: the same object, written, its version moved."""
    if op.inplace_variant is None or not isinstance(sample.arguments.input, Tensor):
        raise NotApplicable
    plain, blocked = sample.plain(), sample.blocked()
    with torch.no_grad():
        version = blocked.input._version
        expected, actual = both(plain, blocked, op.inplace_variant, op.inplace_variant, found)
    moved = plain.input._version > 0
    assert actual is blocked.input or expected is not plain.input, "the answer is not the tensor that was written"
    assert blocked.input._version > version or not moved, "the version did not move"
    compare(actual, expected, op)
    compare(blocked.tensors(), plain.tensors(), op)


def check_out(op: OpInfo, sample: Sample, found: Counter) -> None:
    """The `out=` variant: blocked and plain arguments, blocked and plain `out`, of this dtype and another."""
    if not op.supports_out:
        raise NotApplicable
    with torch.no_grad():
        answer = sample.plain().call(op.op)
        if not all(isinstance(x, Tensor) and x.layout == torch.strided for x in pytree.tree_leaves(answer)):
            raise NotApplicable
        for of_blocked, into_blocked, dtype in ((1, 1, None), (1, 0, None), (0, 1, None), (1, 1, torch.float64)):
            outs = pytree.tree_map(lambda x, dtype=dtype: torch.ones(x.shape, dtype=dtype or x.dtype), answer)
            theirs = pytree.tree_map(lambda x: to_blocked(x, sample.turn), outs) if into_blocked else clones(outs)
            plain, blocked = sample.plain(), sample.blocked() if of_blocked else sample.plain()
            with contextlib.suppress(NotApplicable):
                expected, actual = both(plain, blocked, writing(op.op, outs), writing(op.op, theirs), found)
                compare([actual, theirs], [expected, outs], op)


def writing(function: Callable, out: object) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs, out=out)


def clones(tree: object) -> object:
    return pytree.tree_map(torch.clone, tree)


def check_gradients(op: OpInfo, sample: Sample, found: Counter) -> None:
    """Gradients of all leaves; those of the answers are given blocked and plain in turn."""
    plain, blocked = sample.plain(gradients=True), sample.blocked(gradients=True)
    answers = both(plain, blocked, op.op, op.op, Counter())
    expected, actual = (
        [x for x in pytree.tree_leaves(sample.process(y)) if isinstance(x, Tensor) and x.requires_grad] for y in answers
    )
    leaves, theirs = ([x for x in a.tensors() if x.requires_grad] for a in (plain, blocked))
    if not expected or not leaves or any(x.layout != torch.strided for x in expected):
        raise NotApplicable
    assert len(actual) == len(expected), "not as many answers require a gradient"
    given = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype) for x in expected]
    grads = torch.autograd.grad(expected, leaves, given, allow_unused=True)
    given = [
        to_blocked(g, sample.turn) if isinstance(x, tb.BlockedTensor) else g for x, g in zip(actual, given, strict=True)
    ]
    with counted(found):
        found_grads = torch.autograd.grad(actual, theirs, given, allow_unused=True)
    compare(found_grads, grads, op)


CHECKS: dict[str, Callable[[OpInfo, Sample, Counter], None]] = {
    "values": check_values,
    "inference": check_inference,
    "views": check_views,
    "inplace": check_inplace,
    "out": check_out,
    "gradients": check_gradients,
}


# ---- What the checks share


@contextlib.contextmanager
def counted(found: Counter) -> Iterator[None]:
    """Adds the fallbacks inside to `found`."""
    with tb.count() as counts:
        yield
    found.update(counts.fallbacks)


def both(
    plain: Arguments, blocked: Arguments, of_plain: Callable, of_blocked: Callable, found: Counter
) -> tuple[object, object]:
    """Both answers. What PyTorch refuses for plain tensors must be refused by the same error; `NotApplicable` then."""
    try:
        expected = plain.call(of_plain)
    except Exception as error:
        refusal = type(error)
    else:
        with counted(found):
            return expected, blocked.call(of_blocked)
    try:
        blocked.call(of_blocked)
    except refusal:
        raise NotApplicable from None
    raise AssertionError(f"not refused, {refusal.__name__} for plain tensors")


def compare(actual: object, expected: object, op: OpInfo) -> None:
    """Values, dtypes, shapes and zero padding of all tensors; other things are equal."""
    actual, expected = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual) == len(expected), f"{len(actual)} answers for {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if not isinstance(e, Tensor):
            assert type(a) is type(e) and (a == e or a != a), f"{a} for {e}"
        elif name_of(op) in UNINITIALIZED or e.device.type != "cpu":
            assert (a.shape, a.dtype, a.device) == (e.shape, e.dtype, e.device)
            assert padding_is_zero(a), "the padding is not zero"
        else:
            single = {"rtol": 1.3e-6, "atol": 1e-5} if e.dtype is torch.float64 else {}  # computed in float32
            if name_of(op) in SUMS_OF_PRODUCTS and e.dtype is torch.float32 and e.numel():
                single = {"rtol": 1.3e-6, "atol": 1e-5 * max(1.0, float(e.abs().max()))}
            if name_of(op) in ROUNDED_ONCE and e.dtype is torch.bfloat16 and e.numel():
                eps = torch.finfo(e.dtype).eps
                single = {"rtol": 2 * eps, "atol": eps * max(1.0, float(e.abs().max()))}
            assert_same(a, e, equal_nan=True, **single)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided or not a.numel():
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


# ---- One entry


@dataclass
class Report:
    """What became of one entry: by check, the samples that ran, those without a fallback, and what fell back."""

    ran: Counter = field(default_factory=Counter)
    native: Counter = field(default_factory=Counter)
    fallbacks: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def check(name: str, limit: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Report:
    """Runs all checks of an entry on up to `limit` samples of each dtype, and its error inputs."""
    op, report = OPS[name], Report()
    with tb.fallback("allow"), tb.winograd("never"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            for what in CHECKS:
                _check(op, what, dtype, limit, report)
        _check_errors(op, limit, report)
    return report


def _check(op: OpInfo, what: str, dtype: torch.dtype, limit: int, report: Report) -> None:
    gradients = what == "gradients"
    # Those of bfloat16 are sums of what cancels, in which the order of the terms shows.
    supported = {torch.float32} & op.supported_backward_dtypes("cpu") if gradients else op.supported_dtypes("cpu")
    if dtype not in supported or (gradients and not op.supports_autograd) or (name_of(op), what) in EXCEPTIONS:
        return
    for sample in samples(op, dtype, limit, gradients=gradients):
        found: Counter = Counter()
        try:
            CHECKS[what](op, sample, found)
        except NotApplicable:
            continue
        except Exception as error:
            report.failures.append(f"{what}, {dtype}, sample {sample.turn}, {sample.mode}: {summary(error)}")
        report.ran[what] += 1
        report.native[what] += not found
        report.fallbacks += found


def _check_errors(op: OpInfo, limit: int, report: Report) -> None:
    """What PyTorch refuses for plain tensors is refused with the same class of error."""
    if op.error_inputs_func is None or (name_of(op), "errors") in EXCEPTIONS:
        return
    for turn, wrong in enumerate(op.error_inputs_func(op, "cpu")):
        arguments = Arguments.of(wrong.sample_input)
        if not any(map(is_blockable, arguments.tensors())):
            continue
        for mode in MODES:
            sample = Sample(arguments, mode, turn)
            try:
                both(sample.plain(), sample.blocked(), op.op, op.op, Counter())
            except NotApplicable:
                report.ran["errors"] += 1
            except Exception as error:
                report.failures.append(f"errors, sample {turn}, {mode}: {summary(error)}")


def summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
