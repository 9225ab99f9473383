#include "kernels/reorder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tier.h"

namespace torch_blocked {
namespace {

struct Bytes16 {
  uint64_t low, high;
};

#if defined(CPU_CAPABILITY_AVX512)
constexpr int vector_bytes = 64;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

// Stores a vector; with `stream`, where it is a whole cache line, past the caches.
template <bool stream, class Row>
inline void store(char* dst, const Row& row) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (stream && sizeof(Row) == 64) {
    typedef long long Line __attribute__((vector_size(64)));
    if (reinterpret_cast<uintptr_t>(dst) % 64 == 0)
      return __builtin_ia32_movntdq512(reinterpret_cast<Line*>(dst), reinterpret_cast<Line>(row));
  }
#endif
  std::memcpy(dst, &row, sizeof(Row));
}

// In bytes along a src row or run, farther where src is in no cache: the CPU's own prefetch does not follow so many
// rows.
constexpr int64_t prefetch_distance(bool stream) { return stream ? 2048 : 256; }

// Some rows of elements, one vector of `bytes` bytes each, to be transposed in registers. The compiler's own vectors
// and not ATen's, which has a transpose only of floats and only at full width: this one is as fast there (`interleave`
// becomes one punpckl* or punpckh*, `every_second_part` one vperm2i128 or vshufi32x4) and serves every size of element
// and block. With fewer rows than lanes a vector of the answer holds several dst rows, one after the other.
template <class T, int bytes, int rows_ = bytes / int(sizeof(T))>
struct Tile {
  typedef T Row __attribute__((vector_size(bytes)));
  static constexpr int element_size = sizeof(T);
  static constexpr int rows = rows_, cols = bytes / element_size;
  static constexpr int parts = bytes > 16 ? bytes / 16 : 1;  // of 128 bits: x86 moves little between them
  static constexpr int part = cols / parts;
  static constexpr int group = rows < part ? rows : part;  // rows that meet in one part
  static constexpr int dst_rows_per_vector = cols / rows;
  static_assert(rows % group == 0 && rows <= cols);
  using Lanes = std::make_integer_sequence<int, cols>;

  Row row[rows];

  void load(int r, const char* src) { std::memcpy(&row[r], src, bytes); }

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

  void transpose() {
#pragma GCC unroll 4
    for (int step = 1; step < group; step *= 2) shuffle_within_parts();
    // Now part p of vector g * group + i is a part, the g-th, of the i-th dst row or rows that begin in column
    // p * part.
#pragma GCC unroll 4
    for (int step = 1; step < rows / group; step *= 2) shuffle_parts(group);
#pragma GCC unroll 4
    for (int step = rows / group; step < parts; step *= 2) shuffle_parts(1);
  }

