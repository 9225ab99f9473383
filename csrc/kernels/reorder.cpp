#include "kernels/reorder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "tier.h"

// Vectors are returned from inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace torch_blocked {
namespace {

struct Bytes16 {
  uint64_t low, high;
};

template <int bytes>
struct VectorOf {
  typedef long long type __attribute__((vector_size(bytes)));
};
template <int bytes>
using Vector = typename VectorOf<bytes>::type;

#if defined(CPU_CAPABILITY_AVX512)
constexpr int vector_bytes = 64;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

// An aligned vector, past the caches.
template <class Row>
inline void stream_store(char* dst, const Row& row) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(Row) == 64)
    __builtin_ia32_movntdq512(reinterpret_cast<Vector<64>*>(dst), std::bit_cast<Vector<64>>(row));
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (sizeof(Row) == 32)
    __builtin_ia32_movntdq256(reinterpret_cast<Vector<32>*>(dst), std::bit_cast<Vector<32>>(row));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(Row) == 16)
    __builtin_ia32_movntdq(reinterpret_cast<Vector<16>*>(dst), std::bit_cast<Vector<16>>(row));
#else
  std::memcpy(dst, &row, sizeof(Row));
#endif
}

template <class T>
[[gnu::always_inline]] inline T load(const char* src) {
  T value;
  std::memcpy(&value, src, sizeof(T));
  return value;
}

// Stores a vector; with `stream`, where it is aligned, past the caches.
template <bool stream, class Row>
inline void store(char* dst, const Row& row) {
  if constexpr (stream && sizeof(Row) >= 16 && sizeof(Row) <= vector_bytes) {
    if (reinterpret_cast<uintptr_t>(dst) % sizeof(Row) == 0) return stream_store(dst, row);
  }
  std::memcpy(dst, &row, sizeof(Row));
}

// In bytes along a src row or run, farther where src is in no cache: the CPU's own prefetch does not follow so many
// rows.
constexpr int64_t prefetch_distance(bool stream) { return stream ? 2048 : 256; }

// Some vectors of elements, to be transposed in registers. The compiler's own vectors and not ATen's, which has a
// transpose only of floats and only at full width: this one is as fast there (`interleave` becomes one punpckl* or
// punpckh*, `every_second_part` one vperm2i128 or vshufi32x4) and serves every size of element and block.
template <class T, int bytes, int rows_>
struct Tile {
  using Element = T;
  typedef T Row __attribute__((vector_size(bytes)));
  static constexpr int element_size = sizeof(T);
  static constexpr int rows = rows_, cols = bytes / element_size;
  static constexpr int parts = bytes > 16 ? bytes / 16 : 1;  // of 128 bits: x86 moves little between them
  static constexpr int part = cols / parts;
  static constexpr int group = rows < part ? rows : part;  // rows that meet in one part
  static_assert(rows % group == 0 && rows <= cols);
  using Lanes = std::make_integer_sequence<int, cols>;

  Row row[rows];

