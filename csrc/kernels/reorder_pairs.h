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

}  // namespace
}  // namespace torch_blocked
