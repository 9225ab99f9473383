#include "kernels/reorder.h"

#include <algorithm>
#include <cstring>

#include "caches.h"
#include "reorder_channels.h"
#include "reorder_interleave.h"
#include "reorder_pick.h"
#include "reorder_tiles.h"
#include "tier.h"

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

// The rows or the columns that whole tiles leave, by one or two tiles from `at` on.
struct Edge {
  struct {
    MoveTile* move;
    int64_t at;
  } tiles[2];
  int size = 0;

  void add(MoveTile* move, int64_t at) { tiles[size++] = {move, at}; }
};

// `left` of `all`: the last tile overlaps the one before it instead of being cut; a narrower one does where that is
// enough. One column or row, alone or past such a tile, is moved by elements: planes of 7 x 7 leave one.
Edge edge_of(int64_t left, int64_t all, MoveTile* tile, int64_t tile_size, MoveTile* narrow, int64_t narrow_size,
             MoveTile* one) {
  Edge edge;
  const bool and_one = left == narrow_size + 1 && narrow_size < tile_size;
  if (left > 1 && (left <= narrow_size || and_one))
    edge.add(narrow, all - and_one - narrow_size);
  else if (left > 1)
    edge.add(tile, all - tile_size);
  if (left == 1 || and_one) edge.add(one, all - 1);
  return edge;
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
    for (int i = 0; i < bottom.size; i++) next_src = bottom.tiles[i].move(matrix, bottom.tiles[i].at, c, next_src);
  };
  const auto move_right = [&](const auto& edge) {
    for (int64_t r = 0; r + tile_rows <= matrix.padded_rows; r += tile_rows)
      next_src = edge.move(matrix, r, edge.at, next_src);
    if (bottom.size > 0) next_src = edge.move(matrix, matrix.padded_rows - tile_rows, edge.at, next_src);
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
    for (int i = 0; i < right.size; i++) move_right(right.tiles[i]);
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

// The last tile of a row or a column overlaps the one before it. By numbers, which stay in registers.
template <class Tile>
[[gnu::noinline]] void move_overlapping_tiles(const char* src, int64_t src_stride, int64_t next_in_src, char* dst,
                                              int64_t dst_stride, int64_t next_in_dst, int64_t rows, int64_t cols,
                                              int64_t count) {
  constexpr int64_t size = Tile::element_size;
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst)
    for (int64_t c = 0; c < cols; c += Tile::cols) {
      const int64_t col = std::min(c, cols - Tile::cols);
      for (int64_t r = 0; r < rows; r += Tile::rows) {
        const int64_t row = std::min(r, rows - Tile::rows);
        Tile::template run<false>(src + row * src_stride + col * size, EvenRows{src_stride},
                                  dst + col * dst_stride + row * size, EvenRows{dst_stride});
      }
    }
}

// False where the matrix has not a tile's rows or columns, or they are not even.
template <class Tile>
bool transpose_overlapping(const Matrix& matrix) {
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  if (rows != padded_rows || rows < Tile::rows || cols < Tile::cols || !are_even(matrix)) return false;
  move_overlapping_tiles<Tile>(src + src_rows.each[0], src_rows.stride, next_in_src, dst + dst_rows.each[0],
                               dst_rows.stride, next_in_dst, rows, cols, count);
  return true;
}

// Whether the last tile of so many rows or columns would do little that the one before it did.
bool overlaps_little(int64_t all, int64_t tile) { return all % tile == 0 || all % tile > tile / 2; }

// By tiles that overlap where little is done twice, else with smaller ones at the edges: along src where a cache line
// of it holds some tiles' columns, or where a tile has all rows.
template <class Tile, class NarrowTile = Tile, class ShortTile = Tile>
void transpose_tiles(const Matrix& matrix, Traffic traffic) {
  const auto run = traffic.stream ? transpose_tiles<Tile, NarrowTile, ShortTile, true, false>
                   : are_found_by_distance(matrix, Tile::rows)
                       ? transpose_tiles<Tile, NarrowTile, ShortTile, false, true>
                       : transpose_tiles<Tile, NarrowTile, ShortTile, false, false>;
  const bool in_a_line = matrix.cols > Tile::cols && matrix.cols * Tile::element_size <= 64;
  const bool is_whole = matrix.rows % Tile::rows == 0 && matrix.cols % Tile::cols == 0;
  if (!traffic.stream && !in_a_line && !is_whole && overlaps_little(matrix.rows, Tile::rows) &&
      overlaps_little(matrix.cols, Tile::cols) && transpose_overlapping<Tile>(matrix))
    return;
  run(matrix, traffic.next_src, in_a_line || matrix.padded_rows <= Tile::rows);
}

