#include "conv.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "conv_plain.h"
#include "depthwise.h"
#include "tier.h"
#include "vec.h"
#include "weight_gradient.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

constexpr int line = 16;                  // floats of the cache
constexpr int line_lanes = line / block;  // whose weights fill one

// What the sums of one block begin with.
template <int Rows, int Cols>
inline void begin_sums(const ConvArgs& a, const float* dst, bool first, int b, Register (&acc)[Rows][Cols]) {
  const Vec start = first && a.epilogue.bias ? Vec::loadu(a.epilogue.bias + b * block) : Vec(0.f);
  dst += b * a.dst_block;
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) {
    if (a.fetch_dst) __builtin_prefetch(dst + r * a.dst_row + c * a.dst_step * block, 1, 3);
    acc[r][c] = start;
  }
}

// Adds the sums to dst, unless they are the first, and applies the epilogue to the last.
template <int Rows, int Cols>
inline void end_sums(const ConvArgs& a, const Epilogue& epilogue, float* dst, bool first, bool last, int b, bool stream,
                     Register (&acc)[Rows][Cols]) {
  dst += b * a.dst_block;
  const int64_t dst_row = a.dst_row, dst_pixel = a.dst_step * block;
  if (!first)
    UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] =
        Vec(acc[r][c]) + Vec::loadu(dst + r * dst_row + c * dst_pixel);
  if (last) finish(epilogue, b * block, a.dst_block, dst_row, dst_pixel, acc);
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++)
      store_vector(Vec(acc[r][c]), dst + r * dst_row + c * dst_pixel, stream);
}

template <int64_t n>
using Number = std::integral_constant<int64_t, n>;

// A run: Rows x Cols pixels of Blocks blocks of output channels. Pixel is the distance of neighbouring src pixels.
template <int Pixel, int Rows, int Cols, int Blocks>
[[gnu::always_inline]] inline void convolve_run(const ConvArgs& a, const Epilogue& epilogue, const float* run_src,
                                                float* dst, int64_t left_taps, int64_t wei_ahead) {
  const int64_t src_row = a.src_row, wei_block = a.wei_block, ahead = a.src_prefetch;
  const int64_t wei_ahead_block = a.next ? a.next_block : wei_block;
  const bool stream = a.stream;
  for (int64_t begin = 0; begin < a.nblocks; begin += a.sum_blocks) {
    Register acc[Blocks][Rows][Cols];
    const bool first = a.first && begin == 0;
    UNROLL for (int b = 0; b < Blocks; b++) begin_sums(a, dst, first, b, acc[b]);
    // Here, not in a function, and `lanes` a constant but where there are fewer input channels than a block: else GCC
    // keeps accumulators in memory from one tap to the next. `step` lanes are multiplied in turn: two are faster than
    // one or four (Granite Rapids).
    const auto multiply = [&](int64_t from, int64_t to, auto lanes, auto step) __attribute__((always_inline)) {
      for (int64_t k = from; k < to; k++) {
        for (int64_t t = 0, left = 0; t < a.ntaps; t++) {
          const float* const src = run_src + k * a.src_block + a.taps[t].src;
          const float* wei = a.wei + k * a.wei_ic_block + a.taps[t].wei;
          if (ahead != 0)
            UNROLL for (int i = 0; i < block; i += line_lanes) __builtin_prefetch(src + ahead + i * block, 0, 3);
          const auto multiply_tap = [&](auto first_col) __attribute__((always_inline)) {
            for (int64_t i = 0; i < lanes; i += step) {
              // Into L2: more lines can be on their way there from memory than to L1.
              for (int lane = 0; lane < step; lane += line_lanes)
                UNROLL for (int b = 0; b < std::min(Blocks, 2); b++)
                    __builtin_prefetch(wei + wei_ahead + lane * block + b * wei_ahead_block, 0, 2);
              for (int lane = 0; lane < step; lane++, wei += block) {
                Vec w[Blocks];
                UNROLL for (int b = 0; b < Blocks; b++) w[b] = Vec::loadu(wei + b * wei_block);
                UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = first_col; c < Cols; c++) {
                  const Vec x(src[r * src_row + c * Pixel + i + lane]);
                  UNROLL for (int b = 0; b < Blocks; b++) acc[b][r][c] = multiply_add(w[b], x, acc[b][r][c]);
                }
              }
            }
          };
          if constexpr (Pixel > block) {
            left < left_taps ? multiply_tap(Number<1>()) : multiply_tap(Number<0>());
            left = left + 1 < a.tap_cols ? left + 1 : 0;
          } else {
            multiply_tap(Number<0>());
          }
        }
      }
    };
    const int64_t end = std::min(begin + a.sum_blocks, a.nblocks), whole = std::min(end, a.nblocks - a.half_blocks);
    if (a.lanes == block) {
      multiply(begin, whole, Number<block>(), Number<2>());
      multiply(std::max(begin, whole), end, Number<block / 2>(), Number<2>());
    } else {
      multiply(begin, end, a.lanes, Number<1>());
    }
    const bool last = a.last && end == a.nblocks;
    UNROLL for (int b = 0; b < Blocks; b++) end_sums(a, epilogue, dst, first, last, b, stream, acc[b]);
  }
}

