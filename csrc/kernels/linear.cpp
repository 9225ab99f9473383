#include "linear.h"

#include <numeric>

#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

constexpr int most_rows = 4;        // of weights at a time: as many streams from memory
constexpr int64_t prefetch = 8192;  // floats ahead of each, into L2: more lines can be on their way there than to L1

float sum_of(const Vec& vec) {
  alignas(64) float values[block];
  vec.store(values);
  return std::accumulate(values, values + block, 0.f);
}

template <int Rows, int Images>
void dot_products(const LinearArgs& a, int64_t oc) {
  const float* const wei = a.wei + oc * a.ic;
  Vec acc[Rows][Images];
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int n = 0; n < Images; n++) acc[r][n] = Vec(0.f);
  int64_t i = 0;
  for (; i + block <= a.ic; i += block) UNROLL for (int r = 0; r < Rows; r++) {
      const Vec w = Vec::loadu(wei + r * a.ic + i);
      __builtin_prefetch(wei + r * a.ic + i + prefetch, 0, 2);
      UNROLL for (int n = 0; n < Images; n++) acc[r][n] = multiply_add(w, Vec::loadu(a.src + n * a.ic + i), acc[r][n]);
    }
  for (int r = 0; r < Rows; r++)
    for (int n = 0; n < Images; n++) {
      float sum = sum_of(acc[r][n]) + (a.bias ? a.bias[oc + r] : 0.f);
      for (int64_t k = i; k < a.ic; k++) sum += wei[r * a.ic + k] * a.src[n * a.ic + k];
      a.dst[n * a.oc + oc + r] = sum;
    }
}

template <int Images>
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  int64_t oc = begin;
  for (; oc + most_rows <= end; oc += most_rows) dot_products<most_rows, Images>(a, oc);
  for (; oc < end; oc++) dot_products<1, Images>(a, oc);
}

}  // namespace

extern const LinearKernels TORCH_BLOCKED_TIER_NAME(linear_kernels) = {
    {linear<1>, linear<2>, linear<3>, linear<linear_max_images>}};

}  // namespace torch_blocked
