#include "../batch_norm.h"

#include "operators.h"

namespace torch_blocked {

Tensor batch_norm_cpu(const Tensor& src, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      const Tensor& mean, const Tensor& var, double eps) {
  TORCH_CHECK_VALUE(mean.dim() == 1 && src.dim() >= 3,
                    "batch_norm: src is (n, blocks, ..., block), mean (channels), got ", src.sizes(), " and ",
                    mean.sizes());
  const int64_t channels = mean.size(0), block = src.size(-1);
  TORCH_CHECK_VALUE(block > 0 && src.size(1) == (channels + block - 1) / block, "batch_norm: ", channels,
                    " channels in blocks of ", block, " are not the ", src.size(1), " blocks of src");
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "batch_norm: float32 only, got src ", src.scalar_type());
  const Tensor dense = src.contiguous();
  const Tensor dense_weight = channel_vector("batch_norm: weight", weight, channels);
  const Tensor dense_bias = channel_vector("batch_norm: bias", bias, channels);
  const Tensor dense_mean = channel_vector("batch_norm: mean", mean, channels);
  const Tensor dense_var = channel_vector("batch_norm: var", var, channels);
  Tensor dst = empty_pooled(dense.sizes(), at::kFloat);
  if (dst.numel() == 0) return dst;
  batch_norm({dense.size(0), channels, dense.numel() / (dense.size(0) * dense.size(1) * block), block,
              dense.const_data_ptr<float>(), data_or_null(dense_weight), data_or_null(dense_bias),
              data_or_null(dense_mean), data_or_null(dense_var), eps, dst.mutable_data_ptr<float>(), num_threads()});
  return dst;
}

}  // namespace torch_blocked
