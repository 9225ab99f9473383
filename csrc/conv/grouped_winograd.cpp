// Winograd convolution of groups, 3x3 of stride 1: the steps of winograd.cpp, for the channels of one group at a time.
//
// The groups have whole blocks of channels: smaller ones save less than the transforms cost.
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "window.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) {
  if (c.groups == 1 || c.group_ic() % c.block != 0 || c.group_oc() % c.block != 0) return false;
  Conv dense = c;
  dense.groups = 1;
  return can_winograd(dense);
}

// The transformed weights, (oc, ic / groups, m + 2, m + 2): for each block of output channels the matrices of all
// elements of a tile.
template <int M>
MemoryDesc weights(const Conv& c) {
  MemoryDesc dims_of = c.wei_md;
  dims_of.dims[2] = dims_of.dims[3] = M + 2;
  std::vector<int> order = {0, 2, 3, 1};
  if (dims_of.ndims == 5) order.push_back(4);
  return dense_desc(dims_of, order, {{1, c.block}, {0, c.block}});
}

template <const WinogradTransforms WinogradKernels::* Transforms>
void pack(const Conv& given, const MemoryDesc& wanted, float* packed) {
  const ReorderedWeights reordered(given, dense_desc(given.wei_md, {0, 1, 2, 3}, {{1, given.block}, {0, given.block}}));
  const Conv& c = reordered.conv;
  const int64_t size = c.block, matrix = size * size;
  const WinogradTransforms& transforms = winograd_transforms(c)->*Transforms;
  const int64_t vectors = c.group_ic() * c.kd;  // of output channels, in a block of them
  parallel_for(c.oc_blocks() * vectors, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t oc_block = i / vectors, ic_block = i % vectors / size, lane = i % size * size;
      transforms.wei(c.wei + (oc_block * vectors / size + ic_block) * 9 * matrix + lane, matrix,
                     packed + oc_block * wanted.strides[0] + ic_block * matrix + lane, wanted.strides[3]);
    }
  });
}

// The same with dst rounded up to whole tiles.
Conv with_whole_tiles(const Conv& c, const Tiles& tiles) {
  Conv padded = c;
  padded.oh = tiles.rows * tiles.transforms.m;
  padded.ow = tiles.cols * tiles.transforms.m;
  return padded;
}

// The work is cut into groups, and their rows of tiles into runs.
struct Plan : Tiles {
  const WinogradKernels& kernels;
  PaddedPostOps post_ops;
  int64_t group_ic, group_oc;   // blocks of channels of a group; those of ic times the filter's depth
  int64_t nruns, run_rows;      // runs, and the most rows of tiles in one
  int64_t wei_plane, wei_size;  // floats of a block of output channels' weights: for an element of a tile, for all
  bool stream;                  // dst, past the caches
  bool in_place;  // the products of a tile take the place of its transformed src, which one call of a kernel reads
  Conv padded;
  Window window;  // copies src: most tiles of a small image reach into the padding

  Plan(const Conv& c, const WinogradKernels& kernels, const WinogradTransforms& t);
  int64_t src_plane() const { return plane_of(group_ic * run_rows * cols); }
  int64_t dst_plane() const { return in_place ? src_plane() : plane_of(group_oc * run_rows * cols); }
  int64_t products_size() const { return in_place ? 0 : planes * dst_plane(); }
};

Plan::Plan(const Conv& c, const WinogradKernels& kernels, const WinogradTransforms& t)
    : Tiles(c, t),
      kernels(kernels),
      post_ops(c),
      stream(streams_dst(c)),
      padded(with_whole_tiles(c, *this)),
      window(padded, c.block) {
  const int64_t most_tiles = 2 * kernels.most_tiles[0];  // two calls of the widest kernel; transforms stay in L2
  group_ic = ic_blocks / c.groups;
  group_oc = c.oc_blocks() / c.groups;
  const int64_t all_rows = c.n * c.od * rows, most_rows = std::max<int64_t>(1, most_tiles / cols);
  nruns = (all_rows + most_rows - 1) / most_rows;
  run_rows = (all_rows + nruns - 1) / nruns;
  wei_plane = group_ic * c.block * c.block;
  wei_size = planes * wei_plane;
  in_place = group_ic == group_oc && group_oc <= 2;
}

// products[plane][block][tile] of a group.
void multiply(const Plan& plan, int64_t group, int64_t tiles, const float* src, float* products) {
  const int64_t block = plan.conv.block;
  WinogradProducts a{};
  a.src_plane = plan.src_plane();
  a.src_block = a.dst_block = tiles * block;
  a.wei_plane = plan.wei_plane;
  a.wei_block = plan.wei_size;
  a.dst_plane = plan.dst_plane();
  a.planes = plan.planes;
  a.ic_blocks = plan.group_ic;
  a.sum_blocks = sum_blocks(plan.conv, 1);
  for (int64_t b = 0; b < plan.group_oc; b += 2) {
    const int64_t blocks = std::min<int64_t>(2, plan.group_oc - b), most = plan.kernels.most_tiles[blocks - 1];
    const int64_t ncalls = (tiles + most - 1) / most;
    a.wei = plan.conv.wei + (group * plan.group_oc + b) * plan.wei_size;
    for (int64_t call = 0; call < ncalls; call++) {
      int64_t begin, end;
      split(tiles, ncalls, call, begin, end);
      a.src = src + begin * block;
      a.dst = products + (b * tiles + begin) * block;
      plan.kernels.multiply[blocks - 1][end - begin - 1](a);
    }
  }
}

