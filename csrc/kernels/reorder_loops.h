// The loops over a matrix that is transposed by tiles, and what is done at its edges.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <algorithm>
#include <cstring>

#include "caches.h"
#include "kernels/reorder.h"
#include "reorder_tiles.h"

namespace torch_blocked {
namespace {

// Before a tile: as many bytes of what is read later, or where that is not known, its own rows farther along.
template <class Tile>
[[gnu::always_inline]] inline void fetch(const Matrix& matrix, int64_t r, int64_t c, const char*& next_src) {
  constexpr int64_t row_bytes = Tile::cols * Tile::element_size, bytes = Tile::rows * row_bytes;
  if (next_src != nullptr) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next_src + i);
    next_src += bytes;
  } else if (c * Tile::element_size % 64 < row_bytes) {  // once a cache line
    const int64_t* const rows = matrix.src_rows.each;
    const int64_t src_row = matrix.rows > 1 ? rows[1] - rows[0] : 64, step = 64 / std::clamp<int64_t>(src_row, 1, 64);
    for (int64_t i = r; i < std::min(matrix.rows, r + Tile::rows); i += step)
      __builtin_prefetch(matrix.src + rows[i] + c * Tile::element_size + prefetch_distance(true));
  }
}

// Within the caches a CPU's own prefetch does all, but where matrices of a few lines a row follow each other: planes of
// 7 x 7. So far before its reads a call then fetches src; else 0.
int64_t fetch_ahead(const Matrix& matrix, int64_t row_bytes) {
  constexpr int64_t line = 64, longest_row = 256, least = 2048;
  const int64_t matrix_bytes = matrix.rows * row_bytes;
  if (matrix.count == 1 || row_bytes <= line || row_bytes > longest_row) return 0;
  if (matrix.next_in_src != matrix_bytes || matrix_bytes == 0) return 0;  // 0: padding alone, of one matrix repeated
  return (least + matrix_bytes - 1) / matrix_bytes * matrix_bytes;
}

bool are_even(const Matrix& matrix) { return matrix.src_rows.stride != 0 && matrix.dst_rows.stride != 0; }

// Whether a tile of `rows` src rows finds them sooner by their distance than in a table, which is read like src, and
// where a tile is narrow as often. Not many rows of a page or more each: the compiler adds up distances, and the last
// of rows in no cache is asked for late.
bool are_found_by_distance(const Matrix& matrix, int64_t rows) {
  return are_even(matrix) && (rows <= 16 || matrix.src_rows.stride < 4096);
}

// The offsets of the rows from `row` on, or where they are `even` their distance; these count from the first.
template <bool even, class Byte>
[[gnu::always_inline]] inline auto rows_from(const RowOffsets& rows, int64_t row, Byte*& base) {
  if constexpr (even) {
    base += rows.each[0] + row * rows.stride;
    return EvenRows{rows.stride};
  } else {
    return rows.each + row;
  }
}

// The tile that begins in row r and column c.
template <class Tile, bool stream, bool even>
[[gnu::always_inline]] inline void transpose_tile(const Matrix& matrix, int64_t r, int64_t c, const char*& next_src) {
  if (stream || next_src != nullptr) fetch<Tile>(matrix, r, c, next_src);
  const char* src = matrix.src + c * Tile::element_size;
  char* dst = matrix.dst + r * Tile::element_size;
  const auto src_rows = rows_from<even>(matrix.src_rows, r, src);
  const auto dst_rows = rows_from<even>(matrix.dst_rows, c, dst);
  Tile::template run<stream>(src, src_rows, dst, dst_rows);
}

// The same, wherever that is. Gives next_src as it is after: by reference it would be in memory in every loop over
// whole tiles, which costs up to a fifth of the time past the caches.
using MoveTile = const char*(const Matrix& matrix, int64_t r, int64_t c, const char* next_src);

