// The tiles of a transpose: a few vectors, read, shuffled in registers and written.
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
  if constexpr (stream && sizeof(Row) >= 16 && sizeof(Row) <= vector_bytes) {
    if (reinterpret_cast<uintptr_t>(dst) % sizeof(Row) == 0) return stream_store(dst, row);
  }
  std::memcpy(dst, &row, sizeof(Row));
}

// The same, and within the caches the line two farther is fetched, which is written soon: stores wait for their lines
// one after the other, and what lies in two lines for both.
template <bool stream, class Row>
inline void store_and_fetch(char* dst, const Row& row) {
  if constexpr (!stream) __builtin_prefetch(dst + 128, 1);
  store<stream>(dst, row);
}

// In bytes along a src row or run, farther where src is in no cache: the CPU's own prefetch does not follow so many
// rows.
constexpr int64_t prefetch_distance(bool stream) { return stream ? 2048 : 256; }

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
    return __builtin_shufflevector(a, b, (i % 2 * lanes + i / part * part + half * part / 2 + i % part / 2)...);
  }

  // The even or the odd parts of a, then those of b. As lanes of 64 bits: of less GCC makes no vshufi64x2 of it.
  template <int odd, int... i>
  static Row every_second_part(Row a, Row b, std::integer_sequence<int, i...>) {
    const auto x = std::bit_cast<Vector<bytes>>(a), y = std::bit_cast<Vector<bytes>>(b);
    return std::bit_cast<Row>(__builtin_shufflevector(x, y, (2 * (i - i % 2) + 2 * odd + i % 2)...));
  }

  // One half of two vectors of cells: those of a and of b by turns, each pair a new cell. Cells have 4 bytes or more.
  template <int half, int cell_bytes, int... i>
  static Row merge(Row a, Row b, std::integer_sequence<int, i...>) {
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

// A vector of such parts, or of pieces of several: each begins with the row that is `part` farther.
template <class T, int part, int bytes, int piece, class Rows>
[[gnu::always_inline]] inline auto gather(const char* src, Rows src_rows) {
  typedef T Row __attribute__((vector_size(bytes)));
  constexpr int part_bytes = std::max(piece, 16);
  if constexpr (bytes <= piece)
    return load<Row>(src + *src_rows);
  else if constexpr (bytes <= part_bytes)
    return gather_part<T, bytes, piece>(src, src_rows);
  else {
    const auto part_from = [&](int i) { return gather<T, part, part_bytes, piece>(src, src_rows + i * part); };
    Row row = widen<Row>(part_from(0));
    const auto insert_others = [&]<int... i>(std::integer_sequence<int, i...>) {
      ((row = insert<i + 1>(row, part_from(i + 1))), ...);
    };
    insert_others(std::make_integer_sequence<int, bytes / part_bytes - 1>());
    return row;
  }
}

// Writes whole vectors of dst: `cols` src columns of as many src rows as a vector has elements. So short pieces of src
// are all that it needs, and the fewer columns, the more of the work is done by loads and not by shuffles. Where it
// `fetches`, it asks for dst ahead: of wide elements, whose shuffles leave the time, and not in an order of tiles that
// the CPU's own prefetch follows.
template <class T, int bytes, int cols_, bool fetches = (sizeof(T) > 4)>
struct ToWideRows {
  using Element = T;
  using Registers = Tile<T, bytes, cols_>;
  static constexpr int element_size = sizeof(T), rows = Registers::cols, cols = cols_;

  // The columns of a tile, each in a vector.
  template <class SrcRows>
  [[gnu::always_inline]] static Registers columns(const char* src, SrcRows src_rows) {
    constexpr int part = Registers::part, group = Registers::group;
    constexpr int group_rows = rows / (cols / group), next_row = part / group;
    Registers tile;
#pragma GCC unroll 32
    for (int v = 0; v < cols; v++) {
      const auto first_row = src_rows + v / group * group_rows + v % group * next_row;
      tile.row[v] = gather<typename Registers::Lane, part, bytes, cols * element_size>(src, first_row);
    }
#pragma GCC unroll 4
    for (int step = 1; step < part; step *= 2) tile.shuffle_within_parts();
    if constexpr (Registers::parts > 1)
#pragma GCC unroll 4
      for (int step = group; step < cols; step *= 2) tile.shuffle_parts(group);
    return tile;
  }

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    const Registers tile = columns(src, src_rows);
#pragma GCC unroll 32
    for (int c = 0; c < cols; c++)
      if constexpr (fetches)
        store_and_fetch<stream>(dst + dst_rows[c], tile.row[c]);
      else
        store<stream>(dst + dst_rows[c], tile.row[c]);
  }
};

