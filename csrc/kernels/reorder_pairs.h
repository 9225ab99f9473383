// Small planes of elements of two bytes, as those of 7 x 7, from rows of channels.
//
// A tile of 32 rows takes five stages of shuffles, for which some CPUs have one unit. Here the first is rotations and
// blends, which another unit does: of two rows the even columns meet in one vector and the odd ones in another, and
// pairs are then transposed as words. All registers are for the even ones; the odd ones wait in memory.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "kernels/reorder.h"
#include "reorder_loops.h"

namespace torch_blocked {
namespace {

// Two rows at a time, of 32 columns: whole cache lines of src.
template <class T, int rows_>
struct PairedRows {
  static_assert(sizeof(T) == 2);
  static constexpr int rows = rows_, cols = 32, pairs = rows / 2;
  using Pairs = Tile<uint32_t, 64, pairs>;
  using Row = typename Pairs::Row;
  using Lanes = std::make_integer_sequence<int, cols>;

  static Row rotate(Row row) { return row << 16 | row >> 16; }

  // The first half of each word of a, the second of b.
  template <int... i>
  static Row blend(Row a, Row b, std::integer_sequence<int, i...>) {
    if constexpr (!shuffles) return a;
    using Halves = Vector<64, T>;
    return std::bit_cast<Row>(
        __builtin_shufflevector(std::bit_cast<Halves>(a), std::bit_cast<Halves>(b), (i % 2 ? cols + i : i)...));
  }

  // Stores would wait for their lines one after the other: as many lines of dst as there are rows are fetched, from
  // `line` on, evenly between the shuffles.
  [[gnu::always_inline]] static void run(const char* src, int64_t src_stride, char* dst, int64_t dst_stride,
                                         const char* line) {
    Pairs tile;
    alignas(64) Row odd[pairs];
#pragma GCC unroll 16
    for (int p = 0; p < pairs; p++) {
      const auto first = load<Row>(src), second = load<Row>(src + src_stride);
      advance(src, 2 * src_stride);
      __builtin_prefetch(line + p * 64, 1);
      tile.row[p] = blend(first, rotate(second), Lanes());
      odd[p] = blend(rotate(first), second, Lanes());
    }
    asm volatile("" ::: "memory");  // not in registers, and not all fetched before
    store_columns(tile, dst, dst_stride);
    asm volatile("" ::: "memory");
#pragma GCC unroll 16
    for (int p = 0; p < pairs; p++) {
      __builtin_prefetch(line + (pairs + p) * 64, 1);
      tile.row[p] = odd[p];
    }
    store_columns(tile, dst + dst_stride, dst_stride);
  }

  // Every second one.
  [[gnu::always_inline]] static void store_columns(Pairs& tile, char* dst, int64_t dst_stride) {
    for (int step = 1; step < Pairs::group; step *= 2) tile.shuffle_within_parts();
    if constexpr (rows == cols) {
      for (int step = Pairs::group; step < pairs; step *= 2) tile.shuffle_parts(Pairs::group);
#pragma GCC unroll 16
      for (int p = 0; p < pairs; p++, advance(dst, 2 * dst_stride)) store<false>(dst, tile.row[p]);
    } else {
      tile.template merge_cells<Pairs::group>();
      char* second = dst + 16 * dst_stride;
#pragma GCC unroll 8
      for (int p = 0; p < pairs; p += 2, advance(dst, 2 * dst_stride), advance(second, 2 * dst_stride)) {
        store_halves(tile.row[p], dst, dst + 8 * dst_stride);
        store_halves(tile.row[p + 1], second, second + 8 * dst_stride);
      }
    }
  }

  [[gnu::always_inline]] static void store_halves(Row row, char* first, char* second) {
    store<false>(first, piece<32, 0>(row));
    store<false>(second, piece<32, 1>(row));
  }
};

// 32 columns of a plane of `rows` pixels, less than two tiles. What one tile leaves is a second's, which overlaps it
// where little else is left, or half a tile's, and one row alone.
template <class T>
[[gnu::always_inline]] inline void move_columns(const char* src, int64_t src_stride, char* dst, int64_t dst_stride,
                                                int64_t rows) {
  using Tile = PairedRows<T, 32>;
  using HalfTile = PairedRows<T, 16>;
  const int64_t left = rows - Tile::rows, last = rows - 1;
  const int64_t row = left > HalfTile::rows + 1 ? left : std::min<int64_t>(Tile::rows, rows - HalfTile::rows);
  const char* const lines = dst + Tile::rows * 64;
  Tile::run(src, src_stride, dst, dst_stride, dst);
  if (left > HalfTile::rows + 1)
    Tile::run(src + row * src_stride, src_stride, dst + row * 2, dst_stride, lines);
  else if (left > 1)
    HalfTile::run(src + row * src_stride, src_stride, dst + row * 2, dst_stride, lines);
  if (left == 1 || left == HalfTile::rows + 1)
    OneRow<T, Tile::cols>::template run<false>(src + last * src_stride, EvenRows{0}, dst + last * 2,
                                               EvenRows{dst_stride});
}

// By numbers, which stay in registers.
template <class T>
[[gnu::noinline]] void move_planes(const char* src, int64_t src_stride, int64_t next_in_src, char* dst,
                                   int64_t dst_stride, int64_t next_in_dst, int64_t rows, int64_t cols, int64_t count) {
  constexpr int64_t tile_cols = PairedRows<T, 32>::cols;
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
    for (int64_t c = 0; c < cols; c += tile_cols) {
      const int64_t col = std::min(c, cols - tile_cols);
      move_columns<T>(src + col * 2, src_stride, dst + col * dst_stride, dst_stride, rows);
    }
}

// False where the matrix has other planes.
template <class T>
bool transpose_planes(const Matrix& matrix) {
  constexpr int64_t tile_rows = 32, tile_cols = PairedRows<T, 32>::cols;
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows <= tile_rows || rows >= 2 * tile_rows || rows != padded_rows) return false;
  if (cols < tile_cols || !are_even(matrix)) return false;
  move_planes<T>(src + src_rows.each[0], src_rows.stride, next_in_src, dst + dst_rows.each[0], dst_rows.stride,
                 next_in_dst, rows, cols, count);
  return true;
}

}  // namespace
}  // namespace torch_blocked
