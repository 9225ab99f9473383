// Winograd convolution of groups, 3x3 of stride 1, dilated or not, or 2: the steps of winograd.cpp, for the channels of
// one group at a time, or of a block of whole groups, which is called a group here, too: its lanes are multiplied as in
// depthwise.cpp.
#include "../caches.h"
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) {
  const bool whole_blocks = c.group_ic() % c.block == 0 && c.group_oc() % c.block == 0;
  if (c.groups == 1 || (!whole_blocks && !c.shares_blocks())) return false;
  Conv dense = c;
  dense.groups = 1;
  return can_winograd(dense);
}

// Vectors of weights of a block of input channels: one for each channel of a group.
int64_t block_rows(const Conv& c) { return std::min(c.block, c.group_ic()); }

// The transformed weights, (oc, ic / groups, m + 2, m + 2): for each block of output channels the matrices of all
// elements of a tile.
template <int M>
MemoryDesc weights(const Conv& c) {
  MemoryDesc dims_of = c.wei_md;
  dims_of.dims[2] = dims_of.dims[3] = M + 2;
  return dense_desc(dims_of, {0, 2, 3, 1, 4}, {{1, block_rows(c)}, {0, c.block}});
}

// What weights are packed from, nine matrices for a block of output and one of input channels: Ohwi16o or OIhw16i16o.
MemoryDesc taps(const Conv& c) {
  if (c.shares_blocks()) return dense_desc(c.wei_md, {0, 2, 3, 1}, {{0, c.block}});
  return by_blocks(c);
}

// By the threads that will multiply by them, so that each finds its own in its L2.
template <WinogradByStride Transforms>
void pack(const Conv& given, const MemoryDesc& wanted, float* packed) {
  const ReorderedWeights reordered(given, taps(given));
  const Conv& c = reordered.conv;
  const int64_t rows = block_rows(c), matrix = rows * c.block;
  const WinogradTransforms& transforms = winograd_transforms(c, Transforms);
  const int64_t vectors = c.group_ic() * c.kd;  // of output channels, in a block of them
  parallel_for(c.oc_blocks() * vectors, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t oc_block = i / vectors, ic_block = i % vectors / rows, row = i % rows * c.block;
      transforms.wei(c.wei + (oc_block * vectors / rows + ic_block) * 9 * matrix + row, matrix,
                     packed + oc_block * wanted.strides[0] + ic_block * matrix + row, wanted.strides[3]);
    }
  });
}

// The work is cut into groups, and their rows of tiles into runs.
struct Plan : Tiles {
  const WinogradKernels& kernels;
  PaddedPostOps post_ops;
  int64_t groups;              // or blocks of them
  int64_t group_ic, group_oc;  // blocks of channels of a group; those of ic times the filter's depth
  int64_t nruns, run_rows;     // runs, and the most rows of tiles in one
  // Where, in a block of output channels' weights, those for each element of a tile begin, and their size, in floats.
  std::vector<int64_t> wei_planes;
  int64_t wei_size;
  bool stream;    // dst, past the caches
  bool in_place;  // the products of a tile take the place of its transformed src, which one call of a kernel reads
  std::vector<LaneMap> maps;  // of groups that share a block

  Plan(const Conv& c, const WinogradKernels& kernels, const WinogradTransforms& t);
  int64_t calls_of_run(const Conv& c) const;
  int64_t src_plane() const { return plane_of(group_ic * run_rows * cols); }
  int64_t dst_plane() const { return in_place ? src_plane() : plane_of(group_oc * run_rows * cols); }
  int64_t products_size() const { return in_place ? 0 : planes * dst_plane(); }
};

Plan::Plan(const Conv& c, const WinogradKernels& kernels, const WinogradTransforms& t)
    : Tiles(c, t), kernels(kernels), post_ops(c), stream(streams_dst(c)) {
  groups = c.shares_blocks() ? c.oc_blocks() : c.groups;
  group_ic = ic_blocks / groups;
  group_oc = c.oc_blocks() / groups;
  const int64_t most_tiles = kernels.most_tiles[0] * calls_of_run(c);
  const int64_t all_rows = c.n * c.od * rows, most_rows = std::max<int64_t>(1, most_tiles / cols);
  nruns = (all_rows + most_rows - 1) / most_rows;
  run_rows = (all_rows + nruns - 1) / nruns;
  const int64_t matrix_size = group_ic * block_rows(c) * c.block;
  wei_planes.reserve(planes);
  for (int64_t matrix = 0; matrix < matrices; matrix++)
    wei_planes.insert(wei_planes.end(), sharing(matrix), matrix * matrix_size);
  wei_size = matrices * matrix_size;
  in_place = group_ic == group_oc && group_oc <= 2;
  if (c.shares_blocks()) lane_maps(c, 0, channel_weights(c), maps);
}

// Of the widest kernel: two, whose transforms stay in L2, but one where only those of one stay in L1.
int64_t Plan::calls_of_run(const Conv& c) const {
  const int64_t call_bytes = planes * group_ic * kernels.most_tiles[0] * c.block * int64_t(sizeof(float));
  return call_bytes <= caches().l1 && 2 * call_bytes > caches().l1 ? 1 : 2;
}

// The kernels for `blocks` blocks of output channels.
const WinogradMultiply* multiply_kernels(const Plan& plan, int64_t blocks) {
  if (plan.maps.empty()) return plan.kernels.multiply[blocks - 1];
  return int64_t(plan.maps.size()) * 2 == plan.conv.block ? plan.kernels.multiply_halves : plan.kernels.multiply_lanes;
}

