#include "kernels/reorder.h"

#include <algorithm>
#include <cstring>

#include "reorder_interleave.h"
#include "reorder_tiles.h"
#include "tier.h"

namespace torch_blocked {
namespace {

// A tile with only `rows` src rows: the others are zeros.
template <class Tile, bool stream>
[[gnu::noinline]] void transpose_padded_tile(const char* src, const int64_t* src_rows, char* dst,
                                             const int64_t* dst_rows, int64_t rows) {
  alignas(64) static constexpr char zeros[Tile::cols * Tile::element_size] = {};
  int64_t padded_rows[Tile::rows];
  const int64_t to_zeros = reinterpret_cast<intptr_t>(zeros) - reinterpret_cast<intptr_t>(src);
  for (int64_t r = 0; r < Tile::rows; r++) padded_rows[r] = r < rows ? src_rows[r] : to_zeros;
  Tile::template run<stream>(src, padded_rows, dst, dst_rows);
}

// The tile that begins in row r and column c, or where it would end outside, the last one.
template <class Tile, bool stream>
[[gnu::always_inline]] inline void transpose_tile(const char* src, const int64_t* src_rows, char* dst,
                                                  const int64_t* dst_rows, int64_t rows, int64_t padded_rows,
                                                  int64_t cols, int64_t r, int64_t c, const char*& next_src) {
  r = std::min(r, padded_rows - Tile::rows);
  c = std::min(c, cols - Tile::cols);
  const char* const from = src + c * Tile::element_size;
  char* const to = dst + r * Tile::element_size;
  if (next_src != nullptr) {
    constexpr int64_t bytes = Tile::rows * Tile::cols * Tile::element_size;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next_src + i);
    next_src += bytes;
  } else if (stream && (c * Tile::element_size) % 64 < Tile::cols * Tile::element_size) {  // once a cache line
    const int64_t src_row = rows > 1 ? src_rows[1] - src_rows[0] : 64, step = 64 / std::clamp<int64_t>(src_row, 1, 64);
    for (int64_t i = r; i < std::min(rows, r + Tile::rows); i += step)
      __builtin_prefetch(from + src_rows[i] + prefetch_distance(stream));
  }
  if (rows - r >= Tile::rows) [[likely]]
    Tile::template run<stream>(from, src_rows + r, to, dst_rows + c);
  else
    transpose_padded_tile<Tile, stream>(from, src_rows + r, to, dst_rows + c, rows - r);
}

// At least one tile. The last tile of a row or a column overlaps the one before it instead of being cut; a narrow or a
// short one does where that is enough.
// A few dst rows at a time, each in its full length, or with `along_src` a few src rows.
template <class Tile, class NarrowTile, class ShortTile, bool stream>
void transpose_tiles(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols, const char* next_src, bool along_src) {
  const int64_t outer_end = along_src ? padded_rows : cols, outer_step = along_src ? Tile::rows : Tile::cols;
  const int64_t inner_end = along_src ? cols : padded_rows, inner_step = along_src ? Tile::cols : Tile::rows;
  for (int64_t outer = 0; outer < outer_end; outer += outer_step)
    for (int64_t inner = 0; inner < inner_end; inner += inner_step) {
      const int64_t r = along_src ? outer : inner, c = along_src ? inner : outer;
      if (cols - c <= NarrowTile::cols)
        transpose_tile<NarrowTile, stream>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, r, c, next_src);
      else if (padded_rows - r <= ShortTile::rows)
        transpose_tile<ShortTile, stream>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, r, c, next_src);
      else
        transpose_tile<Tile, stream>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, r, c, next_src);
    }
}

template <int size>
void transpose_elements(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                        int64_t padded_rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c++) {
    char* to = dst + dst_rows[c];
    for (int64_t r = 0; r < rows; r++) std::memcpy(to + r * size, src + src_rows[r] + c * size, size);
    if (rows < padded_rows) std::memset(to + rows * size, 0, (padded_rows - rows) * size);
  }
}

// A few dst rows at a time, unless a cache line of src holds a whole src row.
template <class Tile, class NarrowTile = Tile, class ShortTile = Tile>
void transpose_tiles(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols, Traffic traffic) {
  const auto run = traffic.stream ? transpose_tiles<Tile, NarrowTile, ShortTile, true>
                                  : transpose_tiles<Tile, NarrowTile, ShortTile, false>;
  run(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic.next_src, cols * Tile::element_size <= 64);
}

// With tiles of vectors of `bytes` bytes and of `tile_cols` columns, or less where there are not so many.
template <class T, int bytes, int tile_cols>
void transpose_by(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t padded_rows, int64_t cols, Traffic traffic) {
  constexpr int size = sizeof(T), narrow_cols = std::max(2, tile_cols * size > 16 ? 16 / size : tile_cols / 2);
  if constexpr (bytes < 8 || bytes < 2 * size || tile_cols < 2)
    transpose_elements<size>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  else if (padded_rows * size < bytes)
    transpose_by<T, bytes / 2, std::min(tile_cols, bytes / 2 / size)>(src, src_rows, dst, dst_rows, rows, padded_rows,
                                                                      cols, traffic);
  else if (cols < tile_cols)
    transpose_by<T, bytes, tile_cols / 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic);
  else {
    using Tile = ToWideRows<T, bytes, tile_cols>;
    // Of elements of a byte or two it would write pieces of less than 16 bytes.
    using Short = FromWideRows<T, tile_cols * size, std::min(4, tile_cols), false>;
    constexpr bool has_short = size >= 4 && tile_cols * size >= 16 && Short::rows < Tile::rows;
    transpose_tiles<Tile, ToWideRows<T, bytes, narrow_cols>, std::conditional_t<has_short, Short, Tile>>(
        src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic);
  }
}