// Reads whole vectors of src: `rows` src rows, a block of channels that is narrower than a vector. A vector of the
// answer holds several dst rows, which are stored at once where they follow each other.
template <class T, int bytes, int rows_, bool dense>
struct FromWideRows {
  using Element = T;
  using Registers = Tile<T, bytes, rows_>;
  static constexpr int element_size = sizeof(T), rows = rows_, cols = Registers::cols;
  static constexpr int part = Registers::part, group = Registers::group;
  static constexpr int pieces = cols / rows;               // the dst rows of one vector
  static constexpr bool in_order = dense || rows > group;  // else each dst row lies in one part, and any will do

  // Where the CPU takes any two vectors apart by one instruction, fewer stages put whole vectors in order: shuffles
  // within parts until a cell of rows has as many columns in a part as a vector of the answer, then merges of cells.
  static constexpr bool merges = vector_bytes == 64 && element_size <= 8 && in_order &&
                                 rows / group < Registers::parts && pieces <= std::min(4, part);
  static constexpr int cell_rows = merges ? part / pieces : 1, sets = rows / cell_rows;

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    Registers tile;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) std::memcpy(&tile.row[r], src + src_rows[src_row(r)], bytes);
    store_transposed<stream>(tile, dst, dst_rows, dst_rows + cols / 2);
  }

  // Of fewer columns than `cols`, at least half as many: two halves that overlap, the second from column `second` on.
  [[gnu::always_inline]] static void run_halves(const char* src, const int64_t* src_rows, char* dst,
                                                const int64_t* dst_rows, int64_t second) {
    using Half = Vector<bytes / 2, typename Registers::Lane>;
    Registers tile;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      const char* const row = src + src_rows[src_row(r)];
      tile.row[r] = insert<1>(widen<typename Registers::Row>(load<Half>(row)), load<Half>(row + second * element_size));
    }
    store_transposed<false>(tile, dst, dst_rows, dst_rows + second);
  }

  template <bool stream, class Rows>
  [[gnu::always_inline]] static void store_transposed(Registers& tile, char* dst, Rows first_half, Rows second_half) {
    if constexpr (in_order)
      transpose(tile);
    else
      transpose_within_parts(tile);
    constexpr int piece = rows * element_size;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
      for (int i = 0; i < (dense ? 1 : pieces); i++) {
        const int col = first_col(r, i), col_of_half = col % (cols / 2);
        const Rows half = col < cols / 2 ? first_half : second_half;
        if constexpr (dense)
          store_and_fetch<stream>(dst + half[0] + col_of_half * piece, tile.row[r]);
        else
          std::memcpy(dst + half[col_of_half], reinterpret_cast<const char*>(&tile.row[r]) + i * piece, piece);
      }
  }

  // The src row of a vector: those of one cell are apart, as the perfect shuffles want them.
  static constexpr int src_row(int vector) {
    constexpr int cells = group / cell_rows;
    return merges ? vector / group * group + vector % cells * cell_rows + vector % group / cells : vector;
  }

  // The column of the i-th piece of a vector.
  static constexpr int first_col(int vector, int i) {
    constexpr int part_pieces = part / group;
    if (!in_order) return i / part_pieces * part + vector * part_pieces + i % part_pieces;
    return i + (merges ? vector % sets * part + vector / sets * pieces : vector * pieces);
  }

  [[gnu::always_inline]] static void transpose(Registers& tile) {
    if constexpr (merges) {
#pragma GCC unroll 4
      for (int step = 1; step < cell_rows; step *= 2) tile.shuffle_within_parts();
      tile.template merge_cells<cell_rows>();
    } else {
      transpose_within_parts(tile);
      order_parts(tile);
    }
  }

  // Then part p of vector g * group + i is a part, the g-th, of the i-th dst row or rows that begin in column p * part.
  [[gnu::always_inline]] static void transpose_within_parts(Registers& tile) {
    if constexpr (group > 1)
#pragma GCC unroll 4
      for (int step = 1; step < group; step *= 2) tile.shuffle_within_parts();
  }

  [[gnu::always_inline]] static void order_parts(Registers& tile) {
    if constexpr (Registers::parts > 1) {
#pragma GCC unroll 4
      for (int step = 1; step < rows / group; step *= 2) tile.shuffle_parts(group);
#pragma GCC unroll 4
      for (int step = rows / group; step < Registers::parts; step *= 2) tile.shuffle_parts(1);
    }
  }
};

