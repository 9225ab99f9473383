"""Losses of images: values and gradients, of plain and blocked targets, without a fallback."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same
from dispatch_cases import cases, check, check_error, each_channels, images

import torch_blocked as tb

REDUCTIONS = ["none", "mean", "sum"]

# (x, target, reduction), both between 0 and 1 and one blocked.
OF_ELEMENTS = {
    "mse": lambda x, y, how: F.mse_loss(x, y, reduction=how),
    "l1": lambda x, y, how: F.l1_loss(x, y, reduction=how),
    "smooth_l1": lambda x, y, how: F.smooth_l1_loss(x, y, reduction=how, beta=0.3),
    "huber": lambda x, y, how: F.huber_loss(x, y, reduction=how, delta=0.2),
    "soft_margin": lambda x, y, how: F.soft_margin_loss(x, (y - 0.5).sign(), reduction=how),
    "bce": lambda x, y, how: F.binary_cross_entropy(x, y, reduction=how),
    "weighted bce": lambda x, y, how: F.binary_cross_entropy(x, y, torch.linspace(0, 2, x.size(-1)), reduction=how),
    "bce of logits": lambda x, y, how: F.binary_cross_entropy_with_logits(x, y, reduction=how),
    "weighted bce of logits": lambda x, y, how: F.binary_cross_entropy_with_logits(
        x, y, weight(x)[:, None, None], reduction=how, pos_weight=weight(x)[:, None, None] + 1
    ),
    "kl_div": lambda x, y, how: F.kl_div(x.log_softmax(1), y, reduction="batchmean" if how == "mean" else how),
    "poisson_nll": lambda x, y, how: F.poisson_nll_loss(x, y, reduction=how),
    "cross entropy of probabilities": lambda x, y, how: F.cross_entropy(x, y, reduction=how),
}

# (x, classes, reduction)
OF_CLASSES = {
    "nll": lambda x, y, how: F.nll_loss(x, y, reduction=how),
    "cross entropy": lambda x, y, how: F.cross_entropy(x, y, reduction=how),
    "weighted": lambda x, y, how: F.cross_entropy(x, y, weight(x), reduction=how),
    "ignored": lambda x, y, how: F.cross_entropy(x, y, ignore_index=0, reduction=how),
    "smoothed": lambda x, y, how: F.cross_entropy(x, y, reduction=how, label_smoothing=0.1),
}


def weight(x):
    return torch.linspace(0.5, 2, x.size(1))


def check_loss(loss, x, target, reduction):
    """The value, and the gradient of x."""

    def gradient(x, target):
        leaf = x.detach().requires_grad_()
        each = loss(leaf, target, reduction)
        return torch.autograd.grad((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum(), leaf)[0]

    check(lambda x, target: loss(x, target, reduction), x, target)
    check(gradient, x, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@cases(OF_ELEMENTS)
@each_channels
def test_loss_of_elements(case, channels, reduction):
    target = torch.rand(2, channels, 4, 5)
    for x in images(channels):
        for other in (target, target.to(x.format), target.to(tb.format("acdB2b"))):
            check_loss(case, x + 0.4, other, reduction)
    check_loss(case, torch.rand(2, channels, 4, 5), target.to(tb.blocked), reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@cases(OF_CLASSES)
@each_channels
def test_loss_of_classes(case, channels, reduction):
    for x in images(channels):
        check_loss(case, x, torch.randint(0, channels, (2, 4, 5)), reduction)


def test_features_of_two_networks_are_not_reordered():
    """Blocked alike and without padding: all of it runs on the physical tensors."""
    x, target = (torch.rand(2, 32, 4, 5).to(tb.blocked) for _ in range(2))
    leaf = x.requires_grad_()
    with tb.count() as counts:
        F.mse_loss(leaf, target).backward()
    assert not counts.reorders and not counts.fallbacks
    assert isinstance(leaf.grad, tb.BlockedTensor)
    assert_same(leaf.grad, (x - target).detach() * 2 / x.numel())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_refused(reduction):
    x = torch.rand(2, 3, 4, 5).to(tb.blocked)
    for classes in (
        torch.full((2, 4, 5), 3),
        torch.full((2, 4, 5), -1),
        torch.zeros(2, 4, 4).long(),
        torch.zeros(2, 4, 5).int(),
    ):
        check_error(lambda x, y: F.cross_entropy(x, y, reduction=reduction), x, classes)
    check_error(lambda x: F.binary_cross_entropy(x * 2, x, reduction=reduction), x)
    check_error(lambda x, y: F.huber_loss(x, y[..., :-1, :-1], reduction=reduction), x, x.to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    x, target = torch.rand(2, 17, 4, 5, dtype=dtype), torch.rand(2, 17, 4, 5, dtype=dtype)
    check(F.mse_loss, x.to(tb.blocked), target)
    check(F.binary_cross_entropy_with_logits, x.to(tb.blocked), target)


def test_compiled():
    x, classes = torch.randn(2, 17, 4, 5), torch.randint(0, 17, (2, 4, 5))
    compiled = torch.compile(F.cross_entropy, fullgraph=True)
    assert_same(compiled(x.to(tb.blocked), classes), F.cross_entropy(x, classes))
