#include "activation.h"

#include "exp.h"
#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

inline Vec one_plus_exp_of_minus(const Vec& x) { return exp_of_minus(x, 1.f); }

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