  // Of each part, one half: elements of a and of b by turns.
  template <int half, int... i>
  static Row interleave(Row a, Row b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i % 2 * cols + i / part * part + half * part / 2 + i % part / 2)...);
  }

  // The even or the odd parts of a, then those of b.
  template <int odd, int... i>
  static Row every_second_part(Row a, Row b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, ((2 * (i / part) + odd) * part + i % part)...);
  }

  // One perfect shuffle of each rectangle of group x part elements: log2(group) of them transpose it, log2(part) take
  // the transpose back.
  void shuffle_within_parts() {
    Row next[rows];
#pragma GCC unroll 16
    for (int i = 0; i < rows / 2; i++) {
      const int r = i / (group / 2) * group + i % (group / 2);
      next[2 * i] = interleave<0>(row[r], row[r + group / 2], Lanes());
      next[2 * i + 1] = interleave<1>(row[r], row[r + group / 2], Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) row[i] = next[i];
  }

  // The same, backwards, of parts: from vectors that are `stride` apart.
  void shuffle_parts(int stride) {
    Row next[rows];
#pragma GCC unroll 16
    for (int i = 0; i < rows / 2; i++) {
      const int r = i / stride * 2 * stride + i % stride;
      next[i] = every_second_part<0>(row[r], row[r + stride], Lanes());
      next[i + rows / 2] = every_second_part<1>(row[r], row[r + stride], Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) row[i] = next[i];
  }
};

// Pieces of successive src rows side by side: `bytes` bytes in all, at most a part of a vector.
template <class T, int bytes, int piece>
[[gnu::always_inline]] inline auto gather_part(const char* src, const int64_t* src_rows) {
  using Piece = std::conditional_t<piece == 8, int64_t, std::conditional_t<piece == 4, int32_t, int16_t>>;
  typedef T Part __attribute__((vector_size(bytes)));
  if constexpr (piece == bytes)
    return load<Part>(src + *src_rows);
  else {
    typedef Piece Pieces __attribute__((vector_size(bytes)));
    Pieces pieces;
#pragma GCC unroll 8
    for (int i = 0; i < bytes / piece; i++) pieces[i] = load<Piece>(src + src_rows[i]);
    return reinterpret_cast<Part>(pieces);
  }
}

template <class Row, int... i>
[[gnu::always_inline]] inline Row concatenate(auto a, auto b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, i...);
}

// A vector of such parts, one for each row of a part's length farther.
template <class T, int bytes, int piece>
[[gnu::always_inline]] inline auto gather(const char* src, const int64_t* src_rows) {
  if constexpr (bytes <= 16)
    return gather_part<T, bytes, piece>(src, src_rows);
  else {
    typedef T Row __attribute__((vector_size(bytes)));
    constexpr int half = bytes / 2;
    return concatenate<Row>(gather<T, half, piece>(src, src_rows),
                            gather<T, half, piece>(src, src_rows + half / sizeof(T)),
                            std::make_integer_sequence<int, bytes / sizeof(T)>());
  }
}

// Writes whole vectors of dst: `cols` src columns, at most a part of a vector, of as many src rows as a vector has
// elements. So short pieces of src are all that it needs.
template <class T, int bytes, int cols_>
struct ToWideRows {
  using Registers = Tile<T, bytes, cols_>;
  static constexpr int element_size = sizeof(T), rows = Registers::cols, cols = cols_;

  template <bool stream>
  [[gnu::always_inline]] static void run(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows) {
    Registers tile;
    constexpr int pieces = Registers::part / cols;  // in a part
#pragma GCC unroll 16
    for (int v = 0; v < cols; v++) tile.row[v] = gather<T, bytes, cols * element_size>(src, src_rows + v * pieces);
#pragma GCC unroll 4
    for (int step = 1; step < Registers::part; step *= 2) tile.shuffle_within_parts();
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) store<stream>(dst + dst_rows[c], tile.row[c]);
  }
};

// Reads whole vectors of src: `rows` src rows, a block of channels that is narrower than a vector. A vector of the
// answer holds several dst rows, which are stored at once where they follow each other.
template <class T, int bytes, int rows_, bool dense>
struct FromWideRows {
  using Registers = Tile<T, bytes, rows_>;
  static constexpr int element_size = sizeof(T), rows = rows_, cols = Registers::cols;

  template <bool stream>
  [[gnu::always_inline]] static void run(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows) {
    Registers tile;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) std::memcpy(&tile.row[r], src + src_rows[r], bytes);
    transpose(tile);
    constexpr int piece = rows * element_size, pieces = bytes / piece;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      if constexpr (dense)
        store<stream>(dst + dst_rows[r * pieces], tile.row[r]);
      else
#pragma GCC unroll 16
        for (int i = 0; i < pieces; i++)
          std::memcpy(dst + dst_rows[r * pieces + i], reinterpret_cast<const char*>(&tile.row[r]) + i * piece, piece);
    }
  }

  [[gnu::always_inline]] static void transpose(Registers& tile) {
    constexpr int group = Registers::group;
#pragma GCC unroll 4
    for (int step = 1; step < group; step *= 2) tile.shuffle_within_parts();
    // Now part p of vector g * group + i is a part, the g-th, of the i-th dst row or rows that begin in column
    // p * part.
#pragma GCC unroll 4
    for (int step = 1; step < rows / group; step *= 2) tile.shuffle_parts(group);
#pragma GCC unroll 4
    for (int step = rows / group; step < Registers::parts; step *= 2) tile.shuffle_parts(1);
  }
};

