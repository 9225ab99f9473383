// Activations that are more than a clamp: one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

// In place, of some vectors one after the other. `alpha` is the activation's parameter, where it has one.
using Activate = void (*)(float* values, int64_t vectors, float alpha);

struct ActivationKernels {
  Activate leaky_relu, sigmoid, silu, hardsigmoid, hardswish, gelu, gelu_tanh;
};
TORCH_BLOCKED_DECLARE_KERNELS(ActivationKernels, activation_kernels);

}  // namespace torch_blocked
