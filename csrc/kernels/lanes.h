// A permutation of the channels of one block: at::vec has none, so by the compiler's vectors.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <cstdint>
#include <cstring>

#include "depthwise.h"
#include "vec.h"

namespace torch_blocked {
namespace {

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

}  // namespace
}  // namespace torch_blocked
