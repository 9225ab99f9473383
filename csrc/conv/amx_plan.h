// What a convolution on tiles (amx.cpp) does in which order, and where its src, weights and sums lie in scratch.
#pragma once
#include <algorithm>
#include <vector>

#include "amx.h"
#include "amx_tiles.h"

namespace torch_blocked {

struct PixelRange {
  int64_t begin, end;
};

// Floats that hold so many tiles of parts.
constexpr int64_t amx_floats(int64_t tiles) {
  return tiles * amx_wei_block * int64_t(sizeof(Part)) / int64_t(sizeof(float));
}

struct AmxPlan : AmxWork {
  const Conv& conv;
  const AmxKernels& kernels;
  PaddedPostOps post_ops;
  int64_t rows;  // of dst, in all images; a plane is one row where src is one, too, and each pixel reads its own
  // Of the filter and a pair of input blocks.
  struct Step {
    int64_t pair, kd;
    bool has_second;  // block of the pair
    int64_t wei;      // where its weights begin, in those of an output block
  };
  std::vector<Step> step_list;
  std::vector<int64_t> src_steps;  // where the src of each begins in scratch
  int64_t src_part, src_piece;  // from one part of it to the next, and for as many pixels as a call of a kernel takes
  int64_t chunk;                // steps of a call, whose src is in scratch
  int64_t unit, tile;           // pixels of dst that are shared among threads as one; and most of a tile
  bool stream;
  bool one_image;  // dst's pixels of an image lie one behind the other, in a cache

  explicit AmxPlan(const Conv& c);
  int64_t units() const { return (pixels + unit - 1) / unit; }
  bool is_one_chunk() const { return chunk == steps(); }

  // All windows, with what is read behind the last; else, as of the weights, what is multiplied and what is split
  // meanwhile.
  int64_t src_floats() const {
    if (!windows) return 2 * chunk * amx_floats(tile / amx_rows);
    return (ic_pairs * conv.kd * amx_parts * src_part + (shift_w + amx_pixels) * amx_row) / 2;
  }
  int64_t wei_floats() const {
    return amx_floats(keeps_weights ? steps() * (oc_blocks + oc_blocks % 2) : 2 * chunk * amx_most_blocks);
  }
  int64_t sums_block() const { return tile * conv.block; }
  // Of the tile's sums: whole ones, and a part.
  int64_t whole_sums_floats() const { return (is_one_chunk() ? amx_most_blocks : oc_blocks) * sums_block(); }
  int64_t sums_floats() const { return whole_sums_floats() + amx_most_blocks * sums_block(); }

  bool has_second(int64_t pair) const { return 2 * pair + 1 < (conv.ic + conv.block - 1) / conv.block; }
  int64_t wei_ic_block() const { return conv.kh * conv.kw * conv.block * conv.block; }
  void list_steps();

  // Calls body(row, first column, columns, pixels before it) for each row of dst in pixels [begin, end).
  template <class Body>
  void for_each_row(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t at = begin, count; at < end; at += count) {
      const int64_t row = at / cols, col = at % cols;
      count = std::min(cols - col, end - at);
      body(row, col, count, at - begin);
    }
  }
  const float* src_row(int64_t plane, int64_t pair, int64_t kd, int64_t ih) const;
  int64_t dst_offset(int64_t row, int64_t col, int64_t oc_block) const;
};

}  // namespace torch_blocked
