// The shape of what batch normalization and the channels' reductions run over.
#pragma once
#include <algorithm>
#include <cstdint>

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

}  // namespace torch_blocked
