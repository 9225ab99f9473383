"""How generated code calls the operators: through pointers, with every type of argument."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, compiled, conv, fresh, randomized  # noqa: F401
from torch import nn
from torch._inductor.utils import run_and_get_code

from torch_blocked import library
from torch_blocked.compile import calls


class AllTypes(nn.Module):
    """Operators whose arguments, between them, are of every type, present and absent."""

    def __init__(self):
        super().__init__()
        self.first, self.second = conv(3, 24), conv(24, 24, groups=24)
        self.transposed = nn.ConvTranspose2d(24, 17, 2, 2)
        self.linear = nn.Linear(17, 5)

    def forward(self, x):
        y = F.interpolate(F.leaky_relu(self.first(x), 0.3), scale_factor=(1.5, 2.0), mode="bilinear")
        y = F.max_pool2d(y, 3, 1, 1, ceil_mode=True) + F.avg_pool2d(y, 3, 1, 1, divisor_override=5)
        y = torch.cat([F.gelu(self.second(y)), F.max_pool2d(y, 3, 1, 1)], 1)[:, :24]
        return self.linear(F.adaptive_avg_pool2d(self.transposed(y), 1).flatten(1))


@pytest.mark.slow
def test_arguments_of_every_type(fresh):  # noqa: F811
    model, x = randomized(AllTypes()), torch.randn(2, 3, 14, 13)
    with torch.no_grad():
        answer, code = run_and_get_code(compiled(model), x)
        assert_close(answer, model(x))
    for name in ("convolution", "convolution_transpose", "pool", "linear"):
        assert f"(aoti_torch_cpu_{name}(" in code[0], name
    assert "callBoxed" not in code[0]


def test_every_operator_has_a_function():
    pointers = [library.ops.entry_point(calls._hash(str(op._schema))) for op in calls._OPERATORS]
    assert 0 not in pointers and len(set(pointers)) == len(pointers)


def test_code_for_another_version():
    with pytest.raises(ValueError, match="by another version of torch_blocked: compile or package it again"):
        library.ops.entry_point(7)


def test_functions_of_others_are_kept():
    other = {torch.ops.aten.relu.default: ["AOTITorchError theirs()"]}
    both = calls.calls(other)
    assert both[torch.ops.aten.relu.default] == ["AOTITorchError theirs()"] and library.pool_op in both
    assert calls.calls(both) == both and calls.calls({}) == calls.calls(calls.calls({}))


def test_the_setting_can_be_pickled_for_the_key_of_caches_and_for_other_processes():
    setting = calls.calls({})
    assert pickle.loads(pickle.dumps(setting)) == setting and copy.deepcopy(setting) is setting
