// Depthwise 3x3 of stride 1, of a padding of at most 1: each src row is read once, for the three dst rows that see it.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "depthwise.h"
#include "vec.h"

namespace torch_blocked {
namespace {

// Sums of three dst rows and all weights: so many registers only AVX-512 has.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int rolling_cols = 7;
#else
constexpr int rolling_cols = 0;
#endif

// Cols columns of all of a call's rows, whole sums. Pixels left and right of a tile are read where there are some.
template <int Cols, bool has_left, bool has_right>
struct RollingTile {
  Register wei[3][3], sums[3][Cols];  // of successive dst rows

  // Adds a src row: the filter's row `kh` for the first of the dst rows, and those above it for the next.
  template <int kh>
  [[gnu::always_inline]] void add(const float* src) {
    UNROLL for (int i = has_left ? 0 : 1; i < (has_right ? Cols + 2 : Cols + 1); i++) {
      const Vec x = in_register(Vec::loadu(src + i * block));
      UNROLL for (int kw = 0; kw < 3; kw++) if (const int c = i - kw; c >= 0 && c < Cols)
          UNROLL for (int row = 0; row <= kh; row++) sums[row][c] = multiply_add(wei[kh - row][kw], x, sums[row][c]);
    }
  }

  [[gnu::always_inline]] void to_next_row(const Vec& start) {
    UNROLL for (int c = 0; c < Cols; c++) {
      sums[0][c] = sums[1][c];
      sums[1][c] = sums[2][c];
      sums[2][c] = start;
    }
  }

  [[gnu::always_inline]] void store(const DepthwiseArgs& a, float* dst) {
    Register row[1][Cols];
    UNROLL for (int c = 0; c < Cols; c++) row[0][c] = sums[0][c];
    Epilogue epilogue = a.epilogue;
    if (epilogue.residual) epilogue.residual += dst - a.dst;
    finish(epilogue, 0, 0, 0, block, row);
    UNROLL for (int c = 0; c < Cols; c++) store_vector(Vec(row[0][c]), dst + c * block, a.stream);
  }

  [[gnu::always_inline]] static void run(const DepthwiseArgs& a, const float* src, float* dst) {
    RollingTile tile;
    UNROLL for (int kh = 0; kh < 3; kh++) UNROLL for (int kw = 0; kw < 3; kw++) tile.wei[kh][kw] =
        Vec::loadu(a.wei + a.taps[kh].wei + kw * a.wei_kw);
    const Vec start = a.epilogue.bias ? Vec::loadu(a.epilogue.bias) : Vec(0.f);
    UNROLL for (int row = 0; row < 3; row++) UNROLL for (int c = 0; c < Cols; c++) tile.sums[row][c] = start;
    // Src rows, counted from the first that the filter of dst row 0 would see, are inside from `begin` to `end`.
    const int64_t begin = a.rows[0].begin, end = a.nrows - 1 + a.rows[a.nrows - 1].end;
    const auto inside = [&](int64_t row) { return row >= begin && row < end; };
    if (inside(0)) tile.template add<0>(src);
    if (inside(1)) tile.template add<1>(src + a.src_row);
    const float* ahead = src + a.ahead;
    src += 2 * a.src_row;
    for (int64_t row = 0; row < a.nrows; row++, src += a.src_row, ahead += a.src_row, dst += a.dst_row) {
      if (a.ahead_into == FetchInto::L2)
        UNROLL for (int c = 0; c < Cols; c++) __builtin_prefetch(ahead + c * block, 0, 2);
      else
        UNROLL for (int c = 0; c < Cols; c++) __builtin_prefetch(ahead + c * block, 0, 3);
      if (inside(row + 2)) tile.template add<2>(src);
      tile.store(a, dst);
      tile.to_next_row(start);
    }
  }
};

template <int Cols>
[[gnu::noinline]] void depthwise_rolling(const DepthwiseArgs& a) {
  const float* src = a.src + (a.src_offset + a.maps[0].src);
  float* dst = a.dst;
  int64_t iw = a.iw_begin;
  for (int64_t tile = 0; tile < a.ntiles; tile++) {
    const bool has_left = iw >= 0, has_right = iw + Cols + 1 < a.iw;
    if (has_left && has_right)
      RollingTile<Cols, true, true>::run(a, src, dst);
    else if (has_left)
      RollingTile<Cols, true, false>::run(a, src, dst);
    else if (has_right)
      RollingTile<Cols, false, true>::run(a, src, dst);
    else
      RollingTile<Cols, false, false>::run(a, src, dst);
    src += a.src_tile;
    iw += a.tile_columns;
    dst += Cols * block;
  }
}

}  // namespace
}  // namespace torch_blocked
