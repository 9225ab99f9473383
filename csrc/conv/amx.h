// How a convolution on tiles (amx.cpp) is cut up, for its plan and for its estimate.
#pragma once
#include "../caches.h"
#include "../kernels/amx.h"
#include "conv.h"

namespace torch_blocked {

// The src that the taps of a filter read for some dst rows lies in windows, by phases of its rows and columns (modulo
// the stride), each as wide as dst and what the last tap sees beyond: so a tap reads, for one pixel of dst after the
// other, one pixel of a window after the other, and for the columns beside dst what is not used.
struct AmxWork {
  static constexpr int64_t most_pixels = 256, most_window_pixels = 512;  // of a tile of several rows
  static constexpr int64_t kept_weights = 384 << 10;                     // bytes of all parts
  static constexpr double most_bytes = 32 << 20;  // a thread, of windows and sums: wide rows, dilated filters
  int64_t ic_pairs, planes, taps;  // pairs of input blocks, and planes and taps of the filter, that are summed
  bool windows;                    // else there is one tap, whose src is split as it lies
  int64_t phases;                  // of windows
  int64_t shift_h, shift_w;        // rows and columns of a window beyond those of dst
  int64_t cols, pixels;            // of dst; of windows with the columns beside it
  int64_t oc_blocks;
  int64_t tile_rows;  // of dst, in windows at a time
  int64_t parts;      // that threads share the work in, at most
  bool split_oc;      // threads share the output channels, not the pixels: each then makes all parts of src, not of the
                      // weights, which are more
  bool keeps_weights;  // whose parts are made once, not for each tile of pixels

  explicit AmxWork(const Conv& c)
      : ic_pairs(((c.ic + c.block - 1) / c.block + 1) / 2),
        planes(c.kd),
        taps(c.kd * c.kh * c.kw),
        windows(c.kh * c.kw > 1),
        phases((c.kh > 1 ? c.stride_h : 1) * (c.kw > 1 ? c.stride_w : 1)),
        shift_h((c.kh - 1) * c.dilation_h / c.stride_h),
        shift_w((c.kw - 1) * c.dilation_w / c.stride_w),
        cols(c.ow + (windows ? shift_w : 0)),
        pixels(c.n * c.od * c.oh * cols),
        oc_blocks(c.oc_blocks()),
        split_oc((c.padded_oc() > pixels || (windows && c.n * c.od * c.oh < c.nthreads)) &&
                 oc_blocks >= 2 * c.nthreads),
        keeps_weights(steps() * oc_blocks * amx_wei_block * int64_t(sizeof(Part)) <= kept_weights) {
    tile_rows = 1;
    while (tile_rows < c.oh && (tile_rows + 1) * cols <= most_window_pixels && bytes(tile_rows + 1) <= caches().l2 / 2)
      tile_rows++;
    parts = split_oc ? (oc_blocks + 1) / 2 : windows ? c.n * c.od * c.oh : (pixels + amx_rows - 1) / amx_rows;
  }
  int64_t steps() const { return ic_pairs * taps; }
  // Of all phases, one part of one pair of input blocks.
  int64_t window_pixels(int64_t rows) const { return phases * (rows + shift_h) * cols; }
  // Of all pairs and parts, and of the sums.
  double bytes(int64_t rows) const {
    return double(window_pixels(rows)) * double(planes * ic_pairs * amx_parts * amx_row * int64_t(sizeof(Part))) +
           double(rows * cols * oc_blocks) * amx_rows * sizeof(float);
  }
  bool fits() const { return !windows || bytes(tile_rows) <= most_bytes; }
};

}  // namespace torch_blocked
