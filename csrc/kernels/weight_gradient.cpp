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

template <int OcBlocks, int Lanes>
__attribute__((noinline)) void outer_product(const WeightGradientArgs& a) {
  Vec acc[OcBlocks][Lanes];
  UNROLL for (int o = 0; o < OcBlocks; o++) UNROLL for (int i = 0; i < Lanes; i++) acc[o][i] = Vec(0.f);
  each_row(a, [&](const float* src, const float* diff_dst) {
    for (int64_t c = 0; c < a.cols; c++, src += a.src_pixel, diff_dst += block) {
      __builtin_prefetch(src + a.src_ahead, 0, 3);
      Vec d[OcBlocks];
      UNROLL for (int o = 0; o < OcBlocks; o++) {
        const float* d_block = diff_dst + o * a.diff_dst_block;
        __builtin_prefetch(d_block + a.diff_dst_ahead, 0, 3);
        d[o] = Vec::loadu(d_block);
      }
      UNROLL for (int i = 0; i < Lanes; i++) {
        const Vec s(src[i]);
        UNROLL for (int o = 0; o < OcBlocks; o++) acc[o][i] = multiply_add(d[o], s, acc[o][i]);
      }
    }
  });
  UNROLL for (int o = 0; o < OcBlocks; o++) UNROLL for (int i = 0; i < Lanes; i++) {
    float* sum = a.diff_wei + o * a.diff_wei_block + i * block;
    (acc[o][i] + Vec::loadu(sum)).store(sum);
  }
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

template <size_t... I, size_t... J>
constexpr WeightGradientKernels make_table(std::index_sequence<I...>, std::index_sequence<J...>) {
  return {{outer_product<1, int(I) + 1>...}, {outer_product<2, int(J) + 1>...}, lane_product};
}

}  // namespace

extern const WeightGradientKernels TORCH_BLOCKED_TIER_NAME(weight_gradient_kernels) =
    make_table(std::make_index_sequence<block>(), std::make_index_sequence<block / 2>());

}  // namespace torch_blocked