template <int Pixel, int Rows, int Cols, int Blocks>
[[gnu::noinline]] void convolve_alone(const ConvArgs& a, const Epilogue& epilogue, const float* src, float* dst,
                                      int64_t left_taps, int64_t wei_ahead) {
  convolve_run<Pixel, Rows, Cols, Blocks>(a, epilogue, src, dst, left_taps, wei_ahead);
}

// A call for each run takes as long as 100 products, but of three blocks or two strided rows GCC would keep some sums
// in memory if there was a loop around.
template <int Pixel, int Rows, int Blocks>
constexpr bool runs_alone = Blocks == 3 || (Pixel > block && Rows == 2);

template <int Pixel, int Rows, int Cols, int Blocks>
[[gnu::noinline]] void convolve(const ConvArgs& a) {
  const int64_t dst_run = Cols * a.dst_step * block;
  const float* src = a.src;
  float* dst = a.dst;
  Epilogue epilogue = a.epilogue;
  int64_t wei_ahead = a.next ? a.next - a.wei : wei_prefetch, left_taps = a.left_taps;
  for (int64_t run = 0; run < a.runs; run++, src += Cols * Pixel, dst += dst_run) {
    if constexpr (runs_alone<Pixel, Rows, Blocks>)
      convolve_alone<Pixel, Rows, Cols, Blocks>(a, epilogue, src, dst, left_taps, wei_ahead);
    else
      convolve_run<Pixel, Rows, Cols, Blocks>(a, epilogue, src, dst, left_taps, wei_ahead);
    if (epilogue.residual) epilogue.residual += dst_run;
    wei_ahead += a.next_run;
    left_taps = 0;
  }
}

template <int Pixel, int Rows, int Blocks, size_t... I>
constexpr void fill(ConvKernel* row, std::index_sequence<I...>) {
  ((row[I] = convolve<Pixel, Rows, int(I) + 1, Blocks>), ...);
}

template <int Pixel, int Blocks, size_t... I>
constexpr void fill_plain(ConvKernel* row, std::index_sequence<I...>) {
  ((row[I] = convolve_plain<Pixel, int(I) + 1, Blocks>), ...);
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
  table.cols_three = max_cols_three;
  constexpr auto cols = std::make_index_sequence<max_cols>();
  constexpr auto cols_two = std::make_index_sequence<max_cols_two>();
  fill<block, 1, 1>(table.one_row[0], cols);
  fill<block, 1, 2>(table.one_row[1], cols);
  fill<block, 1, 3>(table.one_row[2], std::make_index_sequence<max_cols_three>());
  fill<block, 2, 1>(table.two_rows[0], cols);
  fill<block, 2, 2>(table.two_rows[1], cols_two);
  fill<2 * block, 1, 1>(table.strided_row[0], cols);
  fill<2 * block, 1, 2>(table.strided_row[1], cols);
  fill<2 * block, 2, 1>(table.strided_two_rows[0], cols);
  fill<2 * block, 2, 2>(table.strided_two_rows[1], cols_two);
  fill_plain<1, 1>(table.plain_row[0][0], cols);
  fill_plain<1, 2>(table.plain_row[0][1], cols);
  fill_plain<2, 1>(table.plain_row[1][0], cols);
  fill_plain<2, 2>(table.plain_row[1][1], cols);
  table.depthwise = &TORCH_BLOCKED_TIER_NAME(depthwise_kernels);
  table.weight_gradient = &TORCH_BLOCKED_TIER_NAME(weight_gradient_kernels);
  table.activations = &TORCH_BLOCKED_TIER_NAME(activation_kernels);
  table.copy_pixels = copy_pixels;
  table.copy_plain = copy_plain;
  return table;
}

}  // namespace

extern const ConvKernels TORCH_BLOCKED_TIER_NAME(conv_kernels) = make_table();

}  // namespace torch_blocked
