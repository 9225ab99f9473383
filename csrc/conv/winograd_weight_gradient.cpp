// The gradient of a 3x3 convolution of stride 1 with respect to its weights by the transpose of Winograd's algorithm:
// a tile whose dst is A^T [(G g G^T) x (B^T d B)] A adds G^T [(A diff_dst A^T) x (B^T d B)] G to the gradient with
// respect to g, see kernels/winograd.h.
//
// Tiles come in chunks, the same for any number of threads. All threads transform a chunk's src and diff_dst, then sum
// its products: for each element of a tile a matrix of input and output channels, which every chunk adds to. After the
// last one the sums are transformed back.
#include "../kernels/weight_gradient.h"
#include "../parallel.h"
#include "../scratch.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

// Tiles of a chunk: many, since every chunk reads and writes the sums; few enough for the transformed ones, 37 KB a
// channel of src and of diff_dst by F(4x4), to be in the last level cache.
constexpr int64_t most_chunk_tiles = 256;
// Tiles of a kernel's call: those of one input block and two output blocks are in L1, for the calls that share them.
constexpr int64_t most_call_tiles = 128;

// A unit of work: two output blocks (the last may be alone) and one input block, the latter innermost.
struct Plan : Tiles {
  const float* const diff_dst;
  float* const diff_wei;
  const WeightGradientKernels& kernels;
  const int64_t oc_blocks, units;
  // Floats from a unit's sums for one element of a tile to those for the next: two matrices, then a vector's room, so
  // that they do not fall into the same sets of the cache.
  const int64_t sums_plane;
  const int64_t nchunks, chunk_tiles;

  Plan(const Conv& c, const WinogradTransforms& t, const float* diff_dst_, float* diff_wei_)
      : Tiles(c, t),
        diff_dst(diff_dst_),
        diff_wei(diff_wei_),
        kernels(*c.kernels()->weight_gradient),
        oc_blocks(c.oc_blocks()),
        units((oc_blocks + 1) / 2 * ic_blocks),
        sums_plane(2 * c.block * c.block + c.block),
        nchunks((count + most_chunk_tiles - 1) / most_chunk_tiles),
        chunk_tiles((count + nchunks - 1) / nchunks) {}
  int64_t src_plane() const { return plane_of(ic_blocks * chunk_tiles); }
  int64_t diff_plane() const { return plane_of(oc_blocks * chunk_tiles); }

  int64_t oc_block(int64_t unit) const { return unit / ic_blocks * 2; }
  int64_t noc_blocks(int64_t unit) const { return std::min<int64_t>(2, oc_blocks - oc_block(unit)); }
  int64_t ic_block(int64_t unit) const { return unit % ic_blocks; }
  int64_t lanes(int64_t unit) const { return std::min(conv.block, conv.ic - ic_block(unit) / conv.kd * conv.block); }
};

// A chunk's tiles, transformed: [element][channel block][tile].
struct Transformed {
  int64_t tiles;
  float *src, *diff;
};

// `edge`, of a tile's size, holds the pixels of a tile that is only partly inside dst; the others are zero.
void transform_diff_dst(const Plan& plan, int64_t tile, int64_t oc_block, float* edge, float* to) {
  const Conv& c = plan.conv;
  const Tiles::Place at = plan.place(tile);
  const int64_t m = plan.transforms.m, rows = plan.rows_inside(at), cols = plan.cols_inside(at);
  const float* const from = plan.diff_dst + plan.dst_offset(at, oc_block);
  if (rows == m && cols == m)
    return plan.transforms.diff_dst(from, plan.dst_row(), plan.dst_pixel(), to, plan.diff_plane());
  std::fill_n(edge, m * m * c.block, 0.f);
  for (int64_t y = 0; y < rows; y++)
    c.kernels()->copy_pixels(from + y * plan.dst_row(), plan.dst_pixel(), edge + y * m * c.block, cols);
  plan.transforms.diff_dst(edge, m * c.block, c.block, to, plan.diff_plane());
}

// The tiles from `tile` on. The threads share the blocks of diff_dst as they share the units, so that those that one
// reads next are in its own cache.
void transform(const Plan& plan, int64_t tile, const Transformed& to) {
  const int64_t block = plan.conv.block, nthreads = plan.conv.nthreads;
  Ranges of_src(plan.ic_blocks * to.tiles, nthreads), of_diff_dst(plan.oc_blocks * to.tiles, nthreads);
  parallel(nthreads, [&](int64_t thread, int64_t) {
    float* const edge = Scratch::get(plan.planes * block);
    for (int64_t begin, end; of_src.take(thread, begin, end);)
      for (int64_t i = begin; i < end; i++)
        plan.transform_src(plan.place(tile + i % to.tiles), i / to.tiles, to.src + i * block, plan.src_plane());
    for (int64_t begin, end; of_diff_dst.take(thread, begin, end);)
      for (int64_t i = begin; i < end; i++)
        transform_diff_dst(plan, tile + i % to.tiles, i / to.tiles, edge, to.diff + i * block);
  });
}

