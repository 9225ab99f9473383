// Blocks of 16 channels whose elements alternate: pairs of two bytes or quadruples of one, each a cache line.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "reorder_vectors.h"

namespace torch_blocked {
namespace {

// A vector of the line, that is, a piece of each of `group` rows.
template <class T, int group>
struct Interleaved {
  using Unit = std::conditional_t<group == 2, uint64_t, uint32_t>;  // what a part of a vector has of one row
  using Row = Vector<vector_bytes, T>;
  using Units = Vector<vector_bytes, Unit>;
  static constexpr int parts = vector_bytes / 16, part = 16 / sizeof(T), piece_bytes = vector_bytes / group;

  // The element of a rows x cols matrix that is the i-th of the transposed one.
  static constexpr int transposed(int i, int rows, int cols) { return i % rows * cols + i / rows; }

  template <int rows, int cols, int... i>
  static Units transpose_units(Units units, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(units, units, transposed(i, rows, cols)...);
  }

  template <int rows, int cols, int... i>
  static Row shuffle_parts(Row row, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(row, row, (i / part * part + transposed(i % part, rows, cols))...);
  }

  static constexpr std::make_integer_sequence<int, vector_bytes / sizeof(Unit)> every_unit{};
  static constexpr std::make_integer_sequence<int, vector_bytes / sizeof(T)> every_element{};

  // By one instruction, or where there is none that takes any order, by perfect shuffles.
  template <int rows, int cols>
  static Row transpose_parts(Row row) {
    if constexpr (vector_bytes > 16) {
      return shuffle_parts<rows, cols>(row, every_element);
    } else {
#pragma GCC unroll 4
      for (int step = 1; step < rows; step *= 2) {
        const auto halves = std::bit_cast<Vector<16>>(row);
        const Row second = std::bit_cast<Row>(__builtin_shufflevector(halves, halves, 1, 1));
        row = Tile<T, 16, 2>::template interleave<0>(row, second, std::make_integer_sequence<int, part>());
      }
      return row;
    }
  }

  // Pieces at `rows`, joined by turns.
  [[gnu::always_inline]] static Row join(const char* src, const int64_t* rows) {
    const Units pieces = gather<Unit, std::max(1, 16 / piece_bytes), vector_bytes, piece_bytes>(src, rows);
    const Units units = transpose_units<group, parts>(pieces, every_unit);
    return transpose_parts<group, part / group>(std::bit_cast<Row>(units));
  }

  [[gnu::always_inline]] static void split(Row row, char* dst, int64_t stride) {
    row = transpose_parts<part / group, group>(row);
    const Units units = transpose_units<parts, group>(std::bit_cast<Units>(row), every_unit);
    for (int g = 0; g < group; g++) store_piece<piece_bytes>(dst + g * stride, units, g);
  }
};

// Lines of quadruples of bytes, one in each part of some vectors: of their rows, which follow each other, whole vectors
// are read and written, and a line takes half as many instructions.
template <int bytes>
struct LinesOfParts {
  using Rows = Tile<uint8_t, bytes, 4>;
  using Words = Tile<uint32_t, bytes, 4>;
  static constexpr int lines = Rows::parts;

  template <bool stream>
  [[gnu::always_inline]] static void join(const char* src, int64_t stride, char* dst, const int64_t* dst_lines) {
    Rows tile;
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) tile.row[g] = load<typename Rows::Row>(src + g * stride);
    for (int step = 1; step < 4; step *= 2) tile.shuffle_within_parts();
    store_lines<stream>(tile, dst, dst_lines, std::make_integer_sequence<int, lines>());
  }

  template <bool stream, int... part>
  [[gnu::always_inline]] static void store_lines(const Rows& tile, char* dst, const int64_t* dst_lines,
                                                 std::integer_sequence<int, part...>) {
    (store_part<part, stream>(tile, dst + dst_lines[part]), ...);
  }

  template <int part, bool stream>
  [[gnu::always_inline]] static void store_part(const Rows& tile, char* line) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto halves = std::bit_cast<Vector<bytes>>(tile.row[i]);
      store<stream>(line + i * 16, __builtin_shufflevector(halves, halves, 2 * part, 2 * part + 1));
    }
  }

  [[gnu::always_inline]] static void split(const char* src, const int64_t* src_lines, char* dst, int64_t stride) {
    Words tile;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto parts = gather<uint8_t, 1, bytes, 16>(src + i * 16, src_lines);
      tile.row[i] = std::bit_cast<typename Words::Row>(Interleaved<uint8_t, 4>::template transpose_parts<4, 4>(parts));
    }
    for (int step = 1; step < 4; step *= 2) tile.shuffle_within_parts();
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) store<false>(dst + g * stride, tile.row[g]);
  }
};

// Vectors of four parts have a line each.
template <int group>
constexpr bool by_parts = group == 4 && vector_bytes == 32;

template <class T, int group>
void interleave(const char* src, char* dst, const int64_t* dst_lines, int64_t lines, int64_t run, bool stream) {
  using Vectors = Interleaved<T, group>;
  using Lines = LinesOfParts<vector_bytes>;
  constexpr int row_bytes = 64 / group;
  int64_t rows[group];
  for (int g = 0; g < group; g++) rows[g] = g * run * row_bytes;
  for (int64_t first = 0; first < lines; first += run, src += (group - 1) * run * row_bytes) {
    int64_t i = first;
    if constexpr (by_parts<group>)
      for (; i + Lines::lines <= first + run; i += Lines::lines, src += vector_bytes)
        stream ? Lines::template join<true>(src, rows[1], dst, dst_lines + i)
               : Lines::template join<false>(src, rows[1], dst, dst_lines + i);
    for (; i < first + run; i++, src += row_bytes)
      for (int v = 0; v < 64 / vector_bytes; v++) {
        const auto line = Vectors::join(src + v * Vectors::piece_bytes, rows);
        char* const to = dst + dst_lines[i] + v * vector_bytes;
        stream ? store<true>(to, line) : store_and_fetch<false>(to, line);
      }
  }
}

template <class T, int group>
void deinterleave(const char* src, const int64_t* src_lines, char* dst, int64_t lines, int64_t run) {
  using Vectors = Interleaved<T, group>;
  using Lines = LinesOfParts<vector_bytes>;
  constexpr int row_bytes = 64 / group;
  for (int64_t first = 0; first < lines; first += run, dst += (group - 1) * run * row_bytes) {
    int64_t i = first;
    if constexpr (by_parts<group>)
      for (; i + Lines::lines <= first + run; i += Lines::lines, dst += vector_bytes)
        Lines::split(src, src_lines + i, dst, run * row_bytes);
    for (; i < first + run; i++, dst += row_bytes)
      for (int v = 0; v < 64 / vector_bytes; v++)
        Vectors::split(load<typename Vectors::Row>(src + src_lines[i] + v * vector_bytes),
                       dst + v * Vectors::piece_bytes, run * row_bytes);
  }
}

}  // namespace
}  // namespace torch_blocked
