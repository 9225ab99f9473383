"""Shared by all tests: this CPU's ISA tiers, channel counts around the block, comparison with plain tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import _python, library
from torch_blocked.__main__ import main
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.explain import passes
from torch_blocked.physical import padding_of

pytest.register_assert_rewrite(
    "deferred_cases",
    "dispatch_cases",
    "kernel_cases",
    "memory_desc_cases",
    "module_cases",
    "reorder_cases",
    "training_cases",
)

TIERS = ("default", "avx2", "avx512")  # of vectors; on tiles, amx, are other convolutions only
VECTORS = tb.isa() if tb.isa() in TIERS else TIERS[-1]
AVAILABLE = TIERS[: TIERS.index(VECTORS) + 1]

# One, around one block of 16, and several blocks with a tail.
CHANNELS = (1, 15, 16, 17, 53)


def seed(number):
    """As torch.manual_seed of the CPU alone: for the devices that are not there it keeps a traceback a call."""
    torch.default_generator.manual_seed(number)


@pytest.fixture(autouse=True)
def seeded():
    seed(0)


@pytest.fixture
def two_passes(monkeypatch):
    """Tests of `tb.explain` look at what is told, not at times: two passes do."""
    monkeypatch.setattr(passes, "PASSES", 2)


@pytest.fixture(autouse=True)
def quiet_fallbacks():
    """Fallbacks are silent unless a test asks for another policy."""
    with tb.fallback("allow"):
        yield


@pytest.fixture(autouse=True)
def nothing_waits():
    """No convolution waits for its post-ops from one test to the next."""
    yield
    _python.finish_deferred()


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def no_gradients(request):
    """Either way to do without gradients."""
    with request.param():
        yield


@pytest.fixture(autouse=True)
def winograd_mode():
    """Convolutions are direct, exact on small integers; Winograd's have a file of tests, which overrides this."""
    with tb.winograd("never"):
        yield


@pytest.fixture
def x(request):
    """A plain tensor of the file's SIZE."""
    return torch.randn(request.module.SIZE)


@pytest.fixture
def models():
    """A plain model of (n, 20, h, w) images and the same blocked."""
    layers = nn.Conv2d(20, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 5)).eval()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model, copy.deepcopy(model).to(tb.blocked)


@pytest.fixture(scope="module")
def one_thread():
    """For tensors too small to share between threads, which would only wait for each other."""
    with num_threads(1):
        yield


@pytest.fixture(params=AVAILABLE)
def isa(request):
    """Each ISA tier that this CPU has; restored afterwards."""
    best = tb.isa()
    library.set_isa(request.param)
    yield request.param
    library.set_isa(best)


@pytest.fixture
def vectors():
    """The best tier of vectors, where this CPU has tiles too."""
    best = tb.isa()
    library.set_isa(VECTORS)
    yield
    library.set_isa(best)


@pytest.fixture
def tiles():
    """Tiles, where this CPU has them, take all that they can."""
    library.set_amx_always(True)
    yield
    library.set_amx_always(False)


@pytest.fixture(params=[(32 << 10, 1 << 20), (48 << 10, 2 << 20)], ids=["l1=32k-l2=1m", "l1=48k-l2=2m"])
def caches(request):
    """A core's L1 and L2 in bytes, by which the kernels cut up their work; this CPU's afterwards."""
    library.set_caches(*request.param)
    yield request.param
    library.set_caches(0, 0)


@pytest.fixture
def guarded():
    """Outputs lie, NaN-filled, between guard bytes; afterwards none may have been written."""
    library.guard_outputs(True)
    yield
    assert library.guard_outputs(False) == 0, "bytes outside an output were written"


@pytest.fixture
def error_of(capsys):
    """The one line in which a bad command ends."""

    def run(command):
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        text = capsys.readouterr().err
        assert ended.value.code == 2 and text.count("\n") == 1, text
        return text

    return run


def one_line(error):
    """Whether the text of what `pytest.raises` caught is one line, and not a long one."""
    return 0 < len(str(error.value)) < 500 and "\n" not in str(error.value)


def hold_free_memory() -> list[torch.Tensor]:
    """Empties the pool; what is left free in segments in use is in the answer's hands."""
    gc.collect()
    tb.empty_cache()
    held = []
    for size in [2**k for k in range(30, 8, -1)]:
        while (free := library.cached_bytes()) >= size:
            held.append(library.new_empty_op(torch.empty(0, dtype=torch.uint8), [size - 64]))
            if library.cached_bytes() >= free:
                del held[-1]
                tb.empty_cache()
                break
    return held


def padding_is_zero(x: object) -> bool:
    """Whether the padding of a blocked tensor, or of all in a list, is zero; a plain tensor has none."""
    if isinstance(x, (list, tuple)):
        return all(map(padding_is_zero, x))
    if not isinstance(x, tb.BlockedTensor):
        return True
    return not any(bool((part != 0).any()) for part in padding_of(x.physical, x.blocking, x.shape))


def dense(x: object) -> object:
    """`x` with every blocked tensor made plain."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(dense, x))
    return x.to_dense() if isinstance(x, tb.BlockedTensor) else x


def assert_same(actual: object, expected: object, **tolerances: float) -> None:
    """Values, dtypes and shapes of a blocked answer are the plain one's, and its padding is zero."""
    assert padding_is_zero(actual), "the padding is not zero"
    actual = dense(actual)
    if not plainly_equal(actual, expected):
        torch.testing.assert_close(actual, expected, **tolerances)


def plainly_equal(a: object, b: object) -> bool:
    """Whether two plain tensors are equal in all that `assert_close` compares: in a fraction of its time."""
    plain = type(a) is type(b) is torch.Tensor and a.layout is b.layout is torch.strided
    plain = plain and not (a.is_quantized or a.is_complex())
    return plain and a.dtype is b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)


@contextlib.contextmanager
def compiled_anew():
    """Each graph is compiled anew: a hit of the caches on disk would hide it.

    `force_disable_caches` does the same and more: it compiles torch's headers and asks for the CPU's vectors once a
    graph. What C++ was compiled to is found by its text, as always.
    """
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    torch._dynamo.reset()
    with (
        dynamo_config.patch(automatic_dynamic_local_pgo=False),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that Inductor is given. They run as they are: compiling takes seconds each."""
    from backend_cases import Graphs
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    found = Graphs()

    def run(gm, *args, **kwargs):
        found.append(gm)
        found.size_asserts.append(inductor_config.size_asserts)

        def forward(*inputs):
            found.ran.append(gm)
            return gm.forward(*inputs)

        return make_boxed_func(forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", run)
    # And of a graph that goes to Inductor whole.
    monkeypatch.setattr(compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=run))
    return found


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    """Runs one benchmark for one short round; gives the printed text and what is in the JSON file."""
    from torch_blocked.__main__ import main
    from torch_blocked.benchmark import measure

    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "PEAK_ROUNDS", 1)

    def run(*argv: str) -> tuple[str, dict]:
        file = tmp_path / "rows.json"
        main(["bench", *argv, "--rounds", "1", "--json", str(file)])
        return capsys.readouterr().out, json.loads(file.read_text())

    return run
