// Winograd convolution, 3x3 of stride 1, dilated or not, or 2: F(2x2, 3x3) and F(4x4, 3x3), see kernels/winograd.h.
//
// A run of dst tiles goes through three steps inside one core's L2: their src tiles are transformed, each of their
// elements becomes a matrix product over the input channels, and the products of some output blocks at a time are
// transformed back, post-ops included. Neither transformed tensor is ever whole in memory.
#include "winograd.h"

#include "../caches.h"
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"

namespace torch_blocked {

const WinogradKernels* winograd_kernels(const Conv& c) {
  return TORCH_BLOCKED_KERNELS_OF_BLOCK(winograd_kernels, c.block);
}

bool can_winograd(const Conv& c) {
  return c.kh == 3 && c.kw == 3 && (c.stride_h == 1 || c.stride_h == 2) && c.stride_w == c.stride_h &&
         (c.stride_h == 1 || (c.dilation_h == 1 && c.dilation_w == 1)) && c.groups == 1 && !c.phase &&
         c.src_md.single_block(1) == c.block && c.src_md.strides[3] == c.block && c.kernels() != nullptr &&
         winograd_kernels(c) != nullptr;
}

Tiles::Tiles(const Conv& c, const WinogradTransforms& t)
    : conv(c),
      transforms(t),
      size(t.size),
      planes(size * size),
      matrices(t.wei_size * t.wei_size),
      down(c.oh, t.m, c.dilation_h),
      across(c.ow, t.m, c.dilation_w),
      rows(down.count),
      cols(across.count),
      count(c.n * c.od * rows * cols),
      ic_blocks((c.ic + c.block - 1) / c.block * c.kd) {}

void Tiles::transform_src(const Place& at, int64_t ic_block, float* dst, int64_t dst_plane) const {
  const Conv& c = conv;
  const int64_t top = at.row * c.stride_h - c.pad_h, left = at.col * c.stride_w - c.pad_w;
  const int64_t src_row = c.src_md.strides[2], tile_row = c.dilation_h * src_row, tile_pixel = c.dilation_w * c.block;
  const int64_t id = at.od * c.stride_d - c.pad_d + ic_block % c.kd * c.dilation_d;
  const int64_t ih = id >= 0 && id < c.id ? c.ih : 0;
  const float* const src = c.src + at.n * c.src_md.strides[0] + ic_block / c.kd * c.src_md.strides[1] +
                           id * c.src_md.strides[4] + top * src_row + left * c.block;
  if (top >= 0 && left >= 0 && top + (size - 1) * c.dilation_h < ih && left + (size - 1) * c.dilation_w < c.iw)
    return transforms.src(src, tile_row, tile_pixel, dst, dst_plane);
  const TilePart part{down.pixels(-top), down.pixels(ih - top), across.pixels(-left), across.pixels(c.iw - left)};
  transforms.src_part(src, tile_row, tile_pixel, part, dst, dst_plane);
}

void Tiles::transform_src(int64_t begin, int64_t tiles, int64_t ic_begin, int64_t ic_end, float* dst,
                          int64_t dst_plane) const {
  for (int64_t ic_block = ic_begin; ic_block < ic_end; ic_block++) {
    Place at = place(begin);
    for (int64_t i = 0; i < tiles; i++, advance(at), dst += conv.block) transform_src(at, ic_block, dst, dst_plane);
  }
}

void Tiles::transform_dst(int64_t begin, int64_t tiles, int64_t oc_block, const float* products, int64_t products_plane,
                          bool stream, const PaddedPostOps& post_ops) const {
  Place at = place(begin);
  for (int64_t i = 0; i < tiles; i++, advance(at), products += conv.block) {
    const int64_t offset = dst_offset(at, oc_block), nrows = rows_inside(at), ncols = cols_inside(at);
    transforms.dst(products, products_plane, conv.dst + offset, dst_row(), dst_pixel(), nrows, ncols, stream,
                   post_ops.at(oc_block, 1, offset));
  }
}

namespace {

// The transformed weights, (oc, ic, m + 2, m + 2): a matrix of oc x ic in blocks for each element of a tile.
template <int M>
MemoryDesc weights(const Conv& c) {
  MemoryDesc dims_of = c.wei_md;
  dims_of.dims[2] = dims_of.dims[3] = M + 2;
  return dense_desc(dims_of, {2, 3, 0, 1, 4}, {{1, c.block}, {0, c.block}});
}

void transform_weights(const Conv& given, const WinogradTransforms& transforms, const MemoryDesc& wanted,
                       float* packed) {
  const ReorderedWeights reordered(given, by_blocks(given));
  const Conv& c = reordered.conv;
  const int64_t ic_blocks = c.wei_md.outer(1) * c.kd,
                vectors = ic_blocks * c.block;  // of output channels, in a block of them
  const int64_t matrix = c.block * c.block, wei_block = ic_blocks * 9 * matrix;
  parallel_for(c.oc_blocks() * vectors, c.nthreads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t oc_block = i / vectors, ic = i % vectors, ic_block = ic / c.block, lane = ic % c.block * c.block;
      transforms.wei(c.wei + oc_block * wei_block + ic_block * 9 * matrix + lane, matrix,
                     packed + oc_block * wanted.strides[0] + ic_block * matrix + lane, wanted.strides[3]);
    }
  });
}

