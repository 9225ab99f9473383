// The matrices of Winograd's transforms, as the few additions and multiplications that they take.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include "vec.h"

namespace torch_blocked {
namespace {

// One dimension of F(M x M, R x R): B^T d (src), A^T m (dst) and G g (wei) of the paper, sharing what they can; for the
// gradient with respect to the weights A d (diff_dst) and G^T m (diff_wei). `wei` is the table of G; `filter` is G g in
// float, for weights that are transformed at every call.
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

}  // namespace
}  // namespace torch_blocked