// With src rows that are not there: they are zeros, as is the word before them.
template <class Tile, bool stream>
[[gnu::noinline]] const char* move_padded_tile(const Matrix& matrix, int64_t r, int64_t c, const char* next_src) {
  alignas(64) static constexpr char zeros[64 + Tile::cols * Tile::element_size] = {};
  const char* const src = matrix.src + c * Tile::element_size;
  const int64_t to_zeros = reinterpret_cast<intptr_t>(zeros + 64) - reinterpret_cast<intptr_t>(src);
  int64_t src_rows[Tile::rows];
  for (int64_t i = 0; i < Tile::rows; i++) src_rows[i] = r + i < matrix.rows ? matrix.src_rows.each[r + i] : to_zeros;
  if (stream || next_src != nullptr) fetch<Tile>(matrix, r, c, next_src);
  Tile::template run<stream>(src, src_rows, matrix.dst + r * Tile::element_size, matrix.dst_rows.each + c);
  return next_src;
}

template <class Tile, bool stream, bool even>
const char* move_tile(const Matrix& matrix, int64_t r, int64_t c, const char* next_src) {
  if (matrix.rows - r < Tile::rows) return move_padded_tile<Tile, stream>(matrix, r, c, next_src);
  transpose_tile<Tile, stream, even>(matrix, r, c, next_src);
  return next_src;
}

// The rows or the columns that whole tiles leave, by a tile at `at`; none where `move` is null.
struct Edge {
  MoveTile* move = nullptr;
  int64_t at = 0;
};

// `left` of `all`: the last tile overlaps the one before it instead of being cut; a narrower one does where that is
// enough. One alone is moved by elements: planes of 7 x 7 leave one.
Edge edge_of(int64_t left, int64_t all, MoveTile* tile, int64_t tile_size, MoveTile* narrow, int64_t narrow_size,
             MoveTile* one) {
  if (left == 0) return {};
  if (left == 1) return {one, all - 1};
  return left <= narrow_size ? Edge{narrow, all - narrow_size} : Edge{tile, all - tile_size};
}

// At least one tile. A few dst rows at a time, each in its full length, or with `along_src` a few src rows.
template <class Tile, class NarrowTile, class ShortTile, bool stream, bool even>
void transpose_tiles(Matrix matrix, const char* next_src, bool along_src) {
  using Column = OneColumn<typename Tile::Element, Tile::rows, Tile::cols>;
  using Row = OneRow<typename Tile::Element, Tile::cols>;
  constexpr int tile_rows = Tile::rows, tile_cols = Tile::cols;
  MoveTile* const tile = move_tile<Tile, stream, even>;
  const Edge right = edge_of(matrix.cols % tile_cols, matrix.cols, tile, tile_cols, move_tile<NarrowTile, stream, even>,
                             NarrowTile::cols, move_tile<Column, stream, even>);
  const Edge bottom = edge_of(matrix.padded_rows % tile_rows, matrix.padded_rows, tile, tile_rows,
                              move_tile<ShortTile, stream, even>, ShortTile::rows, move_tile<Row, stream, even>);
  Matrix whole = matrix;  // in registers: no function is called with it
  whole.rows -= whole.rows % tile_rows, whole.cols -= whole.cols % tile_cols;
  const bool has_bottom = whole.rows < matrix.padded_rows;
  const auto move_bottom = [&](int64_t c) {
    for (int64_t r = whole.rows; r + tile_rows <= matrix.padded_rows; r += tile_rows)
      next_src = tile(matrix, r, c, next_src);
    if (bottom.move != nullptr) next_src = bottom.move(matrix, bottom.at, c, next_src);
  };
  const auto move_right = [&] {
    for (int64_t r = 0; r + tile_rows <= matrix.padded_rows; r += tile_rows)
      next_src = right.move(matrix, r, right.at, next_src);
    if (bottom.move != nullptr) next_src = right.move(matrix, matrix.padded_rows - tile_rows, right.at, next_src);
  };
  const int64_t ahead = stream ? 0 : fetch_ahead(matrix, matrix.cols * Tile::element_size);
  for (; whole.count > 0; whole.count--, whole.src += whole.next_in_src, whole.dst += whole.next_in_dst) {
    matrix.src = whole.src, matrix.dst = whole.dst;
    if (ahead > 0) next_src = whole.src + ahead;
    if (along_src) {
      for (int64_t r = 0; r < whole.rows; r += tile_rows)
        for (int64_t c = 0; c < whole.cols; c += tile_cols) transpose_tile<Tile, stream, even>(whole, r, c, next_src);
      for (int64_t c = 0; has_bottom && c < whole.cols; c += tile_cols) move_bottom(c);
    } else {
      for (int64_t c = 0; c < whole.cols; c += tile_cols) {
        for (int64_t r = 0; r < whole.rows; r += tile_rows) transpose_tile<Tile, stream, even>(whole, r, c, next_src);
        if (has_bottom) move_bottom(c);
      }
    }
    if (right.move != nullptr) move_right();
  }
}