// sums[block of output channels][input channel] += the products of element `plane`, over all tiles.
void multiply(const Plan& plan, const Transformed& of, int64_t unit, int64_t plane, float* sums) {
  const int64_t block = plan.conv.block, lanes = plan.lanes(unit), noc_blocks = plan.noc_blocks(unit);
  const auto* const kernels = noc_blocks == 2 ? plan.kernels.two_outer_products : plan.kernels.outer_product;
  const int64_t most_lanes = block / noc_blocks, nlane_calls = (lanes + most_lanes - 1) / most_lanes;
  const int64_t ntile_calls = (of.tiles + most_call_tiles - 1) / most_call_tiles;
  const float* const src = of.src + plane * plan.src_plane() + plan.ic_block(unit) * of.tiles * block;
  const float* const diff = of.diff + plane * plan.diff_plane() + plan.oc_block(unit) * of.tiles * block;
  WeightGradientArgs a{};
  a.planes = a.rows = 1;
  a.src_pixel = block;
  a.diff_dst_block = of.tiles * block;
  a.diff_wei_block = block * block;
  for (int64_t call = 0; call < ntile_calls; call++) {
    int64_t first, last, begin, end;
    split(of.tiles, ntile_calls, call, first, last);
    const bool at_end = last == of.tiles;  // what comes next is the next element
    a.cols = last - first;
    a.diff_dst = diff + first * block;
    a.src_ahead = at_end ? plan.src_plane() - first * block : a.cols * block;
    a.diff_dst_ahead = at_end ? plan.diff_plane() - first * block : a.cols * block;
    for (int64_t lane_call = 0; lane_call < nlane_calls; lane_call++) {
      split(lanes, nlane_calls, lane_call, begin, end);
      a.src = src + first * block + begin;
      a.diff_wei = sums + begin * block;
      kernels[end - begin - 1](a);
    }
  }
}

// Adds to diff_wei what a unit's sums for all elements are.
void transform_back(const Plan& plan, int64_t unit, const float* sums) {
  const Conv& c = plan.conv;
  const int64_t ic = plan.ic_block(unit) / c.kd * c.block, kd = plan.ic_block(unit) % c.kd;
  for (int64_t b = 0; b < plan.noc_blocks(unit); b++)
    for (int64_t lane = 0; lane < plan.lanes(unit); lane++) {
      const int64_t index[] = {(plan.oc_block(unit) + b) * c.block, ic + lane, 0, 0, kd};
      plan.transforms.diff_wei(sums + (b * c.block + lane) * c.block, plan.sums_plane,
                               plan.diff_wei + c.wei_md.off_v(index), c.wei_md.strides[3]);
    }
}

// Of the only chunk: each thread's sums of one unit at a time are in its own cache.
void finish_at_once(const Plan& plan, const Transformed& all) {
  parallel_for(plan.units, plan.conv.nthreads, [&](int64_t begin, int64_t end) {
    float* const sums = Scratch::get(plan.planes * plan.sums_plane);
    for (int64_t unit = begin; unit < end; unit++) {
      for (int64_t plane = 0; plane < plan.planes; plane++) {
        std::fill_n(sums + plane * plan.sums_plane, plan.sums_plane, 0.f);
        multiply(plan, all, unit, plane, sums + plane * plan.sums_plane);
      }
      transform_back(plan, unit, sums);
    }
  });
}

}  // namespace

void add_winograd_weight_gradient(const Conv& c, const WinogradTransforms& transforms, const float* diff_dst,
                                  float* diff_wei) {
  const Plan plan(c, transforms, diff_dst, diff_wei);
  const bool at_once = plan.nchunks == 1 && plan.units >= c.nthreads;
  const int64_t nproducts = plan.units * plan.planes;
  const PooledBuffer transformed(plan.planes * (plan.src_plane() + plan.diff_plane()));
  const PooledBuffer sums(at_once ? 0 : nproducts * plan.sums_plane);  // [unit][element]
  Transformed chunk{0, transformed.data(), transformed.data() + plan.planes * plan.src_plane()};
  for (int64_t i = 0; i < plan.nchunks; i++) {
    int64_t begin, end;
    split(plan.count, plan.nchunks, i, begin, end);
    chunk.tiles = end - begin;
    transform(plan, begin, chunk);
    if (at_once) return finish_at_once(plan, chunk);
    parallel_for(nproducts, c.nthreads, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) {
        float* const its_sums = sums.data() + p * plan.sums_plane;
        if (i == 0) std::fill_n(its_sums, plan.sums_plane, 0.f);
        multiply(plan, chunk, p / plan.planes, p % plan.planes, its_sums);
      }
    });
  }
  parallel_for(plan.units, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++)
      transform_back(plan, unit, sums.data() + unit * plan.planes * plan.sums_plane);
  });
}

}  // namespace torch_blocked
