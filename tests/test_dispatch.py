"""Every overload that torch_blocked/dispatch takes, by its schema: the plain tensor's answer, no fallback."""

import contextlib
import inspect
import itertools
import math

import pytest
import torch
from conftest import AVAILABLE, CHANNELS
from dispatch_calls import CALLS, NOT_CALLED, SIZES
from dispatch_cases import aten, blocked, check, check_error, check_in_place, from_seed, integers, native
from torch import Tensor

import torch_blocked as tb
from torch_blocked.dispatch import registry
from torch_blocked.dispatch.pointwise import handler_of, pointwise, pointwise_

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = (torch.float64, torch.bfloat16)

OTHER_DTYPES = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)

# Arguments by name. Tensors are drawn; what has a default and is not here keeps it.
VALUES = dict(
    alpha=2, approximate="tanh", beta=1.3, decimals=1, eps=0.1, exponent=2, input_scale=0.8, is_result=False, lambd=0.3,
    max=0.3, max_val=0.3, min=-0.4, min_val=-0.4, n=2, negative_slope=0.1, neginf=-3.0, other=0.4, p=1, posinf=3.0,
    reduction=1, x=0.5,
    rounding_mode="floor", scale=1.2, self=0.4, self_is_result=False, threshold=0.2, value=0.7, weight=0.3,
)  # fmt: skip

# The range of the values of all tensors, (-0.9, 0.9) by default: where a function is defined, and not steep.
POSITIVE = (
    "digamma lgamma log log10 log2 log1p logit pow rsqrt sqrt reciprocal sinc addcdiv div true_divide tan".split()
)

RANGES = {
    **dict.fromkeys(POSITIVE, (0.1, 0.9)),
    "acosh": (1.1, 3.0),
    **dict.fromkeys(["fmod", "remainder", "floor_divide", "mvlgamma", "polygamma"], (0.5, 5.0)),
}

BITWISE = """
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm __lshift __rshift
    __ilshift __irshift __xor __ixor
""".split()

POINTWISE = [f for f, handler in registry.HANDLERS.items() if handler.__module__.endswith(".pointwise")]

RANDOM = [f for f in POINTWISE if registry.HANDLERS[f].__name__ == "random_"]

POINTWISE = [f for f in POINTWISE if f not in RANDOM]

# Take other arguments than tensors of one size and dtype: see test_opinfo.py.
ODD_ARGUMENTS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.float_power_.Scalar, aten.float_power_.Tensor}

# PyTorch's answer depends on where an element lies among the others: of a NaN, of float16.
UNSTEADY_OF_NAN = ("polynomial", "logit_backward")

UNSTEADY_OF_HALF = ("special_i0e",)


def is_any_of(overload, parts):
    return any(part in name_of(overload) for part in parts)


def overloads_by_rule():
    """The overloads of ATen that have no entry of their own and are pointwise by their tag or name, without `out`."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        f = getattr(getattr(aten, packet, None), overload or "default", None) if name.startswith("aten::") else None
        if f is None or f in registry.HANDLERS or f in ODD_ARGUMENTS:
            continue
        if handler_of(f) in (pointwise, pointwise_):
            yield f


POINTWISE += overloads_by_rule()


def name_of(overload):
    return overload._schema.name.removeprefix("aten::").rstrip("_")


def draw(overload, size, dtype):
    """A tensor of the overload's range; of integers those around it, of bools either."""
    low, high = RANGES.get(name_of(overload), (-0.9, 0.9))
    x = torch.empty(size, dtype=torch.float64).uniform_(low, high)
    if not dtype.is_floating_point and not dtype.is_complex:
        x = (x * 10).round() if dtype != torch.bool else x > 0.4
    return x.to(dtype)


def arguments(overload, size, dtype=torch.float32):
    """Plain arguments, positional and by name."""
    args, kwargs = [], {}
    for a in overload._schema.arguments:
        is_tensor = "Tensor" in str(a.type)
        if is_tensor:
            is_condition = a.name in ("condition", "mask")
            value = draw(overload, size, torch.bool if is_condition else dtype)
        elif a.name in VALUES:
            value = VALUES[a.name]
            if name_of(overload) in BITWISE:
                value = 5
        elif a.has_default_value():
            continue
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