template <int size>
void transpose_elements(Matrix matrix) {
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  for (; matrix.count > 0; matrix.count--, matrix.src += next_in_src, matrix.dst += next_in_dst)
    for (int64_t c = 0; c < cols; c++) {
      char* to = dst + dst_rows.each[c];
      for (int64_t r = 0; r < rows; r++) std::memcpy(to + r * size, src + src_rows.each[r] + c * size, size);
      if (rows < padded_rows) std::memset(to + rows * size, 0, (padded_rows - rows) * size);
    }
}

// The first cache keeps as many lines of one place as it has ways: of those whose distance is a multiple of `way`
// bytes.
constexpr int64_t way = 4096;
int64_t ways() { return caches().l1 / way; }

// How far apart rows are, as the places of their lines go: a power of two, at most `way`; 0 where they are not even.
int64_t apart(const RowOffsets& rows) { return std::min(rows.stride & -rows.stride, way); }

// Of a line of each of n rows, how many share a place.
int64_t lines_of_place(const RowOffsets& rows, int64_t n) { return n * apart(rows) / way; }

// Elements of a vector or a few, along some rows of one side at a time, `length` of each. A row has its own load and
// its own store, whose addresses are evenly apart: those a CPU fetches ahead of, not one load's that takes the rows by
// turns, which within the caches takes up to twice as long. With `fetches` dst is fetched ahead, which behind a
// mesh takes a third less time.
template <int size, int some, bool along_src, bool fetches = false, class Rows>
[[gnu::always_inline]] inline void move_wide(const char* src, Rows src_rows, char* dst, Rows dst_rows, int64_t rows,
                                             int64_t length) {
  for (; rows >= some; rows -= some) {
    int64_t offsets[some];
#pragma GCC unroll 8
    for (int r = 0; r < some; r++) offsets[r] = along_src ? src_rows[r] : dst_rows[r];
    for (int64_t i = 0; i < length; i++) {
      const char* const from = src + (along_src ? i * size : src_rows[i]);
      char* const to = dst + (along_src ? dst_rows[i] : i * size);
#pragma GCC unroll 8
      for (int r = 0; r < some; r++) {
        char* const its = to + (along_src ? r * size : offsets[r]);
        if (fetches) __builtin_prefetch(its + 128, 1);
        copy<size>(from + (along_src ? offsets[r] : r * size), its);
      }
    }
    if constexpr (along_src)
      src_rows = src_rows + some, dst += some * size;
    else
      dst_rows = dst_rows + some, src += some * size;
  }
  if constexpr (some > 1) move_wide<size, some / 2, along_src, fetches>(src, src_rows, dst, dst_rows, rows, length);
}

// Pairs of elements of which four fill a vector: four pairs are moved at once, where they follow each other.
template <int size>
constexpr bool are_quarters = size == 16 && vector_bytes == 64;

template <int size, class Rows>
bool follow_each_other(Rows pairs) {
  if constexpr (std::is_same_v<Rows, EvenRows>) return pairs.stride == 2 * size;
  return false;
}

// Blocks to blocks of twice as many channels, and back.
template <int size, class Rows>
[[gnu::always_inline]] inline void join_pairs(const char* src, Rows src_rows, char* dst, Rows dst_rows, int64_t cols) {
  const char *const first = src + src_rows[0], *const second = src + src_rows[1];
  int64_t c = 0;
  if constexpr (are_quarters<size>)
    if (follow_each_other<size>(dst_rows))
      for (; c + 4 <= cols; c += 4) {
        const auto a = load<Vector<64>>(first + c * size), b = load<Vector<64>>(second + c * size);
        char* const to = dst + dst_rows[c];
        store<false>(to, __builtin_shufflevector(a, b, 0, 1, 8, 9, 2, 3, 10, 11));
        store<false>(to + 64, __builtin_shufflevector(a, b, 4, 5, 12, 13, 6, 7, 14, 15));
      }
#pragma GCC unroll 4
  for (; c < cols; c++) {
    char* const to = dst + dst_rows[c];
    if constexpr (2 * size <= vector_bytes) {
      const auto low = widen<Vector<2 * size>>(load<Vector<size>>(first + c * size));
      store<false>(to, insert<1>(low, load<Vector<size>>(second + c * size)));
    } else {
      copy<size>(first + c * size, to);
      copy<size>(second + c * size, to + size);
    }
  }
}

