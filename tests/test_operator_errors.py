"""Bad arguments of the C++ operators: each call ends in one line of text, none in a crash."""

import functools
import json
import subprocess
import sys

import pytest

X = "torch.zeros(2, 20, 3, 3)"
SIZE, ORDER = "(2, 20, 3, 3)", "[0, 1, 2, 3]"
BIG, HUGE = 2**40, 2**62
SRC, WEI, BN = "torch.zeros(1, 1, 5, 5, 16)", "torch.zeros(1, 1, 3, 3, 16, 16)", "torch.zeros(2, 2, 3, 3, 16)"


def bad_conv(src=SRC, src_blocking="[1, 16]", weight=WEI, size="[16, 16, 3, 3]", blocking="[1, 16, 0, 16]", **options):
    given = dict(bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, block=16) | options
    rest = ", ".join(f"{k}={v}" for k, v in given.items())
    return f"convolution({src}, {src_blocking}, {weight}, {size}, {blocking}, {rest})"


# Argument of the convolution -> values that do not fit the others.
BAD_CONV = {
    "stride": ([0, 1], [1], [-1, 1], [HUGE, 1]),
    "padding": ([-1, 0], [HUGE, 0], [2**24 - 1, 2**24 - 1]),
    "dilation": ([0, 1], [HUGE, 1], [2**24 - 1, 1]),
    "groups": (0, -1, 2, 3, HUGE),
    "block": (0, -16, HUGE),
    "size": (
        [16, 16, 3], [16, 16, 3, 3, 3], [17, 16, 3, 3], [16, 17, 3, 3], [0, 16, 3, 3], [16, -16, 3, 3],
        [16, HUGE, 3, 3], [HUGE, 16, 3, 3],
    ),
    "src_blocking": ([], [1], [2, 16]),
    "blocking": ([], [0, 16], [1, 2**20] * 4),
    "src": (
        "torch.zeros(1, 1, 2, 2, 16)", "torch.zeros(1, 1, 0, 5, 16)", "torch.zeros(1, 1, 5, 5)", "torch.zeros(5)",
        f"{SRC}.double()", f"{SRC}.to_sparse()",
    ),
    "weight": (f"{WEI}.double()", f"{WEI}[..., ::2]"),
    "bias": ("torch.zeros(15)", "torch.zeros(1, 16)", "torch.zeros(16).double()"),
    "scale": ("torch.zeros(15)",),
    "shift": ("torch.zeros(17)",),
    "residual": (
        "torch.zeros(1, 1, 3, 3, 8)", "torch.zeros(1, 16, 3, 3)", "torch.zeros(1, 1, 3, 3, 16).double()",
    ),
    "activation": ("'tanh'", "None"),
}  # fmt: skip


