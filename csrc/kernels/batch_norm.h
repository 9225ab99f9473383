// Batch normalization's inner loops, one table per ISA tier.
//
// All run over `pixels` blocks of `block` channels; vectors, and each row of sums, have `block` values.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

struct BatchNormKernels {
  // dst = src * scale + shift.
  void (*scale_shift)(const float* src, const float* scale, const float* shift, float* dst, int64_t pixels,
                      int64_t block);
  // sums[0] = the sum of src - center, sums[1] = that of its squares.
  void (*moments)(const float* src, const float* center, float* sums, int64_t pixels, int64_t block);
  // sums[0] = the sum of diff_dst, sums[1] = that of diff_dst * (src - mean).
  void (*gradient_sums)(const float* diff_dst, const float* src, const float* mean, float* sums, int64_t pixels,
                        int64_t block);
  // diff_src = diff_dst * scale + (src - mean) * slope + shift.
  void (*gradient)(const float* diff_dst, const float* src, const float* scale, const float* mean, const float* slope,
                   const float* shift, float* diff_src, int64_t pixels, int64_t block);
};
TORCH_BLOCKED_DECLARE_KERNELS(BatchNormKernels, batch_norm_kernels);

}  // namespace torch_blocked
