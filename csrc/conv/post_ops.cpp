#include "post_ops.h"

#include <cmath>
#include <limits>

namespace torch_blocked {
namespace {

// Written so that NaN stays NaN.
float clamped(float x, float lower, float upper) { return x < lower ? lower : x > upper ? upper : x; }

float leaky_relu(float x, float alpha) { return x > 0 ? x : x * alpha; }
float sigmoid(float x, float) { return 1 / (1 + std::exp(-x)); }
float silu(float x, float) { return x / (1 + std::exp(-x)); }
float hardsigmoid(float x, float) { return clamped(x + 3, 0, 6) / 6; }
float hardswish(float x, float alpha) { return x * hardsigmoid(x, alpha); }
float gelu(float x, float) { return x / 2 * (1 + std::erf(x * 0.70710678118654752f)); }
float gelu_tanh(float x, float) { return x / 2 * (1 + std::tanh(0.79788456080286536f * (x + .044715f * x * x * x))); }

using Kernels = ActivationKernels;
constexpr Activation activations[] = {
    {"none"},
    {"relu", true, 0, std::numeric_limits<float>::infinity()},
    {"relu6", true, 0, 6},
    {"leaky_relu", false, 0, 0, leaky_relu, &Kernels::leaky_relu},
    {"sigmoid", false, 0, 0, sigmoid, &Kernels::sigmoid},
    {"silu", false, 0, 0, silu, &Kernels::silu},
    {"hardsigmoid", false, 0, 0, hardsigmoid, &Kernels::hardsigmoid},
    {"hardswish", false, 0, 0, hardswish, &Kernels::hardswish},
    {"gelu", false, 0, 0, gelu, &Kernels::gelu},
    {"gelu_tanh", false, 0, 0, gelu_tanh, &Kernels::gelu_tanh},
};

}  // namespace

const Activation* find_activation(std::string_view name) {
  for (const Activation& activation : activations)
    if (name == activation.name) return &activation;
  return nullptr;
}

std::vector<std::string_view> activation_names() {
  std::vector<std::string_view> names;
  for (const Activation& activation : activations) names.push_back(activation.name);
  return names;
}

float PostOps::apply(float value, int64_t oc, int64_t offset) const {
  if (bias) value += bias[oc];
  if (scale) value *= scale[oc];
  if (shift) value += shift[oc];
  if (residual && !residual_last) value += residual[offset];
  if (activation && activation->clamp) value = clamped(value, activation->lower, activation->upper);
  if (activation && activation->function) value = activation->function(value, alpha);
  if (residual && residual_last) value += residual[offset];
  return value;
}

}  // namespace torch_blocked
