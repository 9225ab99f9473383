// Pooling and up-sampling of blocked images: every channel by itself, dst pixel by pixel.
#pragma once
#include <cstdint>

namespace torch_blocked {

// (n, c_blocks, ih, iw, block); strides of the first four, the block is dense.
struct BlockedImages {
  int64_t n, c_blocks, ih, iw, block;
  int64_t strides[4];
  const float* data;
};

enum class PoolMode { Max, Average };
enum class UpsampleMode { Nearest, NearestExact, Bilinear };

// Windows along one axis. `kernel` 0: adaptive, dst pixel i of n sees [floor(i * size / n), ceil((i + 1) * size / n)).
struct PoolAxis {
  int64_t kernel, stride, padding, dilation;
};

struct Pooling {
  BlockedImages src;
  int64_t channels;  // without padding
  PoolMode mode;
  PoolAxis h, w;
  bool count_include_pad;
  float divisor;  // of averages; 0: the pixels of the window, with padding if it counts
  int64_t oh, ow;
  float* dst;        // dense
  int64_t* indices;  // of maxima, ih * iw < 2^31; null: not wanted
  int64_t nthreads;
};

// dst = the maxima or averages; dst's padding, and that of the indices, is zero.
void pool(const Pooling& args);

struct Upsampling {
  BlockedImages src;
  UpsampleMode mode;
  bool align_corners;
  double scale_h, scale_w;  // of dst to src; not positive: by the sizes
  int64_t oh, ow;
  float* dst;  // dense; its padding is made of src's
  int64_t nthreads;
};
void upsample(const Upsampling& args);

}  // namespace torch_blocked