BAD_CALLS = [
    # the logical size is not src's
    f"reorder({X}, (2, 20, 3), [], [0, 1, 2], [])",
    f"reorder({X}, (2, 20, 3, 4), [], {ORDER}, [])",
    f"reorder({X}, (2, 20, 3, -3), [], {ORDER}, [])",
    f"reorder({X}, (-2, 20, 3, -3), [], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), (2, 33, 3, 3), [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), (2, 16, 3, 3), [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 16), {SIZE}, [1, 8], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 32)[..., ::2], {SIZE}, [1, 16], {ORDER}, [])",
    f"reorder(torch.zeros(2, 2, 3, 3, 1).expand(2, 2, 3, 3, 16), {SIZE}, [1, 16], {ORDER}, [])",
    f"reorder_tile_rate({X}, (2, 20, 3), [], [0, 1, 2], [])",
    f"reorder_tile_rate({X}, ({HUGE}, 20, 3, 3), [], {ORDER}, [])",
    f"reorder_tile_rate({X}, {SIZE}, [], [0, 1, 2, {HUGE}], [])",
    f"reorder_tile_rate(torch.zeros(2, 2, 3, 3, 16), (2, 33, 3, 3), [1, 16], {ORDER}, [])",
    "reorder(torch.tensor(1.0), [], [0, 16], [], [])",
    "reorder(torch.tensor(1.0), [], [], [], [0, 16])",
    "reorder(torch.zeros([1] * 13), [1] * 13, [], list(range(13)), [])",
    f"reorder({X}, ({HUGE}, 20, 3, 3), [], {ORDER}, [])",
    # the order is no permutation
    f"reorder({X}, {SIZE}, [], [0, 1, 2], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 2], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 4], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, -1], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, 3, 4], [])",
    f"reorder({X}, {SIZE}, [], [0, 1, 2, {HUGE}], [])",
    # no blocking
    f"reorder({X}, {SIZE}, [], {ORDER}, [1])",
    f"reorder({X}, {SIZE}, [1], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, 0])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, -16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [4, 16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [-1, 16])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, 2] * 13)",
    # more than there is memory, or int64
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {HUGE}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, {2**20}])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, 8])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [0, {2**20}, 1, {2**20}, 2, {2**20}, 3, {2**20}])",
    f"reorder({X}, {SIZE}, [1, {2**20}, 1, {2**20}, 1, {2**20}, 1, {2**20}], {ORDER}, [])",
    f"reorder(torch.zeros(1).expand({HUGE}), ({HUGE},), [], [0], [])",
    f"reorder(torch.zeros(1, dtype=torch.int8).expand({2**63 - 1}), ({2**63 - 1},), [], [0], [0, 16])",
    f"reorder(torch.zeros(1, 1).expand({BIG}, {BIG}), ({BIG}, {BIG}), [], [0, 1], [])",
    f"reorder(torch.zeros(1).expand({BIG}), ({BIG},), [], [0], [0, {2**20}])",
    # types
    f"reorder(None, {SIZE}, [], {ORDER}, [])",
    f"reorder({X}, None, [], {ORDER}, [])",
    f"reorder({X}, {SIZE}, [], {ORDER}, [], 'float32')",
    f"reorder({X}, {SIZE}, [], {ORDER}, [], torch.quint8)",
    f"reorder({X}.to_sparse(), {SIZE}, [], {ORDER}, [])",
    # convolution
    *(bad_conv(**{name: value}) for name, values in BAD_CONV.items() for value in values),
    bad_conv(size=[16, HUGE, 3, 3], groups=16),
    # batch_norm
    f"batch_norm({BN}, None, None, torch.zeros(20), torch.ones(21), 1e-5)",
    f"batch_norm({BN}, torch.zeros(19), None, torch.zeros(20), torch.ones(20), 1e-5)",
    f"batch_norm({BN}, None, torch.zeros(20).double(), torch.zeros(20), torch.ones(20), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(20), torch.tensor(1.0), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(33), torch.ones(33), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(16), torch.ones(16), 1e-5)",
    f"batch_norm({BN}.double(), None, None, torch.zeros(20), torch.ones(20), 1e-5)",
    "batch_norm(torch.zeros(2, 2), None, None, torch.zeros(2), torch.ones(2), 1e-5)",
    "batch_norm(torch.tensor(1.0), None, None, torch.zeros(1), torch.ones(1), 1e-5)",
    "batch_norm(torch.zeros(2, 2, 3, 3, 0), None, None, torch.zeros(0), torch.ones(0), 1e-5)",
    f"batch_norm({BN}, None, None, torch.zeros(20), None, 1e-5)",
    f"batch_norm({BN}, None, None, None, torch.zeros(20), 1e-5)",
    f"batch_norm_backward({BN}, {BN}, None, torch.zeros(20), None, True)",
    f"batch_norm_backward({BN}, {BN}, None, None, torch.zeros(20), False)",
    f"batch_norm({BN[:-5]}1), None, None, torch.zeros(1).expand({2**63 - 1}), torch.ones(1), 1e-5)",
]

# Each call in a process of its own, made from one that has loaded the library: a crash is an answer too.
CALLER = """
import json, os, sys, torch, torch_blocked
names = vars(torch.ops.torch_blocked) | {n: getattr(torch.ops.torch_blocked, n) for n in sys.argv[2:]}
for call in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            eval(call, names | {"torch": torch})
            answer = ["nothing", ""]
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = [kinds, str(error)]
        print(json.dumps(answer), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(["crash", f"status {status}"]))
"""


@functools.cache
def answers():
    operators = {call.partition("(")[0] for call in BAD_CALLS}
    command = [sys.executable, "-W", "ignore", "-c", CALLER, json.dumps(BAD_CALLS), *operators]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    return dict(zip(BAD_CALLS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_arguments(call):
    kinds, text = answers()[call]
    assert {"ValueError", "TypeError", "RuntimeError"} & set(kinds), f"{kinds}: {text}"
    told_by_pytorch = "Could not run" in text or "Expected a value of type" in text or "no tensor arguments" in text
    assert told_by_pytorch or ("\n" not in text and 0 < len(text) < 500), text
