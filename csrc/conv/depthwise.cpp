// Grouped convolution of a blocked src, any number of channels a group; depthwise is one channel a group.
//
// Output channel o of a block reads the src channels of its group. With the j-th of them gathered into lane o, a
// grouped convolution is a sum over j of depthwise ones: vectors of filters times vectors of pixels.
#include "../parallel.h"
#include "../scratch.h"
#include "window.h"

namespace torch_blocked {
namespace {

constexpr int64_t window_budget = 256 << 10;

bool can(const Conv& c) { return c.groups > 1 && c.src_md.single_block(1) == c.block && c.kernels() != nullptr; }

// Any format whose innermost block is one of output channels; Oihw{b}o otherwise.
MemoryDesc weights(const Conv& c) {
  const MemoryDesc& md = c.wei_md;
  const int last = md.inner_nblks - 1;
  if (last >= 0 && md.inner_idxs[last] == 0 && md.inner_blks[last] == c.block && md.block(0) == c.block) return md;
  return dense_desc(md, {0, 1, 2, 3}, {{0, c.block}});
}

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  Window window;
  PaddedPostOps post_ops;
  int64_t ntiles;  // of an image and block of output channels, each some dst rows
  int64_t plane;   // floats from the window of one channel of the group (and filter plane) to the next
  bool identity;   // lane o reads src channel o: nothing to gather
  std::vector<DepthwiseTap> taps;

  explicit Plan(const Conv& c) : conv(c), kernels(*c.kernels()), window(c, c.block), post_ops(c) {
    const auto bytes = [&](int64_t rows) { return planes() * window.size(rows) * int64_t(sizeof(float)); };
    int64_t tile = 1;
    while (tile < c.oh && bytes(tile + 1) <= window_budget) tile++;
    ntiles = (c.oh + tile - 1) / tile;
    if (c.n * c.oc_blocks() * c.od * ntiles % c.nthreads != 0)
      ntiles = std::min(c.oh, (ntiles + c.nthreads - 1) / c.nthreads * c.nthreads);
    plane = window.size((c.oh + ntiles - 1) / ntiles);
    identity = c.group_ic() == 1 && c.group_oc() == 1;
    for (int64_t p = 0; p < planes(); p++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t kw = 0; kw < c.kw; kw++) {
          const int64_t index[] = {0, p / c.kd, kh, kw, p % c.kd};
          taps.push_back({p * plane + window.tap(kh, kw), c.wei_md.off_v(index)});
        }
  }
  int64_t planes() const { return conv.group_ic() * conv.kd; }
};

// Some rows of one plane of dst: image, block of output channels, depth.
struct Tile {
  int64_t n, oc_block, od, row, rows;
};

// Fills the windows of every channel of the groups that this block of output channels belongs to.
void read_src(const Plan& plan, const Tile& tile, float* window) {
  const Conv& c = plan.conv;
  const int64_t* strides = c.src_md.strides;
  const float* const src = c.src + tile.n * strides[0];
  if (plan.identity) {
    for (int64_t kd = 0; kd < c.kd; kd++)
      plan.window.fill(src + tile.oc_block * strides[1], tile.od, kd, tile.row, tile.rows, window + kd * plan.plane,
                       plan.kernels.copy_pixels);
    return;
  }
  std::vector<int64_t> lanes(c.block, -1);
  for (int64_t j = 0; j < c.group_ic(); j++) {
    for (int64_t lane = 0; lane < c.block && tile.oc_block * c.block + lane < c.oc; lane++) {
      const int64_t channel = (tile.oc_block * c.block + lane) / c.group_oc() * c.group_ic() + j;
      lanes[lane] = channel / c.block * strides[1] + channel % c.block;
    }
    const auto gather = [&](const float* pixels, int64_t stride, float* to, int64_t count) {
      for (int64_t p = 0; p < count; p++, pixels += stride, to += c.block)
        for (int64_t lane = 0; lane < c.block; lane++) to[lane] = lanes[lane] < 0 ? 0.f : pixels[lanes[lane]];
    };
    for (int64_t kd = 0; kd < c.kd; kd++)
      plan.window.fill(src, tile.od, kd, tile.row, tile.rows, window + (j * c.kd + kd) * plan.plane, gather);
  }
}

void compute_row(const Plan& plan, const float* window_row, const Tile& tile, int64_t oh) {
  const Conv& c = plan.conv;
  DepthwiseArgs a;
  a.taps = plan.taps.data();
  a.ntaps = plan.taps.size();
  a.wei = c.wei + tile.oc_block * c.wei_md.strides[0];
  const int64_t ncalls = (c.ow + plan.kernels.cols - 1) / plan.kernels.cols;
  for (int64_t call = 0; call < ncalls; call++) {
    int64_t begin, end;
    split(c.ow, ncalls, call, begin, end);
    const int64_t offset = (tile.n * c.oc_blocks() + tile.oc_block) * c.dst_block() + tile.od * c.dst_plane() +
                           oh * c.dst_row() + begin * c.block;
    a.src = window_row + begin * c.block;
    a.dst = c.dst + offset;
    a.epilogue = plan.post_ops.at(tile.oc_block, 1, offset);
    plan.kernels.depthwise[end - begin - 1](a);
  }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * c.oc_blocks() * c.od * plan.ntiles, c.nthreads, [&](int64_t tile_begin, int64_t tile_end) {
    float* const window = Scratch::get(plan.planes() * plan.plane);
    for (int64_t index = tile_begin; index < tile_end; index++) {
      const int64_t plane = index / plan.ntiles, image = plane / c.od;
      int64_t row_begin, row_end;
      split(c.oh, plan.ntiles, index % plan.ntiles, row_begin, row_end);
      const Tile tile = {image / c.oc_blocks(), image % c.oc_blocks(), plane % c.od, row_begin, row_end - row_begin};
      read_src(plan, tile, window);
      for (int64_t oh = row_begin; oh < row_end; oh++) {
        const int64_t row = (oh - row_begin) * plan.window.rows_per_dst * plan.window.row_size;
        compute_row(plan, window + row, tile, oh);
      }
    }
  });
}

}  // namespace

const Algorithm conv_depthwise = {"depthwise", can, weights, run};

}  // namespace torch_blocked