// products[plane][block][tile] of a group.
void multiply(const Plan& plan, int64_t group, int64_t tiles, const float* src, float* products) {
  const int64_t block = plan.conv.block;
  WinogradProducts a{};
  a.src_plane = plan.src_plane();
  a.src_block = a.dst_block = tiles * block;
  a.wei_planes = plan.wei_planes.data();
  a.wei_block = plan.wei_size;
  a.dst_plane = plan.dst_plane();
  a.planes = plan.planes;
  a.ic_blocks = plan.group_ic;
  a.sum_blocks = sum_blocks(plan.conv, 1);
  a.maps = plan.maps.data();
  a.nmaps = plan.maps.size();
  for (int64_t b = 0; b < plan.group_oc; b += 2) {
    const int64_t blocks = std::min<int64_t>(2, plan.group_oc - b), most = plan.kernels.most_tiles[blocks - 1];
    const int64_t ncalls = (tiles + most - 1) / most;
    const WinogradMultiply* const kernels = multiply_kernels(plan, blocks);
    a.wei = plan.conv.wei + (group * plan.group_oc + b) * plan.wei_size;
    for (int64_t call = 0; call < ncalls; call++) {
      int64_t begin, end;
      split(tiles, ncalls, call, begin, end);
      a.src = src + begin * block;
      a.dst = products + (b * tiles + begin) * block;
      kernels[end - begin - 1](a);
    }
  }
}

// The transformed src of the tiles in rows [begin, end) of a block of input channels: dst[plane][tile]. The pixels that
// are likely to be read next are fetched meanwhile: those of the next image, or of the next block's first one.
void transform_src(const Plan& plan, int64_t ic_block, int64_t begin, int64_t end, float* dst) {
  const Conv& c = plan.conv;
  const int64_t* const strides = c.src_md.strides;
  Tiles::Place at = plan.place(begin * plan.cols);
  for (int64_t i = begin * plan.cols; i < end * plan.cols; i++, plan.advance(at), dst += c.block) {
    const int64_t ahead = at.n + 1 < c.n ? (at.n + 1) * strides[0] : strides[1];
    const float* const next =
        c.src + ic_block / c.kd * strides[1] + ahead + at.row * c.stride_h * strides[2] + at.col * c.stride_w * c.block;
    for (int64_t y = 0; y < plan.rows_inside(at) * c.stride_h; y++)
      for (int64_t x = 0; x < plan.transforms.m * c.stride_w; x++)
        __builtin_prefetch(next + y * c.dilation_h * strides[2] + x * c.dilation_w * c.block, 0, 2);
    plan.transform_src(at, ic_block, dst, plan.src_plane());
  }
}

// The products[plane][tile] of a block of output channels back, tiles in rows [begin, end).
void transform_dst(const Plan& plan, int64_t oc_block, int64_t begin, int64_t end, const float* products) {
  const Conv& c = plan.conv;
  for (int64_t row = begin; row < end; row++) {
    Tiles::Place at = plan.place(row * plan.cols);
    const int64_t offset = plan.dst_offset(at, oc_block), rows = plan.rows_inside(at);
    Epilogue epilogue = plan.post_ops.at(oc_block, 1, offset);
    const float* const residual = epilogue.residual;
    for (int64_t i = 0; i < plan.cols; i++, plan.across.advance(at.col), products += c.block) {
      const int64_t col = at.col * c.block;
      if (residual) epilogue.residual = residual + col;
      plan.transforms.dst(products, plan.dst_plane(), c.dst + offset + col, plan.dst_row(), plan.dst_pixel(), rows,
                          plan.cols_inside(at), plan.stream, epilogue);
    }
  }
}

// The dst of these tiles into the cache, while the products are computed.
void prefetch_dst(const Plan& plan, int64_t oc_block, int64_t begin, int64_t end) {
  const Conv& c = plan.conv;
  for (int64_t row = begin; row < end; row++) {
    const Tiles::Place at = plan.place(row * plan.cols);
    const float* const dst = c.dst + plan.dst_offset(at, oc_block);
    for (int64_t y = 0; y < plan.rows_inside(at); y++)
      for (int64_t x = 0; x < c.ow; x++) __builtin_prefetch(dst + y * plan.dst_row() + x * c.block, 1, 3);
  }
}

// Rows of tiles [begin, end) of a group.
void compute_run(const Plan& plan, int64_t group, int64_t begin, int64_t end) {
  const int64_t tiles = (end - begin) * plan.cols, src_size = plan.planes * plan.src_plane();
  float* const src = Scratch::get(src_size + plan.products_size());
  float* const products = plan.in_place ? src : src + src_size;
  for (int64_t b = 0; b < plan.group_ic; b++)
    transform_src(plan, group * plan.group_ic + b, begin, end, src + b * tiles * plan.conv.block);
  for (int64_t b = 0; b < plan.group_oc && !plan.stream; b++) prefetch_dst(plan, group * plan.group_oc + b, begin, end);
  multiply(plan, group, tiles, src, products);
  for (int64_t b = 0; b < plan.group_oc; b++)
    transform_dst(plan, group * plan.group_oc + b, begin, end, products + b * tiles * plan.conv.block);
}

template <WinogradByStride Transforms>
void run(const Conv& c) {
  const Plan plan(c, *winograd_kernels(c), winograd_transforms(c, Transforms));
  parallel_for(plan.groups * plan.nruns, c.nthreads, [&](int64_t index_begin, int64_t index_end) {
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
