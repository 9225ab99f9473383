#include "depthwise.h"

#include <utility>

#include "lanes.h"
#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

// Cols pixels of one block of channels, each channel with its own filter. src pixels are Stride apart; taps come in
// rows of Kw neighbours, and pixel i of a row is the k-th tap of dst column (i - k) / Stride.
template <Lane lane, int Kw, int Stride, int Cols>
struct Tile {
  static constexpr int pixels = (Cols - 1) * Stride + Kw;
  Vec acc[Cols];

  // Where the first pixel of the rows of taps is src column `iw`.
  [[gnu::always_inline]] void add(const DepthwiseArgs& a, int64_t src_offset, int64_t iw, TapRange taps) {
    for (int64_t m = 0; m < (lane == Lane::Own ? 1 : a.nmaps); m++) {
      const Lanes lanes(a.maps[m]);
      for (int64_t t = taps.begin; t < taps.end; t++) {
        const float* const wei = a.wei + a.maps[m].wei + a.taps[t].wei;
        Vec w[Kw];
        UNROLL for (int k = 0; k < Kw; k++) w[k] = Vec::loadu(wei + k * a.wei_kw);
        add_row(a, a.src + (src_offset + a.maps[m].src + a.taps[t].src), iw, lanes, w);
      }
    }
  }

  [[gnu::always_inline]] void add_row(const DepthwiseArgs& a, const float* src, int64_t iw, const Lanes& lanes,
                                      const Vec (&w)[Kw]) {
#pragma GCC unroll 64
    for (int i = 0; i < pixels; i++) {
      if (Kw == 1 && i % Stride != 0) continue;  // no tap reads it
      const bool at_edge = i < Kw - 1 || i > pixels - Kw;
      const float* pixel = src + i * block;
      if (at_edge) pixel = uint64_t(iw + i) < uint64_t(a.iw) ? pixel : a.zeros;
      const Vec x = lane == Lane::Same     ? Vec(*pixel)
                    : lane == Lane::Mapped ? lanes.move(pixel)
                                           : in_register(Vec::loadu(pixel));
      UNROLL for (int k = 0; k < Kw; k++) {
        const int c = (i - k) / Stride;
        if (i >= k && (i - k) % Stride == 0 && c < Cols) acc[c] = multiply_add(w[k], x, acc[c]);
      }
    }
  }

  [[gnu::always_inline]] void store(const DepthwiseArgs& a, float* dst) {
    const int64_t dst_pixel = a.dst_step * block;
    if (!a.first) UNROLL for (int c = 0; c < Cols; c++) acc[c] = acc[c] + Vec::loadu(dst + c * dst_pixel);
    if (a.last) {
      Epilogue epilogue = a.epilogue;
      if (epilogue.residual) epilogue.residual += dst - a.dst;
      finish<1, Cols>(epilogue, 0, 0, 0, dst_pixel, acc);
    }
    const bool stream = a.stream;
    UNROLL for (int c = 0; c < Cols; c++) store_vector(acc[c], dst + c * dst_pixel, stream);
  }

  // Rows of one block are too short for the hardware's own prefetch. All the rows that a dst row reads anew, into L2:
  // with those in use they may be more than L1 holds.
  [[gnu::always_inline]] static void prefetch(const DepthwiseArgs& a, int64_t src_offset) {
    const float* ahead = a.src + (src_offset + a.maps[0].src + a.ahead);
    for (int64_t row = 0; row < a.ahead_rows; row++, ahead += a.ahead_row)
#pragma GCC unroll 64
      for (int i = 0; i < Cols * Stride; i++) __builtin_prefetch(ahead + i * block, 0, 2);
  }
};

template <Lane lane, int Kw, int Stride, int Cols>
[[gnu::noinline]] void depthwise(const DepthwiseArgs& a) {
  const Vec start = a.first && a.epilogue.bias ? Vec::loadu(a.epilogue.bias) : Vec(0.f);
  for (int64_t row = 0; row < a.nrows; row++) {
    const TapRange taps = a.rows[row];
    int64_t src_offset = a.src_offset + row * a.src_row, iw = a.iw_begin;
    float* dst = a.dst + row * a.dst_row;
    for (int64_t tile = 0; tile < a.ntiles; tile++) {
      Tile<lane, Kw, Stride, Cols> t;
      t.prefetch(a, src_offset);
      UNROLL for (int c = 0; c < Cols; c++) t.acc[c] = start;
      t.add(a, src_offset, iw, taps);
      t.store(a, dst);
      src_offset += a.src_tile;
      iw += a.tile_columns;
      dst += Cols * a.dst_step * block;
    }
  }
}

template <Lane lane, int Width, int Stride, size_t... I>
constexpr void fill_cols(DepthwiseKernels& table, std::index_sequence<I...>) {
  ((table.kernels[int(lane)][Width][Stride - 1][I] = depthwise<lane, depthwise_kw[Width], Stride, int(I) + 1>), ...);
}

template <Lane lane, size_t... I>
constexpr void fill(DepthwiseKernels& table, std::index_sequence<I...>) {
  constexpr auto cols = std::make_index_sequence<max_cols>();
  ((fill_cols<lane, I, 1>(table, cols), fill_cols<lane, I, 2>(table, cols)), ...);
}

constexpr DepthwiseKernels make_table() {
  DepthwiseKernels table{};
  constexpr auto widths = std::make_index_sequence<std::size(depthwise_kw)>();
  fill<Lane::Own>(table, widths);
  fill<Lane::Mapped>(table, widths);
  fill<Lane::Same>(table, widths);
  return table;
}

}  // namespace

extern const DepthwiseKernels TORCH_BLOCKED_TIER_NAME(depthwise_kernels) = make_table();

}  // namespace torch_blocked
