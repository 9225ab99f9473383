// The inner loops of the gradient with respect to a convolution's weights, one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"
#include "depthwise.h"

namespace torch_blocked {

// A rectangle of pixels: `rows` x `cols` of each of `planes`. diff_dst is at its first pixel, src at the pixel that one
// filter tap reads for it; neighbours in a row are src_pixel and `block` floats apart.
struct WeightGradientArgs {
  const float* src;
  int64_t src_plane, src_row, src_pixel;
  int64_t src_ahead, diff_dst_ahead;  // from these pixels to those that later calls read; 0 where it is not known
  const float* diff_dst;
  int64_t diff_dst_plane, diff_dst_row;
  int64_t planes, rows, cols;
  float* diff_wei;                         // added to: vectors of a block of output channels
  int64_t diff_dst_block, diff_wei_block;  // to the next block of output channels, where a call takes two
};

// Registers for the sums of two blocks of output channels: half as many channels of src.
constexpr int max_lanes_of_two = max_lanes / 2;

struct WeightGradientKernels {
  // [lanes - 1]: diff_wei[i] += the sum over pixels of src[i] * diff_dst, for `lanes` neighbouring floats of src.
  void (*outer_product[max_lanes])(const WeightGradientArgs&);
  // The same for two blocks of output channels: a float of src is read once for both.
  void (*two_outer_products[max_lanes_of_two])(const WeightGradientArgs&);
  // diff_wei[0] += the sum over pixels of src * diff_dst, lane by lane; the map, unless null, moves src's lanes.
  void (*lane_product)(const WeightGradientArgs&, const LaneMap*);
};
TORCH_BLOCKED_DECLARE_KERNELS(WeightGradientKernels, weight_gradient_kernels);

}  // namespace torch_blocked
