#include "activation.h"

#include <cstring>

#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

// 2^n of the integers n in -127 ... 128 that `shifted` holds in its lowest bits, increased by 127: the exponent of a
// float. 0 and infinity at the ends.
inline Vec power_of_two(const Vec& shifted) {
  using Bits = int32_t __attribute__((vector_size(block * sizeof(int32_t))));
  Bits bits;
  Vec power;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits <<= 23;
  std::memcpy(static_cast<void*>(&power), &bits, sizeof(bits));
  return power;
}

// 1 + e^-x, infinity below -88.4 and 1 above 88, by 2^n e^r with r = -x - n log(2): at::vec calls a function for e^x,
// which leaves no vector in its register. log(2) in two parts, as Cephes' expf has it: the first has so few bits that
// its multiples are exact. The polynomial in -r is the one of degree 5 with e^0 = 1 whose largest relative error, 9e-8,
// is least. Adding 1.5 * 2^23 rounds to an integer.
inline Vec one_plus_exp_of_minus(const Vec& any) {
  const Vec x = at::vec::clamp(any, Vec(-89.f), Vec(88.f)), shift(12582912.f + 127.f);
  const Vec shifted = multiply_add(x, Vec(-1.44269504f), shift), minus_n = shift - shifted;
  const Vec minus_r = multiply_add(minus_n, Vec(2.12194440e-4f), multiply_add(minus_n, Vec(-.693359375f), x));
  Vec sum(-8.290315e-3f);
  for (const float c : {4.189793e-2f, -1.6667636e-1f, 4.9999151e-1f, -9.999997e-1f, 1.f})
    sum = multiply_add(sum, minus_r, Vec(c));
  return multiply_add(sum, power_of_two(shifted), Vec(1.f));
}

Vec leaky_relu(const Vec& x, float alpha) { return Vec::blendv(x * Vec(alpha), x, x > Vec(0.f)); }

Vec silu(const Vec& x, float) { return x / one_plus_exp_of_minus(x); }

Vec sigmoid(const Vec& x, float) { return Vec(1.f) / one_plus_exp_of_minus(x); }

Vec hardsigmoid(const Vec& x, float) { return at::vec::clamp(x + Vec(3.f), Vec(0.f), Vec(6.f)) * Vec(float(1. / 6)); }

Vec hardswish(const Vec& x, float alpha) { return x * hardsigmoid(x, alpha); }

Vec gelu(const Vec& x, float) {
  const Vec sqrt_half(0.70710678118654752f);
  return x * Vec(.5f) * (Vec(1.f) + (x * sqrt_half).erf());
}

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), where (1 + tanh(u)) / 2 is the sigmoid of 2 u.
Vec gelu_tanh(const Vec& x, float) {
  const Vec two_sqrt_two_over_pi(1.5957691216057308f);
  const Vec cube = x * x * x;
  return x / one_plus_exp_of_minus(two_sqrt_two_over_pi * multiply_add(Vec(.044715f), cube, x));
}

template <Vec function(const Vec&, float)>
void apply(float* values, int64_t vectors, float alpha) {
  for (int64_t i = 0; i < vectors; i++, values += block) function(Vec::loadu(values), alpha).store(values);
}

}  // namespace

extern const ActivationKernels TORCH_BLOCKED_TIER_NAME(activation_kernels) = {
    apply<leaky_relu>, apply<sigmoid>, apply<silu>,     apply<hardsigmoid>,
    apply<hardswish>,  apply<gelu>,    apply<gelu_tanh>};

}  // namespace torch_blocked
