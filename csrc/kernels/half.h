// Conversion between half precision and float32, one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

struct HalfKernels {
  // `count` values, contiguous.
  struct Of {
    void (*widen)(const void* src, float* dst, int64_t count);
    void (*narrow)(const float* src, void* dst, int64_t count);  // to nearest even
  };
  Of bfloat16, float16;
};
TORCH_BLOCKED_DECLARE_KERNELS(HalfKernels, half_kernels);

}  // namespace torch_blocked
