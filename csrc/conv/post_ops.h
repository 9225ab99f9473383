// What follows a convolution's sum of products, done as its answer is written.
#pragma once
#include <string_view>
#include <vector>

#include "../kernels/activation.h"

namespace torch_blocked {

// An activation: a clamp to [lower, upper], which the convolutions' kernels do in registers, or a function with a
// kernel of its own.
struct Activation {
  const char* name;
  bool clamp = false;
  float lower = 0, upper = 0;
  float (*function)(float x, float alpha) = nullptr;  // of one value, for those who have no kernels
  Activate ActivationKernels::* kernel = nullptr;
};

// By its name, null where there is none; and all names, for errors.
const Activation* find_activation(std::string_view name);
std::vector<std::string_view> activation_names();

// In this order: + bias, * scale + shift, + residual, activation; where `residual_last`, + residual after it. Vectors
// have oc elements.
struct PostOps {
  const float* bias = nullptr;
  const float* scale = nullptr;
  const float* shift = nullptr;
  const float* residual = nullptr;  // laid out as dst
  const Activation* activation = nullptr;
  float alpha = 0;  // the activation's parameter
  bool residual_last = false;

  bool are_none() const {
    return !bias && !scale && !shift && !residual && !(activation && (activation->clamp || activation->function));
  }
  // To one sum, of channel oc, whose answer lies at `offset` in dst.
  float apply(float sum, int64_t oc, int64_t offset) const;
};

}  // namespace torch_blocked
