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

struct Interpolation {
  UpsampleMode mode;
  bool align_corners;
  double scale_h, scale_w;  // of dst to src; not positive: by the sizes
};

struct Upsampling {
  BlockedImages src;
  Interpolation how;
  int64_t oh, ow;
  float* dst;  // dense; its padding is made of src's
  int64_t nthreads;
};
void upsample(const Upsampling& args);

// ---- The gradients with respect to src: diff_src is dense, its padding is made of diff_dst's

struct MaxPoolBackward {
  int64_t planes, block;   // images times blocks
  int64_t pixels, ih, iw;  // of a plane of diff_dst; the sizes of diff_src
  const float* diff_dst;   // dense
  const int64_t* indices;  // laid out as diff_dst, h * iw + w; what is outside the plane is not added
  float* diff_src;
  int64_t nthreads;
};
void max_pool_backward(const MaxPoolBackward& args);

struct AveragePoolBackward {
  BlockedImages diff_dst;
  PoolAxis h, w;  // without dilation
  bool count_include_pad;
  float divisor;  // as that of `Pooling`
  int64_t ih, iw;
  float* diff_src;
  int64_t nthreads;
};
void average_pool_backward(const AveragePoolBackward& args);

struct UpsampleBackward {
  BlockedImages diff_dst;
  Interpolation how;
  int64_t ih, iw;
  float* diff_src;
  int64_t nthreads;
};
void upsample_backward(const UpsampleBackward& args);

}  // namespace torch_blocked