// The same backwards: src rows of `cols` elements, no longer than a part, follow each other and are read by whole
// vectors.
template <class T, int bytes, int cols_>
struct FromDenseRows {
  using Element = T;
  using Registers = Tile<T, bytes, cols_>;
  static constexpr int element_size = sizeof(T), rows = Registers::cols, cols = cols_;
  static_assert(Registers::group == cols);

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    Registers tile;
#pragma GCC unroll 16
    for (int v = 0; v < cols; v++) std::memcpy(&tile.row[v], src + src_rows[0] + v * bytes, bytes);
    transpose(tile);
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) store_and_fetch<stream>(dst + dst_rows[c], tile.row[c]);
  }

  [[gnu::always_inline]] static void transpose(Registers& tile) {
    if constexpr (Registers::parts > 1)
#pragma GCC unroll 4
      for (int step = 1; step < cols; step *= 2) tile.shuffle_parts(1);
#pragma GCC unroll 4
    for (int step = 1; step < Registers::part; step *= 2) tile.shuffle_within_parts();
  }
};

// Tiles of vectors narrower than a cache line, one below the other, that together write a whole line of each dst row.
// Past the caches they are put together in the first one: a CPU joins the parts of a few lines only, and where it has
// to let go of a part, memory takes as long for it as for ten lines (Zen 3: from eight lines on).
template <class Tile>
struct WholeLines {
  using Element = typename Tile::Element;
  static constexpr int element_size = Tile::element_size, part_bytes = Tile::rows * element_size;
  static constexpr int parts = 64 / part_bytes, rows = parts * Tile::rows, cols = Tile::cols;

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    alignas(64) char lines[cols][64];
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++)
      Tile::template run<false>(src, src_rows + i * Tile::rows, lines[0] + i * part_bytes, EvenRows{64});
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++) {
      char* const line = dst + dst_rows[c];
      const bool is_line = reinterpret_cast<uintptr_t>(line) % 64 == 0;
      if (stream && is_line)
        copy_line<true>(lines[c], line);
      else
        copy_line<false>(lines[c], line);
    }
  }

  template <bool stream>
  [[gnu::always_inline]] static void copy_line(const char* src, char* dst) {
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += vector_bytes) store<stream>(dst + i, load<Vector<vector_bytes>>(src + i));
  }
};

// Beside such tiles: what is no whole line is written through the caches.
template <class Tile>
struct PartOfLines : Tile {
  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    Tile::template run<false>(src, src_rows, dst, dst_rows);
  }
};

// One column, past tiles of `tile_cols`, and one row: too little for shuffles of whole vectors.
template <class T, int rows_, int tile_cols>
struct OneColumn {
  static constexpr int element_size = sizeof(T), rows = rows_, cols = 1;
  using Lane = std::conditional_t<element_size == 16, uint64_t, T>;

  // No CPU puts bytes or halves in a vector as fast as words: they are read with those before them in their rows.
  static constexpr bool in_words = element_size < 4 && (tile_cols + 1) * element_size >= 4 && rows >= 4;
  static constexpr int some = std::min(rows, vector_bytes / (in_words ? 4 : element_size));

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r += some) {
      const auto column = read(src, src_rows + r);
      std::memcpy(dst + dst_rows[0] + r * element_size, &column, sizeof(column));
    }
  }

  template <class Rows>
  [[gnu::always_inline]] static auto read(const char* src, Rows src_rows) {
    constexpr int bytes = some * element_size;
    if constexpr (in_words) {
      constexpr int before = 4 - element_size;
      const auto words = gather<uint32_t, 4, some * 4, 4>(src - before, src_rows) >> 8 * before;
      return __builtin_convertvector(words, Vector<bytes, T>);
    } else {
      return gather<Lane, std::max(1, 16 / element_size), bytes, element_size>(src, src_rows);
    }
  }
};

template <class T, int cols_>
struct OneRow {
  static constexpr int element_size = sizeof(T), rows = 1, cols = cols_;

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
#pragma GCC unroll 64
    for (int c = 0; c < cols; c++) std::memcpy(dst + dst_rows[c], src + src_rows[0] + c * element_size, element_size);
  }
};

}  // namespace
}  // namespace torch_blocked
