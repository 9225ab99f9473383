// Permutations of any bytes of one or two vectors, for CPUs that have them (AVX-512 VBMI). Interleaves
// (reorder_interleave.h): the elements of a group meet within the src row, then groups are transposed as words; back,
// in the other order. And blocks of a few vectors, which are permuted as they are.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <array>

#include "kernels/reorder.h"
#include "reorder_tiles.h"
#if defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace torch_blocked {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
bool has_pick() { return __builtin_cpu_supports("avx512vbmi"); }

#pragma GCC push_options
#pragma GCC target("avx512vbmi")

using Words16 = Tile<uint32_t, 64, 16>;

template <class Row>
inline Row pick(const Row& first, __m512i places, const Row& second) {
  return std::bit_cast<Row>(
      _mm512_permutex2var_epi8(std::bit_cast<__m512i>(first), places, std::bit_cast<__m512i>(second)));
}

inline void transpose(Words16& tile) {
  for (int step = 1; step < 4; step *= 2) tile.shuffle_within_parts();
  for (int step = 4; step < 16; step *= 2) tile.shuffle_parts(4);
}

void interleave_picked(const char* src, const int64_t* src_rows, int64_t rows, char* dst, const int64_t* dst_lines,
                       const Pick* picks, int64_t npicks, bool stream) {
  alignas(64) static constexpr char zeros[64 * most_picks] = {};
  int64_t offsets[16];
  for (int r = 0; r < 16; r++)
    offsets[r] = r < rows ? src_rows[r] : reinterpret_cast<intptr_t>(zeros) - reinterpret_cast<intptr_t>(src);
  for (int64_t p = 0; p < npicks; p++) {
    const Pick& vector = picks[p];
    const __m512i places = _mm512_load_si512(vector.places);
    Words16 tile;
    const char *const first = src + vector.first, *const second = src + vector.second;
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      const int64_t offset = offsets[r];
      tile.row[r] = pick(load<Words16::Row>(first + offset), places, load<Words16::Row>(second + offset));
    }
    transpose(tile);
    const int64_t* const lines = dst_lines + vector.to / 4;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      stream ? store<true>(dst + lines[i], tile.row[i]) : store<false>(dst + lines[i], tile.row[i]);
  }
}

// Of half of each line, 8 rows: two vectors of each, transposed, are in registers at once.
void deinterleave_half(const char* src, const int64_t* src_lines, char* dst, const int64_t* dst_rows, int64_t rows,
                       const Pick* picks, int64_t npicks) {
  using Half = ToWideRows<uint32_t, 64, 8>;
  int64_t at = picks[0].first;
  auto first = Half::columns(src, src_lines + at / 4);
  for (int64_t p = 0; p < npicks; p++) {
    const Pick& vector = picks[p];
    const __m512i places = _mm512_load_si512(vector.places);
    if (vector.first != at) first = Half::columns(src, src_lines + vector.first / 4);
    const auto second = vector.second == vector.first ? first : Half::columns(src, src_lines + vector.second / 4);
    char* const to = dst + vector.to;
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
      if (r < rows) store<false>(to + dst_rows[r], pick(first.row[r], places, second.row[r]));
    first = second, at = vector.second;
  }
}

void deinterleave_picked(const char* src, const int64_t* src_lines, char* dst, const int64_t* dst_rows, int64_t rows,
                         const Pick* picks, int64_t npicks) {
  for (int64_t r = 0; r < rows; r += 8)
    deinterleave_half(src + r * 4, src_lines, dst, dst_rows + r, std::min<int64_t>(rows - r, 8), picks, npicks);
}

template <int vectors>
void permute(const char* src, int64_t next_in_src, char* dst, int64_t next_in_dst, int64_t count, int64_t bytes,
             const Merge* merges) {
  constexpr int64_t n = merges_per_vector(vectors);
  const auto at = [&](int v) { return v < vectors - 1 ? v * 64 : bytes - 64; };
  for (; count > 0; count--, src += next_in_src, dst += next_in_dst) {
    __m512i block[vectors];
#pragma GCC unroll 8
    for (int s = 0; s < vectors; s++) block[s] = _mm512_loadu_si512(src + at(s));
#pragma GCC unroll 8
    for (int d = 0; d < vectors; d++) {
      __m512i row = block[0];
#pragma GCC unroll 8
      for (int m = 0; m < n; m++) {
        const __m512i places = _mm512_load_si512(merges[d * n + m].places);
        row = _mm512_permutex2var_epi8(row, places, block[std::min(m + 1, vectors - 1)]);
      }
      _mm512_storeu_si512(dst + at(d), row);
    }
  }
}