// A channel block of the tiles in rows [begin, end): dst[plane][tile].
void transform_src(const Plan& plan, int64_t ic_block, int64_t begin, int64_t end, float* window, float* dst) {
  const Conv& c = plan.conv;
  const int64_t m = plan.transforms.m;
  for (int64_t row = begin, rows; row < end; row += rows) {
    const Tiles::Place at = plan.place(row * plan.cols);
    rows = std::min(end - row, plan.rows - row % plan.rows);
    const int64_t* const strides = c.src_md.strides;
    // To the same pixel of the next image, or of the next block's first one: what is likely to be read next.
    const int64_t ahead = at.n + 1 < c.n ? strides[0] : strides[1] - (c.n - 1) * strides[0];
    const auto copy = [&](const float* from, int64_t stride, float* to, int64_t n) {
      for (int64_t i = 0; i < n; i++) __builtin_prefetch(from + ahead + i * stride, 0, 2);
      c.kernels()->copy_pixels(from, stride, to, n);
    };
    plan.window.fill(c.src + at.n * c.src_md.strides[0] + ic_block / c.kd * c.src_md.strides[1], at.od, ic_block % c.kd,
                     at.row, rows * m, window, copy);
    for (int64_t y = 0; y < rows; y++)
      for (int64_t x = 0; x < plan.cols; x++, dst += c.block)
        plan.transforms.src(window + y * m * plan.window.row_size + x * m * c.block, plan.window.row_size, dst,
                            plan.src_plane());
  }
}

// And back: products[plane][tile] of a block of output channels.
void transform_dst(const Plan& plan, int64_t oc_block, int64_t begin, int64_t end, const float* products) {
  const Conv& c = plan.conv;
  for (int64_t row = begin; row < end; row++) {
    Tiles::Place at = plan.place(row * plan.cols);
    const int64_t offset = plan.dst_offset(at, oc_block), rows = plan.rows_inside(at), m = plan.transforms.m;
    Epilogue epilogue = plan.post_ops.at(oc_block, 1, offset);
    const int64_t residual_step = epilogue.residual ? m * c.block : 0;
    for (float* dst = c.dst + offset; at.col < c.ow; at.col += m, dst += m * c.block, products += c.block) {
      plan.transforms.dst(products, plan.dst_plane(), dst, c.dst_row(), rows, plan.cols_inside(at), plan.stream,
                          epilogue);
      epilogue.residual += residual_step;
    }
  }
}

// The dst of these tiles into the cache, while the products are computed.
void prefetch_dst(const Plan& plan, int64_t oc_block, int64_t begin, int64_t end) {
  const Conv& c = plan.conv;
  for (int64_t row = begin; row < end; row++) {
    const Tiles::Place at = plan.place(row * plan.cols);
    const float* const dst = c.dst + plan.dst_offset(at, oc_block);
    for (int64_t i = 0; i < plan.rows_inside(at) * c.dst_row(); i += c.block) __builtin_prefetch(dst + i, 1, 3);
  }
}

// Rows of tiles [begin, end) of a group.
void compute_run(const Plan& plan, int64_t group, int64_t begin, int64_t end) {
  const int64_t tiles = (end - begin) * plan.cols, block = plan.conv.block, src_size = plan.planes * plan.src_plane();
  const int64_t window_size = plan.window.size(plan.run_rows * plan.transforms.m);
  float* const src = Scratch::get(src_size + plan.products_size() + window_size);
  float* const window = src + src_size + plan.products_size();
  float* const products = plan.in_place ? src : src + src_size;
  for (int64_t b = 0; b < plan.group_ic; b++)
    transform_src(plan, group * plan.group_ic + b, begin, end, window, src + b * tiles * block);
  for (int64_t b = 0; b < plan.group_oc && !plan.stream; b++) prefetch_dst(plan, group * plan.group_oc + b, begin, end);
  multiply(plan, group, tiles, src, products);
  for (int64_t b = 0; b < plan.group_oc; b++)
    transform_dst(plan, group * plan.group_oc + b, begin, end, products + b * tiles * block);
}

template <const WinogradTransforms WinogradKernels::* Transforms>
void run(const Conv& c) {
  const WinogradKernels& kernels = *winograd_transforms(c);
  const Plan plan(c, kernels, kernels.*Transforms);
  parallel_for(c.groups * plan.nruns, c.nthreads, [&](int64_t index_begin, int64_t index_end) {
    for (int64_t index = index_begin; index < index_end; index++) {
      int64_t begin, end;
      split(c.n * c.od * plan.rows, plan.nruns, index % plan.nruns, begin, end);
      compute_run(plan, index / plan.nruns, begin, end);
    }
    if (plan.stream) finish_streams();
  });
}

}  // namespace

const Algorithm conv_grouped_winograd_f2 =
    winograd_algorithm<2>("winograd_f2", can, weights<2>, run<&WinogradKernels::f2>, pack<&WinogradKernels::f2>);
const Algorithm conv_grouped_winograd_f4 =
    winograd_algorithm<4>("winograd_f4", can, weights<4>, run<&WinogradKernels::f4>, pack<&WinogradKernels::f4>);

}  // namespace torch_blocked
