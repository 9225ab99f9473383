// Winograd's transforms F(m x m, 3 x 3) for m = 2 and 4 (Lavin and Gray, "Fast Algorithms for Convolutional Neural
// Networks", arXiv:1509.09308): a tile of (m + 2) x (m + 2) src pixels gives m x m dst pixels by (m + 2)^2
// multiplications instead of 9 m^2, and as many give what it adds to the gradient with respect to the nine weights.
// Each transform works on all channels of one block at a time, one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"
#include "conv.h"

namespace torch_blocked {

// The elements of a transformed tile lie `plane` floats apart: row-major, (m + 2)^2 of them.
struct WinogradTransforms {
  int64_t m;
  // Pixels of a block, the tile's rows src_row floats apart.
  void (*src)(const float* src, int64_t src_row, float* dst, int64_t dst_plane);
  // The first `rows` x `cols` pixels of the tile, after the epilogue (of one block of output channels).
  void (*dst)(const float* src, int64_t src_plane, float* dst, int64_t dst_row, int64_t rows, int64_t cols,
              const Epilogue& epilogue);
  // Nine taps of a vector of output channels, wei_tap floats apart.
  void (*wei)(const float* wei, int64_t wei_tap, float* dst, int64_t dst_plane);
  // The transposes of the last two: the m x m pixels of a tile of diff_dst, its rows diff_row floats apart, and what is
  // added to nine taps of a vector of output channels.
  void (*diff_dst)(const float* diff, int64_t diff_row, float* dst, int64_t dst_plane);
  void (*diff_wei)(const float* src, int64_t src_plane, float* diff_wei, int64_t wei_tap);
};

struct WinogradKernels {
  int64_t block;
  WinogradTransforms f2, f4;
};
TORCH_BLOCKED_DECLARE_KERNELS(WinogradKernels, winograd_kernels);

}  // namespace torch_blocked
