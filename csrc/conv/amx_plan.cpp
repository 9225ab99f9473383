#include "amx_plan.h"

#include "../caches.h"

namespace torch_blocked {
namespace {

// That are multiplied, and summed, in one call; these sums are then added up, which keeps the error of long ones small.
constexpr int64_t most_steps = 8;

}  // namespace

AmxPlan::AmxPlan(const Conv& c)
    : AmxWork(c),
      conv(c),
      kernels(*amx_kernels_of(c)),
      post_ops(c),
      rows(c.n * c.od * c.oh),
      stream(streams_dst(c)),
      one_image(!stream && !c.phase && cols == c.ow) {
  const bool own_pixel = c.kd * c.kh * c.kw == 1 && c.stride_h == 1 && c.stride_w == 1 && c.pad_h == 0 && c.pad_w == 0;
  const bool one_row = c.oh == 1 || (c.dst_row() == c.ow * c.dst_pixel() && c.src_md.strides[2] == c.iw * c.block);
  if (own_pixel && one_row && c.oh == c.ih && c.ow == c.iw) rows = c.n * c.od, cols = c.oh * c.ow;

  // Parts of src: a fifth of L2, beside those that are made meanwhile.
  constexpr int64_t fewest_units = 16;
  const int64_t budget = caches().l2 / 5, unit_bytes = amx_floats(1) * sizeof(float);
  chunk = std::min(steps(), most_steps);
  if (windows) {
    unit = cols;
    tile = (tile_rows * cols + amx_pixels - 1) / amx_pixels * amx_pixels;
    src_part = window_pixels(tile_rows) * amx_row;
    src_piece = amx_pixels * amx_row;
  } else {
    const int64_t fitting = budget / (chunk * unit_bytes) * amx_rows / amx_pixels * amx_pixels;
    tile = std::clamp<int64_t>(fitting, amx_pixels, most_pixels);
    unit = pixels >= fewest_units * c.nthreads * amx_pixels ? amx_pixels : amx_rows;
    src_part = amx_pixels * amx_row;
    src_piece = chunk * amx_src_step;
  }
  list_steps();
}

// A pair's taps one after the other, so that src is read once.
void AmxPlan::list_steps() {
  const Conv& c = conv;
  const int64_t tap = c.block * c.block;
  step_list.reserve(steps());
  src_steps.reserve(steps());
  for (int64_t pair = 0; pair < ic_pairs; pair++)
    for (int64_t kd = 0; kd < c.kd; kd++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t kw = 0; kw < c.kw; kw++) {
          step_list.push_back(
              {pair, kd, has_second(pair), (2 * pair * c.kd + kd) * wei_ic_block() + (kh * c.kw + kw) * tap});
          const int64_t row = kh * c.dilation_h, col = kw * c.dilation_w, i = src_steps.size();
          const int64_t phase = row % c.stride_h * (c.kw > 1 ? c.stride_w : 1) + col % c.stride_w;
          const int64_t pixel = (phase * (tile_rows + shift_h) + row / c.stride_h) * cols + col / c.stride_w;
          src_steps.push_back(windows ? (pair * c.kd + kd) * amx_parts * src_part + pixel * amx_row
                                      : i % chunk * amx_src_step);
        }
}

// Row ih of src, in a pair's first block, for a plane of dst and of the filter; null where it is in the padding.
const float* AmxPlan::src_row(int64_t plane, int64_t pair, int64_t kd, int64_t ih) const {
  const Conv& c = conv;
  const int64_t id = plane % c.od * c.stride_d - c.pad_d + kd * c.dilation_d;
  if (id < 0 || id >= c.id || ih < 0 || ih >= c.ih) return nullptr;
  const int64_t* strides = c.src_md.strides;
  return c.src + plane / c.od * strides[0] + 2 * pair * strides[1] + id * strides[4] + ih * strides[2];
}

int64_t AmxPlan::dst_offset(int64_t row, int64_t col, int64_t oc_block) const {
  const Conv& c = conv;
  const int64_t dst_rows = rows / (c.n * c.od), plane = row / dst_rows;
  return plane / c.od * c.dst_image() + oc_block * c.dst_block() + plane % c.od * c.dst_plane() +
         row % dst_rows * c.dst_row() + col * c.dst_pixel();
}

}  // namespace torch_blocked
