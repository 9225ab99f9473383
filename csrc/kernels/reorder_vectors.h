// Vectors of a reorder: how they are read, put together, shuffled in registers and written.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

// Vectors are returned from inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace torch_blocked {
namespace {

struct Bytes16 {
  uint64_t low, high;
};

template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <int bytes, class T = long long>
using Vector = typename VectorOf<T, bytes>::type;

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
  static_assert(sizeof(Row) <= vector_bytes, "GCC moves wider ones by 16 bytes, through the stack");
  if constexpr (stream && sizeof(Row) >= 16) {
    if (reinterpret_cast<uintptr_t>(dst) % sizeof(Row) == 0) return stream_store(dst, row);
  }
  std::memcpy(dst, &row, sizeof(Row));
}

// Copies as many bytes, by vectors.
template <int bytes, bool stream = false>
[[gnu::always_inline]] inline void copy(const char* src, char* dst) {
  constexpr int part = std::min(bytes, vector_bytes);
#pragma GCC unroll 4
  for (int i = 0; i < bytes; i += part) store<stream>(dst + i, load<Vector<part>>(src + i));
}

// Clears as many bytes, from byte `first` on.
template <int bytes, bool stream, int first = 0>
[[gnu::always_inline]] inline void clear(char* dst) {
  constexpr int part = std::min(bytes, vector_bytes);
#pragma GCC unroll 4
  for (int i = first; i < bytes; i += part) store<stream>(dst + i, Vector<part>{});
}

// The same as `store`, and within the caches the line so many bytes farther is fetched, which is written soon: stores
// wait for their lines one after the other, and what lies in two lines for both.
template <bool stream, int ahead = 128, class Row>
inline void store_and_fetch(char* dst, const Row& row) {
  if constexpr (!stream) __builtin_prefetch(dst + ahead, 1);
  store<stream>(dst, row);
}

// In bytes along a src row or run, farther where src is in no cache: the CPU's own prefetch does not follow so many
// rows.
constexpr int64_t prefetch_distance(bool stream) { return stream ? 2048 : 256; }

// What a tile's loads and stores take by themselves is measured in a build without its shuffles (`make access`).
#if defined(TORCH_BLOCKED_WITHOUT_SHUFFLES)
constexpr bool shuffles = false;
#else
constexpr bool shuffles = true;
#endif

// Some vectors of elements, to be transposed in registers. The compiler's own vectors and not ATen's, which has a
// transpose only of floats and only at full width: this one is as fast there (`interleave` becomes one punpckl* or
// punpckh*, `every_second_part` one vperm2i128 or vshufi64x2) and serves every size of element and block.
template <class T, int bytes, int rows_>
struct Tile {
  using Lane = std::conditional_t<sizeof(T) == 16, uint64_t, T>;  // no vectors have elements of 16 bytes
  typedef Lane Row __attribute__((vector_size(bytes)));
  static constexpr int element_size = sizeof(T);
  static constexpr int rows = rows_, cols = bytes / element_size;
  static constexpr int parts = bytes > 16 ? bytes / 16 : 1;  // of 128 bits: x86 moves little between them
  static constexpr int part = cols / parts;
  static constexpr int group = rows < part ? rows : part;  // rows that meet in one part
  static_assert(rows % group == 0);
  static constexpr int lanes = bytes / sizeof(Lane);
  using Lanes = std::make_integer_sequence<int, lanes>;
  using Halves = std::make_integer_sequence<int, bytes / 8>;  // of parts

  Row row[rows];

  // Of each part, one half: elements of a and of b by turns.
  template <int half, int... i>
  static Row interleave(Row a, Row b, std::integer_sequence<int, i...>) {
    if constexpr (!shuffles) return half ? b : a;
    return __builtin_shufflevector(a, b, (i % 2 * lanes + i / part * part + half * part / 2 + i % part / 2)...);
  }

  // The even or the odd parts of a, then those of b. As lanes of 64 bits: of less GCC makes no vshufi64x2 of it.
  template <int odd, int... i>
  static Row every_second_part(Row a, Row b, std::integer_sequence<int, i...>) {
    if constexpr (!shuffles) return odd ? b : a;
    const auto x = std::bit_cast<Vector<bytes>>(a), y = std::bit_cast<Vector<bytes>>(b);
    return std::bit_cast<Row>(__builtin_shufflevector(x, y, (2 * (i - i % 2) + 2 * odd + i % 2)...));
  }

  // One half of two vectors of cells: those of a and of b by turns, each pair a new cell. Cells have 4 bytes or more.
  template <int half, int cell_bytes, int... i>
  static Row merge(Row a, Row b, std::integer_sequence<int, i...>) {
    if constexpr (!shuffles) return half ? b : a;
    using Units = Vector<bytes, uint32_t>;
    constexpr int units = bytes / 4, cell = cell_bytes / 4;
    return std::bit_cast<Row>(
        __builtin_shufflevector(std::bit_cast<Units>(a), std::bit_cast<Units>(b),
                                (i / cell % 2 * units + half * units / 2 + i / (2 * cell) * cell + i % cell)...));
  }

  // One perfect shuffle of each rectangle of group x part elements: log2(group) of them transpose it, log2(part) take
  // the transpose back.
  void shuffle_within_parts() {
    Row next[rows];
#pragma GCC unroll 32
    for (int i = 0; i < rows / 2; i++) {
      const int r = i / (group / 2) * group + i % (group / 2);
      next[2 * i] = interleave<0>(row[r], row[r + group / 2], Lanes());
      next[2 * i + 1] = interleave<1>(row[r], row[r + group / 2], Lanes());
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) row[i] = next[i];
  }

