// The convolutions' inner loops: register-blocked micro-kernels, one table per ISA tier.
//
// dst is blocked by `block` channels; one call computes a small rectangle of dst pixels for one to three blocks of
// output channels, which stay in registers while it runs over input channels and filter taps.
#pragma once
#include <cstdint>

#include "../isa.h"
#include "activation.h"

namespace torch_blocked {

// What follows the sum of products, in this order: * scale + shift, + residual, clamp to [lower, upper], activate;
// where residual_last, + residual after them. All pointers are at the call's first output channel and pixel; null means
// absent.
struct Epilogue {
  const float* bias = nullptr;  // the accumulators' first value
  const float* scale = nullptr;
  const float* shift = nullptr;
  const float* residual = nullptr;  // laid out as dst
  const float* keep = nullptr;      // all-ones bits for each real channel of the last block, zero bits for padding
  float lower = 0, upper = 0;
  Activate activate = nullptr;  // with the parameter alpha
  float alpha = 0;
  bool clamp = false, residual_last = false;
};

// One tap, or (depthwise) a row of neighbouring ones: offsets of its first src pixel and of its first vector of
// weights.
struct Tap {
  int64_t src, wei;
};

// src element of (ic block k, tap t, lane i, pixel r, c): src[k * src_block + taps[t].src + i + r * src_row + c *
// pixel]; its weights: wei[k * wei_ic_block + taps[t].wei + i * block], of `block` output channels.
struct ConvArgs {
  const float* src;
  int64_t src_block, src_row;
  int64_t src_prefetch;  // how far ahead of src the next call reads; 0 where it is not known
  const Tap* taps;
  int64_t ntaps, nblocks, lanes;
  // Of a strided or plain src: of each `tap_cols` taps the first ones, which lie in the padding for the first pixel of
  // a row.
  int64_t tap_cols = 1, left_taps = 0;
  // As many calls, for the pixels of a row, one beside the other: left_taps are the first one's. Of a plain src each
  // fetches `nahead` cache lines into L2, ahead[i] floats from its own src.
  int64_t runs = 1;
  const int64_t* ahead = nullptr;
  int64_t nahead = 0;
  // The last ones of nblocks, whose channels are at most half a block: the others, padding, are not multiplied.
  int64_t half_blocks = 0;
  // ic blocks summed in one go; the sums are then added up, which keeps the error of long ones small. At least 1.
  int64_t sum_blocks = 1;
  const float* wei;
  int64_t wei_block;     // to the next block of output channels
  int64_t wei_ic_block;  // from one ic block to the next
  // As much as a block's weights of what later calls read, laid out as this call's and fetched at their pace; null for
  // those of this call itself, some way ahead.
  const float* next = nullptr;
  int64_t next_block = 0;  // where it is not 0, as much of a second block, so far behind the first
  int64_t next_run = 0;    // to what the next run fetches
  float* dst;
  int64_t dst_block, dst_row;
  int64_t dst_step = 1;    // from one pixel of a row to the next, in pixels
  bool first, last;        // the sum starts here (else it adds to dst), ends here (the epilogue applies)
  bool stream = false;     // dst, aligned to a vector, is written past the caches: it is larger than they are
  bool fetch_dst = false;  // into L1 while the sums are made: it may lie in memory
  bool in_turn = false;    // of a plain src: some columns are stored while others are multiplied, not all at the end
  Epilogue epilogue;
};
using ConvKernel = void (*)(const ConvArgs&);

constexpr int conv_max_cols = 14, conv_max_plain_stride = 2;

struct DepthwiseKernels;       // depthwise.h
struct WeightGradientKernels;  // weight_gradient.h

struct ConvKernels {
  int64_t block;
  int cols;        // most pixels of a row in one call, one row
  int cols_two;    // and with two rows of two blocks; two rows of one block have as many as one row
  int cols_three;  // and one row of three blocks; 0 where there are no such kernels
  // [oc blocks - 1][cols - 1]
  ConvKernel one_row[3][conv_max_cols];
  ConvKernel two_rows[2][conv_max_cols];
  // The same of a src whose pixels are two blocks apart: a stride of 2 where it lies.
  ConvKernel strided_row[2][conv_max_cols];
  ConvKernel strided_two_rows[2][conv_max_cols];
  // [stride - 1]: src is a plain plane, its pixels 1 or 2 apart, not `block`; one lane a tap, the whole sum at once, so
  // that nblocks, lanes, first and last are not read
  ConvKernel plain_row[conv_max_plain_stride][2][conv_max_cols];
  const DepthwiseKernels* depthwise;
  const WeightGradientKernels* weight_gradient;
  const ActivationKernels* activations;

  // dst[j] = src[j * stride] for n pixels of one block, or (plain) of one element.
  void (*copy_pixels)(const float* src, int64_t stride, float* dst, int64_t n);
  void (*copy_plain)(const float* src, int64_t stride, float* dst, int64_t n);
};
TORCH_BLOCKED_DECLARE_KERNELS(ConvKernels, conv_kernels);

}  // namespace torch_blocked
