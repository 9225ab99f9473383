// Depthwise convolution of a blocked src: one channel a group, so a block of channels is one vector throughout.
//
// src is read where it lies. The columns of dst fall into runs whose filters have the same columns inside src, and each
// run has its own list of taps; the rows of the filter that are inside are a part of that list. So there is neither a
// copy of src nor a case for the edges.
#include "../parallel.h"
#include "conv.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) {
  return c.group_ic() == 1 && c.group_oc() == 1 && c.groups > 1 && c.stride_w <= depthwise_max_stride &&
         c.wei_md.ndims == 4 && c.src_md.single_block(1) == c.block && c.src_md.strides[3] == c.block &&
         c.kernels() != nullptr;
}

// The filter positions [begin, end) of `kernel` that lie inside src when its first is at `first`.
struct Inside {
  int64_t begin, end;
  Inside(int64_t first, int64_t kernel, int64_t dilation, int64_t src)
      : begin(std::min(kernel, first < 0 ? (-first + dilation - 1) / dilation : 0)),
        end(std::max(begin, std::min(kernel, first < src ? (src - 1 - first) / dilation + 1 : 0))) {}
  bool operator==(const Inside&) const = default;
};

// Dst columns [begin, end) with the same filter columns inside src; `taps` are those of all filter rows, row by row,
// and a whole row of them may be one.
struct ColumnRun {
  int64_t begin, end;
  int row_kernel;  // index into depthwise_kw
  int64_t taps_per_row;
  std::vector<DepthwiseTap> taps;
};

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  PaddedPostOps post_ops;
  std::vector<ColumnRun> runs;

  explicit Plan(const Conv& c);
  Inside columns(int64_t ow) const { return {ow * conv.stride_w - conv.pad_w, conv.kw, conv.dilation_w, conv.iw}; }
  Inside rows(int64_t oh) const { return {oh * conv.stride_h - conv.pad_h, conv.kh, conv.dilation_h, conv.ih}; }
};

Plan::Plan(const Conv& c) : conv(c), kernels(*c.kernels()), post_ops(c) {
  for (int64_t begin = 0, end; begin < c.ow; begin = end) {
    const Inside inside = columns(begin);
    for (end = begin + 1; end < c.ow && columns(end) == inside;) end++;
    const int row_kernel = inside.end - inside.begin == c.kw ? depthwise_row(c) : 0, step = depthwise_kw[row_kernel];
    ColumnRun run{begin, end, row_kernel, (inside.end - inside.begin) / step, {}};
    for (int64_t kh = 0; kh < c.kh; kh++)
      for (int64_t kw = inside.begin; kw < inside.end; kw += step) {
        const int64_t index[] = {0, 0, kh, kw};
        run.taps.push_back(
            {kh * c.dilation_h * c.src_md.strides[2] + kw * c.dilation_w * c.block, c.wei_md.off_v(index)});
      }
    runs.push_back(std::move(run));
  }
}

void compute_row(const Plan& plan, int64_t n, int64_t oc_block, int64_t oh) {
  const Conv& c = plan.conv;
  const Inside rows = plan.rows(oh);
  const int64_t plane = n * c.src_md.strides[0] + oc_block * c.src_md.strides[1];
  const int64_t row = plane + (oh * c.stride_h - c.pad_h) * c.src_md.strides[2];
  DepthwiseArgs a;
  a.wei = c.wei + oc_block * c.wei_md.strides[0];
  a.wei_kw = c.wei_md.strides[3];
  a.first = a.last = true;
  for (const ColumnRun& run : plan.runs) {
    a.taps = run.taps.data() + rows.begin * run.taps_per_row;
    a.ntaps = (rows.end - rows.begin) * run.taps_per_row;
    const int64_t ncalls = (run.end - run.begin + plan.kernels.cols - 1) / plan.kernels.cols;
    for (int64_t call = 0; call < ncalls; call++) {
      int64_t begin, end;
      split(run.end - run.begin, ncalls, call, begin, end);
      const int64_t col = run.begin + begin;
      const int64_t offset = (n * c.oc_blocks() + oc_block) * c.dst_plane() + oh * c.dst_row() + col * c.block;
      a.src = c.src;
      a.src_offset = row + (col * c.stride_w - c.pad_w) * c.block;
      a.dst = c.dst + offset;
      a.epilogue = plan.post_ops.at(oc_block, 1, offset);
      plan.kernels.depthwise[run.row_kernel][c.stride_w - 1][end - begin - 1](a);
    }
  }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * c.oc_blocks() * c.oh, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      compute_row(plan, row / c.oh / c.oc_blocks(), row / c.oh % c.oc_blocks(), row % c.oh);
  });
}

}  // namespace

const Algorithm conv_depthwise = {"depthwise", can, vector_weights, run};

}  // namespace torch_blocked
