// Planes of 7 x 7 pixels, which most networks end with, and of 3 x 3, the weights of depthwise convolutions, from and
// to channels side by side: by distances that are known when this is compiled, for which instructions have room.
// Computed, they would fill the registers.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "kernels/reorder.h"
#include "reorder_loops.h"

namespace torch_blocked {
namespace {

// In pixels.
constexpr int64_t plane_7x7 = 49, plane_3x3 = 9;

template <int64_t plane, int size>
bool are_planes(const RowOffsets& rows, int64_t pixels) {
  return pixels == plane && rows.stride == plane * size;
}

// A tile of elements of two bytes, from rows of channels. One of 32 rows takes five stages of shuffles, for which some
// CPUs have one unit. Here the first is rotations and blends, which another unit does: of two rows the even columns
// meet in one vector and the odd ones in another, and pairs are then transposed as words. All registers are for the
// even ones; the odd ones wait in memory.
//
// Two rows at a time, of 32 columns: whole cache lines of src. Stores would wait for their lines one after the other:
// as many lines of dst as there are rows are fetched, from byte `fetched` on, evenly between the shuffles.
template <class T, int rows_, int fetched>
struct PairedRows {
  using Element = T;
  static_assert(sizeof(T) == 2);
  static constexpr int element_size = 2, rows = rows_, cols = 32, pairs = rows / 2;
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

  template <bool stream>
  [[gnu::always_inline]] static void run(const char* src, EvenRows src_rows, char* dst, EvenRows dst_rows) {
    const int64_t src_stride = src_rows.stride, dst_stride = dst_rows.stride;
    const char* const lines = dst + fetched;
    Pairs tile;
    alignas(64) Row odd[pairs];
#pragma GCC unroll 16
    for (int p = 0; p < pairs; p++) {
      const auto first = load<Row>(src), second = load<Row>(src + src_stride);
      advance(src, 2 * src_stride);
      __builtin_prefetch(lines + p * 64, 1);
      tile.row[p] = blend(first, rotate(second), Lanes());
      odd[p] = blend(rotate(first), second, Lanes());
    }
    asm volatile("" ::: "memory");  // not in registers, and not all fetched before
    store_columns(tile, dst, dst_stride);
    asm volatile("" ::: "memory");
#pragma GCC unroll 16
    for (int p = 0; p < pairs; p++) {
      __builtin_prefetch(lines + (pairs + p) * 64, 1);
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
    store_piece<32>(first, row, 0);
    store_piece<32>(second, row, 1);
  }
};

// A tile's columns to as many planes. What whole tiles leave is moved by another, which overlaps the last, or where
// little is left by half a one, and one row alone: 32 rows, 16 and one.
template <int64_t plane, class Tile, class HalfTile>
[[gnu::always_inline]] inline void move_planes(const char* src, int64_t src_stride, char* dst) {
  static_assert(Tile::rows <= plane);
  constexpr int64_t size = Tile::element_size, left = plane % Tile::rows, whole = plane - left;
  const auto move = [=]<class Some>(Some, int64_t row) __attribute__((always_inline)) {
    Some::template run<false>(src + row * src_stride, EvenRows{src_stride}, dst + row * size, EvenRows{plane * size});
  };
  for (int64_t r = 0; r < whole; r += Tile::rows) move(Tile(), r);
  if constexpr (left > HalfTile::rows + 1)
    move(Tile(), plane - Tile::rows);
  else if constexpr (left > 1)
    move(HalfTile(), std::min<int64_t>(whole, plane - HalfTile::rows));
  if constexpr (left == 1 || left == HalfTile::rows + 1) move(OneRow<typename Tile::Element, Tile::cols>(), plane - 1);
}

// Src rows are `src_step` bytes apart, where that is not 0. The last columns overlap those before. By numbers, which
// stay in registers.
template <int64_t plane, class Tile, class HalfTile, int64_t src_step>
[[gnu::noinline]] void move_planes(const char* src, int64_t src_stride, int64_t next_in_src, char* dst,
                                   int64_t next_in_dst, int64_t cols, int64_t count) {
  constexpr int64_t size = Tile::element_size;
  if constexpr (src_step > 0) src_stride = src_step;
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
    for (int64_t c = 0; c < cols; c += Tile::cols) {
      const int64_t col = std::min(c, cols - Tile::cols);
      move_planes<plane, Tile, HalfTile>(src + col * size, src_stride, dst + col * plane * size);
    }
}

// False where dst has no such planes, or less than a tile's, or src rows are not even or not `src_step` apart.
template <int64_t plane, class Tile, class HalfTile, int64_t src_step = 0>
bool transpose_to_planes(const Matrix& matrix) {
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows != padded_rows || cols < Tile::cols || !are_even(matrix)) return false;
  if (!are_planes<plane, Tile::element_size>(dst_rows, rows)) return false;
  if (src_step > 0 && src_rows.stride != src_step) return false;
  move_planes<plane, Tile, HalfTile, src_step>(src + src_rows.each[0], src_rows.stride, next_in_src,
                                               dst + dst_rows.each[0], next_in_dst, cols, count);
  return true;
}

// The same backwards, from planes to blocks of as many channels as a tile has rows: the last column is moved alone.
template <int64_t plane, class Tile>
[[gnu::noinline]] void move_from_planes(const char* src, int64_t next_in_src, char* dst, int64_t next_in_dst,
                                        int64_t count) {
  constexpr int64_t size = Tile::element_size, block_bytes = Tile::rows * size, last = plane - Tile::cols;
  static_assert(plane % Tile::cols == 1);
  constexpr EvenRows src_rows{plane * size}, dst_rows{block_bytes};
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst) {
    for (int64_t c = 0; c + Tile::cols <= plane; c += Tile::cols)
      Tile::template run<false>(src + c * size, src_rows, dst + c * block_bytes, dst_rows);
    Tile::run_last(src + last * size, src_rows, dst + last * block_bytes, dst_rows);
  }
}

// False where src has no such planes, or dst no such blocks.
template <int64_t plane, class Tile>
bool transpose_from_planes(const Matrix& matrix) {
  constexpr int64_t size = Tile::element_size;
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows != padded_rows || rows != Tile::rows || dst_rows.stride != Tile::rows * size) return false;
  if (!are_planes<plane, size>(src_rows, cols)) return false;
  move_from_planes<plane, Tile>(src + src_rows.each[0], next_in_src, dst + dst_rows.each[0], next_in_dst, count);
  return true;
}

}  // namespace
}  // namespace torch_blocked
