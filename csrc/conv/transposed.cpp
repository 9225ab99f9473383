// Transposed convolution, 1 to 3 dims, by convolutions of stride 1.
//
// dst pixel o reads filter tap k at src pixel (o + pad - k * dilation) / stride, where that is whole: all pixels o of
// one phase (o modulo stride) read the same taps, one in stride / g, each at the src pixel dilation / g before that of
// the tap before, where g is the greatest common divisor of stride and dilation. So a phase is an ordinary convolution
// of stride 1 whose filter is these taps from the last to the first; it has its own padding, which is negative where
// dst begins inside src.
#include <numeric>

#include "../reorder.h"
#include "conv.h"

namespace torch_blocked {
namespace {

// One axis of a phase: its dst pixels, its taps, in the given filter the last of them and the distance to the next, and
// the dilation and the padding of the convolution that it is.
struct PhaseAxis {
  int64_t dst, taps, last_tap, tap_step, dilation, pad;
};

PhaseAxis phase_axis(int64_t first_dst, int64_t dst, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad) {
  const int64_t divisor = std::gcd(stride, dilation), step = stride / divisor, apart = dilation / divisor;
  const int64_t pixels = (dst - first_dst + stride - 1) / stride;
  int64_t tap = 0;
  while (tap < std::min(kernel, step) && (first_dst + pad - tap * dilation) % stride != 0) tap++;
  if (tap == std::min(kernel, step)) return {pixels, 1, 0, 1, 1, pixels};  // no taps: one that sees padding only
  const int64_t taps = (kernel - tap + step - 1) / step, src = (first_dst + pad - tap * dilation) / stride;
  return {pixels, taps, tap + (taps - 1) * step, step, apart, (taps - 1) * apart - src};
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

// The phase of the dst pixels from (plane, row, col) on.
Conv phase(const Conv& given, int64_t plane, int64_t row, int64_t col) {
  const PhaseAxis axes[] = {
      phase_axis(row, given.oh, given.kh, given.stride_h, given.dilation_h, given.pad_h),
      phase_axis(col, given.ow, given.kw, given.stride_w, given.dilation_w, given.pad_w),
      phase_axis(plane, given.od, given.kd, given.stride_d, given.dilation_d, given.pad_d),
  };
  const auto& [h, w, d] = axes;
  Conv c = given;
  for (int axis = 2; axis < c.wei_md.ndims; axis++) {
    const PhaseAxis& along = axes[axis - 2];
    c.wei += along.last_tap * c.wei_md.strides[axis];
    c.wei_md.dims[axis] = along.taps;
    c.wei_md.strides[axis] *= -along.tap_step;
  }
  c.od = d.dst, c.kd = d.taps, c.dilation_d = d.dilation, c.pad_d = d.pad, c.stride_d = 1;
  c.oh = h.dst, c.kh = h.taps, c.dilation_h = h.dilation, c.pad_h = h.pad, c.stride_h = 1;
  c.ow = w.dst, c.kw = w.taps, c.dilation_w = w.dilation, c.pad_w = w.pad, c.stride_w = 1;
  if (given.stride_d == 1 && given.stride_h == 1 && given.stride_w == 1) return c;
  const int64_t plane_size = given.oh * given.dst_row();
  c.phase = Phase{given.stride_d, given.stride_h, given.stride_w, given.od, given.oh, given.ow};
  c.dst += plane * plane_size + row * given.dst_row() + col * given.dst_pixel();
  return c;
}

}  // namespace

void convolve_transposed(const Conv& given, const WeightKey* key) {
  const SwappedWeights swapped(given);
  for (int64_t plane = 0; plane < std::min(given.stride_d, given.od); plane++)
    for (int64_t row = 0; row < std::min(given.stride_h, given.oh); row++)
      for (int64_t col = 0; col < std::min(given.stride_w, given.ow); col++) {
        const Conv c = phase(swapped.conv, plane, row, col);
        if (key == nullptr || c.phase || c.groups > 1) {
          convolve(c, nullptr);
          continue;
        }
        // Weights packed for Winograd are kept under a key whose data begin at the given filter's last tap: a
        // convolution by the same tensor does not take them for its own.
        WeightKey its_key = *key;
        its_key.data = c.wei;
        convolve(c, &its_key);
      }
}

}  // namespace torch_blocked
