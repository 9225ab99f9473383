#include "linear.h"

#include <algorithm>
#include <numeric>

#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

// Of weights at a time. Of one image more only make more streams from memory, of several they read src less often.
constexpr int most_rows(int images) { return images == 1 ? 2 : 4; }
constexpr int64_t least_ahead = 4096;  // floats that the weights are fetched before they are read, into L2

float sum_of(const Vec& vec) {
  alignas(64) float values[block];
  vec.store(values);
  return std::accumulate(values, values + block, 0.f);
}

template <int Rows, int Images>
void dot_products(const LinearArgs& a, int64_t oc) {
  const float* const wei = a.wei + oc * a.ic;
  // The next rows in one run of addresses, which memory is faster at than at several.
  const float* const ahead = wei + std::max(Rows * a.ic, least_ahead);
  Vec acc[Rows][Images];
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int n = 0; n < Images; n++) acc[r][n] = Vec(0.f);
  int64_t i = 0;
  for (; i + block <= a.ic; i += block) UNROLL for (int r = 0; r < Rows; r++) {
      const Vec w = Vec::loadu(wei + r * a.ic + i);
      __builtin_prefetch(ahead + Rows * i + r * block, 0, 2);
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
  constexpr int rows = most_rows(Images);
  int64_t oc = begin;
  for (; oc + rows <= end; oc += rows) dot_products<rows, Images>(a, oc);
  for (; oc < end; oc++) dot_products<1, Images>(a, oc);
}

}  // namespace

extern const LinearKernels TORCH_BLOCKED_TIER_NAME(linear_kernels) = {
    {linear<1>, linear<2>, linear<3>, linear<linear_max_images>}};

}  // namespace torch_blocked
