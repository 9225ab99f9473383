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
    for (int g = 0; g < group; g++)
      std::memcpy(dst + g * stride, reinterpret_cast<const char*>(&units) + g * piece_bytes, piece_bytes);
  }
};

template <class T, int group>
void interleave(const char* src, char* dst, const int64_t* dst_lines, int64_t lines, int64_t run, bool stream) {
  using Vectors = Interleaved<T, group>;
  constexpr int row_bytes = 64 / group;
  int64_t rows[group];
  for (int g = 0; g < group; g++) rows[g] = g * run * row_bytes;
  for (int64_t first = 0; first < lines; first += run, src += (group - 1) * run * row_bytes)
    for (int64_t i = first; i < first + run; i++, src += row_bytes)
      for (int v = 0; v < 64 / vector_bytes; v++) {
        const auto line = Vectors::join(src + v * Vectors::piece_bytes, rows);
        char* const to = dst + dst_lines[i] + v * vector_bytes;
        stream ? store<true>(to, line) : store_and_fetch<false>(to, line);
      }
}

template <class T, int group>
void deinterleave(const char* src, const int64_t* src_lines, char* dst, int64_t lines, int64_t run) {
  using Vectors = Interleaved<T, group>;
  constexpr int row_bytes = 64 / group;
  for (int64_t first = 0; first < lines; first += run, dst += (group - 1) * run * row_bytes)
    for (int64_t i = first; i < first + run; i++, dst += row_bytes)
      for (int v = 0; v < 64 / vector_bytes; v++)
        Vectors::split(load<typename Vectors::Row>(src + src_lines[i] + v * vector_bytes),
                       dst + v * Vectors::piece_bytes, run * row_bytes);
}

}  // namespace
}  // namespace torch_blocked
