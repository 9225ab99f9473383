#include "../channels.h"

#include "operators.h"

namespace torch_blocked {
namespace {

// The shape of src; checked.
BlockedShape describe(const char* name, const Tensor& src, int64_t channels) {
  const BlockedShape shape = blocked_shape(name, src, channels);
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, name, ": float32 only, got ", src.scalar_type());
  TORCH_CHECK_VALUE(channel_kernels(shape.block) != nullptr, name,
                    ": blocks of 8 channels, or of 16 with AVX-512, got ", shape.block);
  TORCH_CHECK_VALUE(channels > 0 && channels <= most_channels, name, ": 1 to 2**24 channels, got ", channels);
  return shape;
}

// (n, ...): a value a pixel.
Tensor empty_pixels(const Tensor& src, at::ScalarType dtype) {
  std::vector<int64_t> size(src.sizes().begin() + 1, src.sizes().end() - 1);
  size.front() = src.size(0);
  return empty_pooled(size, dtype);
}

ChannelReduction reduction(c10::string_view name) {
  static constexpr std::pair<const char*, ChannelReduction> reductions[] = {{"sum", Sum},
                                                                            {"mean", Mean},
                                                                            {"norm", Norm},
                                                                            {"norm_of_deviations", NormOfDeviations},
                                                                            {"logsumexp", LogSumExp},
                                                                            {"max", Greatest},
                                                                            {"min", Least}};
  for (const auto& [known, how] : reductions)
    if (name == known) return how;
  TORCH_CHECK_VALUE(false, "reduce_channels: one of sum, mean, norm, norm_of_deviations, logsumexp, max, min, got '",
                    name, "'");
}

}  // namespace

Tensor reduce_channels_cpu(const Tensor& src, int64_t channels, c10::string_view how) {
  const BlockedShape shape = describe("reduce_channels", src, channels);
  const ChannelReduction by = reduction(how);
  const Tensor dense = src.contiguous();
  Tensor dst = empty_pixels(src, at::kFloat);
  or_out_of_memory("reduce_channels",
                   [&] { reduce_channels(shape, by, dense.const_data_ptr<float>(), dst.mutable_data_ptr<float>()); });
  return dst;
}

std::tuple<Tensor, Tensor> find_channel_cpu(const Tensor& src, int64_t channels, bool least) {
  const BlockedShape shape = describe("find_channel", src, channels);
  const Tensor dense = src.contiguous();
  Tensor dst = empty_pixels(src, at::kFloat), indices = empty_pixels(src, at::kLong);
  or_out_of_memory("find_channel", [&] {
    find_channel(shape, least, dense.const_data_ptr<float>(), dst.mutable_data_ptr<float>(),
                 indices.mutable_data_ptr<int64_t>());
  });
  return {dst, indices};
}

Tensor softmax_channels_cpu(const Tensor& src, int64_t channels, bool log) {
  const BlockedShape shape = describe("softmax_channels", src, channels);
  const Tensor dense = src.contiguous();
  Tensor dst = empty_pooled(dense.sizes(), at::kFloat);
  or_out_of_memory("softmax_channels",
                   [&] { softmax_channels(shape, log, dense.const_data_ptr<float>(), dst.mutable_data_ptr<float>()); });
  return dst;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_channels_cpu(const Tensor& src, int64_t channels,
                                                           const std::optional<Tensor>& weight,
                                                           const std::optional<Tensor>& bias, double eps) {
  const BlockedShape shape = describe("layer_norm_channels", src, channels);
  const Tensor dense = src.contiguous();
  const Tensor dense_weight = channel_vector("layer_norm_channels: weight", weight, channels);
  const Tensor dense_bias = channel_vector("layer_norm_channels: bias", bias, channels);
  Tensor dst = empty_pooled(dense.sizes(), at::kFloat);
  Tensor mean = empty_pixels(src, at::kFloat), rstd = empty_pixels(src, at::kFloat);
  or_out_of_memory("layer_norm_channels", [&] {
    layer_norm_channels(shape, data_or_null(dense_weight), data_or_null(dense_bias), eps, dense.const_data_ptr<float>(),
                        dst.mutable_data_ptr<float>(), mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>());
  });
  return {dst, mean, rstd};
}

Tensor softmax_channels_backward_cpu(const Tensor& diff_dst, const Tensor& dst, int64_t channels, bool log) {
  const BlockedShape shape = describe("softmax_channels_backward", diff_dst, channels);
  TORCH_CHECK_VALUE(dst.sizes() == diff_dst.sizes(), "softmax_channels_backward: diff_dst and dst have one shape, got ",
                    diff_dst.sizes(), " and ", dst.sizes());
  TORCH_CHECK_TYPE(dst.scalar_type() == at::kFloat, "softmax_channels_backward: float32 only, got dst ",
                   dst.scalar_type());
  const Tensor dense = dst.contiguous(), dense_diff = diff_dst.contiguous();
  Tensor diff_src = empty_pooled(dense.sizes(), at::kFloat);
  or_out_of_memory("softmax_channels_backward", [&] {
    softmax_channels_backward(shape, log, dense_diff.const_data_ptr<float>(), dense.const_data_ptr<float>(),
                              diff_src.mutable_data_ptr<float>());
  });
  return diff_src;
}

}  // namespace torch_blocked