// Bytes. While the transformed weights are read fast, a run's transformed src stays in a core's L2 beside them, one
// element of it in L1, and all weights are read for every run. Beyond, runs are long, of two calls' tiles or more, so
// that the weights are read few times from further away: the src of a run then lies in the last level cache, one of its
// planes in L2.
constexpr int64_t src_budget = 640 << 10, long_src_budget = 4 << 20;
constexpr int64_t most_short_run = 28;  // tiles

// How the work is cut up: tiles in runs, every run by one thread (or by each for its share of the output channels).
struct Plan : Tiles {
  const ConvKernels& gemm;
  PaddedPostOps post_ops;
  int64_t oc_blocks;
  int64_t group;             // output blocks between two transforms back: an even number, or all
  int64_t nruns, run_tiles;  // runs, and the most tiles in one
  int64_t call_blocks;       // the most output blocks of a call
  int64_t nchunks;           // of the input blocks, summed one after the other
  bool split_oc, stream;

  Plan(const Conv& c, const WinogradTransforms& t);
  // Of all input channels and one output block.
  int64_t wei_block() const { return ic_blocks * conv.block * conv.block; }
  const float* weights(int64_t matrix, int64_t oc_block) const {
    return conv.wei + (matrix * oc_blocks + oc_block) * wei_block();
  }
  int64_t src_plane() const { return plane_of(ic_blocks * run_tiles); }
  bool src_beyond_l2() const { return planes * src_plane() * int64_t(sizeof(float)) > src_budget; }
  int64_t dst_plane() const { return plane_of(group * run_tiles); }
  int64_t call_tiles() const { return call_blocks == 3 ? gemm.cols_three : gemm.cols; }
};

int64_t most_reread_weights() { return (is_behind_mesh() ? 4 : 16) << 20; }

// Planes of products of a short run between two transforms back, of an even number of output blocks: few stay in L2
// while the weights pass through it.
int64_t short_group(const Conv& c) { return (is_behind_mesh() ? 32 / c.block : 8) * 36; }

// Two output blocks' weights of a chunk of input blocks stay in L1 while several calls read them, beside 32 KB of src
// and of the weights fetched meanwhile. An L1 of no more has no room for them, and everything is one chunk.
int64_t chunks(const Conv& c, int64_t ic_blocks) {
  const int64_t room = caches().l1 - (32 << 10), wei_bytes = ic_blocks * 2 * c.block * c.block * sizeof(float);
  return room > 0 ? std::min(ic_blocks, (wei_bytes + room - 1) / room) : 1;
}

// Output blocks of a call for so many tiles: of few, three fill the registers, with fewer loads for each product.
int64_t blocks_of_call(const ConvKernels& kernels, int64_t tiles) {
  const auto sums = [&](int64_t blocks, int64_t most) {
    return most > 0 ? double(blocks * tiles) / double((tiles + most - 1) / most) : 0;
  };
  return sums(3, kernels.cols_three) > sums(2, kernels.cols) ? 3 : 2;
}

// Whether the threads share the output channels. Each then reads only its own weights, but transforms all of src.
// Sharing the tiles, each goes on with the rows that it wrote in the layer before, and reads all weights: measured on
// two cores of a Zen 4 that is faster for up to 4 output channels a tile, up to 16 where the channels make no even
// shares, if each thread has some tiles.
bool splits_oc(const Conv& c, int64_t count) {
  constexpr int64_t some_tiles = 8;
  const bool even = (c.oc_blocks() + 1) / 2 % c.nthreads == 0;  // two blocks at a time
  const int64_t most_channels_a_tile = count < some_tiles * c.nthreads ? 1 : even ? 4 : 16;
  return c.oc > most_channels_a_tile * count && c.oc_blocks() >= 2 * c.nthreads;
}

