// The tiles of a transpose: a few vectors, read, shuffled in registers and written.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "reorder_vectors.h"

namespace torch_blocked {
namespace {

// Writes whole vectors of dst: `cols` src columns of as many src rows as a vector has elements. So short pieces of src
// are all that it needs, and the fewer columns, the more of the work is done by loads and not by shuffles. With
// `fetched` bytes it asks for dst so far ahead: of wide elements, whose shuffles leave the time, and not in an order of
// tiles that the CPU's own prefetch follows.
template <class T, int bytes, int cols_, int fetched = (sizeof(T) > 4 ? 128 : 0)>
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
      if constexpr (fetched > 0)
        store_and_fetch<stream, fetched>(dst + dst_rows[c], tile.row[c]);
      else
        store<stream>(dst + dst_rows[c], tile.row[c]);
  }

  // The last column alone.
  template <class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run_last(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
    store<false>(dst + dst_rows[cols - 1], columns(src, src_rows).row[cols - 1]);
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
          store_piece<piece>(dst + half[col_of_half], tile.row[r], i);
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
        copy<64, true>(lines[c], line);
      else
        copy<64>(lines[c], line);
    }
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

// Some elements are read at once: one at a time the compiler makes vectors of them, to take them apart in memory.
template <class T, int cols_>
struct OneRow {
  static constexpr int element_size = sizeof(T), rows = 1, cols = cols_;
  using Some = std::conditional_t<(element_size < 8 && cols * element_size % 8 == 0), uint64_t, T>;
  static constexpr int some = sizeof(Some) / element_size;

  template <bool stream, class SrcRows, class DstRows>
  [[gnu::always_inline]] static void run(const char* src, SrcRows src_rows, char* dst, DstRows dst_rows) {
#pragma GCC unroll 64
    for (int c = 0; c < cols; c += some) {
      auto elements = load<Some>(src + src_rows[0] + c * element_size);
#pragma GCC unroll 8
      for (int i = 0; i < some; i++) {
        std::memcpy(dst + dst_rows[c + i], &elements, element_size);
        if constexpr (some > 1) elements >>= 8 * element_size;
      }
    }
  }
};

}  // namespace
}  // namespace torch_blocked
