// The matrices of Winograd's transforms, as the few additions and multiplications that they take.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <type_traits>

#include "vec.h"

namespace torch_blocked {
namespace {

// One dimension of F(M x M, R x R), stride 1: B^T d (src), A^T m (dst) and G g (wei) of the paper, sharing what they
// can; for the gradient with respect to the weights A d (diff_dst) and G^T m (diff_wei). `wei` is the table of G;
// `filter` is G g in float, for weights that are transformed at every call.
template <int M, int R = 3>
struct Matrices;

template <>
struct Matrices<2> {
  static constexpr double wei[4][3] = {{1, 0, 0}, {.5, .5, .5}, {.5, -.5, .5}, {0, 0, 1}};
  static inline void src(const Vec* d, Vec* out) {
    out[0] = d[0] - d[2];
    out[1] = d[1] + d[2];
    out[2] = d[2] - d[1];
    out[3] = d[1] - d[3];
  }
  static inline void dst(const Vec* m, Vec* out) {
    out[0] = m[0] + m[1] + m[2];
    out[1] = m[1] - m[2] - m[3];
  }
  static inline void diff_dst(const Vec* d, Vec* out) {
    out[0] = d[0];
    out[1] = d[0] + d[1];
    out[2] = d[0] - d[1];
    out[3] = Vec(0.f) - d[1];
  }
  static inline void diff_wei(const Vec* m, Vec* out) {
    const Vec half(.5f), sum = m[1] + m[2], difference = m[1] - m[2];
    out[0] = multiply_add(half, sum, m[0]);
    out[1] = half * difference;
    out[2] = multiply_add(half, sum, m[3]);
  }
};

// The interpolation points are 0, +-sqrt(2), +-1/sqrt(2) and infinity, not the usual 0, +-1, +-2: their powers are
// nearer to 1, which makes the error five times smaller (the effect of the points is studied by Barabasz et al., "Error
// Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", ACM TOMS 46, 2020).
template <>
struct Matrices<4> {
  static constexpr double a = 1.41421356237309504880, b = a / 2;
  static constexpr double wei[6][3] = {{1, 0, 0},
                                       {1. / 6, a / 6, 1. / 3},
                                       {1. / 6, -a / 6, 1. / 3},
                                       {-2. / 3, -b * 2 / 3, -1. / 3},
                                       {-2. / 3, b * 2 / 3, -1. / 3},
                                       {0, 0, 1}};
  // G g with its fractions left out: element i is to be multiplied by filter_scale[i]. Then most of it is additions,
  // for which some CPUs have units beside those that multiply.
  static constexpr double filter_scale[6] = {1, 1. / 3, 1. / 3, -1. / 3, -1. / 3, 1};
  static inline void filter(const Vec* g, Vec* out) {
    const Vec even_a = multiply_add(Vec(.5f), g[0], g[2]), odd_a = Vec(float(b)) * g[1];
    const Vec even_b = multiply_add(Vec(2.f), g[0], g[2]), odd_b = odd_a + odd_a;
    out[0] = g[0];
    out[1] = even_a + odd_a;
    out[2] = even_a - odd_a;
    out[3] = even_b + odd_b;
    out[4] = even_b - odd_b;
    out[5] = g[2];
  }
  static inline void src(const Vec* d, Vec* out) {
    const Vec half(-.5f), two(-2.f), sum(-2.5f);
    const Vec even_a = multiply_add(half, d[2], d[4]), odd_a = multiply_add(half, d[1], d[3]);
    const Vec even_b = multiply_add(two, d[2], d[4]), odd_b = multiply_add(two, d[1], d[3]);
    out[0] = multiply_add(sum, d[2], d[0] + d[4]);
    out[1] = multiply_add(Vec(float(a)), odd_a, even_a);
    out[2] = multiply_add(Vec(float(-a)), odd_a, even_a);
    out[3] = multiply_add(Vec(float(b)), odd_b, even_b);
    out[4] = multiply_add(Vec(float(-b)), odd_b, even_b);
    out[5] = multiply_add(sum, d[3], d[1] + d[5]);
  }
  static inline void dst(const Vec* m, Vec* out) {
    const Vec sum_a = m[1] + m[2], difference_a = m[1] - m[2], sum_b = m[3] + m[4], difference_b = m[3] - m[4];
    out[0] = m[0] + (sum_a + sum_b);
    out[1] = multiply_add(Vec(float(a)), difference_a, Vec(float(b)) * difference_b);
    out[2] = multiply_add(Vec(2.f), sum_a, Vec(.5f) * sum_b);
    out[3] = multiply_add(Vec(float(2 * a)), difference_a, multiply_add(Vec(float(b / 2)), difference_b, m[5]));
  }
  static inline void diff_dst(const Vec* d, Vec* out) {
    const Vec even_a = multiply_add(Vec(2.f), d[2], d[0]), even_b = multiply_add(Vec(.5f), d[2], d[0]);
    const Vec odd_a = Vec(float(a)) * multiply_add(Vec(2.f), d[3], d[1]);
    const Vec odd_b = Vec(float(b)) * multiply_add(Vec(.5f), d[3], d[1]);
    out[0] = d[0];
    out[1] = even_a + odd_a;
    out[2] = even_a - odd_a;
    out[3] = even_b + odd_b;
    out[4] = even_b - odd_b;
    out[5] = d[3];
  }
  static inline void diff_wei(const Vec* m, Vec* out) {
    const Vec sum_a = m[1] + m[2], difference_a = m[1] - m[2], sum_b = m[3] + m[4], difference_b = m[3] - m[4];
    out[0] = multiply_add(Vec(float(1. / 6)), sum_a, multiply_add(Vec(float(-2. / 3)), sum_b, m[0]));
    out[1] = Vec(float(a / 6)) * multiply_add(Vec(-2.f), difference_b, difference_a);
    out[2] = multiply_add(Vec(float(1. / 3)), sum_a - sum_b, m[5]);
  }
};

// The interpolation points are 0, +-1, +-2 and +-1/2.
template <>
struct Matrices<4, 4> {
  static constexpr double a = -2. / 9, b = 1. / 90, c = 32. / 45;
  static constexpr double wei[7][4] = {{1, 0, 0, 0},
                                       {a, a, a, a},
                                       {a, -a, a, -a},
                                       {b, 2 * b, 4 * b, 8 * b},
                                       {b, -2 * b, 4 * b, -8 * b},
                                       {c, c / 2, c / 4, c / 8},
                                       {c, -c / 2, c / 4, -c / 8}};
  // d6 + f d4 + g d2 and d5 + f d3 + g d1 are the even and the odd powers of the polynomials of a pair of points.
  static inline void pair(const Vec* d, float f, float g, float point, Vec* out) {
    const Vec even = multiply_add(Vec(f), d[4], multiply_add(Vec(g), d[2], d[6]));
    const Vec odd = multiply_add(Vec(f), d[3], multiply_add(Vec(g), d[1], d[5]));
    out[0] = multiply_add(Vec(point), odd, even);
    out[1] = multiply_add(Vec(-point), odd, even);
  }
  static inline void src(const Vec* d, Vec* out) {
    out[0] = multiply_add(Vec(5.25f), d[4] - d[2], d[0] - d[6]);
    pair(d, -4.25f, 1.f, 1.f, out + 1);
    pair(d, -1.25f, .25f, 2.f, out + 3);
    pair(d, -5.f, 4.f, .5f, out + 5);
  }
  static inline void dst(const Vec* m, Vec* out) {
    const Vec sum_1 = m[1] + m[2], sum_2 = m[3] + m[4], sum_half = m[5] + m[6];
    const Vec difference_1 = m[1] - m[2], difference_2 = m[3] - m[4], difference_half = m[5] - m[6];
    out[0] = (m[0] + sum_1) + (sum_2 + sum_half);
    out[1] = multiply_add(Vec(2.f), difference_2, multiply_add(Vec(.5f), difference_half, difference_1));
    out[2] = multiply_add(Vec(4.f), sum_2, multiply_add(Vec(.25f), sum_half, sum_1));
    out[3] = multiply_add(Vec(8.f), difference_2, multiply_add(Vec(.125f), difference_half, difference_1));
  }
};

template <>
struct Matrices<2, 2> {
  static constexpr double wei[3][2] = {{1, 0}, {1, 1}, {0, 1}};
  static inline void src(const Vec* d, Vec* out) {
    out[0] = d[0] - d[1];
    out[1] = d[1];
    out[2] = d[2] - d[1];
  }
  static inline void dst(const Vec* m, Vec* out) {
    out[0] = m[0] + m[1];
    out[1] = m[1] + m[2];
  }
};

// The interpolation points are +-1/2, +-5/4 and infinity.
template <>
struct Matrices<4, 2> {
  static constexpr double a = 1. / 2, b = 5. / 4, d = a * a - b * b;
  static constexpr double wei[5][2] = {
      {.5 / (a * d), .5 / d}, {-.5 / (a * d), .5 / d}, {-.5 / (b * d), -.5 / d}, {.5 / (b * d), -.5 / d}, {0, 1}};
  // As Matrices<4, 4>'s, of d3 + f d1 and d2 + f d0.
  static inline void pair(const Vec* d, double f, double point, Vec* out) {
    const Vec odd = multiply_add(Vec(float(f)), d[1], d[3]), even = multiply_add(Vec(float(f)), d[0], d[2]);
    out[0] = multiply_add(Vec(float(point)), even, odd);
    out[1] = multiply_add(Vec(float(-point)), even, odd);
  }
  static inline void src(const Vec* d, Vec* out) {
    pair(d, -b * b, a, out);
    pair(d, -a * a, b, out + 2);
    out[4] = multiply_add(Vec(float(-a * a - b * b)), d[2], multiply_add(Vec(float(a * a * b * b)), d[0], d[4]));
  }
  static inline void dst(const Vec* m, Vec* out) {
    const Vec sum_a = m[0] + m[1], difference_a = m[0] - m[1], sum_b = m[2] + m[3], difference_b = m[2] - m[3];
    out[0] = sum_a + sum_b;
    out[1] = multiply_add(Vec(float(a)), difference_a, Vec(float(b)) * difference_b);
    out[2] = multiply_add(Vec(float(a * a)), sum_a, Vec(float(b * b)) * sum_b);
    out[3] = multiply_add(Vec(float(a * a * a)), difference_a, multiply_add(Vec(float(b * b * b)), difference_b, m[4]));
  }
};

// F(M, 3) of a stride: `size` pixels of src, and as many elements, for M of dst; `wei_size` elements of the filter, of
// which the last multiplies all elements of src from there on. Each phase, every stride-th pixel, is transformed by
// itself, to the elements from its first on.
template <int M, int Stride>
struct Filter3;

template <int M>
struct AllPixels : Matrices<M> {
  static constexpr int first = 0, size = M + 2;
};

template <int M>
struct Filter3<M, 1> {
  static constexpr int m = M, stride = 1, size = M + 2, wei_size = M + 2;
  static constexpr auto& wei = Matrices<M>::wei;
  template <int>
  using Phase = AllPixels<M>;
};

// Of stride 2 the outer taps read the even pixels: F(M, 2).
template <int M>
struct EvenPixels : Matrices<M, 2> {
  static constexpr int first = 0, size = M + 1;
};

// The middle one multiplies the odd pixels as they are.
template <int M>
struct OddPixels {
  static constexpr int first = M + 1, size = M;
  static inline void src(const Vec* d, Vec* out) { UNROLL for (int i = 0; i < M; i++) out[i] = d[i]; }
  static inline void dst(const Vec* m, Vec* out) { src(m, out); }
};

template <int M>
struct Filter3<M, 2> {
  static constexpr int m = M, stride = 2, size = 2 * M + 1, wei_size = M + 2;
  struct Wei {
    double rows[wei_size][3];
    constexpr Wei() : rows{} {
      for (int i = 0; i <= M; i++) rows[i][0] = Matrices<M, 2>::wei[i][0], rows[i][2] = Matrices<M, 2>::wei[i][1];
      rows[M + 1][1] = 1;
    }
    constexpr const double* operator[](int i) const { return rows[i]; }
  };
  static constexpr Wei wei{};
  template <int phase>
  using Phase = std::conditional_t<phase == 0, EvenPixels<M>, OddPixels<M>>;
};

}  // namespace
}  // namespace torch_blocked
