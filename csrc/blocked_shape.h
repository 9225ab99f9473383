// The shape of what batch normalization and the channels' reductions run over.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_blocked {

// A tensor of (n, ceil(channels / block), pixels, block), dense.
struct BlockedShape {
  int64_t n, channels, pixels, block;
  int64_t nthreads;
  int64_t blocks() const { return (channels + block - 1) / block; }

  // Where there is little to do, a second thread costs more than it saves.
  int64_t threads() const {
    constexpr int64_t least_per_thread = 16 << 10;  // floats
    return std::min(nthreads, std::max<int64_t>(1, n * blocks() * pixels * block / least_per_thread));
  }
};

// A value a channel, zeros in the padding; of null nothing.
inline std::vector<float> padded(const BlockedShape& s, const float* values) {
  std::vector<float> all(values ? s.blocks() * s.block : 0, 0.f);
  if (values) std::copy_n(values, s.channels, all.begin());
  return all;
}

}  // namespace torch_blocked