// Three rows or columns that alternate on the other side, as the channels of an image. False where there are others.
template <class T>
bool transpose_three(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols, Traffic traffic) {
  constexpr int size = sizeof(T), vector = vector_bytes / size;
  if constexpr (size <= 4) {
    const bool from_three = rows == 3 && padded_rows == 3 && cols >= vector;
    const bool to_three = cols == 3 && rows == padded_rows && rows >= vector;
    if (from_three && dst_rows.stride == 3 * size)
      transpose_tiles<InterleaveThree<T, vector_bytes>>(src, src_rows.each, dst, dst_rows.each, rows, padded_rows, cols,
                                                        traffic);
    else if (to_three && src_rows.stride == 3 * size)
      transpose_tiles<DeinterleaveThree<T, vector_bytes>>(src, src_rows.each, dst, dst_rows.each, rows, padded_rows,
                                                          cols, traffic);
    else
      return false;
    return true;
  }
  return false;
}

// Src rows shorter than 16 bytes that follow each other, as blocks of few channels do. False where they do not.
template <class T, int block>
bool transpose_dense(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols, Traffic traffic) {
  constexpr int size = sizeof(T), vector = vector_bytes / size;
  if constexpr (block * size < 16) {
    if (cols != block || src_rows.stride != block * size || rows != padded_rows || rows < vector) return false;
    transpose_tiles<FromDenseRows<T, vector_bytes, block>>(src, src_rows.each, dst, dst_rows.each, rows, padded_rows,
                                                           cols, traffic);
    return true;
  }
  return false;
}

// Dst rows narrower than a vector, as blocks of channels may be. False where they are not, or where src has no vectors.
template <class T, int block, int bytes = vector_bytes>
bool transpose_blocks(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows,
                      int64_t padded_rows, int64_t cols, Traffic traffic) {
  constexpr int size = sizeof(T);
  if constexpr (block >= 2 && block * size < bytes) {
    if (padded_rows < block || padded_rows * size >= bytes) return false;
    if (cols < bytes / size)
      return transpose_blocks<T, block, bytes / 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic);
    const bool dense = padded_rows == block && dst_rows.stride == block * size;
    if (!dense && 2 * padded_rows * size >= bytes) return false;
    const auto run = dense ? transpose_tiles<FromWideRows<T, bytes, block, true>>
                           : transpose_tiles<FromWideRows<T, bytes, block, false>>;
    run(src, src_rows.each, dst, dst_rows.each, rows, padded_rows, cols, traffic);
    return true;
  }
  return false;
}

// Whether more than eight of `together` rows begin in one place of the first cache, which keeps about so many lines of
// those that are a multiple of 4096 bytes apart.
bool aliased(const int64_t* offsets, int64_t n, int64_t together) {
  return n > 8 && together > 8 && (offsets[1] - offsets[0]) % (4096 * 16 / together) == 0;
}

// Rows that push each other out of the first cache. So of src a few are read at a time, some lines of each, and of dst
// a few are written. False where there are none, or where dst goes past the caches.
template <class T>
bool transpose_aliased(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                       int64_t padded_rows, int64_t cols, Traffic traffic) {
  constexpr int size = sizeof(T), vector = vector_bytes / size;
  if constexpr (size <= 4 && vector >= 8) {
    if (traffic.stream) return false;
    if (aliased(src_rows, rows, vector) && cols >= vector) {
      using Tile = FromWideRows<T, vector_bytes, 8, false>;
      constexpr int64_t some = 4 * vector;
      for (int64_t c = 0; c < cols; c += some) {
        const int64_t first = std::min(c, cols - vector);
        transpose_tiles<Tile, Tile, Tile, false>(src + first * size, src_rows, dst, dst_rows + first, rows, padded_rows,
                                                 std::min(some, cols - first), nullptr, true);
      }
      return true;
    }
    if (aliased(dst_rows, cols, std::min(16, vector)) && padded_rows >= vector) {
      using Tile = ToWideRows<T, vector_bytes, std::min(8, 16 / size)>;
      transpose_tiles<Tile>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, {});
      return true;
    }
  }
  return false;
}

template <class T>
void transpose(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t padded_rows,
               int64_t cols, Traffic traffic) {
  // Past the caches only what fills whole cache lines soon.
  const int64_t dst_bytes = padded_rows * sizeof(T);
  traffic.stream = traffic.stream && (dst_bytes >= 64 || dst_rows.stride == dst_bytes);
  if (transpose_three<T>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_dense<T, 8>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_dense<T, 4>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_dense<T, 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_blocks<T, 16>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_blocks<T, 8>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_blocks<T, 4>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_blocks<T, 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, traffic)) return;
  if (transpose_aliased<T>(src, src_rows.each, dst, dst_rows.each, rows, padded_rows, cols, traffic)) return;
  transpose_by<T, vector_bytes, std::min(16, vector_bytes / int(sizeof(T)))>(src, src_rows.each, dst, dst_rows.each,
                                                                             rows, padded_rows, cols, traffic);
}

// Rows of one vector, or of a few.
template <int bytes, bool stream>
void copy_vectors(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t size, const char* next_src) {
  for (int64_t r = 0; r < rows; r++) {
    const char* from = src + src_rows[r];
    char* to = dst + dst_rows[r];
    for (int64_t i = 0; i < size; i += bytes) {
      if (stream) __builtin_prefetch(next_src ? next_src + r * size + i : from + i + prefetch_distance(stream));
      store<stream>(to + i, load<Vector<bytes>>(from + i));
    }
  }
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
void copy_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, const char* next_src) {
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

void copy_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, Traffic traffic) {
  const auto run = traffic.stream ? copy_rows<true> : copy_rows<false>;
  run(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic.next_src);
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
};

}  // namespace torch_blocked
