// Transposed convolution, 1 or 2 dims, by convolutions of stride 1.
//
// dst pixel o reads filter tap k at src pixel (o + pad - k) / stride, where that is whole: all pixels o of one phase
// (o modulo stride) read the same taps, each at the src pixel one before that of the tap before. So a phase is an
// ordinary convolution of stride 1 whose filter is every stride-th tap of the given one, from the last to the first;
// it has its own padding, which is negative where dst begins inside src.
#include "conv.h"

namespace torch_blocked {
namespace {

// One axis of a phase: its dst pixels, its taps, the first of them in the given filter, and its padding.
struct PhaseAxis {
  int64_t dst, taps, first_tap, pad;
};

PhaseAxis phase_axis(int64_t first_dst, int64_t dst, int64_t kernel, int64_t stride, int64_t pad) {
  const int64_t tap = (first_dst + pad) % stride, src = (first_dst + pad) / stride;
  const int64_t pixels = (dst - first_dst + stride - 1) / stride, taps = (kernel - tap + stride - 1) / stride;
  if (tap >= kernel) return {pixels, 1, 0, pixels};  // no taps: one that sees padding only
  return {pixels, taps, tap + (taps - 1) * stride, taps - 1 - src};
}

// The weights (oc, ic, kh, kw) of a phase as a view of the given ones (ic, oc, kh, kw).
void set_weights(Conv& c, const Conv& given, const PhaseAxis& h, const PhaseAxis& w) {
  MemoryDesc& md = c.wei_md;
  std::swap(md.dims[0], md.dims[1]);
  std::swap(md.strides[0], md.strides[1]);
  for (int i = 0; i < md.inner_nblks; i++) md.inner_idxs[i] = 1 - md.inner_idxs[i];
  c.kh = md.dims[2] = h.taps;
  c.kw = md.dims[3] = w.taps;
  c.wei += h.first_tap * md.strides[2] + w.first_tap * md.strides[3];
  md.strides[2] *= -given.stride_h;
  md.strides[3] *= -given.stride_w;
}

// The phase of the dst pixels from (row, col) on.
Conv phase(const Conv& given, int64_t row, int64_t col) {
  const PhaseAxis h = phase_axis(row, given.oh, given.kh, given.stride_h, given.pad_h);
  const PhaseAxis w = phase_axis(col, given.ow, given.kw, given.stride_w, given.pad_w);
  Conv c = given;
  set_weights(c, given, h, w);
  c.stride_h = c.stride_w = 1;
  c.pad_h = h.pad, c.pad_w = w.pad;
  c.oh = h.dst, c.ow = w.dst;
  if (given.stride_h == 1 && given.stride_w == 1) return c;
  c.phase = Phase{given.stride_h, given.stride_w, given.oh, given.ow};
  c.dst += row * given.dst_row() + col * given.dst_pixel();
  return c;
}

}  // namespace

void convolve_transposed(const Conv& given, const WeightKey* key) {
  // Weights packed for Winograd are kept under a key whose data begin at the phase's first tap, the given filter's
  // last: a convolution by the same tensor does not take them for its own.
  for (int64_t row = 0; row < std::min(given.stride_h, given.oh); row++)
    for (int64_t col = 0; col < std::min(given.stride_w, given.ow); col++) {
      const Conv c = phase(given, row, col);
      WeightKey its_key = key ? *key : WeightKey{};
      its_key.data = c.wei;
      convolve(c, key && !c.phase ? &its_key : nullptr);
    }
}

}  // namespace torch_blocked