Plan::Plan(const Conv& c, const WinogradTransforms& t)
    : Tiles(c, t), gemm(*c.kernels()), post_ops(c), stream(streams_dst(c)) {
  oc_blocks = c.oc_blocks();
  const int64_t wei_bytes = matrices * oc_blocks * wei_block() * sizeof(float);
  const bool long_runs = wei_bytes > most_reread_weights();
  group = long_runs ? oc_blocks : std::min(oc_blocks, std::max<int64_t>(2, short_group(c) / planes / 2 * 2));
  const int64_t tile_bytes = planes * ic_blocks * c.block * sizeof(float);
  const int64_t most_tiles = long_runs ? std::max<int64_t>(long_src_budget / tile_bytes, 2 * gemm.cols)
                                       : std::min(src_budget / tile_bytes, most_short_run);
  const int64_t call_tiles = std::max<int64_t>(1, most_tiles / gemm.cols) * gemm.cols;
  nruns = count <= most_tiles ? 1 : (count + call_tiles - 1) / call_tiles;
  split_oc = splits_oc(c, count);
  if (!split_oc) nruns = even_parts(nruns, 1, count, c.nthreads);
  run_tiles = (count + nruns - 1) / nruns;
  call_blocks = blocks_of_call(gemm, run_tiles);
  nchunks = chunks(c, ic_blocks);
}

// One matrix product: of all tiles' src, in some planes, with the weights of some output blocks. Where several calls
// share the weights, all but the first find them in a cache: the first two fetch those that are read next, the second
// of the last block, so that memory is always busy.
void multiply_tiles(const Plan& plan, int64_t blocks, int64_t planes, const Calls& calls, const float* next_wei,
                    const float* src, float* dst, ConvArgs& a) {
  const ConvKernel* const kernels = plan.gemm.one_row[blocks - 1];
  int64_t done = 0;
  for (int64_t plane = 0; plane < planes; plane++, src += plan.src_plane(), dst += plan.dst_plane())
    for (int64_t call = 0, begin = 0, tiles; call < calls.number; call += a.runs, begin += a.runs * tiles) {
      tiles = calls.size(call);
      a.runs = done < 2 ? 1 : calls.alike(call);
      a.next = planes * calls.number == 1 || done >= 2 ? nullptr
               : done == 0                             ? next_wei
                                                       : next_wei + std::max<int64_t>(1, blocks - 1) * a.wei_block;
      a.next_block = done == 0 && blocks == 3 ? a.wei_block : 0;
      a.src = src + begin * plan.conv.block;
      a.dst = dst + begin * plan.conv.block;
      kernels[tiles - 1](a);
      done += a.runs;
    }
}

// products[plane][block][tile] of some output blocks from oc_block on, two or three at a time. The last ones of a plane
// fetch the src of the next, where that lies beyond L2.
void multiply(const Plan& plan, int64_t oc_block, int64_t blocks, int64_t tiles, const float* src, float* products) {
  static const Tap no_offset = {0, 0};
  const Conv& c = plan.conv;
  const Calls calls(tiles, plan.call_tiles()), parts(blocks, plan.call_blocks);
  ConvArgs a{};
  a.src_block = a.dst_block = tiles * c.block;
  a.taps = &no_offset;
  a.ntaps = 1;
  a.lanes = c.block;
  a.wei_ic_block = c.block * c.block;
  a.wei_block = plan.wei_block();
  a.sum_blocks = sum_blocks(c, 1);
  for (int64_t matrix = 0, planes; matrix < plan.matrices; matrix++) {
    planes = plan.sharing(matrix);
    for (int64_t part = 0, b = 0, part_blocks; part < parts.number; part++, b += part_blocks) {
      part_blocks = parts.size(part);
      const bool last = part + 1 == parts.number, more = matrix + 1 < plan.matrices;
      const float* const next = plan.weights(matrix + (last && more), oc_block + (last ? 0 : b + part_blocks));
      const float* chunk_src = src;
      a.wei = plan.weights(matrix, oc_block + b);
      a.src_prefetch = last && more && plan.src_beyond_l2() ? plan.src_plane() : 0;
      for (int64_t chunk = 0, begin, end; chunk < plan.nchunks; chunk++) {
        split(plan.ic_blocks, plan.nchunks, chunk, begin, end);
        a.first = begin == 0;
        a.nblocks = end - begin;
        a.fetch_dst = a.nblocks > a.sum_blocks;  // to which the second part is added
        a.half_blocks = std::max<int64_t>(0, c.half_blocks() - (plan.ic_blocks - end));
        const float* const after = a.wei + a.nblocks * a.wei_ic_block;
        multiply_tiles(plan, part_blocks, planes, calls, end < plan.ic_blocks ? after : next, chunk_src,
                       products + b * a.dst_block, a);
        a.wei = after;
        chunk_src += a.nblocks * a.src_block;
      }
    }
    src += planes * plan.src_plane();
    products += planes * plan.dst_plane();
  }
}