template <int size, class Rows>
[[gnu::always_inline]] inline void split_pairs(const char* src, Rows src_rows, char* dst, Rows dst_rows, int64_t rows) {
  char *const first = dst + dst_rows[0], *const second = dst + dst_rows[1];
  int64_t r = 0;
  if constexpr (are_quarters<size>)
    if (follow_each_other<size>(src_rows))
      for (; r + 4 <= rows; r += 4) {
        const char* const from = src + src_rows[r];
        const auto a = load<Vector<64>>(from), b = load<Vector<64>>(from + 64);
        store<false>(first + r * size, __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13));
        store<false>(second + r * size, __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15));
      }
#pragma GCC unroll 4
  for (; r < rows; r++) {
    const char* const from = src + src_rows[r];
    copy<size>(from, first + r * size);
    copy<size>(from + size, second + r * size);
  }
}

template <int size, class Rows>
[[gnu::always_inline]] inline void transpose_wide(const Matrix& matrix, bool along_src, const char* src, Rows src_rows,
                                                  char* dst, Rows dst_rows) {
  if (matrix.rows == 2) return join_pairs<size>(src, src_rows, dst, dst_rows, matrix.cols);
  if (matrix.cols == 2) return split_pairs<size>(src, src_rows, dst, dst_rows, matrix.rows);
  if (along_src)
    move_wide<size, 8, true>(src, src_rows, dst, dst_rows, matrix.rows, matrix.cols);
  else if (is_behind_mesh())
    move_wide<size, 8, false, true>(src, src_rows, dst, dst_rows, matrix.cols, matrix.rows);
  else if (lines_of_place(matrix.dst_rows, 8) < ways())
    move_wide<size, 8, false>(src, src_rows, dst, dst_rows, matrix.cols, matrix.rows);
  else  // they would push each other out of the first cache
    move_wide<size, 4, false>(src, src_rows, dst, dst_rows, matrix.cols, matrix.rows);
}

// Along the side whose rows are a larger power of two apart, a few of them in their full length: they are the ones that
// push each other out of the first cache.
bool goes_along_src(const Matrix& matrix) {
  const auto power_of_two = [](int64_t stride) { return stride & -stride; };
  return power_of_two(matrix.src_rows.stride) >= power_of_two(matrix.dst_rows.stride);
}

template <int size>
void transpose_wide(const Matrix& matrix, Traffic) {
  const bool even = are_even(matrix), along_src = goes_along_src(matrix);
  const int64_t *const src_rows = matrix.src_rows.each, *const dst_rows = matrix.dst_rows.each;
  for (int64_t i = 0; i < matrix.count; i++) {
    const char* const src = matrix.src + i * matrix.next_in_src;
    char* const dst = matrix.dst + i * matrix.next_in_dst;
    if (even)
      transpose_wide<size>(matrix, along_src, src + src_rows[0], EvenRows{matrix.src_rows.stride}, dst + dst_rows[0],
                           EvenRows{matrix.dst_rows.stride});
    else
      transpose_wide<size>(matrix, along_src, src, src_rows, dst, dst_rows);
    for (int64_t c = 0; c < matrix.cols && matrix.rows < matrix.padded_rows; c++)
      std::memset(dst + dst_rows[c] + matrix.rows * size, 0, (matrix.padded_rows - matrix.rows) * size);
  }
}

template <class Tile>
constexpr bool can_run_last = requires(char* p, EvenRows rows) { Tile::run_last(p, rows, p, rows); };

