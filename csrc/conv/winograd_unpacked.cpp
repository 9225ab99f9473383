// Winograd convolution F(4x4, 3x3) of few tiles, a small image or two: winograd.cpp's steps, but with weights as they
// are. There they would be read from memory, transformed four times as many, and that would take longer than to
// multiply them: so they are transformed here, in registers, at every call, and nothing is kept.
#include "../parallel.h"
#include "../scratch.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) {
  return can_winograd(c) && c.stride_h == 1 &&
         Tiles(c, winograd_transforms(c, &WinogradKernels::f4)).count <= winograd_kernels(c)->most_unpacked_tiles;
}

// The threads share the output channels; each transforms src, which is small, for itself.
void run(const Conv& c) {
  const WinogradKernels& kernels = *winograd_kernels(c);
  const Tiles tiles(c, winograd_transforms(c, &WinogradKernels::f4));
  const PaddedPostOps post_ops(c);
  const int64_t src_plane = tiles.plane_of(tiles.ic_blocks * tiles.count), dst_plane = tiles.plane_of(tiles.count);
  Ranges ranges(c.oc_blocks(), c.nthreads, 1);
  parallel(c.nthreads, [&](int64_t thread, int64_t) {
    int64_t begin, end;
    if (!ranges.take(thread, begin, end)) return;
    float* const src = Scratch::get(tiles.planes * (src_plane + dst_plane));
    float* const products = src + tiles.planes * src_plane;
    tiles.transform_src(0, tiles.count, 0, tiles.ic_blocks, src, src_plane);
    do {
      for (int64_t oc_block = begin; oc_block < end; oc_block++) {
        const float* const wei = c.wei + oc_block * c.wei_md.strides[0];
        kernels.multiply_unpacked[tiles.count - 1](
            {src, src_plane, tiles.count * c.block, wei, products, dst_plane, tiles.ic_blocks});
        tiles.transform_dst(0, tiles.count, oc_block, products, dst_plane, false, post_ops);
      }
    } while (ranges.take(thread, begin, end));
  });
}

}  // namespace

const Algorithm conv_winograd_f4_unpacked = {"winograd_f4_unpacked",   can, by_blocks, run, nullptr,
                                             unpacked_winograd_seconds};

}  // namespace torch_blocked
