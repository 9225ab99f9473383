// Grouped convolution of a blocked src, any number of channels a group; depthwise is one channel a group.
//
// Output channel o of a block reads the src channels of its group. With the j-th of them brought into lane o, a grouped
// convolution is a sum over j of depthwise ones: vectors of filters times vectors of pixels, no lane wasted.
//
// src is read where it lies. The kernels for whole rows of the filter pass over the pixels in the padding. For filters
// that have none the columns of dst fall into runs whose filters have the same columns inside src, each with its own
// list of taps. The rows of the filter that are inside are a part of the list.
#include "../parallel.h"
#include "conv.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) {
  return c.groups > 1 && c.src_md.single_block(1) == c.block && c.block <= max_lanes && c.kernels() != nullptr;
}

// Columns from one dst pixel's src to the next one's, in blocks; 0 where the kernels do not take it and go pixel by
// pixel.
int64_t column_stride(const Conv& c) {
  const int64_t stride = c.stride_w * c.src_md.strides[3];
  return stride % c.block == 0 && stride <= depthwise_max_stride * c.block ? stride / c.block : 0;
}

// The filter positions [begin, end) of `kernel` that lie inside src when its first is at `first`.
struct Inside {
  int64_t begin, end;
  Inside(int64_t first, int64_t kernel, int64_t dilation, int64_t src)
      : begin(std::min(kernel, first < 0 ? (-first + dilation - 1) / dilation : 0)),
        end(std::max(begin, std::min(kernel, first < src ? (src - 1 - first) / dilation + 1 : 0))) {}
  bool operator==(const Inside&) const = default;
};

// Dst columns [begin, end) with one list of taps: those of all filter rows, row by row. A whole row of them may be one,
// and then takes columns at the edges too.
struct ColumnRun {
  int64_t begin, end;
  bool row_kernel;                 // the kernels take rows of taps
  const DepthwiseKernel* kernels;  // by the number of columns
  int64_t cols;                    // in a call
  int64_t taps_per_row;
  std::vector<DepthwiseTap> taps;
};

// All that can be known before the rows: a row may be no more than thirty multiplications.
struct Plan {
  const Conv& conv;
  PaddedPostOps post_ops;
  int64_t oc_blocks;
  std::vector<ColumnRun> runs;
  std::vector<Inside> rows, planes;  // of the filter, for each dst row and depth

  explicit Plan(const Conv& c);
  Inside columns(int64_t ow) const { return {ow * conv.stride_w - conv.pad_w, conv.kw, conv.dilation_w, conv.iw}; }
};

// The index into depthwise_kw of the kernels that take a row of the filter at once; 0 where they go tap by tap.
int row_kernel(const Conv& c) {
  const auto* const found = std::find(std::begin(depthwise_kw), std::end(depthwise_kw), c.kw);
  const int64_t right = (c.ow - 1) * c.stride_w + c.kw - c.pad_w - c.iw;
  const bool can_share =
      c.dilation_w == 1 && std::max(c.pad_w, right) < c.kw && c.src_md.strides[3] == c.block && column_stride(c) > 0;
  return can_share && found != std::end(depthwise_kw) ? int(found - std::begin(depthwise_kw)) : 0;
}

Plan::Plan(const Conv& c) : conv(c), post_ops(c), oc_blocks(c.oc_blocks()) {
  const ConvKernels& kernels = *c.kernels();
  const int64_t stride = column_stride(c), most = stride == 0 ? 1 : kernels.cols;
  const int kernel = row_kernel(c), step = depthwise_kw[kernel];
  const auto taken = [&](int64_t ow) { return kernel ? Inside(0, c.kw, 1, c.kw) : columns(ow); };
  for (int64_t begin = 0, end; begin < c.ow; begin = end) {
    const Inside inside = taken(begin);
    for (end = begin + 1; end < c.ow && taken(end) == inside;) end++;
    const int64_t ncalls = (end - begin + most - 1) / most;
    ColumnRun run;
    run.begin = begin;
    run.end = end;
    run.row_kernel = kernel > 0;
    run.kernels = kernels.depthwise[!is_depthwise(c)][kernel][std::max<int64_t>(1, stride) - 1];
    run.cols = (end - begin + ncalls - 1) / ncalls;
    run.taps_per_row = (inside.end - inside.begin) / step;
    for (int64_t kh = 0; kh < c.kh; kh++)
      for (int64_t kw = inside.begin; kw < inside.end; kw += step) {
        const int64_t index[] = {0, 0, kh, kw, 0};
        run.taps.push_back(
            {kh * c.dilation_h * c.src_md.strides[2] + kw * c.dilation_w * c.src_md.strides[3], c.wei_md.off_v(index)});
      }
    runs.push_back(std::move(run));
  }
  for (int64_t oh = 0; oh < c.oh; oh++) rows.emplace_back(oh * c.stride_h - c.pad_h, c.kh, c.dilation_h, c.ih);
  for (int64_t od = 0; od < c.od; od++) planes.emplace_back(od * c.stride_d - c.pad_d, c.kd, c.dilation_d, c.id);
}

}  // namespace

