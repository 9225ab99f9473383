// The rows of src that some rows of dst read, copied with their zero padding and, unless a kernel takes the stride,
// with the columns sorted by phase (column modulo stride): a convolution of any kernel, stride, padding and dilation
// becomes a loop of stride 1 over a table of taps, with no case for the edges.
#pragma once
#include <algorithm>
#include <numeric>

#include "conv.h"

namespace torch_blocked {

// Of `taps`, `dilation` from each other, those that see any of src [0, size), not only padding, from places between
// those where the first tap is at `first` and at `last`.
inline TapRange taps_inside(int64_t first, int64_t last, int64_t size, int64_t taps, int64_t dilation) {
  const auto taps_before = [&](int64_t place, int64_t at) {
    return place <= at ? 0 : std::min(taps, (place - at + dilation - 1) / dilation);
  };
  const int64_t begin = taps_before(0, last);
  return {begin, std::max(begin, taps_before(size, first))};
}

// The filter's rows from any of `rows` dst rows, from row oh on each `apart` rows from the one before; its columns from
// one dst column.
inline TapRange tap_rows(const Conv& c, int64_t oh, int64_t rows, int64_t apart = 1) {
  const int64_t first = oh * c.stride_h - c.pad_h;
  return taps_inside(first, first + (rows - 1) * apart * c.stride_h, c.ih, c.kh, c.dilation_h);
}
inline TapRange tap_cols(const Conv& c, int64_t ow) {
  const int64_t first = ow * c.stride_w - c.pad_w;
  return taps_inside(first, first, c.iw, c.kw, c.dilation_w);
}

// Layout of one channel block (or, of a plain src, one channel): [row][phase][column][element].
struct Window {
  int64_t element;       // floats a pixel
  int64_t col_step;      // src columns from one window column to the next, in a phase
  int64_t phases;        // 1 for kernels one wide: the columns that no tap reads are left out
  int64_t phase_cols;    // columns a phase
  int64_t row_size;      // floats a row
  int64_t row_step;      // src rows from one window row to the next: no more are copied than are read
  int64_t rows_per_dst;  // window rows from one dst row to the next
  int64_t rows_per_tap;  // and from one row of the filter to the next
  const Conv& conv;

  // Of dst rows that are `apart` rows from each other.
  Window(const Conv& c, int64_t element_size, bool kernel_takes_stride = false, int64_t apart = 1)
      : element(element_size),
        col_step(kernel_takes_stride ? 1 : c.stride_w),
        phases(c.kw == 1 ? 1 : col_step),
        phase_cols((c.kw - 1) * c.dilation_w / col_step + (c.ow - 1) * (c.stride_w / col_step) + 1),
        row_size(phases * phase_cols * element),
        row_step(c.kh == 1 ? c.stride_h * apart : std::gcd(c.stride_h * apart, c.dilation_h)),
        rows_per_dst(c.stride_h * apart / row_step),
        rows_per_tap(c.dilation_h / row_step),
        conv(c) {}

  int64_t rows(int64_t dst_rows) const { return (dst_rows - 1) * rows_per_dst + (conv.kh - 1) * rows_per_tap + 1; }
  int64_t size(int64_t dst_rows) const { return rows(dst_rows) * row_size; }

  int64_t tap(int64_t kh, int64_t kw) const {
    const int64_t column = kw * conv.dilation_w;
    return kh * rows_per_tap * row_size + (column % phases * phase_cols + column / col_step) * element;
  }

  // As below, of the plane of src that plane `kd` of the filter reads for plane `od` of dst; zeros in the padding.
  template <class Copy>
  void fill(const float* src, int64_t od, int64_t kd, int64_t oh, int64_t dst_rows, float* window,
            const Copy& copy) const {
    const int64_t id = od * conv.stride_d - conv.pad_d + kd * conv.dilation_d;
    if (id < 0 || id >= conv.id)
      std::fill_n(window, size(dst_rows), 0.f);
    else
      fill(src + id * conv.src_md.strides[4], oh, dst_rows, window, copy);
  }

  // Fills the window of `dst_rows` rows from dst row `oh` on; copy(row, column stride, to, n) copies n pixels.
  template <class Copy>
  void fill(const float* src, int64_t oh, int64_t dst_rows, float* window, const Copy& copy) const {
    const int64_t stride_h = conv.src_md.strides[2], stride_w = conv.src_md.strides[3];
    const int64_t nrows = rows(dst_rows), first_row = oh * conv.stride_h - conv.pad_h;
    for (int64_t phase = 0; phase < phases; phase++) {
      // Column j of this phase is src column first + j * step.
      const int64_t first = phase - conv.pad_w, step = col_step;
      const int64_t begin = std::min(phase_cols, first < 0 ? (-first + step - 1) / step : 0);
      const int64_t end = std::max(begin, std::min(phase_cols, first < conv.iw ? (conv.iw - 1 - first) / step + 1 : 0));
      const float* const from = src + (first + begin * step) * stride_w;
      float* to = window + phase * phase_cols * element;
      for (int64_t r = 0, ih = first_row; r < nrows; r++, ih += row_step, to += row_size) {
        if (ih < 0 || ih >= conv.ih) {
          std::fill_n(to, phase_cols * element, 0.f);
          continue;
        }
        if (begin > 0) std::fill_n(to, begin * element, 0.f);
        copy(from + ih * stride_h, step * stride_w, to + begin * element, end - begin);
        if (end < phase_cols) std::fill_n(to + end * element, (phase_cols - end) * element, 0.f);
      }
    }
  }
};

}  // namespace torch_blocked
