"""Dropout and random numbers in place: from the same seed, what a plain tensor would draw."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS
from dispatch_cases import cases, check, check_error, check_in_place, each_channels, formats, from_seed, image

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")

DROPOUTS = {
    "train": lambda x, **how: F.dropout(x, 0.4, True, **how),
    "all": lambda x, **how: F.dropout(x, 1.0, True, **how),
    "none": lambda x, **how: F.dropout(x, 0.0, True, **how),
    "eval": lambda x, **how: F.dropout(x, 0.4, False, **how),
    "channels": lambda x, **how: F.dropout2d(x, 0.4, True, **how),
    "alpha": lambda x, **how: F.alpha_dropout(x, 0.4, True, **how),
    "feature alpha": lambda x, **how: F.feature_alpha_dropout(x, 0.4, True, **how),
}


@each_channels
@cases(DROPOUTS)
def test_dropout_draws_the_mask_of_a_plain_tensor(isa, case, channels):
    for fmt in formats(isa):
        assert isinstance(check(from_seed(case), image(channels).to(fmt)), tb.BlockedTensor)
        x = image(channels).to(fmt)
        assert check(from_seed(lambda x: case(x, inplace=True)), x) is x


RANDOM_IN_PLACE = {
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "bernoulli by a tensor": lambda x: x.bernoulli_(torch.linspace(0, 1, x.numel()).view(x.shape)),
    "cauchy": lambda x: x.cauchy_(1, 2),
    "exponential": lambda x: x.exponential_(2),
    "geometric": lambda x: x.geometric_(0.3),
    "log_normal": lambda x: x.log_normal_(0, 0.5),
    "normal": lambda x: x.normal_(3, 2),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(100),
    "random from": lambda x: x.random_(-5, 100),
    "uniform": lambda x: x.uniform_(1, 2),
    "generator": lambda x: x.uniform_(1, 2, generator=torch.Generator().manual_seed(3)),
    "init": torch.nn.init.xavier_normal_,
}


@cases(RANDOM_IN_PLACE)
def test_random_in_place_draws_what_a_plain_tensor_would(isa, case):
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        check_in_place(from_seed(case), image(channels).to(fmt))


def test_random_errors():
    check_error(lambda x: x.uniform_(2, 1), image(17).to(tb.nChw16c))
    check_error(lambda x: x.bernoulli_(2.0), image(17).to(tb.nChw16c))
    check_error(lambda x: x.normal_(0, -1), image(17).to(tb.nChw16c))