std::vector<LaneMap> lane_maps(const Conv& c, int64_t oc_block) {
  if (is_depthwise(c)) return {LaneMap{oc_block * c.src_md.strides[1], 0, {}, {}}};  // every lane its own
  std::vector<LaneMap> maps;
  for (int64_t j = 0; j < c.group_ic(); j++) {
    const size_t first = maps.size();
    const int64_t index[] = {0, j, 0, 0, 0};
    for (int64_t lane = 0; lane < c.block && oc_block * c.block + lane < c.oc; lane++) {
      const int64_t channel = (oc_block * c.block + lane) / c.group_oc() * c.group_ic() + j;
      const int64_t src = channel / c.block * c.src_md.strides[1];
      const auto same = [&](const LaneMap& map) { return map.src == src; };
      auto map = std::find_if(maps.begin() + first, maps.end(), same);
      if (map == maps.end()) map = maps.insert(map, LaneMap{src, c.wei_md.off_v(index), {}, {}});
      map->from[lane] = channel % c.block;
      map->use[lane] = -1;
    }
  }
  return maps;
}

namespace {

// A row of dst. The next one is a step, not a division.
struct Row {
  int64_t n, oc_block, od, oh;
  Row(const Plan& plan, int64_t index)
      : n(index / (plan.oc_blocks * plan.conv.od * plan.conv.oh)),
        oc_block(index / (plan.conv.od * plan.conv.oh) % plan.oc_blocks),
        od(index / plan.conv.oh % plan.conv.od),
        oh(index % plan.conv.oh) {}
  void next(const Plan& plan) {
    if (++oh < plan.conv.oh) return;
    oh = 0;
    if (++od < plan.conv.od) return;
    od = 0;
    if (++oc_block < plan.oc_blocks) return;
    oc_block = 0;
    n++;
  }
};

// The columns of a run, with what `a` says of the filter.
void compute_columns(const Plan& plan, const Row& row, const ColumnRun& run, DepthwiseArgs& a) {
  const Conv& c = plan.conv;
  const int64_t row_offset = a.src_offset;
  for (int64_t col = run.begin, n; col < run.end; col += n) {
    n = std::min(run.cols, run.end - col);
    const int64_t offset = (row.n * plan.oc_blocks + row.oc_block) * c.dst_block() + row.od * c.dst_plane() +
                           row.oh * c.dst_row() + col * c.dst_pixel();
    const int64_t iw_begin = col * c.stride_w - c.pad_w, iw_end = iw_begin + (n - 1) * c.stride_w + c.kw;
    a.src_offset = row_offset + iw_begin * c.src_md.strides[3];
    a.left = run.row_kernel ? std::max<int64_t>(0, -iw_begin) : 0;
    a.right = run.row_kernel ? std::max<int64_t>(0, iw_end - c.iw) : 0;
    a.dst = c.dst + offset;
    a.epilogue = plan.post_ops.at(row.oc_block, 1, offset);
    run.kernels[n - 1](a);
  }
  a.src_offset = row_offset;
}

void compute_row(const Plan& plan, const Row& row, const std::vector<LaneMap>& maps) {
  const Conv& c = plan.conv;
  const Inside planes = plan.planes[row.od], rows = plan.rows[row.oh];
  DepthwiseArgs a{};
  a.maps = maps.data();
  a.nmaps = maps.size();
  a.wei_kw = c.wei_md.strides[3];
  a.dst_step = c.dst_step();
  a.src_row = c.src_md.strides[2];
  a.ahead = ((c.kh - 1) * c.dilation_h + 1) * a.src_row;
  a.nahead = std::min(c.stride_h, c.kh);
  // Where all planes of the filter lie in the padding, one of them with no taps.
  const int64_t last = std::max(planes.begin, planes.end - 1);
  for (int64_t kd = planes.begin; kd <= last; kd++) {
    const int64_t id = row.od * c.stride_d - c.pad_d + kd * c.dilation_d;
    a.src = c.src + row.n * c.src_md.strides[0];
    a.src_offset = id * c.src_md.strides[4] + (row.oh * c.stride_h - c.pad_h) * c.src_md.strides[2];
    a.wei = c.wei + row.oc_block * c.wei_md.strides[0] + kd * c.wei_md.strides[4];
    a.first = kd == planes.begin;
    a.last = kd == last;
    for (const ColumnRun& run : plan.runs) {
      a.taps = run.taps.data() + rows.begin * run.taps_per_row;
      a.ntaps = planes.begin == planes.end ? 0 : (rows.end - rows.begin) * run.taps_per_row;
      compute_columns(plan, row, run, a);
    }
  }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * plan.oc_blocks * c.od * c.oh, c.nthreads, [&](int64_t begin, int64_t end) {
    std::vector<LaneMap> maps;
    Row row(plan, begin);
    for (int64_t index = begin, maps_of = -1; index < end; index++, row.next(plan)) {
      if (maps_of != row.oc_block) maps = lane_maps(c, maps_of = row.oc_block);
      compute_row(plan, row, maps);
    }
  });
}

// Any format whose innermost block is one of output channels, else Oihw{b}o.
MemoryDesc weights(const Conv& c) {
  const MemoryDesc& md = c.wei_md;
  const int last = md.inner_nblks - 1;
  if (last >= 0 && md.inner_idxs[last] == 0 && md.inner_blks[last] == c.block && md.block(0) == c.block) return md;
  return dense_desc(md, {0, 1, 2, 3}, {{0, c.block}});
}

}  // namespace

const Algorithm conv_depthwise = {"depthwise", can, weights, run};

}  // namespace torch_blocked
