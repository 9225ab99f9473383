// A permutation of the channels of one block: at::vec has none, so by the compiler's vectors, or by the one
// instruction that AVX-512 has for it.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <cstdint>
#include <cstring>

#include "depthwise.h"
#include "vec.h"

namespace torch_blocked {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
// A quad is four lanes: their channel `j`, or of two vectors, in turns, the quads in even and in odd places.
inline Vec of_quads(const float* src, __m512i j) { return _mm512_permutevar_ps(_mm512_loadu_ps(src), j); }
inline Vec even_quads(const Vec& a, const Vec& b) {
  return _mm512_mask_shuffle_f32x4(a, 0xf0f0, b, b, _MM_SHUFFLE(2, 2, 0, 0));
}
inline Vec odd_quads(const Vec& a, const Vec& b) {
  return _mm512_mask_shuffle_f32x4(b, 0x0f0f, a, a, _MM_SHUFFLE(3, 3, 1, 1));
}

struct Lanes {
  __m512i from;
  __mmask16 use;

  explicit Lanes(const LaneMap& map)
      : from(_mm512_loadu_si512(map.from)), use(_mm512_movepi32_mask(_mm512_loadu_si512(map.use))) {}
  Vec move(const float* src) const { return _mm512_maskz_permutexvar_ps(use, from, _mm512_loadu_ps(src)); }
};
#else
struct Lanes {
  using Bits = int32_t __attribute__((vector_size(block * sizeof(int32_t))));
  Bits from, use;

  explicit Lanes(const LaneMap& map) {
    std::memcpy(&from, map.from, sizeof(from));
    std::memcpy(&use, map.use, sizeof(use));
  }
  Vec move(const float* src) const {
    Bits bits;
    Vec moved;
    std::memcpy(&bits, src, sizeof(bits));
    bits = __builtin_shuffle(bits, from) & use;
    std::memcpy(static_cast<void*>(&moved), &bits, sizeof(bits));
    return moved;
  }
};
#endif

}  // namespace
}  // namespace torch_blocked
