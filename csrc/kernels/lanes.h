// Permutations of the channels of one block: at::vec has none, so by the compiler's vectors, or by the one instruction
// that AVX-512 has for any of them.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "depthwise.h"
#include "vec.h"

namespace torch_blocked {
namespace {

using Bits = int32_t __attribute__((vector_size(block * sizeof(int32_t))));

inline Bits bits_of(const Vec& vec) {
  Bits bits;
  std::memcpy(&bits, static_cast<const void*>(&vec), sizeof(bits));
  return bits;
}

inline Vec vec_of(const Bits& bits) {
  Vec vec;
  std::memcpy(static_cast<void*>(&vec), &bits, sizeof(bits));
  return vec;
}

template <int... i>
constexpr Bits numbers(std::integer_sequence<int, i...>) {
  return Bits{i...};
}
constexpr Bits lane_numbers = numbers(std::make_integer_sequence<int, block>());

// Lane i is lane i ^ flip.
template <int flip>
inline Vec exchange(const Vec& vec) {
  return vec_of(__builtin_shuffle(bits_of(vec), lane_numbers ^ flip));
}

// Lane i is that of `b` where i has the bit, else that of `a`.
template <int bit>
inline Vec by_bit(const Vec& a, const Vec& b) {
  return vec_of((lane_numbers & bit) != 0 ? bits_of(b) : bits_of(a));
}

#if defined(CPU_CAPABILITY_AVX512)
struct Lanes {
  __m512i from;
  __mmask16 use;

  explicit Lanes(const LaneMap& map)
      : from(_mm512_loadu_si512(map.from)), use(_mm512_movepi32_mask(_mm512_loadu_si512(map.use))) {}
  Vec move(const float* src) const { return _mm512_maskz_permutexvar_ps(use, from, _mm512_loadu_ps(src)); }
};
#else
struct Lanes {
  Bits from, use;

  explicit Lanes(const LaneMap& map) {
    std::memcpy(&from, map.from, sizeof(from));
    std::memcpy(&use, map.use, sizeof(use));
  }
  Vec move(const float* src) const {
    Bits bits;
    std::memcpy(&bits, src, sizeof(bits));
    return vec_of(__builtin_shuffle(bits, from) & use);
  }
};
#endif

}  // namespace
}  // namespace torch_blocked
