#pragma once
#include <span>

#include "conv.h"

namespace torch_blocked {

// Runs convolutions of two spatial dims, in float32, each of which but the first has the dst of the one before as its
// src, blocked and dense; the src of the first and the dst of the last are set, what lies between is not. `keys` are
// those that packed weights are kept under, or null.
void convolve_chain(std::span<Conv> convs, std::span<const WeightKey* const> keys);

}  // namespace torch_blocked
