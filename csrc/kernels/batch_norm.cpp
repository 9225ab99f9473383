#include "batch_norm.h"

#include <ATen/cpu/vec/vec.h>

#include "tier.h"

namespace torch_blocked {
namespace {

using Vec = at::vec::Vectorized<float>;

// Width known to the compiler: scale and shift stay in registers.
template <int Width>
void scale_shift_of(const float* src, const float* scale, const float* shift, float* dst, int64_t pixels) {
  constexpr int parts = Width / Vec::size();
  Vec scales[parts], shifts[parts];
  for (int i = 0; i < parts; i++) {
    scales[i] = Vec::loadu(scale + i * Vec::size());
    shifts[i] = Vec::loadu(shift + i * Vec::size());
  }
  for (int64_t p = 0; p < pixels; p++, src += Width, dst += Width)
    for (int i = 0; i < parts; i++) {
      const int at = i * Vec::size();
      at::vec::fmadd(Vec::loadu(src + at), scales[i], shifts[i]).store(dst + at);
    }
}

void scale_shift(const float* src, const float* scale, const float* shift, float* dst, int64_t pixels, int64_t block) {
  if (block == 16) return scale_shift_of<16>(src, scale, shift, dst, pixels);
  if constexpr (Vec::size() <= 8)
    if (block == 8) return scale_shift_of<8>(src, scale, shift, dst, pixels);
  for (int64_t p = 0; p < pixels; p++, src += block, dst += block)
    for (int64_t i = 0; i < block; i++) dst[i] = src[i] * scale[i] + shift[i];
}

}  // namespace

extern const BatchNormKernels TORCH_BLOCKED_TIER_NAME(batch_norm_kernels) = {scale_shift};

}  // namespace torch_blocked
