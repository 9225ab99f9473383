// Products of plain rows, for linear layers of few images: one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

constexpr int linear_max_images = 4;

struct LinearArgs {
  const float* src;   // rows of ic floats, one an image, the next `src_row` floats on
  const float* wei;   // rows of ic floats, one an output channel, one after the other
  const float* bias;  // one an output channel; null: zeros
  float* dst;         // rows of output channels, one an image, the next `dst_row` floats on
  int64_t ic, src_row, dst_row;
};

// [images - 1]: dst of the output channels [begin, end). Each weight is read once.
struct LinearKernels {
  void (*linear[linear_max_images])(const LinearArgs& args, int64_t begin, int64_t end);
};
TORCH_BLOCKED_DECLARE_KERNELS(LinearKernels, linear_kernels);

}  // namespace torch_blocked