  // One perfect shuffle of each rectangle of group x part elements; log2(group) of them transpose it.
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

// With zeros for the rows from `rows` on. Inlined: a call costs a quarter of the time of a tile.
template <class Tile, bool stream>
[[gnu::always_inline]] inline void transpose_tile(const char* src, const int64_t* src_rows, char* dst,
                                                  const int64_t* dst_rows, int64_t rows) {
  Tile tile;
#pragma GCC unroll 16
  for (int r = 0; r < Tile::rows; r++) {
    if (r < rows)
      tile.load(r, src + src_rows[r]);
    else
      tile.row[r] = typename Tile::Row{};
  }
  tile.transpose();
#pragma GCC unroll 16
  for (int r = 0; r < Tile::rows; r++) store<stream>(dst + dst_rows[r * Tile::dst_rows_per_vector], tile.row[r]);
}

template <class Tile, bool stream>
[[gnu::noinline]] void transpose_padded_tile(const char* src, const int64_t* src_rows, char* dst,
                                             const int64_t* dst_rows, int64_t rows) {
  transpose_tile<Tile, stream>(src, src_rows, dst, dst_rows, rows);
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
      if (sizeof(typename Tile::Row) >= 32)
        for (int64_t i = r; i < std::min(rows, r + Tile::rows); i++)
          __builtin_prefetch(from + src_rows[i] + prefetch_distance(stream));
      if (rows - r >= Tile::rows) [[likely]]
        transpose_tile<Tile, stream>(from, src_rows + r, to, dst_rows + c, Tile::rows);
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

// With tiles of vectors of `bytes` bytes, or of fewer where there are not so many rows or columns.
template <class T, int bytes>
void transpose_by(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t padded_rows, int64_t cols, bool stream) {
  if constexpr (bytes < 8 || bytes < 2 * int(sizeof(T)) || sizeof(T) == 16)  // no vectors have such elements
    transpose_elements<sizeof(T)>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  else if (std::min(padded_rows, cols) >= Tile<T, bytes>::cols)
    transpose_tiles<Tile<T, bytes>>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
  else
    transpose_by<T, bytes / 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
}

bool follow_each_other(const int64_t* dst_rows, int64_t cols, int64_t size) {
  int64_t different = 0;
  for (int64_t c = 1; c < cols; c++) different |= (dst_rows[c] - dst_rows[c - 1]) ^ size;
  return different == 0;
}

// Whole blocks of channels, narrower than a vector: dst is written by whole vectors all the same. False where this
// cannot be.
template <class T, int block>
bool transpose_blocks(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                      int64_t padded_rows, int64_t cols, bool stream) {
  constexpr int size = sizeof(T);
  if constexpr (block * size < vector_bytes && size < 16) {
    using Wide = Tile<T, vector_bytes, block>;
    if (padded_rows != block || cols < Wide::cols) return false;
    if (!follow_each_other(dst_rows, cols, block * size)) return false;
    transpose_tiles<Wide>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream);
    return true;
  }
  return false;
}

template <int size>
void clear_rows_of(char* dst, const int64_t* dst_rows, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) std::memset(dst + dst_rows[r], 0, size);
}

void clear_rows(char* dst, const int64_t* dst_rows, int64_t rows, int64_t size) {
  if (size == 64) return clear_rows_of<64>(dst, dst_rows, rows);
  if (size == 32) return clear_rows_of<32>(dst, dst_rows, rows);
  for (int64_t r = 0; r < rows; r++) std::memset(dst + dst_rows[r], 0, size);
}

// Tiles of at most 16 x 16: more rows do not fit in the registers.
template <class T>
void transpose(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
               int64_t padded_rows, int64_t cols, bool stream) {
  if (transpose_blocks<T, 16>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  if (transpose_blocks<T, 8>(src, src_rows, dst, dst_rows, rows, padded_rows, cols, stream)) return;
  transpose_by<T, std::min(vector_bytes, 16 * int(sizeof(T)))>(src, src_rows, dst, dst_rows, rows, padded_rows, cols,
                                                               stream);
}

template <int size>
void copy_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) std::memcpy(dst + dst_rows[r], src + src_rows[r], size);
}

// From min to 2 * min bytes, by two moves that may overlap.
template <int min>
void copy_short_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                        int64_t size) {
  for (int64_t r = 0; r < rows; r++) {
    char head[min], tail[min];
    std::memcpy(head, src + src_rows[r], min);
    std::memcpy(tail, src + src_rows[r] + size - min, min);
    std::memcpy(dst + dst_rows[r], head, min);
    std::memcpy(dst + dst_rows[r] + size - min, tail, min);
  }
}

// A copy of whole cache lines.
void stream_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                 int64_t size) {
  typedef char Line __attribute__((vector_size(64)));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < size; i += 64) {
      __builtin_prefetch(src + src_rows[r] + i + prefetch_distance(true));
      Line line;
      std::memcpy(&line, src + src_rows[r] + i, 64);
      store<true>(dst + dst_rows[r] + i, line);
    }
}

void copy_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, bool stream) {
  if (size < padded_size) clear_rows(dst, dst_rows, rows, padded_size);
  if (stream && size % 64 == 0) return stream_rows(src, src_rows, dst, dst_rows, rows, size);
  if (size == 64) return copy_rows_of<64>(src, src_rows, dst, dst_rows, rows);
  if (size == 32) return copy_rows_of<32>(src, src_rows, dst, dst_rows, rows);
  if (size == 16) return copy_rows_of<16>(src, src_rows, dst, dst_rows, rows);
  if (size == 8) return copy_rows_of<8>(src, src_rows, dst, dst_rows, rows);
  if (size == 0) return;
  if (size < 32 && size >= 16) return copy_short_rows_of<16>(src, src_rows, dst, dst_rows, rows, size);
  if (size < 16 && size >= 8) return copy_short_rows_of<8>(src, src_rows, dst, dst_rows, rows, size);
  if (size < 8 && size >= 4) return copy_short_rows_of<4>(src, src_rows, dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memcpy(dst + dst_rows[r], src + src_rows[r], size);
}

}  // namespace

const ReorderKernels TORCH_BLOCKED_TIER_NAME(reorder_kernels) = {
    copy_rows, transpose<uint8_t>, transpose<uint16_t>, transpose<uint32_t>, transpose<uint64_t>, transpose<Bytes16>,
};

}  // namespace torch_blocked
