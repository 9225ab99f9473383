#include "conv.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

#if defined(CPU_CAPABILITY_AVX512)
constexpr int max_cols = 14, max_cols_two = 7;  // 28 accumulators, 2 weights, 2 to spare
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int max_cols = 6, max_cols_two = 3;  // 12 accumulators, 2 weights, 2 to spare
#else
constexpr int max_cols = 3, max_cols_two = 1;
#endif

constexpr int64_t wei_prefetch = 1024;  // floats ahead: a page, at whose end the hardware's own prefetch stops

// Rows x Cols pixels of Blocks blocks of output channels. Pixel is the distance of neighbouring src pixels.
template <int Pixel, int Rows, int Cols, int Blocks>
__attribute__((noinline)) void convolve(const ConvArgs& a) {
  Vec acc[Blocks][Rows * Cols];
  float* const dst = a.dst;
  const int64_t dst_block = a.dst_block, dst_row = a.dst_row, src_row = a.src_row, wei_block = a.wei_block;
  const int64_t dst_pixel = a.dst_step * block;
  const int64_t lanes = Pixel == 1 ? 1 : a.lanes, ahead = a.src_prefetch;  // a plain src has one lane a tap
  for (int64_t begin = 0; begin < a.nblocks; begin += a.sum_blocks) {
    const bool first = a.first && begin == 0;
    UNROLL for (int b = 0; b < Blocks; b++) {
      const Vec start = first && a.epilogue.bias ? Vec::loadu(a.epilogue.bias + b * block) : Vec(0.f);
      UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) {
        __builtin_prefetch(dst + b * dst_block + r * dst_row + c * dst_pixel, 1, 3);
        acc[b][r * Cols + c] = start;
      }
    }
    for (int64_t k = begin; k < std::min(begin + a.sum_blocks, a.nblocks); k++) {
      const float* wei = a.wei + k * a.wei_ic_block;
      for (int64_t t = 0; t < a.ntaps; t++) {
        const float* const src = a.src + k * a.src_block + a.taps[t];
#pragma GCC unroll 4
        for (int64_t i = 0; i < lanes; i++) {
          if constexpr (Pixel > 1) __builtin_prefetch(src + ahead + i * block, 0, 3);
          Vec w[Blocks];
          UNROLL for (int b = 0; b < Blocks; b++) w[b] = Vec::loadu(wei + b * wei_block);
          UNROLL for (int b = 0; b < Blocks; b++) __builtin_prefetch(wei + wei_prefetch + b * wei_block, 0, 3);
          wei += block;
          UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) {
            const Vec x(src[r * src_row + c * Pixel + i]);
            UNROLL for (int b = 0; b < Blocks; b++) acc[b][r * Cols + c] = multiply_add(w[b], x, acc[b][r * Cols + c]);
          }
        }
      }
    }
    const bool last = a.last && begin + a.sum_blocks >= a.nblocks;
    UNROLL for (int b = 0; b < Blocks; b++) {
      float* const pixels = dst + b * dst_block;
      if (!first)
        UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[b][r * Cols + c] =
            acc[b][r * Cols + c] + Vec::loadu(pixels + r * dst_row + c * dst_pixel);
      if (last) finish<Rows, Cols>(a.epilogue, b * block, dst_block, dst_row, acc[b]);
      UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[b][r * Cols + c].store(
          pixels + r * dst_row + c * dst_pixel);
    }
  }
}

alignas(64) constexpr float zeros[block] = {};  // what is read in the padding

// The compiler's vectors: at::vec has no permutation of lanes.
struct Lanes {
  using Bits = int32_t __attribute__((vector_size(block * sizeof(int32_t))));
  Bits from, use;

  explicit Lanes(const LaneMap& map) {
    std::memcpy(&from, map.from, sizeof(from));
    std::memcpy(&use, map.use, sizeof(use));
  }
  Vec move(const float* src) const {
    Bits bits;
    Vec moved;
    std::memcpy(&bits, src, sizeof(bits));
    bits = __builtin_shuffle(bits, from) & use;
    std::memcpy(static_cast<void*>(&moved), &bits, sizeof(bits));
    return moved;
  }
};

