// Batch normalization's inner loop, one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

struct BatchNormKernels {
  // dst = src * scale + shift over `pixels` blocks of `block` channels; scale and shift have `block` values.
  void (*scale_shift)(const float* src, const float* scale, const float* shift, float* dst, int64_t pixels,
                      int64_t block);
};
TORCH_BLOCKED_DECLARE_KERNELS(BatchNormKernels, batch_norm_kernels);

}  // namespace torch_blocked
