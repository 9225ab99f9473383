// Grouped convolution of a blocked src, any number of channels a group.
//
// Output channel o of a block reads the src channels of its group. With the j-th of them brought into lane o, a grouped
// convolution is a sum over j of depthwise ones: vectors of filters times vectors of pixels, no lane wasted.
#include "../parallel.h"
#include "../scratch.h"
#include "window.h"

namespace torch_blocked {
namespace {

// Bytes: the windows of a tile, for a core's L2; and of the channels that are summed in one go, for its L1.
constexpr int64_t window_budget = 256 << 10, sum_budget = 24 << 10;

bool can(const Conv& c) {
  return c.groups > 1 && c.wei_md.ndims == 4 && c.src_md.single_block(1) == c.block && c.block <= max_lanes &&
         c.kernels() != nullptr;
}

// Rows of taps are read with the column stride, single taps from columns sorted by phase.
bool by_phase(const Conv& c) { return depthwise_row(c) == 0 || c.stride_w > depthwise_max_stride; }

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  Window window;
  PaddedPostOps post_ops;
  int row_kernel;  // index into depthwise_kw
  int64_t ntiles;  // of an image and block of output channels, each some dst rows
  int64_t plane;   // floats from the window of one channel of the group to the next
  int64_t nsums;   // the channels of a group are summed in so many parts
  std::vector<DepthwiseTap> taps;

  explicit Plan(const Conv& c)
      : conv(c),
        kernels(*c.kernels()),
        window(c, c.block, by_phase(c)),
        post_ops(c),
        row_kernel(by_phase(c) ? 0 : depthwise_row(c)) {
    const auto bytes = [&](int64_t rows) { return c.group_ic() * window.size(rows) * int64_t(sizeof(float)); };
    int64_t tile = 1;
    while (tile < c.oh && bytes(tile + 1) <= window_budget) tile++;
    ntiles = (c.oh + tile - 1) / tile;
    const int64_t planes = c.n * c.oc_blocks();
    if (planes * ntiles % c.nthreads != 0) ntiles = std::min(c.oh, (ntiles + c.nthreads - 1) / c.nthreads * c.nthreads);
    plane = window.size((c.oh + ntiles - 1) / ntiles);
    nsums = std::min(c.group_ic(), (bytes(1) + sum_budget - 1) / sum_budget);
    for (int64_t j = 0; j < c.group_ic(); j++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t kw = 0; kw < c.kw; kw += depthwise_kw[row_kernel]) {
          const int64_t index[] = {0, j, kh, kw};
          taps.push_back({j * plane + window.tap(kh, kw), c.wei_md.off_v(index)});
        }
  }
};

// What a block of output channels reads of one src block: for every j a map of its lanes.
struct Part {
  int64_t src_block;
  std::vector<LaneMap> maps;
};

std::vector<Part> parts_of(const Conv& c, int64_t oc_block) {
  std::vector<Part> parts;
  for (int64_t j = 0; j < c.group_ic(); j++)
    for (int64_t lane = 0; lane < c.block && oc_block * c.block + lane < c.oc; lane++) {
      const int64_t channel = (oc_block * c.block + lane) / c.group_oc() * c.group_ic() + j;
      const auto same = [&](const Part& part) { return part.src_block == channel / c.block; };
      auto part = std::find_if(parts.begin(), parts.end(), same);
      if (part == parts.end()) part = parts.insert(part, {channel / c.block, std::vector<LaneMap>(c.group_ic())});
      part->maps[j].from[lane] = channel % c.block;
      part->maps[j].use[lane] = -1;
    }
  return parts;
}

// Fills the windows of every channel of the groups that this block of output channels belongs to.
void read_src(const Plan& plan, int64_t n, int64_t oc_block, int64_t row, int64_t rows, float* windows) {
  const Conv& c = plan.conv;
  const std::vector<LaneMap> nothing(c.group_ic());
  bool first = true;
  for (const Part& part : parts_of(c, oc_block)) {
    const auto copy = [&](const float* pixels, int64_t stride, float* to, int64_t count) {
      plan.kernels.permute_pixels(pixels, stride, part.maps.data(), part.maps.size(), first, to, plan.plane, count);
    };
    const auto zero = [&](float* to, int64_t count) {
      if (first)
        plan.kernels.permute_pixels(to, 0, nothing.data(), nothing.size(), true, to, plan.plane, count / c.block);
    };
    const float* const src = c.src + n * c.src_md.strides[0] + part.src_block * c.src_md.strides[1];
    plan.window.fill(src, row, rows, windows, copy, zero);
    first = false;
  }
}

// The s-th part of the sums of a dst row.
void compute_row(const Plan& plan, const float* window_row, int64_t n, int64_t oc_block, int64_t oh, int64_t s) {
  const Conv& c = plan.conv;
  int64_t j_begin, j_end;
  split(c.group_ic(), plan.nsums, s, j_begin, j_end);
  const int64_t taps_per_channel = plan.taps.size() / c.group_ic();
  DepthwiseArgs a;
  a.taps = plan.taps.data() + j_begin * taps_per_channel;
  a.ntaps = (j_end - j_begin) * taps_per_channel;
  a.wei = c.wei + oc_block * c.wei_md.strides[0];
  a.wei_kw = c.wei_md.strides[3];
  a.src = window_row;
  a.first = s == 0;
  a.last = s + 1 == plan.nsums;
  const int64_t stride = by_phase(c) ? 1 : c.stride_w;
  const int64_t ncalls = (c.ow + plan.kernels.cols - 1) / plan.kernels.cols;
  for (int64_t call = 0; call < ncalls; call++) {
    int64_t begin, end;
    split(c.ow, ncalls, call, begin, end);
    const int64_t offset = (n * c.oc_blocks() + oc_block) * c.dst_plane() + oh * c.dst_row() + begin * c.block;
    a.src_offset = begin * stride * c.block;
    a.dst = c.dst + offset;
    a.epilogue = plan.post_ops.at(oc_block, 1, offset);
    plan.kernels.depthwise[plan.row_kernel][stride - 1][end - begin - 1](a);
  }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * c.oc_blocks() * plan.ntiles, c.nthreads, [&](int64_t tile_begin, int64_t tile_end) {
    float* const windows = Scratch::get(c.group_ic() * plan.plane);
    for (int64_t tile = tile_begin; tile < tile_end; tile++) {
      const int64_t n = tile / plan.ntiles / c.oc_blocks(), oc_block = tile / plan.ntiles % c.oc_blocks();
      int64_t row_begin, row_end;
      split(c.oh, plan.ntiles, tile % plan.ntiles, row_begin, row_end);
      read_src(plan, n, oc_block, row_begin, row_end - row_begin, windows);
      for (int64_t s = 0; s < plan.nsums; s++)
        for (int64_t oh = row_begin; oh < row_end; oh++) {
          const int64_t row = (oh - row_begin) * plan.window.rows_per_dst * plan.window.row_size;
          compute_row(plan, windows + row, n, oc_block, oh, s);
        }
    }
  });
}

}  // namespace

const Algorithm conv_grouped = {"grouped", can, vector_weights, run};

}  // namespace torch_blocked