// With tiles of vectors of `bytes` bytes and of `tile_cols` columns, or less where there are not so many.
template <class T, int bytes, int tile_cols>
void transpose_by(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), narrow_cols = std::max(2, tile_cols * size > 16 ? 16 / size : tile_cols / 2);
  if constexpr (bytes < 8 || bytes < 2 * size || tile_cols < 2)
    transpose_elements<size>(matrix);
  else if (matrix.padded_rows * size < bytes)
    transpose_by<T, bytes / 2, std::min(tile_cols, bytes / 2 / size)>(matrix, traffic);
  else if (matrix.cols < tile_cols)
    transpose_by<T, bytes, tile_cols / 2>(matrix, traffic);
  else {
    using Tile = ToWideRows<T, bytes, tile_cols>;
    // Of elements of a byte or two the first would write pieces of less than 16 bytes.
    constexpr int half_bytes = std::max(bytes / 2, tile_cols * size);
    using Short = std::conditional_t<(size >= 4), FromWideRows<T, tile_cols * size, std::min(4, tile_cols), false>,
                                     ToWideRows<T, half_bytes, tile_cols>>;
    constexpr bool has_short = tile_cols * size >= 16 && Short::rows < Tile::rows;
    transpose_tiles<Tile, ToWideRows<T, bytes, narrow_cols>, std::conditional_t<has_short, Short, Tile>>(matrix,
                                                                                                         traffic);
  }
}

// The three channels of an image, to rows or from rows. False where this is another matrix.
template <class T, bool stream>
bool transpose_three(const Matrix& matrix, const char* src_end) {
  using Channels = ThreeChannels<T, stream>;
  const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
  const bool from_rows = rows == 3 && cols >= Channels::fewest_pixels;
  const bool to_rows = cols == 3 && rows >= Channels::fewest_pixels && rows == padded_rows;
  const bool all_of_dst = dst_rows.stride == padded_rows * int64_t(sizeof(T));
  const auto move = from_rows && all_of_dst ? Channels::from_rows(dst_rows.stride)
                    : to_rows               ? Channels::to_rows(src_rows.stride)
                                            : nullptr;
  if (move == nullptr) return false;
  for (int64_t i = 0; i < count; i++)
    move(src + i * next_in_src, src_rows.each, dst + i * next_in_dst, dst_rows.each, from_rows ? cols : rows, src_end);
  return true;
}

// Src rows shorter than 16 bytes that follow each other, as blocks of few channels do. False where they do not.
template <class T, int block, int bytes = vector_bytes>
bool transpose_dense(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T);
  if constexpr (block * size < 16 && bytes >= 16) {
    if (matrix.cols != block || matrix.src_rows.stride != block * size) return false;
    if (matrix.rows != matrix.padded_rows) return false;
    if (matrix.rows < bytes / size) return transpose_dense<T, block, bytes / 2>(matrix, traffic);
    transpose_tiles<FromDenseRows<T, bytes, block>>(matrix, traffic);
    return true;
  }
  return false;
}

// Blocks of up to 16 bytes that are permuted (reorder_pick.h): from more, or to blocks of 16 channels, a tile needs no
// fewer shuffles. False where they are others, or where this CPU has no such permutation.
template <class T, int block>
bool transpose_permuted(const Matrix& matrix, Traffic traffic) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int64_t block_bytes = block * sizeof(T);
  if constexpr (sizeof(T) <= 2 && block_bytes <= 16) {
    using Blocks = PermutedBlocks<T, block>;
    const auto& [src, src_rows, dst, dst_rows, rows, padded_rows, cols, count, next_in_src, next_in_dst] = matrix;
    if (traffic.stream || rows != padded_rows || !are_even(matrix) || !has_pick()) return false;
    const auto run = cols == block && src_rows.stride == block_bytes && rows > Blocks::pixels / 2
                         ? Blocks::template run<false>
                     : block == 8 && rows == block && dst_rows.stride == block_bytes && cols > Blocks::pixels / 2
                         ? Blocks::template run<true>
                         : nullptr;
    if (run != nullptr) run(matrix);
    return run != nullptr;
  }
#endif
  return false;
}

