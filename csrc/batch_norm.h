// Batch normalization of a blocked tensor by given statistics.
#pragma once
#include <cstdint>

namespace torch_blocked {

struct BatchNorm {
  int64_t n, channels, pixels, block;  // src and dst are (n, ceil(channels / block), pixels, block), dense
  const float* src;
  const float* weight;  // null: ones
  const float* bias;    // null: zeros
  const float* mean;
  const float* var;
  double eps;
  float* dst;
  int64_t nthreads;
};

// dst = (src - mean) / sqrt(var + eps) * weight + bias; dst's padding is zero.
void batch_norm(const BatchNorm& args);

}  // namespace torch_blocked
