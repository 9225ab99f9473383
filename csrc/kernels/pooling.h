// The inner loops of pooling and up-sampling, one table per ISA tier: one row of dst, all pixels of one block of
// channels.
#pragma once
#include <cstdint>

#include "../isa.h"

namespace torch_blocked {

// What one pixel of dst sees of src along one axis: pixels begin, begin + dilation, ..., `taps` of them, all in src.
struct Window {
  int64_t begin, taps;
  int64_t count;  // factor of an average's divisor, at least 1
};

// The two pixels of src that one of dst lies between along one axis; without interpolation the first alone.
struct Neighbors {
  int64_t low, high;
  float weight;  // of `high`; that of `low` is 1 - weight
};

// One block of channels of one image: pixel (h, w) is at data[h * row + w * pixel].
struct Plane {
  const float* data;
  int64_t row, pixel, block;
};

struct PoolRow {
  Plane src;
  int64_t iw;
  int64_t dilation_h, dilation_w;
  Window window;          // along h
  const Window* windows;  // along w, one a pixel of dst
  int64_t ow;
  const float* ahead;   // what the next row reads anew, fetched meanwhile
  int64_t ahead_lines;  // cache lines of it for each pixel of dst
  float divisor;        // of averages; 0: the product of the windows' counts
  float* dst;           // dense
  bool stream;          // past the caches, where a vector holds a block: dst is aligned to 64 bytes
  int64_t* indices;     // of maxima within the plane, h * iw + w, laid out as dst
};

struct UpsampleRow {
  Plane src;
  Neighbors neighbors;            // along h
  const Neighbors* neighbors_of;  // along w, one a pixel of dst
  int64_t ow;
  float* dst;  // dense
  bool stream;
};

// The pixels of diff_dst, `count` of them from `begin` on, that one of diff_src has a share in along one axis.
struct Shares {
  int64_t begin, count;
  const float* weights;  // one a pixel of diff_dst
};

struct ShareRow {
  Plane diff_dst;
  Shares rows;         // along h
  const Shares* cols;  // along w, one a pixel of diff_src
  int64_t iw;
  float* diff_src;  // dense
  bool stream;
};

struct PoolingKernels {
  void (*max)(const PoolRow& row);  // writes no indices
  void (*max_with_indices)(const PoolRow& row);
  void (*average)(const PoolRow& row);
  void (*nearest)(const UpsampleRow& row);
  void (*bilinear)(const UpsampleRow& row);
  void (*add_shares)(const ShareRow& row);
};
TORCH_BLOCKED_DECLARE_KERNELS(PoolingKernels, pooling_kernels);

}  // namespace torch_blocked
