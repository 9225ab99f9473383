// Products of float32 matrices on tiles of bfloat16 (Intel AMX), as exact as in float32.
//
// A float32 is the sum of three bfloat16, its parts: the upper, middle and lower eight bits of its significand. Of the
// nine products of two numbers' parts the six largest are summed, in float32; what is left out is less than 2^-24 of
// the whole. Parts below the least normal number, 2^-126, are lost. (Henry, Tang and Heinecke, Leveraging the bfloat16
// Artificial Intelligence Datatype For Higher-Precision Computations, ARITH 2019.) A tile multiplies sixteen times as
// much a cycle as the vectors do.
#pragma once
#include <cstdint>

#include "../isa.h"
#include "conv.h"

namespace torch_blocked {

using Part = uint16_t;  // the bits of a bfloat16

// Numbers must be less than 2^63, so that no product of two parts overflows where float32's sum might not, or might to
// an infinity: infinities of both signs would become a NaN.
constexpr float amx_bound = 9223372036854775808.f;
constexpr uint32_t amx_bound_bits = 0x5f000000;

constexpr int amx_parts = 3, amx_products = 6;  // of a number, and of two numbers' parts
constexpr int amx_rows = 16;                    // of a tile: pixels of src and dst, pairs of lanes of weights
constexpr int amx_row = 32;  // parts in a row of src (two channel blocks) or of weights (two lanes of each channel)
constexpr int amx_most_tiles = 2, amx_most_blocks = 2, amx_pixels = amx_most_tiles * amx_rows;  // of a call
// Of all parts of a step for one call, whose memory so is one piece.
constexpr int64_t amx_src_step = amx_parts * amx_pixels * amx_row;
constexpr int64_t amx_wei_block = amx_parts * amx_rows * amx_row, amx_wei_step = amx_most_blocks * amx_wei_block;

// Vectors of one block of channels and as many of a second whose parts are to be made: dst[part][vector][lane], lanes
// of the two blocks in turn.
struct SplitRun {
  const float *first, *second;
  int64_t first_stride, second_stride;  // from one vector to the next
  int64_t count;
  Part* dst;
  int64_t dst_part;
  int64_t ahead;  // floats from these vectors to those that are split next but some, which are fetched into L2
};

// Those that are made while others' products are summed: `pace` vectors for each of the parts' products.
struct SplitQueue {
  SplitRun *run = nullptr, *end = nullptr;
  int64_t pace = 0;
  bool in_bounds = true;  // all so far
};

// Sums of one or two tiles of pixels for one or two blocks of output channels: of src[t][step] * wei[b][step] over the
// steps, each of two blocks of input channels.
struct AmxProducts {
  const Part* src;           // [part][pixel][lane] of a step begins at its offset
  const int64_t* src_steps;  // these, of each step
  int64_t src_part;          // from one part to the next
  const Part* wei;           // [step][block][part][pair of lanes][output channel][lane]
  int64_t steps;
  float* sums;  // [block][pixel][output channel]
  int64_t sums_block;
  SplitQueue* queue;
};

struct AmxKernels {
  // This thread's tiles, all of 16 rows of 64 bytes, for the products between the two calls.
  void (*configure)();
  void (*release)();

  void (*split)(SplitQueue& queue);  // all of it

  // [tiles - 1][blocks - 1]
  void (*multiply[amx_most_tiles][amx_most_blocks])(const AmxProducts&);

  // sums += part, `count` floats, a whole number of vectors.
  void (*add)(const float* part, float* sums, int64_t count);

  // dst of `count` pixels, `dst_pixel` floats apart, of `blocks` blocks: sums and epilogue, which it changes: a
  // copy of what was just written would wait for every store before it.
  void (*finish)(const float* sums, int64_t sums_block, int64_t blocks, Epilogue& epilogue, float* dst,
                 int64_t dst_block, int64_t dst_pixel, int64_t count, bool stream);
};
// All null but in AVX-512's build.
TORCH_BLOCKED_DECLARE_KERNELS(AmxKernels, amx_kernels);

}  // namespace torch_blocked