void permute_blocks(const char* src, int64_t next_in_src, char* dst, int64_t next_in_dst, int64_t count, int64_t bytes,
                    const Merge* merges) {
  static constexpr ReorderKernels::Permute* by_vectors[] = {permute<1>, permute<2>, permute<3>, permute<4>};
  by_vectors[(bytes + 63) / 64 - 1](src, next_in_src, dst, next_in_dst, count, bytes, merges);
}

// Blocks of channels of one or two bytes, and rows of pixels: one permutation puts side by side what a vector of blocks
// has of each channel, a word, and the words of as many vectors as there are channels are transposed.
template <class T, int block>
struct PermutedBlocks {
  static constexpr int size = sizeof(T), pixels = 64 / size, block_bytes = block * size, word = 64 / block;
  using Word = std::conditional_t<word == 8, uint64_t, uint32_t>;
  using Words = Tile<Word, 64, block>;

  // Of the pixels that are left beside whole tiles.
  struct Masks {
    __mmask64 blocks[block], row;

    explicit Masks(int64_t left) : row(first(left * size)) {
      for (int v = 0; v < block; v++) blocks[v] = first(left * block_bytes - v * 64);
    }
    static __mmask64 first(int64_t bytes) { return bytes >= 64 ? ~0ull : bytes > 0 ? (1ull << bytes) - 1 : 0; }
  };

  // Each byte of a vector of blocks from the transposed one's, or back.
  template <bool to_blocks>
  static constexpr auto places = [] {
    std::array<uint8_t, 64> places{};
    for (int i = 0; i < 64; i++) {
      const int in_blocks = i % word / size * block_bytes + i / word * size + i % size;
      places[to_blocks ? in_blocks : i] = to_blocks ? i : in_blocks;
    }
    return places;
  }();

  template <bool whole>
  static __m512i load(const char* src, __mmask64 mask) {
    return whole ? _mm512_loadu_si512(src) : _mm512_maskz_loadu_epi8(mask, src);
  }
  template <bool whole>
  static void store(char* dst, __mmask64 mask, __m512i row) {
    __builtin_prefetch(dst + 128, 1);  // reorder_vectors.h says why
    if (whole)
      _mm512_storeu_si512(dst, row);
    else
      _mm512_mask_storeu_epi8(dst, mask, row);
  }

  template <bool to_blocks, bool whole>
  static void move(const char* src, char* dst, int64_t row_stride, const Masks& masks) {
    const __m512i permutation = _mm512_loadu_si512(places<to_blocks>.data());
    const int64_t src_stride = to_blocks ? row_stride : 64, dst_stride = to_blocks ? 64 : row_stride;
    Words tile;
#pragma GCC unroll 16
    for (int i = 0; i < block; i++) {
      const __m512i row = load<whole>(src + i * src_stride, to_blocks ? masks.row : masks.blocks[i]);
      tile.row[i] = std::bit_cast<typename Words::Row>(to_blocks ? row : _mm512_permutexvar_epi8(permutation, row));
    }
    FromWideRows<Word, 64, block, true>::transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < block; i++) {
      const auto row = std::bit_cast<__m512i>(tile.row[i]);
      store<whole>(dst + i * dst_stride, to_blocks ? masks.blocks[i] : masks.row,
                   to_blocks ? _mm512_permutexvar_epi8(permutation, row) : row);
    }
  }

  template <bool to_blocks>
  static void run(const Matrix& matrix) {
    const int64_t all = to_blocks ? matrix.cols : matrix.rows, whole = all / pixels * pixels;
    const int64_t row_stride = to_blocks ? matrix.src_rows.stride : matrix.dst_rows.stride;
    const int64_t next_in_src = pixels * (to_blocks ? size : block_bytes);
    const int64_t next_in_dst = pixels * (to_blocks ? block_bytes : size);
    const Masks masks(all - whole);
    for (int64_t i = 0; i < matrix.count; i++) {
      const char* src = matrix.src + matrix.src_rows.each[0] + i * matrix.next_in_src;
      char* dst = matrix.dst + matrix.dst_rows.each[0] + i * matrix.next_in_dst;
      for (int64_t p = 0; p < whole; p += pixels, src += next_in_src, dst += next_in_dst)
        move<to_blocks, true>(src, dst, row_stride, masks);
      if (whole < all) move<to_blocks, false>(src, dst, row_stride, masks);
    }
  }
};

#pragma GCC pop_options
#else
bool has_pick() { return false; }
constexpr ReorderKernels::InterleavePicked* interleave_picked = nullptr;
constexpr ReorderKernels::DeinterleavePicked* deinterleave_picked = nullptr;
constexpr ReorderKernels::Permute* permute_blocks = nullptr;
#endif

}  // namespace
}  // namespace torch_blocked
