// Batch normalization of a blocked tensor, and its gradient.
#pragma once

#include "blocked_shape.h"
#include "half.h"

namespace torch_blocked {

// A value a channel; weight null: ones, bias null: zeros.
struct BatchNormParameters {
  const float* weight;
  const float* bias;
  const float* mean;
  const float* var;
  double eps;
};

// dst = (src - mean) / sqrt(var + eps) * weight + bias; dst's padding is zero.
void batch_norm(const BlockedShape& shape, const BatchNormParameters& parameters, const Values& src,
                const Results& dst);

// The same as dst = src * scale + shift.
void batch_norm_scale_shift(const BatchNormParameters& parameters, int64_t channels, float* scale, float* shift);

// Mean and biased variance of each channel.
void batch_norm_statistics(const BlockedShape& shape, const Values& src, float* mean, float* var);

// The gradients of batch_norm with respect to src, weight and bias. invstd is 1 / sqrt(var + eps); where `training`,
// both statistics are those of src. diff_src's padding is zero.
void batch_norm_backward(const BlockedShape& shape, const float* weight, const float* mean, const float* invstd,
                         bool training, const Values& diff_dst, const Values& src, const Results& diff_src,
                         float* diff_weight, float* diff_bias);

}  // namespace torch_blocked
