// How a convolution on tiles (amx.cpp) is cut up, for its plan and for its estimate.
#pragma once
#include "../kernels/amx.h"
#include "conv.h"

namespace torch_blocked {

struct AmxWork {
  static constexpr int64_t most_pixels = 256;         // of a tile
  static constexpr int64_t kept_weights = 384 << 10;  // bytes of all parts
  int64_t ic_pairs, taps;                             // pairs of input blocks, and taps of the filter, that are summed
  int64_t oc_blocks, pixels;
  bool split_oc;  // threads share the output channels, not the pixels: each then makes all parts of src, not of the
                  // weights, which are more
  bool keeps_weights;  // whose parts are made once, not for each tile of pixels

  explicit AmxWork(const Conv& c)
      : ic_pairs(((c.ic + c.block - 1) / c.block + 1) / 2),
        taps(c.kd * c.kh * c.kw),
        oc_blocks(c.oc_blocks()),
        pixels(c.n * c.od * c.oh * c.ow),
        split_oc(c.padded_oc() > pixels && oc_blocks >= 2 * c.nthreads),
        keeps_weights(steps() * oc_blocks * amx_wei_block * int64_t(sizeof(Part)) <= kept_weights) {}
  int64_t steps() const { return ic_pairs * taps; }
};

}  // namespace torch_blocked