// All columns by one tile, which has room for up to twice as many.
template <class Tile>
void transpose_halves(const Matrix& matrix) {
  const Matrix whole = matrix;
  for (int64_t i = 0; i < whole.count; i++)
    Tile::run_halves(whole.src + i * whole.next_in_src, whole.src_rows.each, whole.dst + i * whole.next_in_dst,
                     whole.dst_rows.each, whole.cols - Tile::cols / 2);
}

// Dst rows narrower than a vector, as blocks of channels may be. False where they are not, or where src has no vectors.
template <class T, int block, int bytes = vector_bytes>
bool transpose_blocks(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T);
  if constexpr (block >= 2 && block * size < bytes) {
    using Dense = FromWideRows<T, bytes, block, true>;
    using Apart = FromWideRows<T, bytes, block, false>;
    if (matrix.padded_rows < block || matrix.padded_rows * size >= bytes) return false;
    const bool dense = matrix.padded_rows == block && matrix.dst_rows.stride == block * size;
    constexpr bool few_pieces = bytes <= 32 || Dense::pieces <= 4;  // of more, narrow vectors have fewer stages
    if (!few_pieces || matrix.cols < Dense::cols) {
      if constexpr (bytes > 16 && few_pieces)
        if (matrix.cols > Dense::cols / 2 && dense && matrix.rows >= block && !traffic.stream) {
          transpose_halves<Dense>(matrix);
          return true;
        }
      return transpose_blocks<T, block, bytes / 2>(matrix, traffic);
    }
    if (!dense && 2 * matrix.padded_rows * size >= bytes) return false;
    constexpr int narrow = bytes == 64 ? 32 : bytes;
    const auto run = dense ? transpose_tiles<Dense, FromWideRows<T, narrow, block, true>>
                           : transpose_tiles<Apart, FromWideRows<T, narrow, block, false>>;
    run(matrix, traffic);
    return true;
  }
  return false;
}

// Blocks of few pixels that follow each other, to rows of as few: weights of depthwise convolutions. False where they
// are others.
template <class T, int block>
bool transpose_few_rows(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), bytes = block * size;
  constexpr int64_t few = 16;
  if (traffic.stream || matrix.count == 1 || matrix.cols != block || matrix.rows > few) return false;
  if constexpr (size <= 4 && bytes >= 16 && bytes <= vector_bytes)
    return transpose_overlapping<FromWideRows<T, bytes, std::min(8, 16 / size), false>>(matrix);
  return false;
}

// Whether more than eight of `together` rows begin in one place of the first cache: of lines that are a multiple of
// 4096 bytes apart it keeps 8 or 12.
bool aliased(const int64_t* offsets, int64_t n, int64_t together) {
  return n > 8 && (offsets[1] - offsets[0]) % (4096 * 16 / together) == 0;
}

// Rows that push each other out of the first cache. So of src some lines are read of a few rows at a time, which one of
// 12 ways gains nothing by, but where the tiles of others are so narrow that they read each line four times; and of dst
// a few rows are written. False where there are none, or where dst goes past the caches.
template <class T>
bool transpose_aliased(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), vector = vector_bytes / size;
  if constexpr (vector_bytes >= 32) {
    if (traffic.stream) return false;
    const bool few_ways = caches().l1 <= 8 * 4096;
    if constexpr (size == 1 && vector_bytes == 64)
      if (!few_ways && aliased(matrix.src_rows.each, matrix.rows, 128) &&
          transpose_overlapping<FromWideRows<T, 64, 16, false>>(matrix))
        return true;
    if (few_ways && aliased(matrix.src_rows.each, matrix.rows, std::max(vector, 16)) && matrix.cols >= vector) {
      using Tile = std::conditional_t<(size <= 4), FromWideRows<T, 32, 8, false>, ToWideRows<T, vector_bytes, vector>>;
      constexpr int64_t some = 256 / size;  // four lines
      for (int64_t c = 0; c < matrix.cols; c += some) {
        const int64_t first = std::min(c, matrix.cols - vector);
        Matrix part = matrix;
        part.src += first * size;
        part.dst_rows = matrix.dst_rows.from(first);
        part.cols = std::min(some, matrix.cols - first);
        transpose_tiles<Tile, Tile, Tile, false, false>(part, nullptr, true);
      }
      return true;
    }
  }
  if constexpr (size <= 4 && vector >= 8) {
    if (aliased(matrix.dst_rows.each, matrix.cols, 16) && matrix.padded_rows >= vector) {
      using Tile = ToWideRows<T, vector_bytes, std::min(8, 16 / size)>;
      transpose_tiles<Tile>(matrix, {});
      return true;
    }
  }
  return false;
}

