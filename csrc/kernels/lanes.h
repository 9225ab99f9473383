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
