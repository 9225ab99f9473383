// One vector of a block of channels, for every kernel of a tier, and the post-ops on it.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <type_traits>

#include "conv.h"
#include "store.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace torch_blocked {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int block = 16;
#else
constexpr int block = 8;  // without AVX2 a block is two or more registers
#endif

// Most pixels of a row in one call of a kernel, one row; with two rows of two blocks; and one row of three.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int max_cols = 14, max_cols_two = 7, max_cols_three = 9;  // 28 accumulators, 2 weights, 2 to spare
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int max_cols = 6, max_cols_two = 3, max_cols_three = 0;  // 12 accumulators, 2 weights, 2 to spare
#else
constexpr int max_cols = 3, max_cols_two = 1, max_cols_three = 0;
#endif

// Floats ahead that weights are fetched: a page, at whose end the hardware's own prefetch stops.
constexpr int64_t wei_prefetch = 1024;

using FloatVec = at::vec::Vectorized<float>;
using Vec = std::conditional_t<FloatVec::size() == block, FloatVec,
                               at::vec::VectorizedN<float, (block > FloatVec::size() ? block / FloatVec::size() : 1)>>;
static_assert(Vec::size() == block);

// For arrays of vectors that are to stay in registers: what a Vec is of, without its constructor, whose loop over an
// array GCC 12 unrolls in some places only, and keeps the array in memory in others.
#if defined(CPU_CAPABILITY_AVX512)
using Register = __m512;
#elif defined(CPU_CAPABILITY_AVX2)
using Register = __m256;
#else
using Register = Vec;
#endif

inline Vec multiply_add(const Vec& a, const Vec& b, const Vec& c) {
  if constexpr (std::is_same_v<Vec, FloatVec>)
    return at::vec::fmadd(a, b, c);
  else
    return a * b + c;
}

// The same, in a register: a compiler may else load what several instructions use again for each of them.
inline Vec in_register(Vec vec) {
  Register values = vec;
#if defined(CPU_CAPABILITY_AVX512)
  asm("" : "+v"(values));
#elif defined(CPU_CAPABILITY_AVX2)
  asm("" : "+x"(values));
#endif
  return values;
}

template <int Rows, int Cols>
inline void add_residual(const float* residual, int64_t dst_row, int64_t dst_pixel, Register (&acc)[Rows][Cols]) {
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] =
      Vec(acc[r][c]) + Vec::loadu(residual + r * dst_row + c * dst_pixel);
}

// By way of memory: a function call leaves no vector in its register.
template <int Rows, int Cols>
inline void activate(const Epilogue& e, Register (&acc)[Rows][Cols]) {
  alignas(64) float values[Rows][Cols][block];
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) Vec(acc[r][c]).store(values[r][c]);
  e.activate(values[0][0], Rows * Cols, e.alpha);
  UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] = Vec::loadu(values[r][c]);
}

// The epilogue of Rows x Cols pixels of the block of channels from `channel` on.
template <int Rows, int Cols>
[[gnu::always_inline]] inline void finish(const Epilogue& e, int64_t channel, int64_t dst_block, int64_t dst_row,
                                          int64_t dst_pixel, Register (&acc)[Rows][Cols]) {
  const float* const residual = e.residual ? e.residual + channel / block * dst_block : nullptr;
  if (e.scale || e.shift) {
    const Vec scale = e.scale ? Vec::loadu(e.scale + channel) : Vec(1.f);
    const Vec shift = e.shift ? Vec::loadu(e.shift + channel) : Vec(0.f);
    UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] =
        multiply_add(acc[r][c], scale, shift);
  }
  if (residual && !e.residual_last) add_residual(residual, dst_row, dst_pixel, acc);
  if (e.clamp) {
    const Vec lower(e.lower), upper(e.upper);
    UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] =
        at::vec::clamp(Vec(acc[r][c]), lower, upper);
  }
  if (e.activate) activate(e, acc);
  if (residual && e.residual_last) add_residual(residual, dst_row, dst_pixel, acc);
  if (e.keep) {
    const Vec keep = Vec::loadu(e.keep + channel), zero(0.f);
    UNROLL for (int r = 0; r < Rows; r++) UNROLL for (int c = 0; c < Cols; c++) acc[r][c] =
        Vec::blendv(zero, acc[r][c], keep);
  }
}

}  // namespace
}  // namespace torch_blocked