template <class T>
void transpose(const Matrix& matrix, Traffic traffic) {
  // Past the caches only what fills whole cache lines soon.
  const int64_t dst_bytes = matrix.padded_rows * sizeof(T);
  traffic.stream = traffic.stream && (dst_bytes >= 64 || matrix.dst_rows.stride == dst_bytes);
  if constexpr (sizeof(T) <= 4) {
    const auto three = traffic.stream ? transpose_three<T, true> : transpose_three<T, false>;
    if (three(matrix, traffic.src_end)) return;
  }
  if (transpose_few_rows<T, 16>(matrix, traffic)) return;
  if (transpose_few_rows<T, 8>(matrix, traffic)) return;
  if (transpose_permuted<T, 16>(matrix, traffic)) return;
  if (transpose_permuted<T, 8>(matrix, traffic)) return;
  if (transpose_dense<T, 8>(matrix, traffic)) return;
  if (transpose_dense<T, 4>(matrix, traffic)) return;
  if (transpose_dense<T, 2>(matrix, traffic)) return;
  if (transpose_blocks<T, 16>(matrix, traffic)) return;
  if (transpose_blocks<T, 8>(matrix, traffic)) return;
  if (transpose_blocks<T, 4>(matrix, traffic)) return;
  if (transpose_blocks<T, 2>(matrix, traffic)) return;
  if (transpose_aliased<T>(matrix, traffic)) return;
  transpose_by<T, vector_bytes, std::min(16, vector_bytes / int(sizeof(T)))>(matrix, traffic);
}

// Rows of one vector, or of a few. Within the caches the lines of dst are fetched some rows before they are written:
// stores wait for their lines one after the other.
template <int bytes, bool stream>
void copy_vectors(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t size, const char* next_src) {
  const auto copy = [&](int64_t r) {
    const char* from = src + src_rows[r];
    char* to = dst + dst_rows[r];
    for (int64_t i = 0; i < size; i += bytes) {
      if (stream) __builtin_prefetch(next_src ? next_src + r * size + i : from + i + prefetch_distance(stream));
      store<stream>(to + i, load<Vector<bytes>>(from + i));
    }
  };
  constexpr int64_t ahead = 8;
  int64_t r = 0;
  for (; !stream && r < rows - ahead; r++) {
    __builtin_prefetch(dst + dst_rows[r + ahead], 1);
    copy(r);
  }
  for (; r < rows; r++) copy(r);
}

template <int bytes, bool stream>
void clear_vectors(char* dst, const int64_t* dst_rows, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < size; i += bytes) store<stream>(dst + dst_rows[r] + i, Vector<bytes>{});
}

// From sizeof(Half) to 2 * sizeof(Half) bytes, by two moves that may overlap.
template <class Half>
void copy_short_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                        int64_t size) {
  const int64_t tail = size - sizeof(Half);
  for (int64_t r = 0; r < rows; r++) {
    const Half first = load<Half>(src + src_rows[r]), last = load<Half>(src + src_rows[r] + tail);
    std::memcpy(dst + dst_rows[r], &first, sizeof(Half));
    std::memcpy(dst + dst_rows[r] + tail, &last, sizeof(Half));
  }
}

// As many bytes, then zeros: a few channels in a block of `padded` bytes, written at once.
template <class Half, int padded, bool stream>
void pad_short_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                       int64_t size) {
  const int64_t tail = size - sizeof(Half);
  for (int64_t r = 0; r < rows; r++) {
    const uint64_t first = load<Half>(src + src_rows[r]), last = load<Half>(src + src_rows[r] + tail);
    Vector<padded> row = {};
    if constexpr (sizeof(Half) == 8 && padded >= 16) {
      row[0] = first;
      row[1] = tail > 0 ? last >> 8 * (8 - tail) : 0;
    } else {
      row[0] = first | last << 8 * tail;
    }
    store<stream>(dst + dst_rows[r], row);
  }
}

template <class Half, bool stream>
bool pad_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                    int64_t size, int64_t padded_size) {
  const auto run = padded_size == 64   ? pad_short_rows_of<Half, 64, stream>
                   : padded_size == 32 ? pad_short_rows_of<Half, 32, stream>
                   : padded_size == 16 ? pad_short_rows_of<Half, 16, stream>
                   : padded_size == 8  ? pad_short_rows_of<Half, 8, stream>
                                       : nullptr;
  if (run == nullptr || (sizeof(Half) == 8 && padded_size == 8)) return false;
  run(src, src_rows, dst, dst_rows, rows, size);
  return true;
}

