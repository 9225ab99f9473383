// Convolution of a plain src: one lane a tap, of pixels less than a block apart.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <algorithm>

#include "conv.h"
#include "vec.h"

namespace torch_blocked {
namespace {

// Adds the products of one tap of a plain src to columns [begin, end), but to column 0 where that tap is `left` of src.
template <int Pixel, int begin, int end, int Cols, int Blocks>
[[gnu::always_inline]] inline void multiply_plain_tap(const float* src, const float* wei, int64_t wei_block, bool left,
                                                      Register (&acc)[Blocks][Cols]) {
  Vec w[Blocks];
  UNROLL for (int b = 0; b < Blocks; b++) w[b] = Vec::loadu(wei + b * wei_block);
  UNROLL for (int c = begin; c < end; c++) {
    if (c == 0 && left) continue;
    const Vec x(src[c * Pixel]);
    UNROLL for (int b = 0; b < Blocks; b++) acc[b][c] = multiply_add(w[b], x, acc[b][c]);
  }
}

// The epilogue of columns [begin, end), and their stores.
template <int begin, int end, int Cols, int Blocks>
[[gnu::always_inline]] inline void end_plain_columns(Epilogue e, float* dst, int64_t dst_block, bool stream,
                                                     Register (&acc)[Blocks][Cols]) {
  if (e.residual) e.residual += begin * block;
  UNROLL for (int b = 0; b < Blocks; b++) {
    Register sums[1][end - begin];
    UNROLL for (int c = begin; c < end; c++) sums[0][c - begin] = acc[b][c];
    finish(e, b * block, dst_block, 0, block, sums);
    UNROLL for (int c = begin; c < end; c++)
        store_vector(Vec(sums[0][c - begin]), dst + b * dst_block + c * block, stream);
  }
}

constexpr int taps_in_turn = 3;

// The last taps, none of them left of src, and the end of the columns from `begin` on, some at a time, so that these
// are stored while the next are multiplied: a store takes as long as two products.
template <int Pixel, int begin, int Cols, int Blocks>
[[gnu::always_inline]] inline void end_plain_in_turn(const ConvArgs& a, const Epilogue& e, const float* src, float* dst,
                                                     Register (&acc)[Blocks][Cols]) {
  if constexpr (begin < Cols) {
    constexpr int end = std::min(begin + block / 4, Cols);
    const Tap* const taps = a.taps + a.ntaps - taps_in_turn;
    // No loop: the branches of a short one are often mispredicted.
    multiply_plain_tap<Pixel, begin, end>(src + taps[0].src, a.wei + taps[0].wei, a.wei_block, false, acc);
    multiply_plain_tap<Pixel, begin, end>(src + taps[1].src, a.wei + taps[1].wei, a.wei_block, false, acc);
    multiply_plain_tap<Pixel, begin, end>(src + taps[2].src, a.wei + taps[2].wei, a.wei_block, false, acc);
    end_plain_columns<begin, end>(e, dst, a.dst_block, a.stream, acc);
    end_plain_in_turn<Pixel, end>(a, e, src, dst, acc);
  }
}

// Runs of Cols pixels of a row, of Blocks blocks of output channels: the whole sum at once. Pixel is the distance of
// neighbouring src pixels.
template <int Pixel, int Cols, int Blocks>
__attribute__((noinline)) void convolve_plain(const ConvArgs& a) {
  const float* src = a.src;
  float* dst = a.dst;
  Epilogue epilogue = a.epilogue;
  const int64_t ntaps = a.ntaps, wei_block = a.wei_block, dst_block = a.dst_block;
  for (int64_t run = 0, left_taps = a.left_taps; run < a.runs; run++, left_taps = 0) {
    for (int64_t i = 0; i < a.nahead; i++) __builtin_prefetch(src + a.ahead[i], 0, 2);
    Register acc[Blocks][Cols];
    UNROLL for (int b = 0; b < Blocks; b++) {
      const Vec start = epilogue.bias ? Vec::loadu(epilogue.bias + b * block) : Vec(0.f);
      UNROLL for (int c = 0; c < Cols; c++) {
        if (a.fetch_dst) __builtin_prefetch(dst + b * dst_block + c * block, 1, 3);
        acc[b][c] = start;
      }
    }
    const bool in_turn = a.in_turn && !epilogue.activate && ntaps >= taps_in_turn &&
                         (left_taps == 0 || a.tap_cols - left_taps >= taps_in_turn);
    const int64_t whole = in_turn ? ntaps - taps_in_turn : ntaps;
    for (int64_t t = 0, col = 0; t < whole; t++) {
      multiply_plain_tap<Pixel, 0, Cols>(src + a.taps[t].src, a.wei + a.taps[t].wei, wei_block, col < left_taps, acc);
      col = col + 1 < a.tap_cols ? col + 1 : 0;
    }
    if (in_turn) {
      if (epilogue.activate) __builtin_unreachable();  // no call, around which GCC would keep all columns in memory
      end_plain_in_turn<Pixel, 0>(a, epilogue, src, dst, acc);
    } else {
      end_plain_columns<0, Cols>(epilogue, dst, dst_block, a.stream, acc);
    }
    src += Cols * Pixel;
    dst += Cols * block;
    if (epilogue.residual) epilogue.residual += Cols * block;
  }
}

}  // namespace
}  // namespace torch_blocked
