// Reductions over the channels of a blocked tensor, softmax along them and its gradient, of float32.
#pragma once
#include <cstdint>

#include "blocked_shape.h"
#include "kernels/channels.h"

namespace torch_blocked {

// Most channels: their numbers are floats in the kernels.
constexpr int64_t most_channels = 1 << 24;

// Those for blocks of so many channels; null: none.
const ChannelKernels* channel_kernels(int64_t block);

// dst and indices are (n, pixels).
void reduce_channels(const BlockedShape& shape, ChannelReduction how, const float* src, float* dst);
void find_channel(const BlockedShape& shape, bool least, const float* src, float* dst, int64_t* indices);

// All are of `shape`.
void softmax_channels(const BlockedShape& shape, bool log, const float* src, float* dst);
// weight and bias have a value a channel; null: ones, zeros. mean and rstd are (n, pixels).
void layer_norm_channels(const BlockedShape& shape, const float* weight, const float* bias, double eps,
                         const float* src, float* dst, float* mean, float* rstd);
void softmax_channels_backward(const BlockedShape& shape, bool log, const float* diff_dst, const float* dst,
                               float* diff_src);

}  // namespace torch_blocked
