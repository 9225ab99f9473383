#include "../batch_norm.h"

#include "operators.h"

namespace torch_blocked {
namespace {

// The shape of src; checked.
BlockedShape describe(const char* name, const Tensor& src, int64_t channels) {
  check_precision(name, "src", src.scalar_type());
  return blocked_shape(name, src, channels);
}

int64_t channels_of(const char* name, const Tensor& mean) {
  TORCH_CHECK_VALUE(mean.defined(), name, ": mean is a tensor, got None");
  TORCH_CHECK_VALUE(mean.dim() == 1, name, ": mean has one value a channel, got shape ", mean.sizes());
  return mean.size(0);
}

// One that must be given: the dispatcher passes Python's None as an undefined tensor.
Tensor required_vector(const char* name, const Tensor& vector, int64_t channels) {
  TORCH_CHECK_VALUE(vector.defined(), name, " is a tensor, got None");
  return channel_vector(name, vector, channels);
}

// The vectors of a batch normalization, dense, for as long as it runs.
struct Vectors {
  Tensor weight, bias, mean, var;
  BatchNormParameters parameters;

  Vectors(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& var,
          int64_t channels, double eps)
      : weight(channel_vector("batch_norm: weight", weight, channels)),
        bias(channel_vector("batch_norm: bias", bias, channels)),
        mean(required_vector("batch_norm: mean", mean, channels)),
        var(required_vector("batch_norm: var", var, channels)),
        parameters{data_or_null(this->weight), data_or_null(this->bias), data_or_null(this->mean),
                   data_or_null(this->var), eps} {}
};

}  // namespace

Tensor batch_norm_cpu(const Tensor& src, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      const Tensor& mean, const Tensor& var, double eps) {
  const int64_t channels = channels_of("batch_norm", mean);
  const BlockedShape shape = describe("batch_norm", src, channels);
  const Tensor dense = src.contiguous();
  const Vectors vectors(weight, bias, mean, var, channels, eps);
  Tensor dst = empty_pooled(dense.sizes(), src.scalar_type());
  if (dst.numel() == 0) return dst;
  or_out_of_memory("batch_norm", [&] { batch_norm(shape, vectors.parameters, values(dense), results(dst)); });
  return dst;
}

std::tuple<Tensor, Tensor> batch_norm_scale_shift_cpu(const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias, const Tensor& mean,
                                                      const Tensor& var, double eps) {
  const int64_t channels = channels_of("batch_norm", mean);
  const Vectors vectors(weight, bias, mean, var, channels, eps);
  Tensor scale = empty_pooled({channels}, at::kFloat), shift = empty_pooled({channels}, at::kFloat);
  batch_norm_scale_shift(vectors.parameters, channels, scale.mutable_data_ptr<float>(),
                         shift.mutable_data_ptr<float>());
  return {scale, shift};
}

std::tuple<Tensor, Tensor> batch_norm_statistics_cpu(const Tensor& src, int64_t channels) {
  const BlockedShape shape = describe("batch_norm_statistics", src, channels);
  TORCH_CHECK_VALUE(src.numel() > 0, "batch_norm_statistics: src has no values, shape ", src.sizes());
  const Tensor dense = src.contiguous();
  Tensor mean = empty_pooled({channels}, at::kFloat), var = empty_pooled({channels}, at::kFloat);
  or_out_of_memory("batch_norm_statistics", [&] {
    batch_norm_statistics(shape, values(dense), mean.mutable_data_ptr<float>(), var.mutable_data_ptr<float>());
  });
  return {mean, var};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_cpu(const Tensor& diff_dst, const Tensor& src,
                                                           const std::optional<Tensor>& weight, const Tensor& mean,
                                                           const Tensor& invstd, bool training) {
  const int64_t channels = channels_of("batch_norm_backward", mean);
  const BlockedShape shape = describe("batch_norm_backward", src, channels);
  TORCH_CHECK_VALUE(diff_dst.sizes() == src.sizes() && src.numel() > 0,
                    "batch_norm_backward: diff_dst and src have one shape and values, got ", diff_dst.sizes(), " and ",
                    src.sizes());
  TORCH_CHECK_TYPE(diff_dst.scalar_type() == src.scalar_type(),
                   "batch_norm_backward: diff_dst and src have one dtype, got ", diff_dst.scalar_type(), " and ",
                   src.scalar_type());
  const Tensor dense = src.contiguous(), dense_diff = diff_dst.contiguous();
  const Tensor dense_weight = channel_vector("batch_norm_backward: weight", weight, channels);
  const Tensor dense_mean = required_vector("batch_norm_backward: mean", mean, channels);
  const Tensor dense_invstd = required_vector("batch_norm_backward: invstd", invstd, channels);
  Tensor diff_src = empty_pooled(dense.sizes(), src.scalar_type());
  Tensor diff_weight = empty_pooled({channels}, at::kFloat), diff_bias = empty_pooled({channels}, at::kFloat);
  or_out_of_memory("batch_norm_backward", [&] {
    batch_norm_backward(shape, data_or_null(dense_weight), data_or_null(dense_mean), data_or_null(dense_invstd),
                        training, values(dense_diff), values(dense), results(diff_src),
                        diff_weight.mutable_data_ptr<float>(), diff_bias.mutable_data_ptr<float>());
  });
  return {diff_src, diff_weight, diff_bias};
}

}  // namespace torch_blocked
