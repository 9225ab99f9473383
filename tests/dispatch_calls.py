"""A call of each overload outside the pointwise families, which test_dispatch.py makes on blocked tensors."""

import torch
from conftest import dense
from dispatch_cases import aten


def ones(x):
    return torch.ones(x.size(1))


def places(x):
    """Indices 0 and 1, blocked as x is."""
    return (x > 0).long()


def halves(x):
    """Zero and one, blocked as x is."""
    return (x > 0).to(x.dtype)


# Functions of a blocked image and the overload, which they call.
CALLS = {
    aten.mse_loss.default: lambda x, f: f(x, halves(x)),
    aten.mse_loss_backward.default: lambda x, f: f(x.sum(), x, halves(x), 1),
    aten.smooth_l1_loss.default: lambda x, f: f(x, halves(x), 0),
    aten.smooth_l1_loss_backward.default: lambda x, f: f(x.sum(), x, halves(x), 2, 0.5),
    aten.huber_loss.default: lambda x, f: f(x, halves(x), 1, 2.0),
    aten.huber_loss_backward.default: lambda x, f: f(x + 1, x, halves(x), 0, 0.5),
    aten.soft_margin_loss.default: lambda x, f: f(x, dense(x.sign())),
    aten.soft_margin_loss_backward.default: lambda x, f: f(x.sum(), x, x.sign(), 1),
    aten.binary_cross_entropy.default: lambda x, f: f(halves(x), halves(x + 1)),
    aten.binary_cross_entropy_backward.default: lambda x, f: f(x.sum(), halves(x), halves(x + 1), x * 2, 1),
    aten.binary_cross_entropy_with_logits.default: lambda x, f: f(x, halves(x + 1), None, None, 0),
    aten.nll_loss2d_forward.default: lambda x, f: f(x, dense(places(x)[:, 0]) * (x.size(1) - 1), None, 1, 0),
    aten.nll_loss2d_backward.default: lambda x, f: f(
        x.sum(), x, dense(places(x)[:, 0]) * (x.size(1) - 1), ones(x), 2, -100, ones(x).sum()
    ),
    aten.convolution.default: lambda x, f: f(x, x, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    aten.convolution_backward.default: lambda x, f: f(
        torch.ones(2, 2, 3, 3), x, x, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    ),
    aten.native_batch_norm_backward.default: lambda x, f: f(
        x + 1, x, ones(x), None, None, ones(x), 2 * ones(x), True, 1e-5, [True, True, True]
    ),
    aten.pixel_shuffle.default: lambda x, f: f(x.repeat(1, 4, 1, 1), 2),
    aten.pixel_unshuffle.default: lambda x, f: f(x.repeat(1, 1, 1, 2), 2),
    aten.channel_shuffle.default: lambda x, f: f(x.repeat(1, 2, 1, 1), 2),
    aten.native_channel_shuffle.default: lambda x, f: f(x.repeat(1, 3, 1, 1), 3),
    aten.conv2d.default: lambda x, f: f(x, x, None, [1, 1], [1, 1]),
    aten.batch_norm.default: lambda x, f: f(x, ones(x), None, ones(x), 2 * ones(x), False, 0.1, 1e-5, False),
    aten._native_batch_norm_legit_no_training.default: lambda x, f: f(x, None, None, ones(x), 2 * ones(x), 0.1, 1e-5),
    aten.native_batch_norm.default: lambda x, f: f(x, ones(x), None, ones(x), ones(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: lambda x, f: f(x, None, ones(x), ones(x), ones(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda x, f: f(x, None, None, True, 0.1, 1e-5),
    aten.avg_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten._adaptive_avg_pool2d.default: lambda x, f: f(x, [2, 3]),
    aten.adaptive_avg_pool2d.default: lambda x, f: f(x, [2, 3]),
    aten.upsample_nearest2d.default: lambda x, f: f(x, [6, 7]),
    aten.upsample_bilinear2d.default: lambda x, f: f(x, [6, 7], False),
    aten._upsample_nearest_exact2d.default: lambda x, f: f(x, [6, 7]),
    aten.upsample_nearest2d.vec: lambda x, f: f(x, [6, 7], None),
    aten._upsample_nearest_exact2d.vec: lambda x, f: f(x, None, [1.7, 0.6]),
    aten.upsample_bilinear2d.vec: lambda x, f: f(x, None, True, [1.7, 0.6]),
    aten.upsample_bicubic2d.vec: lambda x, f: f(x, None, False, [1.7, 0.6]),
    aten.upsample_bicubic2d.default: lambda x, f: f(x, [6, 7], True),
    aten.max_pool2d_with_indices.default: lambda x, f: f(x, [2, 2]),
    aten.max_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten.adaptive_max_pool2d.default: lambda x, f: f(x, [2, 2]),
    aten.upsample_linear1d.default: lambda x, f: f(x, [6], False),
    aten.upsample_trilinear3d.default: lambda x, f: f(x, [3, 5, 4], True),
    aten.upsample_nearest1d.default: lambda x, f: f(x, [6]),
    aten.upsample_nearest3d.default: lambda x, f: f(x, [3, 5, 4]),
    aten._upsample_nearest_exact1d.default: lambda x, f: f(x, [6]),
    aten._upsample_nearest_exact3d.default: lambda x, f: f(x, [3, 5, 4]),
    aten.upsample_linear1d.vec: lambda x, f: f(x, None, False, [1.7]),
    aten.upsample_trilinear3d.vec: lambda x, f: f(x, [3, 5, 4], True, None),
    aten.upsample_nearest1d.vec: lambda x, f: f(x, None, [1.7]),
    aten.upsample_nearest3d.vec: lambda x, f: f(x, None, [1.7, 2, 0.6]),
    aten._upsample_nearest_exact1d.vec: lambda x, f: f(x, [6], None),
    aten._upsample_nearest_exact3d.vec: lambda x, f: f(x, None, [1.7, 2, 0.6]),
    aten.avg_pool3d.default: lambda x, f: f(x, [2, 2, 2]),
    aten._adaptive_avg_pool3d.default: lambda x, f: f(x, [2, 3, 1]),
    aten.max_pool3d_with_indices.default: lambda x, f: f(x, [2, 2, 2]),
    aten.adaptive_max_pool3d.default: lambda x, f: f(x, [2, 3, 1]),
    aten.avg_pool2d_backward.default: lambda x, f: f(x, x, [3, 3], [1, 1], [1, 1], False, True, None),
    aten.avg_pool3d_backward.default: lambda x, f: f(x, x, [3] * 3, [1] * 3, [1] * 3, False, True, None),
    aten._adaptive_avg_pool2d_backward.default: lambda x, f: f(x[:, :, :1, :3], x),
    aten._adaptive_avg_pool3d_backward.default: lambda x, f: f(x[:, :, :1, :3], x),
    aten.max_pool2d_with_indices_backward.default: lambda x, f: f(
        x, x, *(maximum := ([3, 3], [1, 1], [1, 1], [1, 1], False)), aten.max_pool2d_with_indices(x, *maximum)[1]
    ),
    aten.max_pool3d_with_indices_backward.default: lambda x, f: f(
        x, x, *(maximum := ([3] * 3, [1] * 3, [1] * 3, [1] * 3, False)), aten.max_pool3d_with_indices(x, *maximum)[1]
    ),
    aten.adaptive_max_pool2d_backward.default: lambda x, f: f(x, x, aten.adaptive_max_pool2d(x, x.shape[2:])[1]),
    aten.adaptive_max_pool3d_backward.default: lambda x, f: f(x, x, aten.adaptive_max_pool3d(x, x.shape[2:])[1]),
    **{
        getattr(aten, name).default: lambda x, f, how=how: f(x, x.shape[2:], [*x.shape[:2], *how[0]], *how[1:])
        for name, how in {
            "upsample_nearest2d_backward": ([3, 2],),
            "_upsample_nearest_exact2d_backward": ([3, 2],),
            "upsample_bilinear2d_backward": ([3, 2], True),
            "upsample_bicubic2d_backward": ([3, 2], True),
            "upsample_linear1d_backward": ([3], True),
            "upsample_trilinear3d_backward": ([3, 2, 4], True),
            "upsample_nearest1d_backward": ([3],),
            "upsample_nearest3d_backward": ([3, 2, 4],),
            "_upsample_nearest_exact1d_backward": ([3],),
            "_upsample_nearest_exact3d_backward": ([3, 2, 4],),
        }.items()
    },
    aten.native_group_norm.default: lambda x, f: f(x, ones(x), None, *x.shape[:2], 20, 1, 1e-5),
    aten.native_group_norm_backward.default: lambda x, f: f(
        x + 1, x, torch.ones(2, 1), torch.ones(2, 1), 2 * ones(x), *x.shape[:2], 20, 1, [True, True, True]
    ),
    aten.instance_norm.default: lambda x, f: f(x, None, ones(x), None, None, True, 0.1, 1e-5, False),
    aten.native_layer_norm.default: lambda x, f: f(x, x.shape[2:], torch.ones(x.shape[2:]), None, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, f: f(
        x + 1, x, x.shape[1:], *[torch.ones(2, 1, 1, 1)] * 2, *[torch.ones(x.shape[1:])] * 2, [True, True, True]
    ),
    aten.view.default: lambda x, f: f(x, [-1]),
    aten._unsafe_view.default: lambda x, f: f(x, [-1, 5]),
    aten.reshape.default: lambda x, f: f(x, [5, -1]),
    aten.permute.default: lambda x, f: f(x, [3, 2, 1, 0]),
    aten.transpose.int: lambda x, f: f(x, 1, 2),
    aten.t.default: lambda x, f: f(x),
    aten.slice.Tensor: lambda x, f: f(x, 2, 1, 3),
    aten.select.int: lambda x, f: f(x, 2, 1),
    aten.native_dropout.default: lambda x, f: f(x, 0.5, True),
    aten.unbind.int: lambda x, f: f(x, 2),
    aten.split.Tensor: lambda x, f: f(x, 2, 2),
    aten.split_with_sizes.default: lambda x, f: f(x, [1, 3], 2),
    aten.cat.default: lambda x, f: f([x, x], 2),
    aten.unsqueeze.default: lambda x, f: f(x, 2),
    aten.squeeze.dim: lambda x, f: f(x[..., :1], 3),
    aten.squeeze.default: lambda x, f: f(x[..., :1]),
    aten.squeeze.dims: lambda x, f: f(x[:1, ..., :1], [0, 3]),
    aten.diagonal.default: lambda x, f: f(x, 1, 3, -2),
    aten.diagonal_backward.default: lambda x, f: f(x.sum(2), [*x.shape[:2], 6, 5], 0, 2, 3),
    aten.mean.dim: lambda x, f: f(x, [2]),
    aten.sum.dim_IntList: lambda x, f: f(x, [2, 3], True),
    aten.amax.default: lambda x, f: f(x, [-1]),
    aten.amin.default: lambda x, f: f(x, [0]),
    aten.sum.default: lambda x, f: f(x),
    aten.nansum.default: lambda x, f: f(x, [1]),
    aten.mean.default: lambda x, f: f(x),
    aten.max.default: lambda x, f: f(x),
    aten.max.dim: lambda x, f: f(x, 1),
    aten.min.default: lambda x, f: f(x - 9),
    aten.min.dim: lambda x, f: f(x, 1, True),
    aten.aminmax.default: lambda x, f: f(x, dim=1),
    aten.argmax.default: lambda x, f: f(x - 9),
    aten.argmin.default: lambda x, f: f(x, 1),
    aten.all.default: lambda x, f: f(x + 9),
    aten.all.dim: lambda x, f: f(x, 1),
    aten.all.dims: lambda x, f: f(x, [0, 1]),
    aten.any.default: lambda x, f: f(x),
    aten.any.dim: lambda x, f: f(x, 1),
    aten.any.dims: lambda x, f: f(x, [0, 1]),
    aten.prod.default: lambda x, f: f(x / 4),
    aten.prod.dim_int: lambda x, f: f(x / 4, 1),
    aten.count_nonzero.default: lambda x, f: f(x, 1),
    aten.count_nonzero.dim_IntList: lambda x, f: f(x, [1, 3]),
    aten.logsumexp.default: lambda x, f: f(x, [1]),
    aten.linalg_vector_norm.default: lambda x, f: f(x + 5, -1, [1]),
    aten.norm.Scalar: lambda x, f: f(x, 3),
    aten.norm.ScalarOpt_dim: lambda x, f: f(x, None, [1]),
    aten.norm.ScalarOpt_dim_dtype: lambda x, f: f(x, 1, [1], True, dtype=torch.float64),
    aten.norm.ScalarOpt_dtype: lambda x, f: f(x, 2, dtype=torch.float64),
    aten.var.correction: lambda x, f: f(x, [1, 2]),
    aten.std.correction: lambda x, f: f(x, [1, 2], correction=0, keepdim=True),
    aten.var_mean.correction: lambda x, f: f(x),
    aten.std_mean.correction: lambda x, f: f(x, [1, 2]),
    aten._softmax.default: lambda x, f: f(x, 1, False),
    aten._log_softmax.default: lambda x, f: f(x, 1, False),
    aten._softmax_backward_data.default: lambda x, f: f(x, dense(x).softmax(1), 1, torch.float32),
    aten._log_softmax_backward_data.default: lambda x, f: f(x, x.log_softmax(1), 1, torch.float32),
    aten.cumsum.default: lambda x, f: f(x, 1),
    aten.cumprod.default: lambda x, f: f(x / 4, 1),
    aten.cummax.default: lambda x, f: f(x, 2),
    aten.cummin.default: lambda x, f: f(x, 3),
    aten.logcumsumexp.default: lambda x, f: f(x, 2),
    aten.sort.default: lambda x, f: f(x),
    aten.sort.stable: lambda x, f: f(x, stable=True, dim=2),
    aten.topk.default: lambda x, f: f(x.cumsum(2).abs().cumsum(2), 2, 2)[0],
    aten.kthvalue.default: lambda x, f: f(x, 2, 0),
    aten.median.dim: lambda x, f: f(x, 2),
    aten.nanmedian.dim: lambda x, f: f(x, 2, True),
    aten.mode.default: lambda x, f: f(x, 3),
    aten.stack.default: lambda x, f: f([x, x + 1], 1),
    aten.flip.default: lambda x, f: f(x, [1, 2]),
    aten.roll.default: lambda x, f: f(x, [1, 2], [1, 3]),
    aten.repeat.default: lambda x, f: f(x, [2, 2, 1, 3]),
    aten.expand.default: lambda x, f: f(x, [2, *x.shape]),
    aten.constant_pad_nd.default: lambda x, f: f(x, [1, -1, 0, 2], 3),
    aten.reflection_pad1d.default: lambda x, f: f(x[0], [1, 2]),
    aten.reflection_pad2d.default: lambda x, f: f(x, [1, 2, 3, 0]),
    aten.reflection_pad3d.default: lambda x, f: f(x.unsqueeze(0).transpose(1, 2), [1, 2, 3, 0, 1, 1]),
    aten.replication_pad1d.default: lambda x, f: f(x[0], [1, 2]),
    aten.replication_pad2d.default: lambda x, f: f(x, [1, 2, 9, 0]),
    aten.replication_pad3d.default: lambda x, f: f(x.unsqueeze(0).transpose(1, 2), [1, 2, 3, 0, 1, 1]),
    aten.reflection_pad1d_backward.default: lambda x, f: f(x[0], x[0, ..., :3], [1, 1]),
    aten.reflection_pad2d_backward.default: lambda x, f: f(x, x[:, :, :3, :3], [1, 1, 0, 1]),
    aten.reflection_pad3d_backward.default: lambda x, f: f(
        x.unsqueeze(2), x[:, :, :3, :3].unsqueeze(2), [1, 1, 0, 1, 0, 0]
    ),
    aten.replication_pad1d_backward.default: lambda x, f: f(x[0], x[0, ..., :3], [1, 1]),
    aten.replication_pad2d_backward.default: lambda x, f: f(x, x[:, :, :3, :3], [1, 1, 0, 1]),
    aten.replication_pad3d_backward.default: lambda x, f: f(
        x.unsqueeze(2), x[:, :, :3, :3].unsqueeze(2), [1, 1, 0, 1, 0, 0]
    ),
    aten.index_select.default: lambda x, f: f(x, 2, torch.tensor([3, 0, 3])),
    aten.index.Tensor: lambda x, f: f(x, [None, None, torch.tensor([3, 0, 3])]),
    aten.index_put.default: lambda x, f: f(dense(x), [None, None, torch.tensor([3, 0])], x[:, :, :2], True),
    aten.index_add.default: lambda x, f: f(dense(x), 2, torch.tensor([3, 3]), x[:, :, :2], alpha=2),
    aten.index_add_.default: lambda x, f: f(x, 2, torch.tensor([3, 3]), x[:, :, :2] + 1),
    aten.index_copy.default: lambda x, f: f(x, 2, torch.tensor([3, 1]), x[:, :, :2]),
    aten.index_copy_.default: lambda x, f: f(x, 2, torch.tensor([3, 1]), x[:, :, :2] + 1),
    aten.gather.default: lambda x, f: f(x, 2, places(x)),
    aten.scatter.src: lambda x, f: f(dense(x), 0, torch.zeros_like(x[:1], dtype=torch.int64), x),
    aten.scatter.value: lambda x, f: f(x, 2, places(x), 3),
    aten.scatter.reduce: lambda x, f: f(x, 2, places(x), x, reduce="add"),
    aten.scatter.value_reduce: lambda x, f: f(x, 2, places(x), 3, reduce="multiply"),
    aten.scatter_add.default: lambda x, f: f(dense(x), 2, places(x), x),
    aten.scatter_reduce.two: lambda x, f: f(x, 2, places(x), x, "amax"),
    aten.tril.default: lambda x, f: f(x, 1),
    aten.triu.default: lambda x, f: f(x),
    aten.select_backward.default: lambda x, f: f(x, [*x.shape[:2], 3, *x.shape[2:]], 2, -1),
    aten.slice_backward.default: lambda x, f: f(x, [*x.shape[:2], 9, 5], 2, 1, 9, 2),
    aten.detach.default: lambda x, f: f(x),
    aten.alias.default: lambda x, f: f(x),
    aten.clone.default: lambda x, f: f(x),
    aten._to_copy.default: lambda x, f: f(x, dtype=torch.float64),
    aten.copy_.default: lambda x, f: f(x, x + 1),
    aten.zeros_like.default: lambda x, f: f(x),
    aten.ones_like.default: lambda x, f: f(x),
    aten.full_like.default: lambda x, f: f(x, 3),
    aten.empty_like.default: lambda x, f: f(x).zero_(),
    aten.rand_like.default: lambda x, f: f(x),
    aten.randn_like.default: lambda x, f: f(x),
    aten.randint_like.default: lambda x, f: f(x, 5),
    aten.randint_like.low_dtype: lambda x, f: f(x, -2, 5),
    aten.new_empty.default: lambda x, f: f(x, [2]).zero_(),
    aten.new_zeros.default: lambda x, f: f(x, [2]),
    aten.new_ones.default: lambda x, f: f(x, [2]),
    aten.new_full.default: lambda x, f: f(x, [2], 3),
    aten.new_empty_strided.default: lambda x, f: f(x, [2], [2]).zero_(),
    aten.zero_.default: lambda x, f: f(x),
    aten.fill_.Scalar: lambda x, f: f(x, 3),
    aten.fill_.Tensor: lambda x, f: f(x, torch.tensor(3)),
    aten._local_scalar_dense.default: lambda x, f: f(x),
    aten.equal.default: lambda x, f: f(x, x),
    aten.is_same_size.default: lambda x, f: f(x, x),
    aten.bernoulli_.Tensor: lambda x, f: f(x, torch.full(x.shape, 0.3)),
    aten.bernoulli_.float: lambda x, f: f(x, 0.3),
    aten.cauchy_.default: lambda x, f: f(x),
    aten.exponential_.default: lambda x, f: f(x),
    aten.geometric_.default: lambda x, f: f(x, 0.3),
    aten.log_normal_.default: lambda x, f: f(x),
    aten.normal_.default: lambda x, f: f(x),
    getattr(aten.random_, "from"): lambda x, f: f(x, 2, 9),
    aten.random_.to: lambda x, f: f(x, 9),
    aten.random_.default: lambda x, f: f(x),
    aten.uniform_.default: lambda x, f: f(x),
    aten.transpose_.default: lambda x, f: f(x, 1, -1),
    aten.t_.default: lambda x, f: f(x),
    aten.squeeze_.default: lambda x, f: f(x),
    aten.squeeze_.dim: lambda x, f: f(x, 0),
    aten.squeeze_.dims: lambda x, f: f(x, [0, 2]),
    aten.unsqueeze_.default: lambda x, f: f(x, 1),
    aten.resize_.default: lambda x, f: f(x, [x.size(1), 5, 8]),
    aten.resize_as_.default: lambda x, f: f(x, torch.empty(x.size(1), 40)),
}  # fmt: skip

# Logical sizes, for those that do not take a blocked image of (2, channels, 4, 5).
SIZES = {
    aten.t.default: lambda c: (3, c),
    aten.t_.default: lambda c: (3, c),
    aten.squeeze_.default: lambda c: (1, c + 1, 4, 5),
    aten.squeeze_.dim: lambda c: (1, c, 4, 5),
    aten.squeeze_.dims: lambda c: (1, c, 1, 4, 5),
    aten._local_scalar_dense.default: lambda c: (1, 1, 1, 1),
}

SIZES |= {f: lambda c: (2, c, 5) for f in CALLS if "1d" in str(f) and "_pad" not in str(f)}

SIZES |= {f: lambda c: (2, c, 3, 4, 5) for f in CALLS if "3d" in str(f) and "_pad" not in str(f)}

# Overloads that have no plain answer to compare with, or are tested by themselves.
NOT_CALLED = {
    aten.set_.source_Tensor: "copies where plain tensors share; test_set_takes_the_values_of_a_blocked_tensor"
}
