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

// A square of elements, one vector of `bytes` bytes a row. The compiler's own vectors and not ATen's, which has a
// transpose only of floats and only at full width: this one is as fast there (`interleave` becomes one punpckl* or
// punpckh*, `every_second_part` one vperm2i128 or vshufi32x4) and serves every size of element and block.
template <class T, int bytes>
struct Tile {
  typedef T Row __attribute__((vector_size(bytes)));
  static constexpr int lanes = bytes / sizeof(T);
  static constexpr int parts = bytes > 16 ? bytes / 16 : 1;  // of 128 bits: x86 moves little between them
  static constexpr int part = lanes / parts;
  using Lanes = std::make_integer_sequence<int, lanes>;

  Row row[lanes];

  void load(int r, const char* src) { std::memcpy(&row[r], src, bytes); }
  void store(int r, char* dst) const { std::memcpy(dst, &row[r], bytes); }

  // Of each part, one half: elements of a and of b by turns.
  template <int half, int... i>
  static Row interleave(Row a, Row b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i % 2 * lanes + i / part * part + half * part / 2 + i % part / 2)...);
  }

  // The even or the odd parts of a, then those of b.
  template <int odd, int... i>
  static Row every_second_part(Row a, Row b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, ((2 * (i / part) + odd) * part + i % part)...);
  }

  void transpose() {
#pragma GCC unroll 4
    for (int step = 1; step < part; step *= 2) transpose_within_parts();
#pragma GCC unroll 4
    for (int step = 1; step < parts; step *= 2) transpose_parts();
  }

  // One perfect shuffle of each square of part x part elements; log2(part) of them transpose it.
  void transpose_within_parts() {
    Row next[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes / 2; i++) {
      const int r = i / (part / 2) * part + i % (part / 2);
      next[2 * i] = interleave<0>(row[r], row[r + part / 2], Lanes());
      next[2 * i + 1] = interleave<1>(row[r], row[r + part / 2], Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) row[i] = next[i];
  }

  // The same, backwards, of the parts x parts squares.
  void transpose_parts() {
    Row next[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes / 2; i++) {
      const int r = i / part * 2 * part + i % part;
      next[i] = every_second_part<0>(row[r], row[r + part], Lanes());
      next[i + lanes / 2] = every_second_part<1>(row[r], row[r + part], Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) row[i] = next[i];
  }
};

template <class Tile>
inline void transpose_tile(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows) {
  Tile tile;
#pragma GCC unroll 16
  for (int r = 0; r < Tile::lanes; r++) tile.load(r, src + src_rows[r]);
  tile.transpose();
#pragma GCC unroll 16
  for (int r = 0; r < Tile::lanes; r++) tile.store(r, dst + dst_rows[r]);
}

// With zeros for the rows from `rows` on.
template <class Tile>
void transpose_padded_tile(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows) {
  constexpr int bytes = sizeof(Tile) / Tile::lanes;
  alignas(64) char padded[Tile::lanes * bytes] = {};
  int64_t padded_rows[Tile::lanes];
  for (int r = 0; r < Tile::lanes; r++) padded_rows[r] = r * bytes;
  for (int64_t r = 0; r < std::min<int64_t>(rows, Tile::lanes); r++)
    std::memcpy(padded + r * bytes, src + src_rows[r], bytes);
  transpose_tile<Tile>(padded, padded_rows, dst, dst_rows);
}

// Bytes along a src row. The rows are more than the CPU's own prefetch follows.
constexpr int64_t prefetch_distance = 256;

// At least lanes x lanes elements. The last tile of a row or a column overlaps the one before it instead of being cut.
// A few dst rows at a time, each in its full length, unless a cache line of src holds a whole src row: then a few of
// those.
template <class Tile, int element_size>
void transpose_tiles(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t padded_rows, int64_t cols) {
  constexpr int64_t lanes = Tile::lanes;
  const auto tile = [&](int64_t r, int64_t c) {
    r = std::min(r, padded_rows - lanes);
    c = std::min(c, cols - lanes);
    const char* from = src + c * element_size;
    char* to = dst + r * element_size;
    if (rows - r >= lanes) {
      if (lanes * element_size >= 32)
        for (int64_t i = r; i < r + lanes; i++) __builtin_prefetch(from + src_rows[i] + prefetch_distance);
      transpose_tile<Tile>(from, src_rows + r, to, dst_rows + c);
    } else {
      transpose_padded_tile<Tile>(from, src_rows + r, to, dst_rows + c, rows - r);
    }
  };
  if (cols * element_size > 64) {
    for (int64_t c = 0; c < cols; c += lanes)
      for (int64_t r = 0; r < padded_rows; r += lanes) tile(r, c);
  } else {
    for (int64_t r = 0; r < padded_rows; r += lanes)
      for (int64_t c = 0; c < cols; c += lanes) tile(r, c);
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

// With tiles of vectors of `bytes` bytes, or of fewer where there are not so many rows or columns.
template <class T, int bytes>
void transpose_by(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                  int64_t padded_rows, int64_t cols) {
  if constexpr (bytes < 8 || bytes < 2 * int(sizeof(T)) || sizeof(T) == 16)  // no vectors have such elements
    transpose_elements<sizeof(T)>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  else if (std::min(padded_rows, cols) >= Tile<T, bytes>::lanes)
    transpose_tiles<Tile<T, bytes>, sizeof(T)>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  else
    transpose_by<T, bytes / 2>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
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

// With no rows of padding. Tiles of at most 16 x 16: more rows do not fit in the registers.
template <class T>
void transpose_full(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                    int64_t padded_rows, int64_t cols) {
  transpose_by<T, std::min(vector_bytes, 16 * int(sizeof(T)))>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
}

template <class T>
void transpose(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
               int64_t padded_rows, int64_t cols) {
  constexpr int64_t size = sizeof(T), lanes = 16 / size;
  if (rows == padded_rows) return transpose_full<T>(src, src_rows, dst, dst_rows, rows, padded_rows, cols);
  // First zeros, then only the rows that are needed; few columns at a time, so that the zeros are still in the cache.
  const int64_t used_rows = std::min((rows + lanes - 1) / lanes * lanes, padded_rows);
  for (int64_t c = 0; c < cols; c += 64) {
    const int64_t n = std::min<int64_t>(cols - c, 64);
    clear_rows(dst, dst_rows + c, n, padded_rows * size);
    if (rows > 0) transpose_full<T>(src + c * size, src_rows, dst, dst_rows + c, rows, used_rows, n);
  }
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

void copy_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows, int64_t size,
               int64_t padded_size) {
  if (size < padded_size) clear_rows(dst, dst_rows, rows, padded_size);
  if (size == 64) return copy_rows_of<64>(src, src_rows, dst, dst_rows, rows);
  if (size == 32) return copy_rows_of<32>(src, src_rows, dst, dst_rows, rows);
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
