#include "weight_gradient.h"

#include <utility>

#include "lanes.h"
#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {

// Calls body(src, diff_dst) at the beginning of each row.
template <class Body>
inline void each_row(const WeightGradientArgs& a, const Body& body) {
  for (int64_t p = 0; p < a.planes; p++)
    for (int64_t r = 0; r < a.rows; r++)
      body(a.src + p * a.src_plane + r * a.src_row, a.diff_dst + p * a.diff_dst_plane + r * a.diff_dst_row);
}

template <int Lanes>
__attribute__((noinline)) void outer_product(const WeightGradientArgs& a) {
  Vec acc[Lanes];
  UNROLL for (int i = 0; i < Lanes; i++) acc[i] = Vec(0.f);
  each_row(a, [&](const float* src, const float* diff_dst) {
    for (int64_t c = 0; c < a.cols; c++, src += a.src_pixel, diff_dst += block) {
      __builtin_prefetch(src + a.src_ahead, 0, 3);
      __builtin_prefetch(diff_dst + a.diff_dst_ahead, 0, 3);
      const Vec d = Vec::loadu(diff_dst);
      UNROLL for (int i = 0; i < Lanes; i++) acc[i] = multiply_add(d, Vec(src[i]), acc[i]);
    }
  });
  UNROLL for (int i = 0; i < Lanes; i++)(acc[i] + Vec::loadu(a.diff_wei + i * block)).store(a.diff_wei + i * block);
}

template <class Load>
inline void lane_product_of(const WeightGradientArgs& a, const Load& load) {
  constexpr int chains = 4;  // sums that do not wait for each other
  Vec acc[chains];
  UNROLL for (int u = 0; u < chains; u++) acc[u] = Vec(0.f);
  each_row(a, [&](const float* src, const float* diff_dst) {
    int64_t c = 0;
    for (; c + chains <= a.cols; c += chains)
      UNROLL for (int u = 0; u < chains; u++) acc[u] =
          multiply_add(Vec::loadu(diff_dst + (c + u) * block), load(src + (c + u) * a.src_pixel), acc[u]);
    for (; c < a.cols; c++)
      acc[0] = multiply_add(Vec::loadu(diff_dst + c * block), load(src + c * a.src_pixel), acc[0]);
  });
  (Vec::loadu(a.diff_wei) + ((acc[0] + acc[1]) + (acc[2] + acc[3]))).store(a.diff_wei);
}

void lane_product(const WeightGradientArgs& a, const LaneMap* map) {
  if (map == nullptr) return lane_product_of(a, [](const float* src) { return Vec::loadu(src); });
  const Lanes lanes(*map);
  lane_product_of(a, [&](const float* src) { return lanes.move(src); });
}

template <size_t... I>
constexpr WeightGradientKernels make_table(std::index_sequence<I...>) {
  return {{outer_product<int(I) + 1>...}, lane_product};
}

}  // namespace

extern const WeightGradientKernels TORCH_BLOCKED_TIER_NAME(weight_gradient_kernels) =
    make_table(std::make_index_sequence<block>());

}  // namespace torch_blocked
