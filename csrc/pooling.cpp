#include "pooling.h"

#include <algorithm>
#include <vector>

#include "kernels/pooling.h"
#include "parallel.h"

namespace torch_blocked {
namespace {

constexpr int64_t least_per_thread = 16 << 10;  // floats: below it a second thread costs more than it saves

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- what one pixel of dst sees

Window adaptive_window(int64_t size, int64_t dst_size, int64_t i) {
  const int64_t begin = i * size / dst_size, end = ceil_div((i + 1) * size, dst_size);
  return {begin, end - begin, end - begin};
}

Window window(const PoolAxis& axis, int64_t size, int64_t i, bool count_include_pad) {
  const int64_t begin = i * axis.stride - axis.padding, end = begin + (axis.kernel - 1) * axis.dilation + 1;
  const int64_t skipped = begin < 0 ? ceil_div(-begin, axis.dilation) : 0;
  const int64_t first = std::min(begin + skipped * axis.dilation, size + axis.dilation);
  const int64_t taps = ceil_div(std::max<int64_t>(0, std::min(end, size) - first), axis.dilation);
  const int64_t count = count_include_pad ? std::min(end, size + axis.padding) - begin : taps;
  return {first, taps, std::max<int64_t>(1, count)};
}

std::vector<Window> windows(const PoolAxis& axis, int64_t size, int64_t dst_size, bool count_include_pad) {
  std::vector<Window> all(dst_size);
  for (int64_t i = 0; i < dst_size; i++)
    all[i] = axis.kernel ? window(axis, size, i, count_include_pad) : adaptive_window(size, dst_size, i);
  return all;
}

// The pixel that holds the point `at`, not negative; the last one where that is NaN or beyond.
int64_t pixel_at(float at, int64_t size) { return at < double(size) ? int64_t(at) : size - 1; }

// As PyTorch computes it, in float: at a border between two pixels rounding decides.
int64_t nearest(float scale, int64_t size, int64_t dst_size, int64_t i, bool exact) {
  if (!exact && dst_size == size) return i;
  if (!exact && dst_size == 2 * size) return i / 2;
  return pixel_at(exact ? float((i + 0.5) * scale) : i * scale, size);
}

Neighbors linear(float scale, int64_t size, int64_t dst_size, int64_t i, bool align_corners) {
  if (dst_size == size) return {i, i, 0};
  const float at = align_corners ? scale * i : std::max(0.f, scale * (i + 0.5f) - 0.5f);
  const int64_t low = pixel_at(at, size);
  return {low, std::min(low + 1, size - 1), std::clamp(at - low, 0.f, 1.f)};
}

float src_pixels_a_pixel(const Upsampling& a, double scale, int64_t size, int64_t dst_size) {
  if (a.mode == UpsampleMode::Bilinear && a.align_corners) return dst_size > 1 ? float(size - 1) / (dst_size - 1) : 0.f;
  return scale > 0 ? float(1 / scale) : float(size) / dst_size;
}

std::vector<Neighbors> neighbors(const Upsampling& a, double factor, int64_t size, int64_t dst_size) {
  const float scale = src_pixels_a_pixel(a, factor, size, dst_size);
  std::vector<Neighbors> all(dst_size);
  for (int64_t i = 0; i < dst_size; i++)
    if (a.mode == UpsampleMode::Bilinear)
      all[i] = linear(scale, size, dst_size, i, a.align_corners);
    else
      all[i].low = nearest(scale, size, dst_size, i, a.mode == UpsampleMode::NearestExact);
  return all;
}

// ---- loops

// Calls row(plane of src, block of channels, row h of dst, offset in dst) for every row of dst, shared among threads.
template <class Row>
void for_each_row(const BlockedImages& src, int64_t oh, int64_t ow, int64_t nthreads, const Row& row) {
  const int64_t planes = src.n * src.c_blocks;
  const int64_t floats = planes * src.block * std::max(src.ih * src.iw, oh * ow);
  nthreads = std::min(nthreads, std::max<int64_t>(1, floats / least_per_thread));
  parallel_for(planes * oh, nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t plane = i / oh, n = plane / src.c_blocks, c = plane % src.c_blocks;
      const float* const data = src.data + n * src.strides[0] + c * src.strides[1];
      row(Plane{data, src.strides[2], src.strides[3], src.block}, c, i % oh, i * ow * src.block);
    }
  });
}

// Zeroes the channels from `begin` on of a row of pixels.
template <class T>
void clear_channels(T* row, int64_t pixels, int64_t block, int64_t begin) {
  for (int64_t j = 0; j < pixels; j++) std::fill(row + j * block + begin, row + (j + 1) * block, T(0));
}

}  // namespace

void pool(const Pooling& a) {
  const BlockedImages& src = a.src;
  const std::vector<Window> rows = windows(a.h, src.ih, a.oh, a.count_include_pad);
  const std::vector<Window> cols = windows(a.w, src.iw, a.ow, a.count_include_pad);
  const PoolingKernels& kernels = TORCH_BLOCKED_KERNELS(pooling_kernels, isa());
  const auto kernel = a.mode == PoolMode::Average ? kernels.average
                      : a.indices                 ? kernels.max_with_indices
                                                  : kernels.max;
  for_each_row(src, a.oh, a.ow, a.nthreads, [&](const Plane& plane, int64_t c, int64_t h, int64_t offset) {
    float* const dst = a.dst + offset;
    int64_t* const indices = a.indices ? a.indices + offset : nullptr;
    kernel({plane, src.iw, a.h.dilation, a.w.dilation, rows[h], cols.data(), a.ow, a.divisor, dst, indices});
    // The maximum of nothing is -inf, that of zeros is at some index.
    const int64_t real = a.channels - c * src.block;
    if (a.mode == PoolMode::Average || real >= src.block) return;
    clear_channels(dst, a.ow, src.block, real);
    if (indices) clear_channels(indices, a.ow, src.block, real);
  });
}

void upsample(const Upsampling& a) {
  const std::vector<Neighbors> rows = neighbors(a, a.scale_h, a.src.ih, a.oh);
  const std::vector<Neighbors> cols = neighbors(a, a.scale_w, a.src.iw, a.ow);
  const PoolingKernels& kernels = TORCH_BLOCKED_KERNELS(pooling_kernels, isa());
  const auto kernel = a.mode == UpsampleMode::Bilinear ? kernels.bilinear : kernels.nearest;
  for_each_row(a.src, a.oh, a.ow, a.nthreads, [&](const Plane& plane, int64_t, int64_t h, int64_t offset) {
    kernel({plane, rows[h], cols.data(), a.ow, a.dst + offset});
  });
}

}  // namespace torch_blocked
