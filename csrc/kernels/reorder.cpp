// Which tiles transpose a matrix, and the table of kernels.
#include "kernels/reorder.h"

#include <algorithm>

#include "caches.h"
#include "reorder_channels.h"
#include "reorder_interleave.h"
#include "reorder_loops.h"
#include "reorder_pick.h"
#include "reorder_planes.h"
#include "reorder_rotate.h"
#include "reorder_rows.h"
#include "reorder_tiles.h"
#include "tier.h"

namespace torch_blocked {
namespace {

// With tiles of vectors of `bytes` bytes and of `tile_cols` columns, or less where there are not so many.
template <class T, int bytes, int tile_cols, int fetched = (sizeof(T) > 4 ? 128 : 0)>
void transpose_by(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), narrow_cols = std::max(2, tile_cols * size > 16 ? 16 / size : tile_cols / 2);
  if constexpr (bytes < 8 || bytes < 2 * size || tile_cols < 2)
    transpose_elements<size>(matrix);
  else if (matrix.padded_rows * size < bytes)
    transpose_by<T, bytes / 2, std::min(tile_cols, bytes / 2 / size), fetched>(matrix, traffic);
  else if (matrix.cols < tile_cols)
    transpose_by<T, bytes, tile_cols / 2, fetched>(matrix, traffic);
  else {
    using Tile = ToWideRows<T, bytes, tile_cols, fetched>;
    // Of elements of a byte or two the first would write pieces of less than 16 bytes.
    constexpr int half_bytes = std::max(bytes / 2, tile_cols * size);
    using Short = std::conditional_t<(size >= 4), FromWideRows<T, tile_cols * size, std::min(4, tile_cols), false>,
                                     ToWideRows<T, half_bytes, tile_cols>>;
    constexpr bool has_short = tile_cols * size >= 16 && Short::rows < Tile::rows;
    transpose_tiles<Tile, ToWideRows<T, bytes, narrow_cols, fetched>, std::conditional_t<has_short, Short, Tile>>(
        matrix, traffic);
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

// Src rows of up to 16 bytes that follow each other, as blocks of few channels do. False where they do not.
template <class T, int block, int bytes = vector_bytes>
bool transpose_dense(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T);
  if constexpr (block * size <= 16 && bytes >= 16) {
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
bool transpose_permuted([[maybe_unused]] const Matrix& matrix, [[maybe_unused]] Traffic traffic) {
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
    constexpr bool halves = size <= 2 && bytes == 32;  // by half as many shuffles as vectors of 16 bytes take
    if (!dense && 2 * matrix.padded_rows * size >= bytes && !halves) return false;
    constexpr int narrow = bytes == 64 ? 32 : bytes;
    const auto run = dense ? transpose_tiles<Dense, FromWideRows<T, narrow, block, true>>
                           : transpose_tiles<Apart, FromWideRows<T, narrow, block, false>>;
    run(matrix, traffic);
    return true;
  }
  return false;
}

// Blocks of one part of a vector or a few, to small planes and back. A part of each of a vector's rows is loaded to its
// place and not shuffled there, for which what has parts of one line has to be in the first cache. False where they are
// others.
template <class T, int block>
bool transpose_parts(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), cols = 16 / size, block_bytes = block * size;
  constexpr int bytes = std::min(64, 32 * size);  // of no more rows than a plane
  if constexpr (vector_bytes == 64 && size <= 4 && block >= cols) {
    if (traffic.stream || !is_behind_mesh()) return false;
    if constexpr (block_bytes >= 32)
      if (transpose_from_planes<plane_7x7, ToWideRows<T, block_bytes, cols, 128>>(matrix)) return true;
    if (matrix.cols != block) return false;
    using Tile = ToWideRows<T, bytes, cols, 128>;
    using HalfTile = ToWideRows<T, bytes / 2, cols, 128>;
    return transpose_to_planes<plane_7x7, Tile, HalfTile, block_bytes>(matrix);
  }
  return false;
}

// Blocks of few pixels that follow each other, to rows of as few, or 3 x 3 back: weights of depthwise convolutions.
// False where they are others.
template <class T, int block>
bool transpose_few_rows(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T), bytes = block * size;
  constexpr int64_t few = 16;
  if (traffic.stream || matrix.count == 1) return false;
  if constexpr (size == 2 && bytes == 32 && bytes <= vector_bytes) {
    using Back = FromWideRows<T, bytes, 8, false>;
    if (transpose_from_planes<plane_3x3, ToWideRows<T, bytes, 8>>(matrix)) return true;
    if (transpose_to_planes<plane_3x3, Back, Back, bytes>(matrix)) return true;
  }
  if (matrix.cols != block || matrix.rows > few) return false;
  if constexpr (size <= 4 && bytes >= 16 && bytes <= vector_bytes)
    return transpose_overlapping<FromWideRows<T, bytes, std::min(8, 16 / size), false>>(matrix);
  return false;
}

// Dense rows of one of these numbers of elements, on either side. False where they have others.
template <class T, int... each>
bool transpose_rotated([[maybe_unused]] const Matrix& matrix, [[maybe_unused]] Traffic traffic) {
  if constexpr (sizeof(T) == 4 && vector_bytes >= 32)
    return !traffic.stream && (RotatedRows<T, each, vector_bytes>::run(matrix) || ...);
  return false;
}

// Dst rows that follow each other and share cache lines, as planes of 7 x 7 do: a store that lies in two lines waits
// for both. Behind a mesh they are fetched ahead, and whole lines of src are read, all rows before the next columns:
// dst is then written in the order of memory. False elsewhere.
template <class T>
bool transpose_shared_lines([[maybe_unused]] const Matrix& matrix, [[maybe_unused]] Traffic traffic) {
  if constexpr (vector_bytes == 64) {
    constexpr int64_t size = sizeof(T), line = 64;
    const int64_t dst_bytes = matrix.padded_rows * size;
    if (traffic.stream || !is_behind_mesh() || matrix.dst_rows.stride != dst_bytes || dst_bytes % line == 0)
      return false;
    if constexpr (size == 2)
      if (transpose_to_planes<plane_7x7, PairedRows<T, 32, 0>, PairedRows<T, 16, 31 * line>>(matrix)) return true;
    if constexpr (size == 1)  // few planes have as many pixels as a vector has bytes
      return is_aliased(matrix.src_rows, matrix.rows) && transpose_overlapping<ToWideRows<T, 32, 32>, line>(matrix);
    else
      transpose_by<T, line, line / size, 128>(matrix, traffic);
    return true;
  }
  return false;
}

// By pieces of dst rows, of `bytes` each. False where dst rows have padding, or where transpose_overlapping is.
template <class Tile, int64_t bytes = 512>
bool transpose_pieces(const Matrix& matrix) {
  constexpr int64_t size = Tile::element_size, some = bytes / size;
  if (matrix.rows != matrix.padded_rows) return false;
  const int64_t pieces = std::max<int64_t>(1, matrix.rows / some);
  const auto move = are_planes<plane_7x7, size>(matrix.src_rows, matrix.cols)
                        ? transpose_overlapping<Tile, Tile::cols, plane_7x7 * size>
                        : transpose_overlapping<Tile>;
  for (int64_t i = 0; i < pieces; i++) {
    const int64_t begin = i * some, end = i + 1 < pieces ? begin + some : matrix.rows;
    Matrix piece = matrix;
    piece.src_rows = matrix.src_rows.from(begin);
    piece.dst += begin * size;
    piece.rows = piece.padded_rows = end - begin;
    if (!move(piece)) return false;
  }
  return true;
}

// The tiles of rows that push each other out of the first cache: of src and of dst where a tile's own lines stay, that
// is, are there still when another tile reads or writes the rest of them, and where they do not.
template <class T>
struct AliasedTiles {
  static constexpr int size = sizeof(T), vector = vector_bytes / size;
  static constexpr bool whole_lines = size == 1 && vector_bytes == 64;
  using Short = FromWideRows<T, 32, size == 4 ? 8 : 16, false>;
  using OfSrc = std::conditional_t<(size > 4), ToWideRows<T, vector_bytes, vector>,
                                   std::conditional_t<whole_lines, FromWideRows<T, 64, 16, false>, Short>>;
  using FewOfSrc = std::conditional_t<(size > 4) || whole_lines, OfSrc, FromWideRows<T, 32, 8, false>>;
  using OfDst = std::conditional_t<whole_lines, ToWideRows<T, 64, 16>, Short>;
  using FewOfDst = ToWideRows<T, vector_bytes, size == 1 ? 8 : size == 2 ? vector_bytes / 8 : 4>;
  // Behind a mesh dst is fetched ahead: words in longer pieces, halves where the next tile writes.
  static constexpr auto few_of_dst_behind_mesh =
      size == 4   ? transpose_pieces<ToWideRows<T, vector_bytes, 4, 128>, 1024>
      : size == 2 ? transpose_pieces<ToWideRows<T, vector_bytes, vector_bytes / 8, vector_bytes>, 640>
                  : transpose_pieces<FewOfDst>;
};

// Of src or of dst some lines of a few rows are moved at a time. False where no rows push each other out or both those
// of src and of dst do, where dst goes past the caches, or where rows have padding, are not even or fewer than a
// tile's.
template <class T>
bool transpose_aliased(const Matrix& matrix, Traffic traffic) {
  if constexpr (vector_bytes >= 32 && sizeof(T) <= 8) {
    using Tiles = AliasedTiles<T>;
    constexpr int size = sizeof(T);
    if (traffic.stream) return false;
    // By vectors of half a line each is read twice: it pays sooner.
    const bool by_halves = vector_bytes < 64 && apart(matrix.src_rows) > 64;
    if (is_aliased(matrix.src_rows, matrix.rows) || (by_halves && lines_of_place(matrix.src_rows, matrix.rows) >= 8)) {
      constexpr int64_t run = (size == 4 ? 512 : 256) / size;
      const bool dst_stays = lines_of_place(matrix.dst_rows, std::min(matrix.cols, run)) <= ways();
      const bool stay = lines_of_place(matrix.src_rows, Tiles::OfSrc::rows) <= ways();
      const auto move = stay ? transpose_overlapping<typename Tiles::OfSrc, run>
                             : transpose_overlapping<typename Tiles::FewOfSrc, run>;
      return dst_stays && move(matrix);
    }
    if constexpr (size <= 4) {
      if (!is_aliased(matrix.dst_rows, matrix.cols)) return false;
      const bool stay = apart(matrix.dst_rows) < way && lines_of_place(matrix.dst_rows, Tiles::OfDst::cols) <= 8;
      const auto few = is_behind_mesh() ? Tiles::few_of_dst_behind_mesh : transpose_pieces<typename Tiles::FewOfDst>;
      const auto run = stay ? transpose_pieces<typename Tiles::OfDst> : few;
      return run(matrix);
    }
  }
  return false;
}

// Within the caches by squares of tiles, which behind a mesh fetch dst ahead. False past them, of elements that are too
// wide for it, and where transpose_by_squares is.
template <class T>
bool transpose_squares(const Matrix& matrix, Traffic traffic) {
  constexpr int size = sizeof(T);
  if constexpr (size <= 4 || vector_bytes == 64) {
    constexpr int cols = std::min(vector_bytes / 2, vector_bytes / size);
    const auto move = is_behind_mesh() ? transpose_by_squares<ToWideRows<T, vector_bytes, cols, 128>>
                                       : transpose_by_squares<ToWideRows<T, vector_bytes, cols, 0>>;
    return !traffic.stream && move(matrix);
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
  if constexpr (sizeof(T) == 16) {
    if (transpose_shared_lines<T>(matrix, traffic)) return;
    if (transpose_squares<T>(matrix, traffic)) return;
    // Four rows are a vector of dst: whole ones are read and written.
    const bool by_vectors = vector_bytes == 64 && matrix.rows == 4 && matrix.cols > 2;
    if (!traffic.stream && !by_vectors) return transpose_wide<16>(matrix, traffic);
  }
  if (transpose_rotated<T, 5, 7, 9>(matrix, traffic)) return;
  if (transpose_few_rows<T, 16>(matrix, traffic)) return;
  if (transpose_few_rows<T, 8>(matrix, traffic)) return;
  if (transpose_parts<T, 16>(matrix, traffic)) return;
  if (transpose_parts<T, 8>(matrix, traffic)) return;
  if (transpose_permuted<T, 16>(matrix, traffic)) return;
  if (transpose_permuted<T, 8>(matrix, traffic)) return;
  if (transpose_dense<T, 8>(matrix, traffic)) return;
  if (transpose_dense<T, 4>(matrix, traffic)) return;
  if (transpose_dense<T, 2>(matrix, traffic)) return;
  if (transpose_blocks<T, 16>(matrix, traffic)) return;
  if (transpose_blocks<T, 8>(matrix, traffic)) return;
  if (transpose_blocks<T, 4>(matrix, traffic)) return;
  if (transpose_blocks<T, 2>(matrix, traffic)) return;
  if (transpose_shared_lines<T>(matrix, traffic)) return;
  // A tile of whole lines needs none of them again, one of halves does.
  constexpr bool squares_first = vector_bytes == 64 && sizeof(T) < 16;  // of 16 bytes they were above
  if (squares_first && transpose_squares<T>(matrix, traffic)) return;
  if (transpose_aliased<T>(matrix, traffic)) return;
  if (vector_bytes < 64 && transpose_squares<T>(matrix, traffic)) return;
  transpose_by<T, vector_bytes, std::min(16, vector_bytes / int(sizeof(T)))>(matrix, traffic);
}

}  // namespace

const ReorderKernels TORCH_BLOCKED_TIER_NAME(reorder_kernels) = {
    copy_rows,
    transpose<uint8_t>,
    transpose<uint16_t>,
    transpose<uint32_t>,
    transpose<uint64_t>,
    transpose<Bytes16>,
    transpose_wide<32>,
    transpose_wide<64>,
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
