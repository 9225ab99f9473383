#include "pooling.h"

#include <algorithm>
#include <vector>

#include "kernels/pooling.h"
#include "parallel.h"
#include "streaming.h"

namespace torch_blocked {
namespace {

constexpr int64_t most_fetched = 64;  // cache lines beside a pixel of dst: more do not stay in L1

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

// As PyTorch computes it, in float: at a border between two pixels rounding decides. Where it `ignores_scales`, those
// of a size that stays or doubles do not count.
int64_t nearest(float scale, int64_t size, int64_t dst_size, int64_t i, bool exact, bool ignores_scales) {
  if (!exact && ignores_scales && dst_size == size) return i;
  if (!exact && ignores_scales && dst_size == 2 * size) return i / 2;
  return pixel_at(exact ? float((i + 0.5) * scale) : i * scale, size);
}

Neighbors linear(float scale, int64_t size, int64_t dst_size, int64_t i, bool align_corners) {
  if (dst_size == size) return {i, i, 0};
  const float at = align_corners ? scale * i : std::max(0.f, scale * (i + 0.5f) - 0.5f);
  const int64_t low = pixel_at(at, size);
  return {low, std::min(low + 1, size - 1), std::clamp(at - low, 0.f, 1.f)};
}

float src_pixels_a_pixel(const Interpolation& a, double scale, int64_t size, int64_t dst_size) {
  if (a.mode == UpsampleMode::Bilinear && a.align_corners) return dst_size > 1 ? float(size - 1) / (dst_size - 1) : 0.f;
  return scale > 0 ? float(1 / scale) : float(size) / dst_size;
}

std::vector<Neighbors> neighbors(const Interpolation& a, double factor, int64_t size, int64_t dst_size,
                                 bool ignores_scales) {
  const float scale = src_pixels_a_pixel(a, factor, size, dst_size);
  std::vector<Neighbors> all(dst_size);
  for (int64_t i = 0; i < dst_size; i++)
    if (a.mode == UpsampleMode::Bilinear) {
      all[i] = linear(scale, size, dst_size, i, a.align_corners);
    } else {
      const int64_t at = nearest(scale, size, dst_size, i, a.mode == UpsampleMode::NearestExact, ignores_scales);
      all[i] = {at, at, 0};
    }
  return all;
}

// ---- the way back: what one pixel of src has a share in

// `shares` of every pixel of src; the weights that they point at are kept beside them.
struct AxisShares {
  std::vector<Shares> shares;
  std::vector<float> weights;
};

// Pixel i of dst sees this one: what sees it are neighbours, since windows only move forward.
void add_share(Shares& shares, int64_t i) {
  if (!shares.count) shares.begin = i;
  shares.count = i + 1 - shares.begin;
}

AxisShares shares_of_windows(const std::vector<Window>& windows, int64_t size, float factor, bool by_count) {
  AxisShares axis{std::vector<Shares>(size), std::vector<float>(windows.size(), factor)};
  for (size_t i = 0; i < windows.size(); i++) {
    if (by_count) axis.weights[i] /= float(windows[i].count);
    for (int64_t j = 0; j < windows[i].taps; j++) add_share(axis.shares[windows[i].begin + j], i);
  }
  for (Shares& shares : axis.shares) shares.weights = axis.weights.data() + shares.begin;
  return axis;
}

AxisShares shares_of_neighbors(const std::vector<Neighbors>& neighbors, int64_t size) {
  AxisShares axis{std::vector<Shares>(size), {}};
  for (size_t i = 0; i < neighbors.size(); i++)
    for (const int64_t j : {neighbors[i].low, neighbors[i].high}) add_share(axis.shares[j], i);
  for (int64_t j = 0; j < size; j++)
    for (int64_t i = axis.shares[j].begin; i < axis.shares[j].begin + axis.shares[j].count; i++) {
      const Neighbors& n = neighbors[i];
      axis.weights.push_back((n.low == j ? 1 - n.weight : 0.f) + (n.high == j ? n.weight : 0.f));
    }
  const float* weights = axis.weights.data();
  for (Shares& shares : axis.shares) shares.weights = weights, weights += shares.count;
  return axis;
}

// ---- loops

// Where a row of dst is: image after image, of each one band of rows after the other, of all blocks of channels.
struct RowPlace {
  int64_t c_blocks, oh, band_rows;
  int64_t n, first, c, h;  // image, the band's first row, block of channels, row