  // The same, backwards, of parts: from vectors that are `stride` apart.
  void shuffle_parts(int stride) {
    Row next[rows];
#pragma GCC unroll 32
    for (int i = 0; i < rows / 2; i++) {
      const int r = i / stride * 2 * stride + i % stride;
      next[i] = every_second_part<0>(row[r], row[r + stride], Halves());
      next[i + rows / 2] = every_second_part<1>(row[r], row[r + stride], Halves());
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) row[i] = next[i];
  }

  // From cells of `cell_rows` elements of a column to cells of them all.
  template <int cell_rows>
  void merge_cells() {
    if constexpr (cell_rows < rows) {
      constexpr int cell_bytes = cell_rows * element_size;
      constexpr std::make_integer_sequence<int, bytes / 4> every_unit;
      Row next[rows];
#pragma GCC unroll 16
      for (int i = 0; i < rows / 2; i++) {
        const int r = i / cell_rows * 2 * cell_rows + i % cell_rows;
        next[2 * i] = merge<0, cell_bytes>(row[r], row[r + cell_rows], every_unit);
        next[2 * i + 1] = merge<1, cell_bytes>(row[r], row[r + cell_rows], every_unit);
      }
#pragma GCC unroll 16
      for (int i = 0; i < rows; i++) row[i] = next[i];
      merge_cells<2 * cell_rows>();
    }
  }
};

// Offsets of rows, as a table of them has them, where each row is as far from the one before: nothing is read.
struct EvenRows {
  int64_t stride, first = 0;

  int64_t operator[](int64_t i) const { return (first + i) * stride; }
  int64_t operator*() const { return first * stride; }
  EvenRows operator+(int64_t n) const { return {stride, first + n}; }
};

// Pieces of successive src rows side by side: `bytes` bytes in all, at most a part of a vector.
template <class T, int bytes, int piece, class Rows>
[[gnu::always_inline]] inline auto gather_part(const char* src, Rows src_rows) {
  using Piece =
      std::conditional_t<piece == 8, int64_t,
                         std::conditional_t<piece == 4, int32_t, std::conditional_t<piece == 2, int16_t, int8_t>>>;
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

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// A vector that begins with a part of it; what follows is any.
template <class Row, class Part>
[[gnu::always_inline]] inline Row widen(Part part) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(Row) == 64 && sizeof(Part) == 32)
    return std::bit_cast<Row>(_mm512_castsi256_si512(std::bit_cast<__m256i>(part)));
  else if constexpr (sizeof(Row) == 64)
    return std::bit_cast<Row>(_mm512_castsi128_si512(std::bit_cast<__m128i>(part)));
  else
#endif
    return std::bit_cast<Row>(_mm256_castsi128_si256(std::bit_cast<__m128i>(part)));
}

// Puts a part in its i-th place. By intrinsics: of the compiler's own shuffles GCC makes others, which do not take the
// part from memory, and where they do a load moves it, not the one unit for shuffles that some CPUs have.
template <int i, class Row, class Part>
[[gnu::always_inline]] inline Row insert(Row row, Part part) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(Row) == 64 && sizeof(Part) == 32)
    return std::bit_cast<Row>(_mm512_inserti64x4(std::bit_cast<__m512i>(row), std::bit_cast<__m256i>(part), i));
  else if constexpr (sizeof(Row) == 64)
    return std::bit_cast<Row>(_mm512_inserti32x4(std::bit_cast<__m512i>(row), std::bit_cast<__m128i>(part), i));
  else
#endif
    return std::bit_cast<Row>(_mm256_inserti128_si256(std::bit_cast<__m256i>(row), std::bit_cast<__m128i>(part), i));
}
#endif

// Stores the i-th piece of a vector. Halves of a wide one by intrinsics: GCC would take them from memory, to which it
// writes the vector first.
template <int bytes, class Row>
[[gnu::always_inline]] inline void store_piece(char* dst, const Row& row, int i) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(Row) == 64 && bytes == 32) {
    const auto all = std::bit_cast<__m512i>(row);
    return store<false>(dst, i == 0 ? _mm512_castsi512_si256(all) : _mm512_extracti64x4_epi64(all, 1));
  }
#endif
  std::memcpy(dst, reinterpret_cast<const char*>(&row) + i * bytes, bytes);
}

// Moves a pointer from row to row, in one register: the compiler would find each row from the first one, by more
// distances than it has registers for.
template <class Byte>
[[gnu::always_inline]] inline void advance(Byte*& row, int64_t stride) {
  row += stride;
  asm("" : "+r"(row));
}

// A vector of such parts, or of pieces of several: each begins with the row that is `part` farther. By halves, of which
// none waits for the other.
template <class T, int part, int bytes, int piece, class Rows>
[[gnu::always_inline]] inline auto gather(const char* src, Rows src_rows) {
  typedef T Row __attribute__((vector_size(bytes)));
  constexpr int part_bytes = std::max(piece, 16);
  if constexpr (bytes <= piece)
    return load<Row>(src + *src_rows);
  else if constexpr (bytes <= part_bytes)
    return gather_part<T, bytes, piece>(src, src_rows);
  else {
    constexpr int half = bytes / 2;
    const auto first = gather<T, part, half, piece>(src, src_rows);
    const auto second = gather<T, part, half, piece>(src, src_rows + half / part_bytes * part);
    return insert<1>(widen<Row>(first), second);
  }
}

}  // namespace
}  // namespace torch_blocked
