#include "batch_norm.h"

#include <ATen/cpu/vec/vec.h>

#include "tier.h"

namespace torch_blocked {
namespace {

using Vec = at::vec::Vectorized<float>;

// One of the functions below for blocks of a width that the compiler knows, so that vectors stay in registers; blocks
// of other widths go float by float.
template <template <int> class Kernel, class... Args>
void by_width(int64_t block, const Args&... args) {
  if (block == 16) return Kernel<16>::run(block, args...);
  if constexpr (Vec::size() <= 8)
    if (block == 8) return Kernel<8>::run(block, args...);
  Kernel<1>::run(block, args...);
}

// `Width` floats at `p`: as vectors, or one.
template <int Width>
struct Wide {
  static constexpr int parts = Width / Vec::size();
  Vec v[parts];
  static constexpr int step = Width;
  static Wide load(const float* p) {
    Wide w;
    for (int i = 0; i < parts; i++) w.v[i] = Vec::loadu(p + i * Vec::size());
    return w;
  }
  static Wide zero() {
    Wide w;
    for (int i = 0; i < parts; i++) w.v[i] = Vec(0.f);
    return w;
  }
  void store(float* p) const {
    for (int i = 0; i < parts; i++) v[i].store(p + i * Vec::size());
  }
  friend Wide operator-(const Wide& a, const Wide& b) {
    Wide w;
    for (int i = 0; i < parts; i++) w.v[i] = a.v[i] - b.v[i];
    return w;
  }
  friend Wide operator+(const Wide& a, const Wide& b) {
    Wide w;
    for (int i = 0; i < parts; i++) w.v[i] = a.v[i] + b.v[i];
    return w;
  }
  friend Wide multiply_add(const Wide& a, const Wide& b, const Wide& c) {
    Wide w;
    for (int i = 0; i < parts; i++) w.v[i] = at::vec::fmadd(a.v[i], b.v[i], c.v[i]);
    return w;
  }
};

template <>
struct Wide<1> {
  float v;
  static constexpr int step = 1;
  static Wide load(const float* p) { return {*p}; }
  static Wide zero() { return {0.f}; }
  void store(float* p) const { *p = v; }
  friend Wide operator-(const Wide& a, const Wide& b) { return {a.v - b.v}; }
  friend Wide operator+(const Wide& a, const Wide& b) { return {a.v + b.v}; }
  friend Wide multiply_add(const Wide& a, const Wide& b, const Wide& c) { return {a.v * b.v + c.v}; }
};

constexpr int chains = 4;  // sums that do not wait for each other

// sums[0] and sums[1] of what add(offset of a pixel, first, second) adds to them.
template <class W, class Add>
inline void two_sums(int64_t pixels, int64_t block, float* sums, const Add& add) {
  W first[chains], second[chains];
  for (int u = 0; u < chains; u++) first[u] = second[u] = W::zero();
  int64_t p = 0;
  for (; p + chains <= pixels; p += chains)
#pragma GCC unroll 4
    for (int u = 0; u < chains; u++) add((p + u) * block, first[u], second[u]);
  for (; p < pixels; p++) add(p * block, first[0], second[0]);
  ((first[0] + first[1]) + (first[2] + first[3])).store(sums);
  ((second[0] + second[1]) + (second[2] + second[3])).store(sums + block);
}

template <int Width>
struct ScaleShift {
  static void run(int64_t block, const float* src, const float* scale, const float* shift, float* dst, int64_t pixels) {
    using W = Wide<Width>;
    for (int64_t i = 0; i < block; i += W::step) {
      const W a = W::load(scale + i), b = W::load(shift + i);
      for (int64_t at = i; at < pixels * block; at += block) multiply_add(W::load(src + at), a, b).store(dst + at);
    }
  }
};

template <int Width>
struct Moments {
  static void run(int64_t block, const float* src, const float* center, float* sums, int64_t pixels) {
    using W = Wide<Width>;
    for (int64_t i = 0; i < block; i += W::step) {
      const W c = W::load(center + i);
      two_sums<W>(pixels, block, sums + i, [&](int64_t at, W& sum, W& squares) {
        const W d = W::load(src + at + i) - c;
        sum = sum + d;
        squares = multiply_add(d, d, squares);
      });
    }
  }
};

template <int Width>
struct GradientSums {
  static void run(int64_t block, const float* diff_dst, const float* src, const float* mean, float* sums,
                  int64_t pixels) {
    using W = Wide<Width>;
    for (int64_t i = 0; i < block; i += W::step) {
      const W m = W::load(mean + i);
      two_sums<W>(pixels, block, sums + i, [&](int64_t at, W& sum, W& products) {
        const W d = W::load(diff_dst + at + i);
        sum = sum + d;
        products = multiply_add(d, W::load(src + at + i) - m, products);
      });
    }
  }
};

template <int Width>
struct Gradient {
  static void run(int64_t block, const float* diff_dst, const float* src, const float* scale, const float* mean,
                  const float* slope, const float* shift, float* diff_src, int64_t pixels) {
    using W = Wide<Width>;
    for (int64_t i = 0; i < block; i += W::step) {
      const W a = W::load(scale + i), m = W::load(mean + i), b = W::load(slope + i), c = W::load(shift + i);
      for (int64_t at = i; at < pixels * block; at += block)
        multiply_add(W::load(diff_dst + at), a, multiply_add(W::load(src + at) - m, b, c)).store(diff_src + at);
    }
  }
};

void scale_shift(const float* src, const float* scale, const float* shift, float* dst, int64_t pixels, int64_t block) {
  by_width<ScaleShift>(block, src, scale, shift, dst, pixels);
}

void moments(const float* src, const float* center, float* sums, int64_t pixels, int64_t block) {
  by_width<Moments>(block, src, center, sums, pixels);
}

void gradient_sums(const float* diff_dst, const float* src, const float* mean, float* sums, int64_t pixels,
                   int64_t block) {
  by_width<GradientSums>(block, diff_dst, src, mean, sums, pixels);
}

void gradient(const float* diff_dst, const float* src, const float* scale, const float* mean, const float* slope,
              const float* shift, float* diff_src, int64_t pixels, int64_t block) {
  by_width<Gradient>(block, diff_dst, src, scale, mean, slope, shift, diff_src, pixels);
}

}  // namespace

extern const BatchNormKernels TORCH_BLOCKED_TIER_NAME(batch_norm_kernels) = {scale_shift, moments, gradient_sums,
                                                                             gradient};

}  // namespace torch_blocked
