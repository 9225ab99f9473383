// Transposed convolution, 1 to 3 dims, by convolutions of stride 1.
//
// dst pixel o reads filter tap k at src pixel (o + pad - k * dilation) / stride, where that is whole: all pixels o of
// one phase (o modulo stride) read the same taps, one in stride / g, each at the src pixel dilation / g before that of
// the tap before, where g is the greatest common divisor of stride and dilation. So a phase is an ordinary convolution
// of stride 1 whose filter is these taps from the last to the first; it has its own padding, which is negative where
// dst begins inside src.
#include <numeric>

#include "../parallel.h"
#include "../reorder.h"
#include "conv.h"

namespace torch_blocked {
namespace {

// One axis of a phase: its dst pixels, the first of them and how many, its taps, in the given filter the last of them
// and the distance to the next, and the dilation and the padding of the convolution that it is.
struct PhaseAxis {
  int64_t first, dst, taps, last_tap, tap_step, dilation, pad;
};

// The phases of an axis that have taps: one for each of the first stride / g taps.
std::vector<PhaseAxis> phases(int64_t dst, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad) {
  const int64_t divisor = std::gcd(stride, dilation), step = stride / divisor, apart = dilation / divisor;
  std::vector<PhaseAxis> all;
  for (int64_t tap = 0; tap < std::min(kernel, step); tap++) {
    const int64_t first = ((tap * dilation - pad) % stride + stride) % stride;
    if (first >= dst) continue;
    const int64_t taps = (kernel - tap + step - 1) / step, src = (first + pad - tap * dilation) / stride;
    all.push_back({first, (dst - first + stride - 1) / stride, taps, tap + (taps - 1) * step, step, apart,
                   (taps - 1) * apart - src});
  }
  return all;
}

// The same problem with weights (oc, ic / groups, ...): a view of the given (ic, oc / groups, ...). With groups of
// several channels no view has that order, and they are copied.
class SwappedWeights {
 public:
  explicit SwappedWeights(const Conv& given) : conv(given) {
    if (given.groups == 1)
      swap_axes();
    else if (given.group_ic() > 1 || given.group_oc() > 1)
      copy(given);
  }
  Conv conv;

 private:
  void swap_axes() {
    MemoryDesc& md = conv.wei_md;
    std::swap(md.dims[0], md.dims[1]);
    std::swap(md.strides[0], md.strides[1]);
    for (int i = 0; i < md.inner_nblks; i++) md.inner_idxs[i] = 1 - md.inner_idxs[i];
  }

  void copy(const Conv& given) {
    const ReorderedWeights plain(given, dense_desc(given.wei_md, {0, 1, 2, 3}, {}));
    const int64_t taps = given.kd * given.kh * given.kw, matrix = given.group_ic() * given.group_oc() * taps;
    const int64_t from_strides[] = {matrix, taps, given.group_oc() * taps, 1};
    const int64_t to_strides[] = {matrix, given.group_ic() * taps, taps, 1};
    MemoryDesc from;  // (groups, oc / groups, ic / groups, taps)
    from.ndims = 4;
    const int64_t dims[] = {given.groups, given.group_oc(), given.group_ic(), taps};
    std::copy_n(dims, 4, from.dims);
    MemoryDesc to = from;
    std::copy_n(from_strides, 4, from.strides);
    std::copy_n(to_strides, 4, to.strides);
    copied_.resize(given.groups * matrix);
    reorder(from, plain.conv.wei, to, copied_.data(), sizeof(float), given.nthreads);
    conv.wei = copied_.data();
    conv.wei_md.dims[0] = given.oc;
    conv.wei_md.dims[1] = given.group_ic();
    conv.wei_md = dense_desc(conv.wei_md, {0, 1, 2, 3}, {});
  }

  std::vector<float> copied_;
};

// One phase as a convolution.
Conv phase(const Conv& given, const PhaseAxis& d, const PhaseAxis& h, const PhaseAxis& w) {
  const PhaseAxis* const axes[] = {&h, &w, &d};
  Conv c = given;
  for (int axis = 2; axis < c.wei_md.ndims; axis++) {
    const PhaseAxis& along = *axes[axis - 2];
    c.wei += along.last_tap * c.wei_md.strides[axis];
    c.wei_md.dims[axis] = along.taps;
    c.wei_md.strides[axis] *= -along.tap_step;
  }
  c.od = d.dst, c.kd = d.taps, c.dilation_d = d.dilation, c.pad_d = d.pad, c.stride_d = 1;
  c.oh = h.dst, c.kh = h.taps, c.dilation_h = h.dilation, c.pad_h = h.pad, c.stride_h = 1;
  c.ow = w.dst, c.kw = w.taps, c.dilation_w = w.dilation, c.pad_w = w.pad, c.stride_w = 1;
  if (given.stride_d == 1 && given.stride_h == 1 && given.stride_w == 1) return c;  // dst is whole
  c.phase = Phase{given.stride_d, given.stride_h, given.stride_w, given.od, given.oh, given.ow};
  c.advance_dst(d.first * given.dst_plane() + h.first * given.dst_row() + w.first * given.dst_pixel());
  return c;
}

// Bytes of dst that all phases are computed of before the next images: each phase writes its pixels between those of
// the others, and finds them in the cache.
constexpr int64_t dst_budget = 4 << 20;

// A phase with its weights, of the taps that it reads, as its algorithm wants them, for any images of the batch.
class ReadyPhase {
 public:
  ReadyPhase(const Conv& phase, const WeightKey* key, const Taps& taps)
      : algorithm_(choose(phase, 1)), weights_(phase, algorithm_, key, taps) {}
  void run(int64_t first, int64_t images) const { algorithm_.run(weights_.conv.images(first, images)); }
  // Depthwise: one block of channels of one image, by the calling thread alone.
  void run_block(int64_t image, int64_t oc_block) const {
    Conv c = weights_.conv;
    const int64_t channel = oc_block * c.block;
    c.src += image * c.src_md.strides[0] + oc_block * c.src_md.strides[1];
    c.wei += oc_block * c.wei_md.strides[0];
    c.advance_dst(image * c.dst_image() + oc_block * c.dst_block());
    for (const float** values : {&c.post_ops.bias, &c.post_ops.scale, &c.post_ops.shift})
      if (*values) *values += channel;
    c.ic = c.oc = c.groups = std::min(c.block, c.oc - channel);
    c.n = c.nthreads = 1;
    algorithm_.run(c);
  }