@contextlib.contextmanager
def dispatched(overload):
    """The handler registered for `overload` is called inside."""
    seen, handler = [], registry.look_up(overload)

    def watched(*args, **kwargs):
        seen.append(overload)
        return handler(*args, **kwargs)

    assert inspect.unwrap(handler) is inspect.unwrap(registry.HANDLERS.get(overload) or handler_of(overload))
    registry._resolved[overload] = watched
    quick = registry.QUICK.get(overload)  # test_quick.py compares it with the handler
    if quick:
        quick.enabled = False
    try:
        yield
    finally:
        registry._resolved[overload] = handler
        if quick:
            quick.enabled = True
    assert seen, f"{overload} was not dispatched"


# Formats of the tensors among the arguments, in their order; None is plain.
ARRANGEMENTS = [
    (tb.blocked,),
    (tb.nChw16c, None),
    (None, tb.nChw8c),
    (tb.nChw8c, tb.nChw16c),
    (tb.format("acdB4b"), None),
]


def arrange(args, formats):
    """The arguments with their tensors in these formats, over and over."""
    formats = itertools.cycle(formats)
    return [(blocked(a, fmt) if (fmt := next(formats)) else a) if isinstance(a, Tensor) else a for a in args]


def check_overload(overload, args, kwargs, expects=native):
    """Called itself: in inference mode, where those that PyTorch decomposes arrive too."""
    with torch.inference_mode(), dispatched(overload):
        in_place = overload._schema.is_mutable and isinstance(args[0], tb.BlockedTensor)
        (check_in_place if in_place else check)(from_seed(lambda *a: overload(*a, **kwargs)), *args, expects=expects)


@pytest.mark.parametrize("overload", POINTWISE, ids=str)
def test_each_pointwise_overload(isa, overload):
    dtype = torch.int32 if name_of(overload) in BITWISE else torch.float32
    for channels, formats in itertools.product(CHANNELS, ARRANGEMENTS if isa == AVAILABLE[-1] else ARRANGEMENTS[:1]):
        args, kwargs = arguments(overload, (2, channels, 3, 5), dtype)
        args = arrange(args, formats)
        if any(isinstance(a, tb.BlockedTensor) for a in args):
            check_overload(overload, args, kwargs)


@pytest.mark.parametrize("overload", [f for f in POINTWISE if not is_any_of(f, UNSTEADY_OF_HALF)], ids=str)
def test_each_pointwise_overload_in_other_dtypes(overload):
    for dtype, formats in itertools.product(OTHER_DTYPES, ARRANGEMENTS[:3]):
        args, kwargs = arguments(overload, (2, 17, 2, 3), dtype)
        given = arrange(args, formats)
        if not any(isinstance(a, tb.BlockedTensor) for a in given):
            continue

        def f(*a, kwargs=kwargs):
            return overload(*a, **kwargs)

        try:
            f(*[a.clone() if isinstance(a, Tensor) else a for a in args])
        except (RuntimeError, NotImplementedError):
            check_error(f, *given)
        else:
            check(f, *given, expects=native if dtype in FLOATS else contextlib.nullcontext)


@pytest.mark.parametrize(
    "overload",
    [f for f in POINTWISE if name_of(f) not in BITWISE and not is_any_of(f, UNSTEADY_OF_NAN)],
    ids=str,
)
def test_each_pointwise_overload_of_special_values(overload):
    """NaN and infinities stay in their channels, and out of the padding."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    args, kwargs = arguments(overload, (2, 17, 2, 5))
    for i, a in enumerate(a for a in args if isinstance(a, Tensor) and a.is_floating_point()):
        a[0, 0, 0], a[1, 16, 1], a[0, 5, 1] = special.roll(i), special, special.roll(2 * i)
    check_overload(overload, arrange(args, (tb.nChw16c,)), kwargs)
    check_overload(overload, arrange(args, (tb.nChw8c, None)), kwargs)


def test_every_overload_has_a_case():
    tested = {*POINTWISE, *CALLS, *NOT_CALLED}
    assert set(registry.HANDLERS) - tested == set(), "handlers without a case"
    assert [o for o in tested - set(registry.HANDLERS) if not handler_of(o)] == [], "cases without a handler"


@pytest.mark.parametrize("overload", list(CALLS), ids=str)
def test_each_other_overload(isa, overload):
    size = SIZES.get(overload, lambda c: (2, c, 4, 5))
    for channels in CHANNELS:
        with torch.inference_mode(), dispatched(overload):
            x = integers(*size(channels)).to(tb.blocked)
            check(from_seed(lambda x: CALLS[overload](x, overload)), x, expects=native)
