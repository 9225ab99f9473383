// A cost model for the choice between direct and Winograd algorithms: how long each would take, in seconds.
#pragma once
#include "conv.h"

namespace torch_blocked {

double direct_seconds(const Conv& conv);
// Of float32 on tiles of bfloat16.
double amx_seconds(const Conv& conv);
// Of groups, as conv/depthwise.cpp does them.
double depthwise_seconds(const Conv& conv);
// Of F(m x m, 3 x 3), m 2 or 4.
template <int m>
double winograd_seconds(const Conv& conv);
// Of F(4x4, 3x3) on tiles of bfloat16.
double winograd_amx_seconds(const Conv& conv);
// Of transforming the weights.
template <int m>
double winograd_pack_seconds(const Conv& conv);
// Of F(4x4, 3x3) with weights transformed at every call.
double unpacked_winograd_seconds(const Conv& conv);
// Of F(4, ceil(kw / stride_w)) along the rows of a plain src, and of transforming its weights.
double row_winograd_seconds(const Conv& conv);
double row_winograd_pack_seconds(const Conv& conv);

// Of the gradient with respect to the weights.
double direct_weight_gradient_seconds(const Conv& conv);
double winograd_weight_gradient_seconds(const Conv& conv, int64_t m);

}  // namespace torch_blocked
