// The shape of what batch normalization and the channels' reductions run over.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace torch_blocked {

// A tensor of (n, ceil(channels / block), pixels, block), dense.
struct BlockedShape {
  int64_t n, channels, pixels, block;
  int64_t nthreads;
  int64_t blocks() const { return (channels + block - 1) / block; }
  int64_t threads() const { return threads_for(n * blocks() * pixels * block, nthreads); }
};

// A value a channel, zeros in the padding; of null nothing.
inline std::vector<float> padded(const BlockedShape& s, const float* values) {
  std::vector<float> all(values ? s.blocks() * s.block : 0, 0.f);
  if (values) std::copy_n(values, s.channels, all.begin());
  return all;
}

}  // namespace torch_blocked