// The transformed src of one run, and the memory for its products.
class Run {
 public:
  Run(const Plan& plan, int64_t index)
      : plan_(plan), src_(Scratch::get(plan.planes * (plan.src_plane() + plan.dst_plane()))) {
    int64_t end;
    split(plan.count, plan.nruns, index, begin_, end);
    tiles_ = end - begin_;
    plan.transform_src(begin_, tiles_, 0, plan.ic_blocks, src_, plan.src_plane());
  }

  // Output blocks [oc_begin, oc_end).
  void compute(int64_t oc_begin, int64_t oc_end) const {
    for (int64_t oc_block = oc_begin; oc_block < oc_end; oc_block += plan_.group) {
      const int64_t blocks = std::min(plan_.group, oc_end - oc_block);
      multiply(plan_, oc_block, blocks, tiles_, src_, products());
      for (int64_t b = 0; b < blocks; b++)
        plan_.transform_dst(begin_, tiles_, oc_block + b, products() + b * tiles_ * plan_.conv.block, plan_.dst_plane(),
                            plan_.stream, plan_.post_ops);
    }
    if (plan_.stream) finish_streams();
  }

 private:
  float* products() const { return src_ + plan_.planes * plan_.src_plane(); }

  const Plan& plan_;
  float* const src_;
  int64_t begin_, tiles_;
};

// The threads share the runs, or the output channels, two blocks at a time, of each run, which all of them transform.
void run(const Conv& c, const WinogradTransforms& transforms) {
  const Plan plan(c, transforms);
  if (!plan.split_oc)
    return parallel_for(plan.nruns, c.nthreads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) Run(plan, i).compute(0, plan.oc_blocks);
    });
  // Each range of pairs reads the run's src: from beyond L2 once a thread. Calls of three blocks need long ranges.
  const int64_t pairs = (plan.oc_blocks + 1) / 2, share = pairs / c.nthreads;
  const int64_t least = std::max<int64_t>(1, plan.src_beyond_l2() || plan.call_blocks == 3 ? share : share / 2);
  for (int64_t i = 0; i < plan.nruns; i++) {
    Ranges ranges(pairs, c.nthreads, least);
    parallel(c.nthreads, [&](int64_t thread, int64_t) {
      int64_t begin, end;
      if (!ranges.take(thread, begin, end)) return;
      const Run run(plan, i);
      do run.compute(begin * 2, std::min(end * 2, plan.oc_blocks));
      while (ranges.take(thread, begin, end));
    });
  }
}

template <WinogradByStride Transforms>
void pack(const Conv& c, const MemoryDesc& wanted, float* packed) {
  transform_weights(c, winograd_transforms(c, Transforms), wanted, packed);
}

template <WinogradByStride Transforms>
void run(const Conv& c) {
  run(c, winograd_transforms(c, Transforms));
}

}  // namespace

MemoryDesc winograd_f4_weights(const Conv& c) { return weights<4>(c); }
void pack_winograd_f4(const Conv& c, const MemoryDesc& wanted, float* packed) {
  pack<&WinogradKernels::f4>(c, wanted, packed);
}

const Algorithm conv_winograd_f2 = winograd_algorithm<2>("winograd_f2", can_winograd, weights<2>,
                                                         run<&WinogradKernels::f2>, pack<&WinogradKernels::f2>);
const Algorithm conv_winograd_f4 = winograd_algorithm<4>("winograd_f4", can_winograd, winograd_f4_weights,
                                                         run<&WinogradKernels::f4>, pack_winograd_f4);

}  // namespace torch_blocked