// A tile with only `rows` src rows: the others are zeros, in a copy.
template <class Tile, bool stream>
[[gnu::noinline]] void transpose_padded_tile(const char* src, const int64_t* src_rows, char* dst,
                                             const int64_t* dst_rows, int64_t rows) {
  constexpr int row_bytes = Tile::cols * Tile::element_size;
  alignas(64) char copy[Tile::rows * row_bytes] = {};
  int64_t copy_rows[Tile::rows];
  for (int64_t r = 0; r < Tile::rows; r++) {
    copy_rows[r] = r * row_bytes;
    if (r < rows) std::memcpy(copy + copy_rows[r], src + src_rows[r], row_bytes);
  }
  Tile::template run<stream>(copy, copy_rows, dst, dst_rows);
}

// At least one tile. The last tile of a row or a column overlaps the one before it instead of being cut.
// A few dst rows at a time, each in its full length, unless a cache line of src holds a whole src row: then a few of
// those.
template <class Tile, bool stream>
void transpose_tiles(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols) {
  const bool along_dst = cols * Tile::element_size > 64;
  const int64_t outer_end = along_dst ? cols : padded_rows, outer_step = along_dst ? Tile::cols : Tile::rows;
  const int64_t inner_end = along_dst ? padded_rows : cols, inner_step = along_dst ? Tile::rows : Tile::cols;
  for (int64_t outer = 0; outer < outer_end; outer += outer_step)
    for (int64_t inner = 0; inner < inner_end; inner += inner_step) {
      const int64_t r = std::min(along_dst ? inner : outer, padded_rows - Tile::rows);
      const int64_t c = std::min(along_dst ? outer : inner, cols - Tile::cols);
      const char* from = src + c * Tile::element_size;
      char* to = dst + r * Tile::element_size;
      if (stream && (c * Tile::element_size) % 64 < Tile::cols * Tile::element_size)  // once a cache line
        for (int64_t i = r; i < std::min(rows, r + Tile::rows); i++)
          __builtin_prefetch(from + src_rows[i] + prefetch_distance(stream));
      if (rows - r >= Tile::rows) [[likely]]
        Tile::template run<stream>(from, src_rows + r, to, dst_rows + c);
      else
        transpose_padded_tile<Tile, stream>(from, src_rows + r, to, dst_rows + c, rows - r);
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

template <class Tile>
void transpose_tiles(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols, bool stream) {
  const auto run = stream ? transpose_tiles<Tile, true> : transpose_tiles<Tile, false>;
  run(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
}

// With tiles of vectors of `bytes` bytes and of `tile_cols` columns, or less where there are not so many.
template <class T, int bytes, int tile_cols>
void transpose_by(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t padded_rows, int64_t cols, bool stream) {
  constexpr int size = sizeof(T), part = std::min(bytes, 16) / size;
  if constexpr (bytes < 8 || part < 2 || tile_cols < 2)  // no vectors have such elements
    transpose_elements<size>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  else if (padded_rows * size < bytes)
    transpose_by<T, bytes / 2, std::min(tile_cols, bytes / 2 / size)>(src, src_rows, dst, dst_rows, rows, padded_rows,
                                                                      cols, stream);
  else if (bytes / size <= 16 && cols >= bytes / size)
    transpose_tiles<FromWideRows<T, bytes, std::min(bytes / size, 16), true>>(src, src_rows, dst, dst_rows, rows,
                                                                              padded_rows, cols, stream);
  else if (cols < tile_cols)
    transpose_by<T, bytes, tile_cols / 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
  else
    transpose_tiles<ToWideRows<T, bytes, tile_cols>>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
}

bool follow_each_other(const int64_t* dst_rows, int64_t cols, int64_t size) {
  int64_t different = 0;
  for (int64_t c = 1; c < cols; c++) different |= (dst_rows[c] - dst_rows[c - 1]) ^ size;
  return different == 0;
}

// Dst rows narrower than a vector, as blocks of channels may be. False where they are not, or where src has no vectors.
template <class T, int block>
bool transpose_blocks(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                      int64_t padded_rows, int64_t cols, bool stream) {
  constexpr int size = sizeof(T);
  if constexpr (block >= 2 && block * size < vector_bytes && size < 16) {
    if (padded_rows < block || padded_rows * size >= vector_bytes || cols < vector_bytes / size) return false;
    const auto run = padded_rows == block && follow_each_other(dst_rows, cols, block * size)
                         ? transpose_tiles<FromWideRows<T, vector_bytes, block, true>>
                         : transpose_tiles<FromWideRows<T, vector_bytes, block, false>>;
    run(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
    return true;
  }
  return false;
}

template <class T>
void transpose(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
               int64_t padded_rows, int64_t cols, bool stream) {
  // Past the caches only what fills whole cache lines soon.
  const int64_t dst_bytes = padded_rows * sizeof(T);
  stream = stream && (dst_bytes >= 64 || follow_each_other(dst_rows, cols, dst_bytes));
  if (transpose_blocks<T, 16>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  if (transpose_blocks<T, 8>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  if (transpose_blocks<T, 4>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  if (transpose_blocks<T, 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  transpose_by<T, vector_bytes, std::max(1, 16 / int(sizeof(T)))>(src, src_rows, dst, dst_rows, rows, padded_rows, cols,
                                                                  stream);
}

// Rows of one vector, or of a few.
template <int bytes, bool stream>
void copy_vectors(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t size) {
  for (int64_t r = 0; r < rows; r++) {
    const char* from = src + src_rows[r];
    char* to = dst + dst_rows[r];
    for (int64_t i = 0; i < size; i += bytes) {
      if (stream) __builtin_prefetch(from + i + prefetch_distance(stream));
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
               int64_t padded_size) {
  if (size > 0 && size < padded_size && pad_short_rows<stream>(src, src_rows, dst, dst_rows, rows, size, padded_size))
    return;
  if (size < padded_size) clear_rows<stream>(dst, dst_rows, rows, padded_size);
  if (size == 0) return;
  if (size % 64 == 0 && (stream || size == 64))
    return copy_vectors<64, stream>(src, src_rows, dst, dst_rows, rows, size);
  if (size == 32) return copy_vectors<32, stream>(src, src_rows, dst, dst_rows, rows, 32);
  if (size == 16) return copy_vectors<16, stream>(src, src_rows, dst, dst_rows, rows, 16);
  if (size == 8) return copy_vectors<8, false>(src, src_rows, dst, dst_rows, rows, 8);
  if (size < 16) return copy_short_rows(src, src_rows, dst, dst_rows, rows, size);
  if (size < 32) return copy_short_rows_of<Vector<16>>(src, src_rows, dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memcpy(dst + dst_rows[r], src + src_rows[r], size);
}

void copy_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, bool stream) {
  const auto run = stream ? copy_rows<true> : copy_rows<false>;
  run(src, src_rows, dst, dst_rows, rows, size, padded_size);
}

}  // namespace

const ReorderKernels TORCH_BLOCKED_TIER_NAME(reorder_kernels) = {
    copy_rows, transpose<uint8_t>, transpose<uint16_t>, transpose<uint32_t>, transpose<uint64_t>, transpose<Bytes16>,
};

}  // namespace torch_blocked
