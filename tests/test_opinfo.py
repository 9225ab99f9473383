"""PyTorch's operator database on blocked tensors, a few samples an operator: see opinfo.py; `make opinfo` runs all."""

from __future__ import annotations

import pytest
import torch
from opinfo import OPS, check
from opinfo_exceptions import EXCEPTIONS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_operator(name):
    report = check(name, limit=4, dtypes=(torch.float32, torch.int64))
    assert not report.failures, "\n".join(report.failures)


def test_exceptions_are_of_operators_that_exist():
    assert {name for name, _ in EXCEPTIONS} <= OPS.keys()