 private:
  const Algorithm& algorithm_;
  ReorderedWeights weights_;
};

// What no tap reaches, like all that has no phase, has a sum of nothing, before the post-ops.
void fill(const Conv& c) {
  parallel_for(c.n * c.oc_blocks(), c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t oc_block = i % c.oc_blocks(), first = i / c.oc_blocks() * c.dst_image() + oc_block * c.dst_block();
      if (c.post_ops.are_none()) {
        std::fill_n(c.dst + first, c.dst_block(), 0.f);
        continue;
      }
      for (int64_t offset = first; offset < first + c.dst_block(); offset++) {
        const int64_t oc = oc_block * c.block + (offset - first) % c.block;
        c.dst[offset] = oc < c.oc ? c.post_ops.apply(0, oc, offset) : 0.f;
      }
    }
  });
}

void run_phases(const Conv& c, const std::vector<ReadyPhase>& phases) {
  const int64_t blocks = c.n * c.oc_blocks(), image_bytes = c.oc_blocks() * c.dst_block() * int64_t(sizeof(float));
  if (c.groups > 1 && c.group_ic() == 1 && c.group_oc() == 1 && blocks % c.nthreads == 0)
    return parallel_for(blocks, c.nthreads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        for (const ReadyPhase& phase : phases) phase.run_block(i / c.oc_blocks(), i % c.oc_blocks());
    });
  const int64_t images = std::max<int64_t>(1, dst_budget / image_bytes);
  for (int64_t n = 0; n < c.n; n += images)
    for (const ReadyPhase& phase : phases) phase.run(n, std::min(images, c.n - n));
}

// Of half precision, all images in float32: each phase reads all of src.
void convolve_widened(const Conv& given, const WeightKey* key) {
  const int64_t src_size = elements(given.src_md), dst_size = given.n * given.dst_image();
  const PooledBuffer src(src_size), dst(dst_size);
  given.half_src.widen(0, src_size, src.data(), given.nthreads);
  Conv c = given;
  c.half_src.precision = c.half_dst.precision = Precision::Single;
  c.src = src.data(), c.dst = dst.data();
  convolve_transposed(c, key);
  given.half_dst.narrow(0, dst_size, dst.data(), given.nthreads);
}

}  // namespace

void convolve_transposed(const Conv& given, const WeightKey* given_key) {
  const bool whole = given.stride_d == 1 && given.stride_h == 1 && given.stride_w == 1;
  if (given.is_half() && !whole) return convolve_widened(given, given_key);
  const SwappedWeights swapped(given);
  const Conv& c = swapped.conv;
  const WeightKey* const key = c.groups == 1 ? given_key : nullptr;  // of several groups the weights are a copy
  const auto planes = phases(c.od, c.kd, c.stride_d, c.dilation_d, c.pad_d);
  const auto rows = phases(c.oh, c.kh, c.stride_h, c.dilation_h, c.pad_h);
  const auto cols = phases(c.ow, c.kw, c.stride_w, c.dilation_w, c.pad_w);
  if (whole) return convolve(phase(c, planes[0], rows[0], cols[0]), key);
  if (key) PackedWeights::instance().uses(*key, true);
  std::vector<ReadyPhase> ready;
  for (const PhaseAxis& d : planes)
    for (const PhaseAxis& h : rows)
      for (const PhaseAxis& w : cols) {
        const Taps taps = {d.last_tap, d.tap_step, h.last_tap, h.tap_step, w.last_tap, w.tap_step};
        ready.emplace_back(phase(c, d, h, w), key, taps);
      }
  const int64_t all = std::min(c.stride_d, c.od) * std::min(c.stride_h, c.oh) * std::min(c.stride_w, c.ow);
  if (int64_t(ready.size()) < all) fill(c);
  run_phases(c, ready);
}

}  // namespace torch_blocked
