// Dense rows of few elements, an odd number of them, transposed by rotations: small planes, the taps of a depthwise
// convolution's weights, and pixels of three channels. After "A Decomposition for In-place Matrix Transposition",
// Catanzaro, Keller and Garland, PPoPP 2014.
//
// As many rows as a vector has lanes are as many vectors as a row has columns. Each lane then has, in one vector or
// another, one element of every column, as the two numbers have no common divisor. The lanes are rotated until all of
// column c are in vector c, by one blend of each vector for each bit of the distance; a permutation of the lanes puts
// its rows in order. Where no instruction permutes all of a vector's lanes, each part of it has rows of its own.
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

template <class T, int cols, int part_bytes>
struct RotatedRows {
  static constexpr int size = sizeof(T), lanes = part_bytes / size;  // of a part
  static constexpr int parts = vector_bytes / part_bytes, rows = parts * lanes;
  static_assert(cols % 2 == 1, "prime to the number of lanes");
  using Row = Vector<vector_bytes, T>;
  using Bytes = Vector<vector_bytes, uint8_t>;
  using Lanes = std::make_integer_sequence<int, rows>;  // of a vector

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
    return __builtin_shufflevector(a, b, (l % lanes % cols & bit ? rows + l : l)...);
  }

  // Column c of row r is in lane (r * cols + c) % lanes.
  static constexpr auto places(bool to_dense) {
    std::array<std::array<T, rows>, cols> places{};
    for (int c = 0; c < cols; c++)
      for (int r = 0; r < rows; r++) {
        const int lane = (r % lanes * cols + c) % lanes, first = r / lanes * lanes;
        places[c][first + (to_dense ? lane : r % lanes)] = first + (to_dense ? r % lanes : lane);
      }
    return places;
  }

  template <bool to_dense>
  [[gnu::always_inline]] void permute() {
    if constexpr (part_bytes == vector_bytes) {
      alignas(vector_bytes) static constexpr auto each = places(to_dense);
#pragma GCC unroll 16
      for (int c = 0; c < cols; c++)
        row[c] = __builtin_shuffle(row[c], load<Row>(reinterpret_cast<const char*>(each[c].data())));
    } else {
      permute_parts<to_dense>(std::make_integer_sequence<int, cols>());
    }
  }

  template <bool to_dense, int... c>
  [[gnu::always_inline]] void permute_parts(std::integer_sequence<int, c...>) {
    ((row[c] = permute_bytes<to_dense, c>(row[c], std::make_integer_sequence<int, vector_bytes>())), ...);
  }

  template <bool to_dense, int c, int... i>
  [[gnu::always_inline]] static Row permute_bytes(Row row, std::integer_sequence<int, i...>) {
    constexpr auto place = places(to_dense)[c];
    const Bytes bytes = std::bit_cast<Bytes>(row);
    return std::bit_cast<Row>(__builtin_shufflevector(bytes, bytes, (place[i / size] * size + i % size)...));
  }

  // From dense rows.
  [[gnu::always_inline]] static RotatedRows from_dense(const char* src) {
    RotatedRows block;
#pragma GCC unroll 16
    for (int v = 0; v < cols; v++)
      block.row[v * lanes % cols] =
          gather<T, 1, vector_bytes, part_bytes>(src + v * part_bytes, EvenRows{cols * part_bytes});
    block.template rotate<1>();
    block.template permute<false>();
    return block;
  }

  // To dense rows.
  template <bool stream>
  [[gnu::always_inline]] void to_dense(char* dst) {
    permute<true>();
    rotate<-1>();
    store_dense<stream>(dst, std::make_integer_sequence<int, cols>());
  }

  template <bool stream, int... v>
  [[gnu::always_inline]] void store_dense(char* dst, std::integer_sequence<int, v...>) {
    (store<stream>(dst + v * vector_bytes, dense<v>()), ...);
  }

  // Vector v of dense rows. Its parts are those of successive ones of the rotated, of which `done` are in so_far.
  template <int v, int done = 0>
  [[gnu::always_inline]] Row dense(Row so_far = Row{}) const {
    constexpr int from = (v * parts + done) % cols;
    const Row next = row[from * lanes % cols];
    if constexpr (parts == 1)
      return next;
    else if constexpr (done == 0)
      return dense<v, 1>(next);
    else if constexpr (done == std::min(cols, parts))
      return so_far;
    else
      return dense<v, done + 1>(add_parts<v, done>(so_far, next, Lanes()));
  }

  template <int v, int done, int... l>
  [[gnu::always_inline]] static Row add_parts(Row so_far, Row next, std::integer_sequence<int, l...>) {
    constexpr auto lane = [](int i) {
      const int part = i / lanes, turn = part % cols;  // which of the vectors has it
      const int its = (v * parts + part) / cols * lanes + i % lanes;
      return turn == done ? rows + its : done == 1 && turn == 0 ? its : i;
    };
    return __builtin_shufflevector(so_far, next, lane(l)...);
  }

  // From dense rows of src to `cols` rows of dst.
  [[gnu::always_inline]] static void from_dense(const char* src, char* dst, int64_t dst_stride) {
    const RotatedRows block = from_dense(src);
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) store<false>(dst + c * dst_stride, block.row[c]);
  }

  // Back, from `cols` rows of src.
  [[gnu::always_inline]] static void to_dense(const char* src, int64_t src_stride, char* dst) {
    RotatedRows block;
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) block.row[c] = load<Row>(src + c * src_stride);
    block.template to_dense<false>(dst);
  }

  // The last ones of `n` dense rows may overlap those before them. No Matrix is handed over: numbers stay in registers.
  template <bool is_from_dense>
  static void move(const char* src, char* dst, int64_t stride, int64_t n, int64_t count, int64_t next_in_src,
                   int64_t next_in_dst) {
    for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
      for (int64_t first = 0; first < n; first += rows) {
        const int64_t r = std::min(first, n - rows) * size;
        is_from_dense ? from_dense(src + r * cols, dst + r, stride) : to_dense(src + r, stride, dst + r * cols);
      }
  }

  // False where neither side has dense rows for a vector.
  static bool run(const Matrix& matrix) {
    const auto& [src, src_rows, dst, dst_rows, all_rows, padded_rows, all_cols, count, next_in_src, next_in_dst] =
        matrix;
    const bool from = all_cols == cols && src_rows.stride == cols * size && all_rows >= rows && dst_rows.stride != 0;
    const bool to = all_rows == cols && dst_rows.stride == cols * size && all_cols >= rows && src_rows.stride != 0;
    if (all_rows != padded_rows || (!from && !to)) return false;
    const auto move_rows = from ? move<true> : move<false>;
    move_rows(src + src_rows.each[0], dst + dst_rows.each[0], from ? dst_rows.stride : src_rows.stride,
              from ? all_rows : all_cols, count, next_in_src, next_in_dst);
    return true;
  }
};

}  // namespace
}  // namespace torch_blocked