  RowPlace(int64_t index, int64_t c_blocks, int64_t oh, int64_t bands)
      : c_blocks(c_blocks), oh(oh), band_rows(ceil_div(oh, bands)), n(index / (c_blocks * oh)) {
    const int64_t of_image = index % (c_blocks * oh);
    first = of_image / (c_blocks * band_rows) * band_rows;
    const int64_t rows = std::min(band_rows, oh - first), of_band = of_image - first * c_blocks;
    c = of_band / rows, h = first + of_band % rows;
  }

  void next() {
    if (++h < std::min(oh, first + band_rows)) return;
    if (++c == c_blocks) {
      c = 0, first += band_rows;
      if (first >= oh) first = 0, n++;
    }
    h = first;
  }
};

// Calls row(plane of src, block of channels, row h of dst, offset in dst, whether to stream it) for every row of dst,
// shared among threads.
template <class Row>
void for_each_row(const BlockedImages& src, int64_t oh, int64_t ow, const float* dst, int64_t nthreads, int64_t bands,
                  const Row& row) {
  const int64_t planes = src.n * src.c_blocks;
  const int64_t bytes = planes * src.block * (src.ih * src.iw + oh * ow) * sizeof(float);
  const bool stream = outgrows_caches(bytes, little_work_cache_room) && is_streamable(dst);
  const int64_t floats = planes * src.block * std::max(src.ih * src.iw, oh * ow);
  nthreads = threads_for(floats, nthreads);
  parallel_for(planes * oh, nthreads, [&](int64_t begin, int64_t end) {
    RowPlace at(begin, src.c_blocks, oh, bands);
    for (int64_t i = begin; i < end; i++, at.next()) {
      const float* const data = src.data + at.n * src.strides[0] + at.c * src.strides[1];
      const int64_t offset = ((at.n * src.c_blocks + at.c) * oh + at.h) * ow * src.block;
      row(Plane{data, src.strides[2], src.strides[3], src.block}, at.c, at.h, offset, stream);
    }
    if (stream) finish_streams();
  });
}

// diff_src from what its pixels have a share in.
void add_shares(const BlockedImages& diff_dst, const AxisShares& h, const AxisShares& w, float* diff_src,
                int64_t nthreads) {
  const int64_t ih = h.shares.size(), iw = w.shares.size();
  const PoolingKernels& kernels = TORCH_BLOCKED_KERNELS(pooling_kernels, isa());
  const auto add = [&](const Plane& plane, int64_t, int64_t row, int64_t offset, bool stream) {
    kernels.add_shares({plane, h.shares[row], w.shares.data(), iw, diff_src + offset, stream});
  };
  for_each_row(diff_dst, ih, iw, diff_src, nthreads, 1, add);
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
  // Of what a row reads, about.
  const auto end = [&](int64_t h) { return std::min(src.ih, rows[h].begin + rows[h].taps * a.h.dilation); };
  const auto denormals = a.mode == PoolMode::Average ? Denormals::Flushed : Denormals::Kept;
  const auto pool_row = [&](const Plane& plane, int64_t c, int64_t h, int64_t offset, bool stream) {
    const Denormals here(denormals);
    const int64_t ahead_rows = h + 1 < a.oh ? end(h + 1) - end(h) : end(0);  // the last one: of the next plane
    const int64_t ahead_lines = ceil_div(ahead_rows * src.iw * src.block * int64_t(sizeof(float)), a.ow * 64);
    float* const dst = a.dst + offset;
    int64_t* const indices = a.indices ? a.indices + offset : nullptr;
    const int64_t real = a.channels - c * src.block;
    stream = stream && real >= src.block;
    kernel({plane, src.iw, a.h.dilation, a.w.dilation, rows[h], cols.data(), a.ow, plane.data + end(h) * plane.row,
            std::min(ahead_lines, most_fetched), a.divisor, dst, stream, indices});
    // The maximum of nothing is -inf, that of zeros is at some index.
    if (a.mode == PoolMode::Average || real >= src.block) return;
    clear_channels(dst, a.ow, src.block, real);
    if (indices) clear_channels(indices, a.ow, src.block, real);
  };
  // Of a few large images each thread takes the rows that it has of a convolution's dst: what another core wrote is
  // slow to read, slower where the two share no cache.
  const bool by_rows = src.n < a.nthreads && src.ih * src.iw >= a.channels;
  for_each_row(src, a.oh, a.ow, a.dst, a.nthreads, by_rows ? std::clamp<int64_t>(a.oh, 1, a.nthreads) : 1, pool_row);
}

void upsample(const Upsampling& a) {
  const bool ignores_scales = a.oh + a.ow <= 128;  // of larger images PyTorch has another kernel
  const std::vector<Neighbors> rows = neighbors(a.how, a.how.scale_h, a.src.ih, a.oh, ignores_scales);
  const std::vector<Neighbors> cols = neighbors(a.how, a.how.scale_w, a.src.iw, a.ow, ignores_scales);
  const PoolingKernels& kernels = TORCH_BLOCKED_KERNELS(pooling_kernels, isa());
  const auto kernel = a.how.mode == UpsampleMode::Bilinear ? kernels.bilinear : kernels.nearest;
  const auto upsample_row = [&](const Plane& plane, int64_t, int64_t h, int64_t offset, bool stream) {
    kernel({plane, rows[h], cols.data(), a.ow, a.dst + offset, stream});
  };
  for_each_row(a.src, a.oh, a.ow, a.dst, a.nthreads, 1, upsample_row);
}

// A plane is one thread's, and in its cache from the zeros to the sums.
void max_pool_backward(const MaxPoolBackward& a) {
  const int64_t src_pixels = a.ih * a.iw, floats = a.planes * std::max(a.pixels, src_pixels) * a.block;
  const int64_t nthreads = threads_for(floats, a.nthreads);
  parallel_for(a.planes, nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      float* const diff_src = a.diff_src + plane * src_pixels * a.block;
      std::fill_n(diff_src, src_pixels * a.block, 0.f);
      for (int64_t i = plane * a.pixels; i < (plane + 1) * a.pixels; i++)
        for (int64_t c = 0; c < a.block; c++) {
          const int64_t index = a.indices[i * a.block + c];
          if (index >= 0 && index < src_pixels) diff_src[index * a.block + c] += a.diff_dst[i * a.block + c];
        }
    }
  });
}

void average_pool_backward(const AveragePoolBackward& a) {
  const float factor = a.divisor != 0 ? 1 / a.divisor : 1.f;
  const auto shares = [&](const PoolAxis& axis, int64_t size, int64_t dst_size, float weight) {
    return shares_of_windows(windows(axis, size, dst_size, a.count_include_pad), size, weight, a.divisor == 0);
  };
  add_shares(a.diff_dst, shares(a.h, a.ih, a.diff_dst.ih, factor), shares(a.w, a.iw, a.diff_dst.iw, 1.f), a.diff_src,
             a.nthreads);
}

// PyTorch's has one kernel, which ignores scales.
void upsample_backward(const UpsampleBackward& a) {
  const auto shares = [&](double scale, int64_t size, int64_t dst_size) {
    return shares_of_neighbors(neighbors(a.how, scale, size, dst_size, /*ignores_scales=*/true), size);
  };
  add_shares(a.diff_dst, shares(a.how.scale_h, a.ih, a.diff_dst.ih), shares(a.how.scale_w, a.iw, a.diff_dst.iw),
             a.diff_src, a.nthreads);
}

}  // namespace torch_blocked
