#include "batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/batch_norm.h"
#include "parallel.h"

namespace torch_blocked {

constexpr int64_t least_per_thread = 16 << 10;  // floats: below it a second thread costs more than it saves

void batch_norm(const BatchNorm& a) {
  const int64_t blocks = (a.channels + a.block - 1) / a.block, plane = a.pixels * a.block;
  std::vector<float> scale(blocks * a.block, 0.f), shift(blocks * a.block, 0.f);  // zero in the padding: so is dst
  for (int64_t c = 0; c < a.channels; c++) {
    const double weight = (a.weight ? a.weight[c] : 1.) / std::sqrt(a.var[c] + a.eps);
    scale[c] = float(weight);
    shift[c] = float((a.bias ? a.bias[c] : 0.) - a.mean[c] * weight);
  }
  const BatchNormKernels& kernels = TORCH_BLOCKED_KERNELS(batch_norm_kernels, isa());
  const int64_t total = a.n * blocks * a.pixels;
  const int64_t nthreads = std::min(a.nthreads, std::max<int64_t>(1, total * a.block / least_per_thread));
  parallel_for(total, nthreads, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t index = begin / a.pixels, pixel = begin % a.pixels, channel = index % blocks * a.block;
      const int64_t count = std::min(end - begin, a.pixels - pixel), offset = index * plane + pixel * a.block;
      kernels.scale_shift(a.src + offset, &scale[channel], &shift[channel], a.dst + offset, count, a.block);
      begin += count;
    }
  });
}

}  // namespace torch_blocked
