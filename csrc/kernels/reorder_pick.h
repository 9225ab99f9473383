// Interleaves (reorder_interleave.h) by permutations of any bytes of two vectors, for CPUs that have them (AVX-512
// VBMI): the elements of a group meet within the src row, then groups are transposed as words. Back, in the other
// order.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
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

inline Words16::Row pick(const char* src, __m512i places) {
  return std::bit_cast<Words16::Row>(
      _mm512_permutex2var_epi8(_mm512_loadu_si512(src), places, _mm512_loadu_si512(src + 64)));
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
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) tile.row[r] = pick(src + offsets[r] + vector.from, places);
    transpose(tile);
    const int64_t* const lines = dst_lines + vector.to / 4;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      stream ? store<true>(dst + lines[i], tile.row[i]) : store_and_fetch<false>(dst + lines[i], tile.row[i]);
  }
}

void deinterleave_picked(const char* src, const int64_t* src_lines, int64_t lines, char* dst, const int64_t* dst_rows,
                         int64_t rows, const Pick* picks, int64_t npicks) {
  // Not a power of two apart: the rows would push each other out of the first cache.
  constexpr int64_t row_bytes = 64 * most_picks + 64;
  alignas(64) char between[16 * row_bytes];
  for (int64_t first = 0; first < lines; first += 16) {
    const int64_t line = std::min(first, lines - 16);
    Words16 tile;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) tile.row[i] = load<Words16::Row>(src + src_lines[line + i]);
    transpose(tile);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store<false>(between + r * row_bytes + line * 4, tile.row[r]);
  }
  for (int64_t p = 0; p < npicks; p++) {
    const Pick& vector = picks[p];
    const __m512i places = _mm512_load_si512(vector.places);
    const char* from = between + vector.from;
    char* const to = dst + vector.to;
    for (int64_t r = 0; r < rows; r++, from += row_bytes) store_and_fetch<false>(to + dst_rows[r], pick(from, places));
  }
}

#pragma GCC pop_options
#else
bool has_pick() { return false; }
constexpr ReorderKernels::InterleavePicked* interleave_picked = nullptr;
constexpr ReorderKernels::DeinterleavePicked* deinterleave_picked = nullptr;
#endif

}  // namespace
}  // namespace torch_blocked
