// Dense rows of few elements of 4 bytes, an odd number of them, transposed by rotations: small planes, and the taps of
// a depthwise convolution's weights. After "A Decomposition for In-place Matrix Transposition", Catanzaro, Keller and
// Garland, PPoPP 2014.
//
// As many rows as a vector has lanes are as many vectors as a row has columns. Each lane then has, in one vector or
// another, one element of every column, as the two numbers have no common divisor. The lanes are rotated until all of
// column c are in vector c, by one blend of each vector for each bit of the distance; a permutation of the lanes puts
// its rows in order.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <algorithm>
#include <array>
#include <utility>

#include "kernels/reorder.h"
#include "reorder_vectors.h"

namespace torch_blocked {
namespace {

template <int cols>
struct RotatedRows {
  static constexpr int size = 4, lanes = vector_bytes / size;
  static_assert(cols % 2 == 1, "prime to the number of lanes");
  using Row = Vector<vector_bytes, uint32_t>;
  using Lanes = std::make_integer_sequence<int, lanes>;

  Row row[cols];

  // Lane l comes from the vector `sign` * l before, counted around: what the bits of l % cols from `bit` on add to
  // that.
  template <int sign, int bit = 1>
  [[gnu::always_inline]] void rotate() {
    if constexpr (bit < cols && bit < lanes) {
      Row next[cols];
#pragma GCC unroll 16
      for (int c = 0; c < cols; c++) next[c] = blend<bit>(row[c], row[(c + cols - sign * bit) % cols], Lanes());
#pragma GCC unroll 16
      for (int c = 0; c < cols; c++) row[c] = next[c];
      rotate<sign, 2 * bit>();
    }
  }

  template <int bit, int... l>
  [[gnu::always_inline]] static Row blend(Row a, Row b, std::integer_sequence<int, l...>) {
    return __builtin_shufflevector(a, b, (l % cols & bit ? lanes + l : l)...);
  }

  // Column c of row r is in lane (r * cols + c) % lanes.
  static constexpr auto places(bool to_dense) {
    std::array<std::array<uint32_t, lanes>, cols> places{};
    for (int c = 0; c < cols; c++)
      for (int r = 0; r < lanes; r++) {
        const int lane = (r * cols + c) % lanes;
        places[c][to_dense ? lane : r] = to_dense ? r : lane;
      }
    return places;
  }

  template <bool to_dense>
  [[gnu::always_inline]] void permute() {
    alignas(vector_bytes) static constexpr auto each = places(to_dense);
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++)
      row[c] = __builtin_shuffle(row[c], load<Row>(reinterpret_cast<const char*>(each[c].data())));
  }

  // From dense rows of src to `cols` rows of dst.
  [[gnu::always_inline]] static void from_dense(const char* src, char* dst, int64_t dst_stride) {
    RotatedRows block;
#pragma GCC unroll 16
    for (int v = 0; v < cols; v++) block.row[v * lanes % cols] = load<Row>(src + v * vector_bytes);
    block.template rotate<1>();
    block.template permute<false>();
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) store<false>(dst + c * dst_stride, block.row[c]);
  }

  // Back, from `cols` rows of src.
  [[gnu::always_inline]] static void to_dense(const char* src, int64_t src_stride, char* dst) {
    RotatedRows block;
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) block.row[c] = load<Row>(src + c * src_stride);
    block.template permute<true>();
    block.template rotate<-1>();
#pragma GCC unroll 16
    for (int v = 0; v < cols; v++) store<false>(dst + v * vector_bytes, block.row[v * lanes % cols]);
  }

  // The last ones of `n` dense rows may overlap those before them. No Matrix is handed over: numbers stay in registers.
  template <bool is_from_dense>
  static void move(const char* src, char* dst, int64_t stride, int64_t n, int64_t count, int64_t next_in_src,
                   int64_t next_in_dst) {
    for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
      for (int64_t first = 0; first < n; first += lanes) {
        const int64_t r = std::min(first, n - lanes) * size;
        is_from_dense ? from_dense(src + r * cols, dst + r, stride) : to_dense(src + r, stride, dst + r * cols);
      }
  }

  // False where neither side has dense rows for a vector.
  static bool run(const Matrix& matrix) {
    const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, all_cols, count, next_in_src, next_in_dst] = matrix;
    const bool from = all_cols == cols && src_rows.stride == cols * size && rows >= lanes && dst_rows.stride != 0;
    const bool to = rows == cols && dst_rows.stride == cols * size && all_cols >= lanes && src_rows.stride != 0;
    if (rows != padded_rows || (!from && !to)) return false;
    const auto move_rows = from ? move<true> : move<false>;
    move_rows(src + src_rows.each[0], dst + dst_rows.each[0], from ? dst_rows.stride : src_rows.stride,
              from ? rows : all_cols, count, next_in_src, next_in_dst);
    return true;
  }
};

}  // namespace
}  // namespace torch_blocked
