// The convolution of a src whose channels are scaled, as squeeze and excitation does: image by image, the weights times
// the factors, which are fewer numbers than src where that is large.
#include <algorithm>

#include "../parallel.h"
#include "conv.h"

namespace torch_blocked {

static void scale_weights(const Conv& c, const float* factors, float* scaled) {
  constexpr int64_t least = int64_t(1) << 13;  // numbers that are worth a thread
  const int64_t ic_blocks = c.group_ic_blocks() / c.kd, taps = c.kd * c.kh * c.kw, matrix = c.block * c.block;
  const int64_t n = c.oc_blocks() * ic_blocks, nthreads = std::clamp<int64_t>(n * taps * matrix / least, 1, c.nthreads);
  parallel_for(n, nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin * taps; k < end * taps; k++) {
      const float* const factors_of_block = factors + k / taps % ic_blocks * c.block;
      for (int64_t i = 0; i < c.block; i++) {
        const float factor = factors_of_block[i];
        const float* const from = c.wei + k * matrix + i * c.block;
        float* const __restrict to = scaled + k * matrix + i * c.block;
        for (int64_t o = 0; o < c.block; o++) to[o] = from[o] * factor;
      }
    }
  });
}

void convolve_scaled(const Conv& conv, const float* src_scale) {
  const PooledBuffer scaled(elements(conv.wei_md));
  for (int64_t n = 0; n < conv.n; n++) {
    scale_weights(conv, src_scale + n * conv.src_md.outer(1) * conv.block, scaled.data());
    Conv image = conv.images(n, 1);
    image.wei = scaled.data();
    convolve(image, nullptr);
  }
}

}  // namespace torch_blocked
