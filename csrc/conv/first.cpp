// Convolution of a plain src, whatever its strides: the first layer of a network, which reads an image of few channels.
//
// The window holds one plane a channel (and filter plane), and the filter's taps run over rows, columns and channels,
// so the sum is one loop over a table; dst is blocked.
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "inline_memory.h"
#include "window.h"

namespace torch_blocked {
namespace {

constexpr int64_t window_budget = 256 << 10;  // bytes: a part of a core's L2, which dst goes through, too

bool can(const Conv& c) { return c.groups == 1 && c.src_md.is_plain() && c.kernels() != nullptr; }

// Ohwi{b}o: the order of the taps.
MemoryDesc weights(const Conv& c) { return dense_desc(c.wei_md, {0, 2, 3, 1}, {{0, c.block}}); }

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  int64_t pixel;  // columns of the window from one dst pixel's to the next
  bool stream;
  Window window;
  PaddedPostOps post_ops;
  int64_t ntiles;  // of an image, each some dst rows
  int64_t plane;   // floats from one plane's window to the next
  InlineMemory<2048> memory;
  std::pmr::vector<int64_t> taps;

  explicit Plan(const Conv& c)
      : conv(c),
        kernels(*c.kernels()),
        pixel(c.stride_w <= conv_max_plain_stride ? c.stride_w : 1),
        stream(streams_dst(c)),
        window(c, 1, pixel == c.stride_w),
        post_ops(c),
        taps(&memory) {
    int64_t tile = 1;
    while (tile < c.oh && c.ic * c.kd * window.size(tile + 1) * int64_t(sizeof(float)) <= window_budget) tile++;
    ntiles = even_parts((c.oh + tile - 1) / tile, c.n * c.od, c.oh, c.nthreads);
    plane = window.size((c.oh + ntiles - 1) / ntiles);
    const auto window_taps = window.taps(&memory);
    taps.reserve(c.kd * window_taps.size() * c.ic);
    for (int64_t kd = 0; kd < c.kd; kd++)
      for (const int64_t tap : window_taps)
        for (int64_t channel = 0; channel < c.ic; channel++) taps.push_back(tap + (kd * c.ic + channel) * plane);
  }
  // From one dst row's window to the next.
  int64_t window_row() const { return window.rows_per_dst * window.row_size; }
};

// Some dst rows of one or two blocks of output channels; `dst` is the offset of the first row in block 0.
void compute_rows(const Plan& plan, const float* window, int64_t dst, int64_t rows, int64_t oc_block) {
  const Conv& c = plan.conv;
  const int64_t blocks = std::min<int64_t>(2, c.oc_blocks() - oc_block);
  ConvArgs a{};
  a.taps = plan.taps.data();
  a.ntaps = plan.taps.size();
  a.nblocks = a.lanes = 1;
  a.wei_block = c.wei_md.strides[0];
  a.wei = c.wei + oc_block * a.wei_block;
  a.dst_block = c.dst_block();
  a.first = a.last = true;
  a.stream = plan.stream;
  a.fetch_dst = !plan.stream && !c.dst_cached;
  const int64_t ncalls = (c.ow + plan.kernels.cols - 1) / plan.kernels.cols, cols = (c.ow + ncalls - 1) / ncalls;
  dst += oc_block * c.dst_block();
  a.epilogue = plan.post_ops.at(oc_block, blocks, dst);
  for (int64_t row = 0; row < rows; row++, dst += c.dst_row(), window += plan.window_row())
    for (int64_t begin = 0, n; begin < c.ow; begin += n) {
      n = std::min(cols, c.ow - begin);
      const int64_t at = dst + begin * c.block;
      a.src = window + begin * plan.pixel;
      a.dst = c.dst + at;
      if (c.post_ops.residual) a.epilogue.residual = c.post_ops.residual + at;
      plan.kernels.plain_row[plan.pixel - 1][blocks - 1][n - 1](a);
    }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * c.od * plan.ntiles, c.nthreads, [&](int64_t tile_begin, int64_t tile_end) {
    float* const window = Scratch::get(c.ic * c.kd * plan.plane);
    for (int64_t tile = tile_begin; tile < tile_end; tile++) {
      const int64_t n = tile / plan.ntiles / c.od, od = tile / plan.ntiles % c.od;
      int64_t row_begin, row_end;
      split(c.oh, plan.ntiles, tile % plan.ntiles, row_begin, row_end);
      const float* const src = c.src + n * c.src_md.strides[0];
      for (int64_t kd = 0; kd < c.kd; kd++)
        for (int64_t channel = 0; channel < c.ic; channel++)
          plan.window.fill(src + channel * c.src_md.strides[1], od, kd, row_begin, row_end - row_begin,
                           window + (kd * c.ic + channel) * plan.plane, plan.kernels.copy_plain);
      const int64_t dst = n * c.dst_image() + od * c.dst_plane() + row_begin * c.dst_row();
      for (int64_t oc_block = 0; oc_block < c.oc_blocks(); oc_block += 2)  // two blocks' weights stay in L1
        compute_rows(plan, window, dst, row_end - row_begin, oc_block);
    }
    if (plan.stream) finish_streams();
  });
}

}  // namespace

const Algorithm conv_first = {"first", can, weights, run, nullptr, direct_seconds};

}  // namespace torch_blocked
