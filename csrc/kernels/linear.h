// Products of dense row-major matrices, for linear layers of few images: one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

constexpr int linear_max_images = 4;

struct LinearArgs {
  const float* src;   // (images, ic)
  const float* wei;   // (oc, ic)
  const float* bias;  // (oc); null: zeros
  float* dst;         // (images, oc)
  int64_t ic, oc;
};

// [images - 1]: dst of the output channels [begin, end). Each weight is read once.
struct LinearKernels {
  void (*linear[linear_max_images])(const LinearArgs& args, int64_t begin, int64_t end);
};
TORCH_BLOCKED_DECLARE_KERNELS(LinearKernels, linear_kernels);

}  // namespace torch_blocked