// Cols pixels of one block of channels, each channel with its own filter. src pixels are Stride apart; taps come in
// rows of Kw neighbours, and pixel i of a row is the k-th tap of dst column (i - k) / Stride.
template <bool Moved, int Kw, int Stride, int Cols>
__attribute__((noinline)) void depthwise(const DepthwiseArgs& a) {
  constexpr int pixels = (Cols - 1) * Stride + Kw;
  const int64_t left = a.left, right = a.right;
  // Rows of one block are too short for the hardware's own prefetch.
  const float* ahead = a.src + (a.src_offset + a.maps[0].src + a.ahead);
  for (int64_t r = 0; r < a.nahead; r++, ahead += a.src_row)
#pragma GCC unroll 64
    for (int i = 0; i < pixels; i++) __builtin_prefetch(ahead + i * block, 0, 3);
  Vec acc[Cols];
  const Vec start = a.first && a.epilogue.bias ? Vec::loadu(a.epilogue.bias) : Vec(0.f);
  UNROLL for (int c = 0; c < Cols; c++) acc[c] = start;
  for (int64_t m = 0; m < (Moved ? a.nmaps : 1); m++) {
    const Lanes lanes(a.maps[m]);
    for (int64_t t = 0; t < a.ntaps; t++) {
      const float* const src = a.src + (a.src_offset + a.maps[m].src + a.taps[t].src);
      const float* const wei = a.wei + a.maps[m].wei + a.taps[t].wei;
      Vec w[Kw];
      UNROLL for (int k = 0; k < Kw; k++) w[k] = Vec::loadu(wei + k * a.wei_kw);
#pragma GCC unroll 64
      for (int i = 0; i < pixels; i++) {
        const bool read = Kw > 1 || i % Stride == 0;  // by any tap
        const bool padding = (i < Kw - 1 && i < left) || (i > pixels - Kw && i >= pixels - right);
        if (read) {
          const float* const pixel = padding ? zeros : src + i * block;
          const Vec x = Moved ? lanes.move(pixel) : Vec::loadu(pixel);
          UNROLL for (int k = 0; k < Kw; k++) {
            const int c = (i - k) / Stride;
            if (i >= k && (i - k) % Stride == 0 && c < Cols) acc[c] = multiply_add(w[k], x, acc[c]);
          }
        }
      }
    }
  }
  const int64_t dst_pixel = a.dst_step * block;
  if (!a.first) UNROLL for (int c = 0; c < Cols; c++) acc[c] = acc[c] + Vec::loadu(a.dst + c * dst_pixel);
  if (a.last) finish<1, Cols>(a.epilogue, 0, 0, 0, acc);
  UNROLL for (int c = 0; c < Cols; c++) acc[c].store(a.dst + c * dst_pixel);
}

template <int Pixel, int Rows, int Blocks, size_t... I>
constexpr void fill(ConvKernel* row, std::index_sequence<I...>) {
  ((row[I] = convolve<Pixel, Rows, int(I) + 1, Blocks>), ...);
}

template <bool Moved, int Kw, int Stride, size_t... I>
constexpr void fill_depthwise(DepthwiseKernel* row, std::index_sequence<I...>) {
  ((row[I] = depthwise<Moved, Kw, Stride, int(I) + 1>), ...);
}

template <bool Moved, class Table, class Cols, size_t... I>
constexpr void fill_depthwise(Table& table, Cols cols, std::index_sequence<I...>) {
  ((fill_depthwise<Moved, depthwise_kw[I], 1>(table[I][0], cols),
    fill_depthwise<Moved, depthwise_kw[I], 2>(table[I][1], cols)),
   ...);
}

void copy_pixels(const float* src, int64_t stride, float* dst, int64_t n) {
  for (int64_t j = 0; j < n; j++, src += stride, dst += block) Vec::loadu(src).store(dst);
}

void copy_plain(const float* src, int64_t stride, float* dst, int64_t n) {
  if (stride == 1)
    std::memcpy(dst, src, n * sizeof(float));
  else if (stride == 2)  // a constant stride, so that the compiler makes shuffles of it
    for (int64_t j = 0; j < n; j++) dst[j] = src[j * 2];
  else
    for (int64_t j = 0; j < n; j++) dst[j] = src[j * stride];
}

constexpr ConvKernels make_table() {
  ConvKernels table{};
  table.block = block;
  table.cols = max_cols;
  table.cols_two = max_cols_two;
  constexpr auto cols = std::make_index_sequence<max_cols>();
  constexpr auto cols_two = std::make_index_sequence<max_cols_two>();
  fill<block, 1, 1>(table.one_row[0], cols);
  fill<block, 1, 2>(table.one_row[1], cols);
  fill<block, 2, 1>(table.two_rows[0], cols);
  fill<block, 2, 2>(table.two_rows[1], cols_two);
  fill<1, 1, 1>(table.plain_row[0], cols);
  fill<1, 1, 2>(table.plain_row[1], cols);
  constexpr auto kernel_widths = std::make_index_sequence<std::size(depthwise_kw)>();
  fill_depthwise<false>(table.depthwise[0], cols, kernel_widths);
  fill_depthwise<true>(table.depthwise[1], cols, kernel_widths);
  table.copy_pixels = copy_pixels;
  table.copy_plain = copy_plain;
  return table;
}

}  // namespace

extern const ConvKernels TORCH_BLOCKED_TIER_NAME(conv_kernels) = make_table();

}  // namespace torch_blocked
