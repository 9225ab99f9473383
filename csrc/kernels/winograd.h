// Winograd's transforms F(m x m, 3 x 3) for m = 2 and 4 (Lavin and Gray, "Fast Algorithms for Convolutional Neural
// Networks", arXiv:1509.09308): a tile of (m + 2) x (m + 2) src pixels gives m x m dst pixels by (m + 2)^2
// multiplications instead of 9 m^2, and as many give what it adds to the gradient with respect to the nine weights.
// Of a dilated filter the pixels of both are a dilation apart.
// Of stride 2 the outer taps of a row of the filter read the even pixels of src, the middle one the odd: F(m, 2), of
// m + 1 multiplications, and m as they are, so (2 m + 1)^2 for a tile of as many pixels: 25 instead of 36, 81 of 144.
// Each transform works on all channels of one block at a time, one table per ISA tier.
#pragma once
#include <cstdint>

#include "../isa.h"
#include "conv.h"
#include "depthwise.h"

namespace torch_blocked {

// The pixels of a tile that lie inside src: rows [row_begin, row_end) and columns likewise. The others are zero.
struct TilePart {
  int64_t row_begin, row_end, col_begin, col_end;
};

// The elements of a transformed tile lie `plane` floats apart, size^2 of them, for as many pixels of src. They are in
// the order of the weights that multiply them, wei_size^2 vectors: row-major where these are as many. Otherwise the
// last row and column of the weights multiply all rows and columns from there on, and what one vector of weights
// multiplies is row-major.
struct WinogradTransforms {
  int64_t m, size, wei_size;
  // Pixels of a block, the tile's rows src_row and its columns src_pixel floats apart.
  void (*src)(const float* src, int64_t src_row, int64_t src_pixel, float* dst, int64_t dst_plane);
  // The same where only a part of them is there; src is the tile's first pixel, wherever that lies.
  void (*src_part)(const float* src, int64_t src_row, int64_t src_pixel, const TilePart& part, float* dst,
                   int64_t dst_plane);
  // The first `rows` x `cols` pixels of the tile, after the epilogue (of one block of output channels). `stream` as in
  // ConvArgs.
  void (*dst)(const float* src, int64_t src_plane, float* dst, int64_t dst_row, int64_t dst_pixel, int64_t rows,
              int64_t cols, bool stream, const Epilogue& epilogue);
  // Nine taps of a vector of output channels, wei_tap floats apart.
  void (*wei)(const float* wei, int64_t wei_tap, float* dst, int64_t dst_plane);
  // The transposes of the last two, of stride 1: the m x m pixels of a tile of diff_dst, its rows diff_row and
  // its columns diff_pixel floats apart, and what is added to nine taps of a vector of output channels.
  void (*diff_dst)(const float* diff, int64_t diff_row, int64_t diff_pixel, float* dst, int64_t dst_plane);
  void (*diff_wei)(const float* src, int64_t src_plane, float* diff_wei, int64_t wei_tap);
};

// The same in one dimension, F(m, taps): m pixels of a row by size = m + taps - 1 multiplications instead of m * taps.
struct WinogradRowTransforms {
  int64_t m, taps, size;
  // dst[p * dst_phase + j] = src[j * phases + p] for `cols` j and all phases p; whole vectors are read and written.
  void (*sort_columns)(const float* src, int64_t phases, int64_t cols, float* dst, int64_t dst_phase);
  // Element j of tile t is src[columns[j] + t], and of dst dst[j * dst_plane + t]. Whole vectors of tiles are read and
  // written.
  void (*src)(const float* src, const int64_t* columns, int64_t tiles, float* dst, int64_t dst_plane);
  // `cols` pixels of a row of dst, of one block of output channels, after the epilogue. Element j of tile t is a vector
  // at src[j * src_plane + t * block]. `stream` as in ConvArgs.
  void (*dst)(const float* src, int64_t src_plane, float* dst, int64_t cols, bool stream, const Epilogue& epilogue);
  // `count` taps, at most `taps`, of a vector of output channels, wei_tap floats apart.
  void (*wei)(const float* wei, int64_t wei_tap, int64_t count, float* dst, int64_t dst_plane);
};

// The products of transformed tiles and weights over few input channels, all elements of a tile in one call: src
// element (plane, ic block k, tile t, lane i) is src[plane * src_plane + k * src_block + t * block + i], and dst
// likewise by blocks of output channels; the weights of a plane are dense, wei[wei_planes[plane] + oc block * wei_block
// + (k, i, output channel)].
struct WinogradProducts {
  const float* src;
  int64_t src_plane, src_block;
  const float* wei;
  const int64_t* wei_planes;
  int64_t wei_block;
  float* dst;  // may be src where there is one call for all blocks of both
  int64_t dst_plane, dst_block;
  int64_t planes, ic_blocks;
  int64_t sum_blocks;  // as in ConvArgs
  // Where several groups share a block of channels, one for each channel of a group: a block of input channels has as
  // many vectors of weights, (k, map, output channel), and each multiplies the src lanes that its map names.
  const LaneMap* maps;
  int64_t nmaps;
};
using WinogradMultiply = void (*)(const WinogradProducts&);
constexpr int winograd_max_tiles = 16;

// The same of F(4x4, 3x3), one block of output channels and few tiles, with weights as they are, nine taps of a block
// of input channels after the other: they are transformed in registers, next to which all sums of a row of a tile's
// elements stay. So a quarter of what the transformed weights would be is read.
struct WinogradUnpackedProducts {
  const float* src;
  int64_t src_plane, src_block;
  const float* wei;
  float* dst;
  int64_t dst_plane;
  int64_t ic_blocks;
};
using WinogradUnpackedMultiply = void (*)(const WinogradUnpackedProducts&);
constexpr int winograd_max_unpacked_tiles = 4;

struct WinogradKernels {
  int64_t block;
  WinogradTransforms f2[2], f4[2];  // [stride - 1]
  // Of one and two blocks of output channels: the most tiles of a call, [tiles - 1].
  int64_t most_tiles[2];
  WinogradMultiply multiply[2][winograd_max_tiles];
  // Of one block that several groups share, and of one that two do.
  WinogradMultiply multiply_lanes[winograd_max_tiles], multiply_halves[winograd_max_tiles];
  int64_t most_unpacked_tiles;
  WinogradUnpackedMultiply multiply_unpacked[winograd_max_unpacked_tiles];  // [tiles - 1]
  WinogradRowTransforms rows[2];                                            // F(4, 3) and F(4, 4)
};
TORCH_BLOCKED_DECLARE_KERNELS(WinogradKernels, winograd_kernels);

}  // namespace torch_blocked