// The last tile of a row or a column overlaps the one before it. `run` columns at a time, along their src rows; of one
// tile they are no loop, which is why its first round has no test of `cols`. One column that is left, as planes of odd
// sides leave, is moved alone: dst rows are not written twice. By numbers, which stay in registers.
template <class Tile, int64_t run, int64_t src_step>
[[gnu::noinline]] void move_overlapping_tiles(const char* src, int64_t src_stride, int64_t next_in_src, char* dst,
                                              int64_t dst_stride, int64_t next_in_dst, int64_t rows, int64_t cols,
                                              int64_t count) {
  constexpr int64_t size = Tile::element_size;
  if constexpr (src_step > 0) src_stride = src_step;
  const bool is_one_left = can_run_last<Tile> && cols % Tile::cols == 1;
  const int64_t tiled = cols - is_one_left, last_col = cols - Tile::cols;
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst) {
    for (int64_t begin = 0; begin < tiled; begin += run)
      for (int64_t r = 0; r < rows; r += Tile::rows)
        for (int64_t c = begin; c < begin + run && (c == begin || c < tiled); c += Tile::cols) {
          const int64_t row = std::min(r, rows - Tile::rows), col = std::min(c, last_col);
          Tile::template run<false>(src + row * src_stride + col * size, EvenRows{src_stride},
                                    dst + col * dst_stride + row * size, EvenRows{dst_stride});
        }
    if constexpr (can_run_last<Tile>)
      for (int64_t r = 0; is_one_left && r < rows; r += Tile::rows) {
        const int64_t row = std::min(r, rows - Tile::rows);
        Tile::run_last(src + row * src_stride + last_col * size, EvenRows{src_stride},
                       dst + last_col * dst_stride + row * size, EvenRows{dst_stride});
      }
  }
}

// False where the matrix has not a tile's rows or columns, or they are not even.
template <class Tile, int64_t run = Tile::cols, int64_t src_step = 0>
bool transpose_overlapping(const Matrix& matrix) {
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows != padded_rows || rows < Tile::rows || cols < Tile::cols || !are_even(matrix)) return false;
  move_overlapping_tiles<Tile, run, src_step>(src + src_rows.each[0], src_rows.stride, next_in_src,
                                              dst + dst_rows.each[0], dst_rows.stride, next_in_dst, rows, cols, count);
  return true;
}

// Whether the last tile of so many rows or columns would do little that the one before it did.
bool overlaps_little(int64_t all, int64_t tile) { return all % tile == 0 || all % tile > tile / 2; }

// Whether rows push each other out of the first cache: if all have one place, sooner.
bool is_aliased(const RowOffsets& rows, int64_t n) {
  return lines_of_place(rows, n) > (apart(rows) == way ? 8 : ways() * 3 / 2);
}

// By squares of two by two tiles, one after the other along the rows of one side, best of that whose rows are farther
// apart: the two lines of a pair are then asked for one soon after the other on both sides, and a CPU's prefetch sees
// it. Within the second cache that takes half to nine tenths of the time of whole rows of tiles. The last tile of a
// side overlaps the one before it.
template <class Tile, bool along_src>
[[gnu::noinline]] void move_squares(const char* src, int64_t src_stride, int64_t next_in_src, char* dst,
                                    int64_t dst_stride, int64_t next_in_dst, int64_t rows, int64_t cols,
                                    int64_t count) {
  constexpr int64_t size = Tile::element_size;
  constexpr int64_t step = along_src ? Tile::cols : Tile::rows, other_step = along_src ? Tile::rows : Tile::cols;
  const int64_t length = along_src ? cols : rows, other_length = along_src ? rows : cols;
  const auto move_one = [=](const char* src, char* dst, int64_t at, int64_t other) __attribute__((always_inline)) {
    at = std::min(at, length - step), other = std::min(other, other_length - other_step);
    const int64_t row = along_src ? other : at, col = along_src ? at : other;
    Tile::template run<false>(src + row * src_stride + col * size, EvenRows{src_stride},
                              dst + col * dst_stride + row * size, EvenRows{dst_stride});
  };
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
    for (int64_t first = 0; first < other_length; first += 2 * other_step)
      for (int64_t begin = 0; begin < length; begin += 2 * step)
        for (int64_t other = first; other < std::min(other_length, first + 2 * other_step); other += other_step)
          for (int64_t at = begin; at < std::min(length, begin + 2 * step); at += step) move_one(src, dst, at, other);
}

