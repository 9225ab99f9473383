#include "../kernels/linear.h"

#include <ATen/Functions.h>

#include "../parallel.h"
#include "operators.h"
#include "tensors.h"

namespace torch_blocked {

Tensor linear_cpu(const Tensor& src, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool has_bias = bias.has_value() && bias->defined();
  const auto is_plain = [](const Tensor& t) { return t.scalar_type() == at::kFloat && t.is_contiguous(); };
  const bool fits = src.dim() == 2 && weight.dim() == 2 && src.size(1) == weight.size(1) && src.size(0) > 0 &&
                    src.size(0) <= linear_max_images && is_plain(src) && is_plain(weight) &&
                    (!has_bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && is_plain(*bias)));
  if (!fits) return at::linear(src, weight, bias);
  const Tensor dst = empty_pooled({src.size(0), weight.size(0)}, at::kFloat);
  const LinearArgs args{src.const_data_ptr<float>(),
                        weight.const_data_ptr<float>(),
                        has_bias ? bias->const_data_ptr<float>() : nullptr,
                        dst.mutable_data_ptr<float>(),
                        src.size(1),
                        weight.size(0)};
  const auto kernel = TORCH_BLOCKED_KERNELS(linear_kernels, isa()).linear[src.size(0) - 1];
  parallel_for(weight.size(0), num_threads(), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return dst;
}

}  // namespace torch_blocked
