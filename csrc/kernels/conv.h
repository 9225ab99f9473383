// The convolutions' inner loops: register-blocked micro-kernels, one table per ISA tier.
//
// dst is blocked by `block` channels; one call computes a small rectangle of dst pixels for one or two blocks of output
// channels, which stay in registers while it runs over input channels and filter taps.
#pragma once
#include <cstdint>
#include <iterator>

#include "../isa.h"

namespace torch_blocked {

// What follows the sum of products, in this order: * scale + shift, + residual, clamp to [lower, upper].
// All pointers are at the call's first output channel and pixel; null means absent.
struct Epilogue {
  const float* bias = nullptr;  // the accumulators' first value
  const float* scale = nullptr;
  const float* shift = nullptr;
  const float* residual = nullptr;  // laid out as dst
  const float* keep = nullptr;      // all-ones bits for each real channel of the last block, zero bits for padding
  float lower = 0, upper = 0;
  bool clamp = false;
};

// src element of (ic block k, tap t, lane i, pixel r, c): src[k * src_block + taps[t] + i + r * src_row + c * pixel];
// the weights are read in that order of (k, t, i), `block` output channels at a time.
struct ConvArgs {
  const float* src;
  int64_t src_block, src_row;
  int64_t src_prefetch;  // how far ahead of src the next call reads; 0 where it is not known
  const int64_t* taps;
  int64_t ntaps, nblocks, lanes;
  // ic blocks summed in one go; the sums are then added up, which keeps the error of long ones small. At least 1.
  int64_t sum_blocks = 1;
  const float* wei;
  int64_t wei_block;     // to the next block of output channels
  int64_t wei_ic_block;  // from the first tap of an ic block to that of the next
  float* dst;
  int64_t dst_block, dst_row;
  int64_t dst_step = 1;  // from one pixel of a row to the next, in pixels
  bool first, last;      // the sum starts here (else it adds to dst), ends here (the epilogue applies)
  Epilogue epilogue;
};
using ConvKernel = void (*)(const ConvArgs&);

// One tap of a depthwise convolution, or a row of neighbouring taps: offsets of its first src pixel and of its first
// vector of weights.
struct DepthwiseTap {
  int64_t src, wei;
};

// For one channel of each group: dst lane i reads src lane from[i] where use[i] is -1 (all bits) and nothing where it
// is 0. src and wei are added to every tap's.
constexpr int max_lanes = 16;
struct LaneMap {
  int64_t src, wei;
  int32_t from[max_lanes];
  int32_t use[max_lanes];
};

// The sum over maps and taps.
struct DepthwiseArgs {
  const float* src;
  int64_t src_offset;  // of the first pixel's filter: it may lie in the padding, before src, where its taps do not
  const LaneMap* maps;
  int64_t nmaps;
  const DepthwiseTap* taps;
  int64_t ntaps;
  int64_t ahead, nahead, src_row;  // what the next dst row reads first: its offset, like taps', and rows of src
  int64_t left, right;  // the first and last pixels of a row of taps that lie in the padding; each less than its width
  const float* wei;
  int64_t wei_kw;  // to the weights of the next tap of a row
  float* dst;
  int64_t dst_step = 1;  // as in ConvArgs
  bool first, last;      // too
  Epilogue epilogue;
};
using DepthwiseKernel = void (*)(const DepthwiseArgs&);

// A row of taps of these widths shares its pixels: each is loaded once. Other filters go tap by tap.
constexpr int depthwise_kw[] = {1, 2, 3, 5, 7};
constexpr int depthwise_max_stride = 2;

constexpr int conv_max_cols = 14;

struct ConvKernels {
  int64_t block;
  int cols;      // most pixels of a row in one call, one row
  int cols_two;  // and with two rows of two blocks; two rows of one block have as many as one row
  // [oc blocks - 1][cols - 1]
  ConvKernel one_row[2][conv_max_cols];
  ConvKernel two_rows[2][conv_max_cols];
  ConvKernel plain_row[2][conv_max_cols];  // src is a plain plane: pixels are 1 apart, not `block`
  // [whether lanes move][index into depthwise_kw][column stride - 1][cols - 1]
  DepthwiseKernel depthwise[2][std::size(depthwise_kw)][depthwise_max_stride][conv_max_cols];

  // dst[j] = src[j * stride] for n pixels of one block, or (plain) of one element.
  void (*copy_pixels)(const float* src, int64_t stride, float* dst, int64_t n);
  void (*copy_plain)(const float* src, int64_t stride, float* dst, int64_t n);
};
TORCH_BLOCKED_DECLARE_KERNELS(ConvKernels, conv_kernels);

}  // namespace torch_blocked