// Fewer than 16 bytes.
void copy_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t size) {
  const auto run = size >= 8   ? copy_short_rows_of<uint64_t>
                   : size >= 4 ? copy_short_rows_of<uint32_t>
                   : size >= 2 ? copy_short_rows_of<uint16_t>
                               : copy_short_rows_of<uint8_t>;
  run(src, src_rows, dst, dst_rows, rows, size);
}

// The same with padding. False where this is not so short.
template <bool stream>
bool pad_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                    int64_t size, int64_t padded_size) {
  if (size >= 16) return false;
  const auto run = size >= 8   ? pad_short_rows<uint64_t, stream>
                   : size >= 4 ? pad_short_rows<uint32_t, stream>
                   : size >= 2 ? pad_short_rows<uint16_t, stream>
                               : pad_short_rows<uint8_t, stream>;
  return run(src, src_rows, dst, dst_rows, rows, size, padded_size);
}

template <bool stream>
void clear_rows(char* dst, const int64_t* dst_rows, int64_t rows, int64_t size) {
  if (size % 64 == 0) return clear_vectors<64, stream>(dst, dst_rows, rows, size);
  if (size % 16 == 0) return clear_vectors<16, stream>(dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memset(dst + dst_rows[r], 0, size);
}

template <bool stream>
void copy_any_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                   int64_t size, int64_t padded_size, const char* next_src) {
  if (size > 0 && size < padded_size && pad_short_rows<stream>(src, src_rows, dst, dst_rows, rows, size, padded_size))
    return;
  if (size < padded_size) clear_rows<stream>(dst, dst_rows, rows, padded_size);
  if (size == 0) return;
  if (size % 64 == 0 && (stream || size == 64))
    return copy_vectors<64, stream>(src, src_rows, dst, dst_rows, rows, size, next_src);
  if (size == 32) return copy_vectors<32, stream>(src, src_rows, dst, dst_rows, rows, 32, next_src);
  if (size == 16) return copy_vectors<16, stream>(src, src_rows, dst, dst_rows, rows, 16, next_src);
  if (size == 8) return copy_vectors<8, false>(src, src_rows, dst, dst_rows, rows, 8, nullptr);
  if (size < 16) return copy_short_rows(src, src_rows, dst, dst_rows, rows, size);
  if (size < 32) return copy_short_rows_of<Vector<16>>(src, src_rows, dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memcpy(dst + dst_rows[r], src + src_rows[r], size);
}

// The three channels of an image, to blocks or from blocks. False where these are other rows.
template <class T, bool stream>
bool copy_three(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
                int64_t padded_size, const char* src_end) {
  using Channels = ThreeChannels<T, stream>;
  if (size != Channels::packed_bytes || rows < Channels::fewest_pixels || dst_rows.stride != padded_size) return false;
  const auto move = src_rows.stride == size ? Channels::to_blocks(dst_rows.stride)
                    : padded_size == size   ? Channels::from_blocks(src_rows.stride)
                                            : Channels::between_blocks(src_rows.stride, dst_rows.stride);
  if (move != nullptr) move(src, src_rows.each, dst, dst_rows.each, rows, src_end);
  return move != nullptr;
}

template <bool stream>
void copy_rows(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, Traffic traffic) {
  const auto three = [&]<class T>(T) {
    return copy_three<T, stream>(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic.src_end);
  };
  if (three(uint8_t()) || three(uint16_t()) || three(uint32_t())) return;
  copy_any_rows<stream>(src, src_rows.each, dst, dst_rows.each, rows, size, padded_size, traffic.next_src);
}

void copy_rows(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, Traffic traffic) {
  const auto run = traffic.stream ? copy_rows<true> : copy_rows<false>;
  run(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic);
}

}  // namespace

const ReorderKernels TORCH_BLOCKED_TIER_NAME(reorder_kernels) = {
    copy_rows,
    transpose<uint8_t>,
    transpose<uint16_t>,
    transpose<uint32_t>,
    transpose<uint64_t>,
    transpose<Bytes16>,
    interleave<uint8_t, 4>,
    interleave<uint16_t, 2>,
    deinterleave<uint8_t, 4>,
    deinterleave<uint16_t, 2>,
    has_pick,
    interleave_picked,
    deinterleave_picked,
    permute_blocks,
};

}  // namespace torch_blocked
