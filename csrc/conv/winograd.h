// What Winograd's convolution and its gradient with respect to the weights share: dst cut into tiles of m x m pixels,
// and the transform of the pixels of src that such a tile reads. With a depth, every pair of a channel block and a
// plane of the filter counts as a channel block of one plane of dst, as in direct.cpp.
#pragma once
#include "../kernels/winograd.h"
#include "conv.h"
#include "cost.h"

namespace torch_blocked {

// Whether the problem is one of 3x3 filters, stride 1 or (not dilated) 2 and blocked src that there are transforms for.
bool can_winograd(const Conv& conv);
// The kernels of blocks of conv.block channels; null where no build of them is.
const WinogradKernels* winograd_kernels(const Conv& conv);
// F(m x m, 3 x 3) of conv's stride.
using WinogradByStride = WinogradTransforms (WinogradKernels::*)[2];
inline const WinogradTransforms& winograd_transforms(const Conv& conv, WinogradByStride of) {
  return (winograd_kernels(conv)->*of)[conv.stride_h - 1];
}

// Tiles along an axis of dst, of m pixels each. The pixels of a tile are a dilation apart, as its filter's taps are: of
// the dilation's phases, each an axis of its own, the tiles of one follow those of the one before.
struct TileAxis {
  int64_t size, m, dilation;
  int64_t of_phase, count;  // tiles; the last ones of a phase may have no pixels

  TileAxis(int64_t size_, int64_t m_, int64_t dilation_)
      : size(size_),
        m(m_),
        dilation(dilation_),
        of_phase((size + dilation * m - 1) / (dilation * m)),
        count(of_phase * std::min(dilation, size)) {}
  // The first pixel of a tile.
  int64_t first(int64_t tile) const { return tile / of_phase + tile % of_phase * m * dilation; }
  // From the first pixel of a tile to that of the next; false, and 0, where there is none.
  bool advance(int64_t& first) const {
    const int64_t end = of_phase * m * dilation;  // a multiple of the dilation: what is beyond is a phase
    if ((first += m * dilation) < end) return true;
    if ((first -= end - 1) < std::min(dilation, size)) return true;
    first = 0;
    return false;
  }
  // How many pixels of the tile whose first is this one there are.
  int64_t inside(int64_t first) const { return std::clamp<int64_t>(pixels(size - first), 0, m); }
  // How many of n pixels in a row are of the first one's phase; at most 0 of none. Where all are, without a division.
  int64_t pixels(int64_t n) const { return dilation == 1 ? n : (n + dilation - 1) / dilation; }
};

struct Tiles {
  const Conv& conv;
  const WinogradTransforms& transforms;
  int64_t size, planes;  // of a transformed tile, and of src: elements along an edge, and all
  int64_t matrices;      // of weights, each for one plane or for several that follow each other
  TileAxis down, across;
  int64_t rows, cols, count;
  int64_t ic_blocks;  // those of ic times the filter's depth

  Tiles(const Conv& c, const WinogradTransforms& t);

  // Where a tile is: its image and depth, and its first dst pixel.
  struct Place {
    int64_t n, od, row, col;
  };
  Place place(int64_t tile) const {
    const int64_t image = tile / (rows * cols);
    return {image / conv.od, image % conv.od, down.first(tile / cols % rows), across.first(tile % cols)};
  }
  // The place of the tile after it.
  void advance(Place& at) const {
    if (across.advance(at.col) || down.advance(at.row) || ++at.od < conv.od) return;
    at.od = 0, at.n++;
  }
  // Of its pixels those inside dst, from the first on.
  int64_t rows_inside(const Place& at) const { return down.inside(at.row); }
  int64_t cols_inside(const Place& at) const { return across.inside(at.col); }
  // Floats from the beginning of a tensor laid out as dst to its first pixel, and from one row and column of it to the
  // next.
  int64_t dst_offset(const Place& at, int64_t oc_block) const {
    return at.n * conv.dst_image() + oc_block * conv.dst_block() + at.od * conv.dst_plane() + at.row * conv.dst_row() +
           at.col * conv.block;
  }
  int64_t dst_row() const { return conv.dilation_h * conv.dst_row(); }
  int64_t dst_pixel() const { return conv.dilation_w * conv.block; }

  // Floats from one element of transformed tiles to the next, of `vectors` of them: an odd number of cache lines, so
  // that they do not fall into the same sets of the cache.
  int64_t plane_of(int64_t vectors) const { return ((vectors + 1) | 1) * conv.block; }
  // How many planes a matrix of weights multiplies.
  int64_t sharing(int64_t matrix) const {
    const int64_t last = transforms.wei_size - 1, all = size - last;
    return (matrix / transforms.wei_size == last ? all : 1) * (matrix % transforms.wei_size == last ? all : 1);
  }
  // One tile of one channel block.
  void transform_src(const Place& at, int64_t ic_block, float* dst, int64_t dst_plane) const;
  // Those from `begin` on of channel blocks [ic_begin, ic_end): dst[plane][block][tile].
  void transform_src(int64_t begin, int64_t tiles, int64_t ic_begin, int64_t ic_end, float* dst,
                     int64_t dst_plane) const;
  // And back, of one block of output channels: products[plane][tile].
  void transform_dst(int64_t begin, int64_t tiles, int64_t oc_block, const float* products, int64_t products_plane,
                     bool stream, const PaddedPostOps& post_ops) const;
};

// The algorithm F(m x m, 3 x 3) of these steps, with its estimates.
template <int m>
constexpr Algorithm winograd_algorithm(const char* name, decltype(Algorithm::can) can,
                                       decltype(Algorithm::weights) weights, decltype(Algorithm::run) run,
                                       decltype(Algorithm::pack) pack) {
  return {name, can, weights, run, pack, winograd_seconds<m>, winograd_pack_seconds<m>};
}

// F(4x4, 3x3)'s, of stride 1 and 2.
MemoryDesc winograd_f4_weights(const Conv& conv);
void pack_winograd_f4(const Conv& conv, const MemoryDesc& wanted, float* packed);

// Adds to diff_wei, which lies as conv.wei_md says, the gradient with respect to the weights.
void add_winograd_weight_gradient(const Conv& conv, const WinogradTransforms& transforms, const float* diff_dst,
                                  float* diff_wei);

}  // namespace torch_blocked