// False where the matrix has not a tile's rows or columns or they are not even, where the tiles at the edges would move
// more than three quarters of the elements again, or where the rows of one tile push each other out of the first cache:
// of dst, which has to be read before it is written, sooner, but by tiles of bytes, whose shuffles take longer.
template <class Tile>
bool transpose_by_squares(const Matrix& matrix) {
  constexpr int64_t most_of_src = 8, most_of_dst = Tile::element_size == 1 ? 8 : 4;
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows != padded_rows || rows < Tile::rows || cols < Tile::cols || !are_even(matrix)) return false;
  const int64_t moved =
      (rows + Tile::rows - 1) / Tile::rows * Tile::rows * ((cols + Tile::cols - 1) / Tile::cols * Tile::cols);
  if (4 * moved > 7 * rows * cols) return false;
  if (lines_of_place(src_rows, Tile::rows) > most_of_src) return false;
  if (lines_of_place(dst_rows, Tile::cols) > most_of_dst) return false;
  // Dst rows whose lines have one place or two are finished a few at a time, though those of src may be farther apart.
  const bool along_src = src_rows.stride >= dst_rows.stride && apart(dst_rows) < way / 2;
  // Behind a mesh a CPU's prefetch follows so many rows at once: they are moved in their full length.
  constexpr int64_t followed = 32, whole_rows = int64_t(1) << 40;
  if (Tile::rows == followed && along_src && is_behind_mesh()) return transpose_overlapping<Tile, whole_rows>(matrix);
  const auto move = along_src ? move_squares<Tile, true> : move_squares<Tile, false>;
  move(src + src_rows.each[0], src_rows.stride, next_in_src, dst + dst_rows.each[0], dst_rows.stride, next_in_dst, rows,
       cols, count);
  return true;
}

// Whether tiles write whole cache lines, and the first cache has room for a line of each dst row at once, and for src.
template <class Tile>
bool writes_lines(const Matrix& matrix) {
  constexpr int64_t line = 64;
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (Tile::rows * Tile::element_size % line != 0 || cols <= Tile::cols) return false;
  return apart(dst_rows) >= line && apart(dst_rows) < way && cols * apart(dst_rows) <= ways() * 3 / 4 * way;
}

// By tiles that overlap where little is done twice, else with smaller ones at the edges: along src where a cache line
// of it holds some tiles' columns, where a tile has all rows, or where each line of dst is written once in any order.
// Past the caches by whole lines, where dst rows have them.
template <class Tile, class NarrowTile = Tile, class ShortTile = Tile>
void transpose_tiles(const Matrix& matrix, Traffic traffic) {
  const bool in_a_line = matrix.cols > Tile::cols && matrix.cols * Tile::element_size <= 64;
  if constexpr (vector_bytes < 64 && Tile::rows * Tile::element_size == vector_bytes) {
    using Lines = WholeLines<Tile>;
    if (traffic.stream && matrix.padded_rows >= Lines::rows)
      return transpose_tiles<Lines, WholeLines<NarrowTile>, PartOfLines<Tile>, true, false>(matrix, traffic.next_src,
                                                                                            in_a_line);
  }
  const auto run = traffic.stream ? transpose_tiles<Tile, NarrowTile, ShortTile, true, false>
                   : are_found_by_distance(matrix, Tile::rows)
                       ? transpose_tiles<Tile, NarrowTile, ShortTile, false, true>
                       : transpose_tiles<Tile, NarrowTile, ShortTile, false, false>;
  const bool is_whole = matrix.rows % Tile::rows == 0 && matrix.cols % Tile::cols == 0;
  if (!traffic.stream && !in_a_line && !is_whole && overlaps_little(matrix.rows, Tile::rows) &&
      overlaps_little(matrix.cols, Tile::cols) && transpose_overlapping<Tile>(matrix))
    return;
  const bool any_order = matrix.padded_rows <= Tile::rows || (!traffic.stream && writes_lines<Tile>(matrix));
  run(matrix, traffic.next_src, in_a_line || any_order);
}

}  // namespace
}  // namespace torch_blocked
