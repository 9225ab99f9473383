// Convolution written from the formula: any format of src and weights. Slow; it ends the list of algorithms.

#include "../parallel.h"
#include "conv.h"

namespace torch_blocked {
namespace {

bool can(const Conv&) { return true; }

MemoryDesc weights(const Conv& c) { return c.wei_md; }

// Offsets of one axis alone; the offset of an index is the sum of its axes' (memory_desc.h).
std::vector<int64_t> axis_offsets(const MemoryDesc& md, int axis) {
  std::vector<int64_t> offsets;
  int64_t index[max_ndims] = {};
  for (; index[axis] < md.dims[axis]; index[axis]++) offsets.push_back(md.off_v(index));
  return offsets;
}

struct Offsets {
  std::vector<int64_t> axis[5] = {{}, {}, {}, {}, {0}};  // without a depth there is one plane
  explicit Offsets(const MemoryDesc& md) {
    for (int d = 0; d < md.ndims; d++) axis[d] = axis_offsets(md, d);
  }
};

// What one plane of the filter, at `w`, adds to a dst pixel from one plane of src, at `s`.
float plane_sum(const Conv& c, const Offsets& src, const Offsets& wei, const float* s, const float* w, int64_t first_ic,
                int64_t oh, int64_t ow) {
  float sum = 0;
  for (int64_t kh = 0; kh < c.kh; kh++) {
    const int64_t ih = oh * c.stride_h - c.pad_h + kh * c.dilation_h;
    if (ih < 0 || ih >= c.ih) continue;
    for (int64_t kw = 0; kw < c.kw; kw++) {
      const int64_t iw = ow * c.stride_w - c.pad_w + kw * c.dilation_w;
      if (iw < 0 || iw >= c.iw) continue;
      const float* const pixel = s + src.axis[2][ih] + src.axis[3][iw];
      const float* const tap = w + wei.axis[2][kh] + wei.axis[3][kw];
      for (int64_t ic = 0; ic < c.group_ic(); ic++) sum += pixel[src.axis[1][first_ic + ic]] * tap[wei.axis[1][ic]];
    }
  }
  return sum;
}

float pixel(const Conv& c, const Offsets& src, const Offsets& wei, int64_t n, int64_t oc, int64_t od, int64_t oh,
            int64_t ow) {
  const int64_t first_ic = oc / c.group_oc() * c.group_ic();
  float sum = 0;
  for (int64_t kd = 0; kd < c.kd; kd++) {
    const int64_t id = od * c.stride_d - c.pad_d + kd * c.dilation_d;
    if (id < 0 || id >= c.id) continue;
    const float* const s = c.src + src.axis[0][n] + src.axis[4][id];
    const float* const w = c.wei + wei.axis[0][oc] + wei.axis[4][kd];
    sum += plane_sum(c, src, wei, s, w, first_ic, oh, ow);
  }
  return sum;
}

void run(const Conv& c) {
  const Offsets src(c.src_md), wei(c.wei_md);
  const int64_t rows = c.n * c.oc_blocks() * c.od * c.oh;
  parallel_for(rows, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t oh = row % c.oh, od = row / c.oh % c.od, plane = row / c.oh / c.od;
      const int64_t oc_block = plane % c.oc_blocks(), n = plane / c.oc_blocks();
      const int64_t first = n * c.dst_image() + oc_block * c.dst_block() + od * c.dst_plane() + oh * c.dst_row();
      for (int64_t ow = 0; ow < c.ow; ow++)
        for (int64_t lane = 0; lane < c.block; lane++) {
          const int64_t oc = oc_block * c.block + lane;
          const int64_t offset = first + ow * c.block + lane;
          c.dst[offset] = oc < c.oc ? c.post_ops.apply(pixel(c, src, wei, n, oc, od, oh, ow), oc, offset) : 0.f;
        }
    }
  });
}

}  // namespace

const Algorithm conv_reference = {"reference", can, weights, run};

}  // namespace torch_blocked
