"""Images for the tests of what runs on plain tensors, and their check."""

import contextlib
import functools

import dispatch_cases
import torch

import torch_blocked as tb

FORMATS = [tb.nChw16c, tb.nChw8c, tb.format("acdB4b"), tb.format("aBcd2b4b")]
WEIGHT = torch.randn(17, 17, 3, 3) / 10

# The plain tensor's answer, whether on plain tensors or not.
check = functools.partial(dispatch_cases.check, expects=contextlib.nullcontext)


def image(channels=17, fmt=tb.nChw16c):
    return torch.randn(2, channels, 4, 5).to(fmt)
