// Reductions over the channels of a blocked tensor, and softmax along them: one table per ISA tier.
//
// All take a tile: as many pixels, one after another, as a vector has lanes, of every block of channels. Each pixel has
// one value where channels are reduced. NaN is what a NaN among the channels makes of it.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

struct ChannelTile {
  const float* src;   // pixel p of block k begins at src[k * src_block + p * block]
  int64_t src_block;  // floats; that of every other tensor of these pixels, too
  int64_t channels;   // more than 0
};

// The sum of the values and their mean; the root of the sum of their squares, and of those of what they differ from
// their mean; the logarithm of the sum of their exponentials; extremes. Squares may be beyond what float32 holds where
// their root is not.
enum ChannelReduction { Sum, Mean, Norm, NormOfDeviations, LogSumExp, Greatest, Least, channel_reductions };

struct ChannelKernels {
  int64_t block;  // channels in a block, lanes of a vector
  void (*reduce[channel_reductions])(const ChannelTile& tile, float* dst);
  // The greatest value, or the least, and the first channel that has it.
  void (*find_greatest)(const ChannelTile& tile, float* dst, int64_t* indices);
  void (*find_least)(const ChannelTile& tile, float* dst, int64_t* indices);
  // dst's padding is zero.
  void (*softmax)(const ChannelTile& tile, float* dst);
  void (*log_softmax)(const ChannelTile& tile, float* dst);
  // Their gradients with respect to src, from that of dst, which is the tile, and dst.
  void (*softmax_backward)(const ChannelTile& diff_dst, const float* dst, float* diff_src);
  void (*log_softmax_backward)(const ChannelTile& diff_dst, const float* dst, float* diff_src);
  // dst = (src - mean) * rstd * weight + bias, rstd = 1 / sqrt(the mean of the squared deviations + eps). weight and
  // bias have a value for each channel and place in the padding; null: ones, zeros.
  void (*layer_norm)(const ChannelTile& tile, const float* weight, const float* bias, float eps, float* dst,
                     float* mean, float* rstd);
};
TORCH_BLOCKED_DECLARE_KERNELS(ChannelKernels, channel_kernels);

}  // namespace torch_blocked
