#include "batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/batch_norm.h"
#include "parallel.h"
#include "scratch.h"

namespace torch_blocked {
namespace {

constexpr int64_t chunk_pixels = 128;  // summed in float; chunks are added in double
// Floats of a chunk, where it is widened.
int64_t chunk_size(const BlockedShape& s) { return std::min(chunk_pixels, s.pixels) * s.block; }

const BatchNormKernels& kernels() { return TORCH_BLOCKED_KERNELS(batch_norm_kernels, isa()); }

// Calls body(offset, first channel, pixels) on runs of pixels of one image and block, at most a chunk.
template <class Body>
void each_run(const BlockedShape& s, const Body& body) {
  const int64_t plane = s.pixels * s.block;
  parallel_for(s.n * s.blocks() * s.pixels, s.threads(), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t index = begin / s.pixels, pixel = begin % s.pixels;
      const int64_t count = std::min({end - begin, s.pixels - pixel, chunk_pixels});
      body(index * plane + pixel * s.block, index % s.blocks() * s.block, count);
      begin += count;
    }
  });
}

// Calls body(offset, plane, pixels) on chunks of the planes (images times blocks), in order within a plane: each plane
// is one thread's, so that sums do not depend on their number.
template <class Body>
void each_chunk(const BlockedShape& s, const Body& body) {
  parallel_for(s.n * s.blocks(), s.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++)
      for (int64_t pixel = 0; pixel < s.pixels; pixel += chunk_pixels)
        body((plane * s.pixels + pixel) * s.block, plane, std::min(chunk_pixels, s.pixels - pixel));
  });
}

// Of `count` numbers: their mean and the sum of the squares of what they differ from it.
struct Spread {
  double count = 0, mean = 0, squares = 0;

  // Both sets together (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample
  // Variances, 1979).
  void add(const Spread& other) {
    if (other.count == 0) return;
    const double both = count + other.count, apart = other.mean - mean;
    squares += other.squares + apart * apart * count * other.count / both;
    mean = (mean * count + other.mean * other.count) / both;  // not by `apart`: infinities stay infinite
    count = both;
  }
};

}  // namespace

void batch_norm_scale_shift(const BatchNormParameters& p, int64_t channels, float* scale, float* shift) {
  for (int64_t c = 0; c < channels; c++) {
    const double weight = (p.weight ? p.weight[c] : 1.) / std::sqrt(p.var[c] + p.eps);
    scale[c] = float(weight);
    shift[c] = float((p.bias ? p.bias[c] : 0.) - p.mean[c] * weight);
  }
}

void batch_norm(const BlockedShape& s, const BatchNormParameters& p, const Values& src, const Results& dst) {
  std::vector<float> scale(s.blocks() * s.block, 0.f), shift(scale);  // zero in the padding: so is dst
  batch_norm_scale_shift(p, s.channels, scale.data(), shift.data());
  each_run(s, [&](int64_t offset, int64_t channel, int64_t pixels) {
    const int64_t count = pixels * s.block;
    float* const scratch = Scratch::get(chunk_size(s));
    float* const to = dst.place(offset, scratch);  // the kernel reads a vector before it writes it
    kernels().scale_shift(src.read(offset, count, scratch), &scale[channel], &shift[channel], to, pixels, s.block);
    dst.finish(offset, count, to);
  });
}

void batch_norm_statistics(const BlockedShape& s, const Values& given, float* mean, float* var) {
  std::vector<Spread> planes(s.n * s.blocks() * s.block);
  each_chunk(s, [&](int64_t offset, int64_t plane, int64_t pixels) {
    float *const sums = Scratch::get(3 * s.block + chunk_size(s)), *const center = sums + 2 * s.block;
    const float* const src = given.read(offset, pixels * s.block, center + s.block);
    // Centered on one of them, which is near their mean where that is large.
    for (int64_t i = 0; i < s.block; i++) center[i] = std::isfinite(src[i]) ? src[i] : 0.f;
    kernels().moments(src, center, sums, pixels, s.block);
    for (int64_t i = 0; i < s.block; i++) {
      const double n = double(pixels), sum = sums[i], squares = sums[s.block + i] - sum * sum / n;
      planes[plane * s.block + i].add({n, center[i] + sum / n, squares < 0 ? 0 : squares});  // NaN stays
    }
  });
  for (int64_t c = 0; c < s.channels; c++) {
    Spread all;
    for (int64_t n = 0; n < s.n; n++) all.add(planes[n * s.blocks() * s.block + c]);
    mean[c] = float(all.mean);
    var[c] = float(all.squares / all.count);
  }
}

void batch_norm_backward(const BlockedShape& s, const float* weight, const float* mean, const float* invstd,
                         bool training, const Values& diff_dst, const Values& src, const Results& diff_src,
                         float* diff_weight, float* diff_bias) {
  const std::vector<float> means = padded(s, mean);
  std::vector<double> planes(s.n * s.blocks() * s.block * 2);
  each_chunk(s, [&](int64_t offset, int64_t plane, int64_t pixels) {
    float* const sums = Scratch::get(2 * s.block + 2 * chunk_size(s));
    float* const scratch = sums + 2 * s.block;
    const float* const diffs = diff_dst.read(offset, pixels * s.block, scratch);
    const float* const values = src.read(offset, pixels * s.block, scratch + chunk_size(s));
    kernels().gradient_sums(diffs, values, &means[plane % s.blocks() * s.block], sums, pixels, s.block);
    for (int64_t i = 0; i < 2 * s.block; i++) planes[plane * 2 * s.block + i] += sums[i];
  });
  std::vector<float> scale(s.blocks() * s.block, 0.f), slope(scale), shift(scale);
  for (int64_t c = 0; c < s.channels; c++) {
    double sum = 0, products = 0;
    for (int64_t n = 0; n < s.n; n++) {
      const double* const sums = &planes[(n * s.blocks() + c / s.block) * 2 * s.block + c % s.block];
      sum += sums[0];
      products += sums[s.block];
    }
    const double inverse = invstd[c], factor = (weight ? weight[c] : 1.) * inverse, count = double(s.n * s.pixels);
    scale[c] = float(factor);
    if (training) {
      slope[c] = float(-factor * inverse * inverse * products / count);
      shift[c] = float(-factor * sum / count);
    }
    diff_weight[c] = float(products * inverse);
    diff_bias[c] = float(sum);
  }
  each_run(s, [&](int64_t offset, int64_t channel, int64_t pixels) {
    const int64_t count = pixels * s.block;
    float* const scratch = Scratch::get(2 * chunk_size(s));
    float* const to = diff_src.place(offset, scratch);
    if (!training) {  // not by a slope of 0: of an infinite src that would be NaN
      const float* const diffs = diff_dst.read(offset, count, scratch);
      kernels().scale_shift(diffs, &scale[channel], &shift[channel], to, pixels, s.block);
      return diff_src.finish(offset, count, to);
    }
    kernels().gradient(diff_dst.read(offset, count, scratch), src.read(offset, count, scratch + chunk_size(s)),
                       &scale[channel], &means[channel], &slope[channel], &shift[channel], to, pixels, s.block);
    diff_src.finish(offset, count, to);
  });
}

}  // namespace torch_blocked
