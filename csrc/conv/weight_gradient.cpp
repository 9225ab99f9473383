// The gradient of a convolution with respect to its weights: for every filter tap the sum over pixels of the products
// of src's channels, at the pixel that the tap reads, and diff_dst's.
//
// A dense filter's is an outer product of two blocks of channels, kept in registers over many pixels; filter taps whose
// channels together are fewer than a block (an image of three colours, copied with its padding) go side by side. Groups
// narrower than a block are summed lane by lane, as the depthwise algorithm runs them forward.
//
// Dense filters of 3x3 and stride 1 go by winograd_weight_gradient.cpp where that is estimated to be faster.
//
// Pixels come in chunks, the same for any number of threads: sums of a chunk are added up in memory, which keeps the
// error small. Threads share the blocks of diff_wei, not the pixels.
#include "../kernels/weight_gradient.h"

#include <limits>

#include "../parallel.h"
#include "../reorder.h"
#include "../scratch.h"
#include "cost.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

constexpr int64_t chunk_pixels = 256;                  // of one block a third of an L1 of 48 KB
constexpr int64_t ic_tile_bytes = int64_t(256) << 10;  // src of some blocks, in L2 while all blocks of diff_dst pass

// The dst positions [begin, end) of `dst` whose src, `first` for dst 0, lies inside it.
struct Range {
  int64_t begin, end;
  Range(int64_t first, int64_t stride, int64_t src, int64_t dst)
      : begin(std::min(dst, first < 0 ? (-first + stride - 1) / stride : 0)),
        end(std::max(begin, first < src ? std::min(dst, (src - 1 - first) / stride + 1) : 0)) {}
  Range(int64_t begin_, int64_t end_) : begin(begin_), end(std::max(begin_, end_)) {}
  Range operator&(const Range& other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
  bool empty() const { return begin == end; }
};

// Pixels of dst: an image (all, where they have no depth), and in it planes (images, where they have none) and rows.
struct Chunk {
  int64_t n;
  Range planes, rows;
};

// Whether there is a depth: else an image is its one plane, which the one plane of the filter sees.
bool is_deep(const Conv& c) { return c.od > 1 || c.kd > 1 || c.pad_d > 0; }

std::vector<Chunk> make_chunks(const Conv& c) {
  const bool deep = is_deep(c);
  const int64_t planes = deep ? c.od : c.n, pixels = c.oh * c.ow;
  const int64_t planes_step = std::max<int64_t>(1, chunk_pixels / pixels);
  const int64_t rows_step = std::min(c.oh, std::max<int64_t>(1, chunk_pixels / c.ow));
  std::vector<Chunk> chunks;
  for (int64_t n = 0; n < (deep ? c.n : 1); n++)
    for (int64_t p = 0; p < planes; p += planes_step)
      for (int64_t r = 0; r < c.oh; r += rows_step)
        chunks.push_back({n, {p, std::min(planes, p + planes_step)}, {r, std::min(c.oh, r + rows_step)}});
  return chunks;
}

// diff_wei, in the format `wei_md` of its conv, which is one of formats() below.
struct Problem {
  Conv conv;
  const float* diff_dst;
  float* diff_wei;
  const WeightGradientKernels& kernels;
  bool deep, lane_wise;
  int64_t src_pixel;
  int64_t ic_blocks;  // of a group; maps of an output block, if lane_wise
  int64_t run;        // taps of a row that lie side by side, in src and in diff_wei
  int64_t lanes;      // of one tap

  Problem(const Conv& c, const float* diff_dst_, float* diff_wei_);
  int64_t oc_blocks() const { return conv.oc_blocks(); }
  WeightGradientArgs rectangle(const Chunk& chunk, int64_t src_offset, int64_t oc_block, int64_t kd, int64_t kh,
                               int64_t kw, int64_t ntaps) const;
};

bool is_lane_wise(const Conv& c) {
  return c.groups > 1 && (c.group_ic() % c.block != 0 || c.group_oc() % c.block != 0);
}

// What the sums are made in: OIhw{b}i{b}o; with fewer input channels than a block Ohwi{b}o, lane by lane Oihw{b}o.
MemoryDesc format(const Conv& c) {
  if (is_lane_wise(c)) return dense_desc(c.wei_md, {0, 1, 2, 3}, {{0, c.block}});
  if (c.src_md.is_plain() || c.group_ic() < c.block) return dense_desc(c.wei_md, {0, 2, 3, 1}, {{0, c.block}});
  return by_blocks(c);
}

Problem::Problem(const Conv& c, const float* diff_dst_, float* diff_wei_)
    : conv(c), diff_dst(diff_dst_), diff_wei(diff_wei_), kernels(*c.kernels()->weight_gradient) {
  deep = is_deep(c);
  lane_wise = is_lane_wise(c);
  const bool plain = c.src_md.is_plain();
  src_pixel = c.stride_w * c.src_md.strides[3];
  ic_blocks = plain ? 1 : (c.group_ic() + c.block - 1) / c.block;
  run = plain && c.dilation_w == 1 ? c.kw : 1;
  lanes = plain ? c.ic : std::min(c.block, c.group_ic());
}

// Of the chunk, the pixels for which these taps of the filter read src; no rows where there are none.
WeightGradientArgs Problem::rectangle(const Chunk& chunk, int64_t src_offset, int64_t oc_block, int64_t kd, int64_t kh,
                                      int64_t kw, int64_t ntaps) const {
  const Conv& c = conv;
  const int64_t id = kd * c.dilation_d - c.pad_d, ih = kh * c.dilation_h - c.pad_h, iw = kw * c.dilation_w - c.pad_w;
  const Range planes = deep ? chunk.planes & Range(id, c.stride_d, c.id, c.od) : chunk.planes;
  const Range rows = chunk.rows & Range(ih, c.stride_h, c.ih, c.oh);
  const Range cols = Range(iw, c.stride_w, c.iw, c.ow) & Range(iw + ntaps - 1, c.stride_w, c.iw, c.ow);
  const int64_t* const strides = c.src_md.strides;
  WeightGradientArgs a{};
  if (planes.empty() || rows.empty() || cols.empty()) return a;
  a.planes = planes.end - planes.begin, a.rows = rows.end - rows.begin, a.cols = cols.end - cols.begin;
  a.src_plane = deep ? c.stride_d * strides[4] : strides[0];
  a.src_row = c.stride_h * strides[2];
  a.src_pixel = src_pixel;
  a.src = c.src + src_offset + chunk.n * strides[0] + planes.begin * a.src_plane + (deep ? id * strides[4] : 0) +
          (rows.begin * c.stride_h + ih) * strides[2] + (cols.begin * c.stride_w + iw) * strides[3];
  const int64_t image = oc_blocks() * c.dst_block();
  a.diff_dst_plane = deep ? c.dst_plane() : image;
  a.diff_dst_row = c.dst_row();
  a.diff_dst = diff_dst + chunk.n * image + oc_block * c.dst_block() + planes.begin * a.diff_dst_plane +
               rows.begin * a.diff_dst_row + cols.begin * c.block;
  return a;
}

// From the pixels of a call to those that later calls read.
struct Ahead {
  int64_t src, diff_dst;
};

// One or two blocks of output channels and one of input channels of a dense filter, one of its rows.
void add_outer_products(const Problem& p, const Chunk& chunk, int64_t oc_block, int64_t noc_blocks, int64_t ic_block,
                        int64_t kd, int64_t kh, const Ahead& ahead) {
  const Conv& c = p.conv;
  const int64_t group = oc_block / (p.oc_blocks() / c.groups);
  const int64_t src_offset = (group * p.ic_blocks + ic_block) * c.src_md.strides[1];
  for (int64_t kw = 0; kw < c.kw; kw += p.run) {
    WeightGradientArgs a = p.rectangle(chunk, src_offset, oc_block, kd, kh, kw, p.run);
    if (a.rows == 0) continue;
    const int64_t index[] = {oc_block * c.block, ic_block * c.block, kh, kw, kd};
    a.diff_wei = p.diff_wei + c.wei_md.off_v(index);
    a.src_ahead = ahead.src;
    a.diff_dst_ahead = ahead.diff_dst;
    a.diff_dst_block = c.dst_block();
    a.diff_wei_block = c.wei_md.strides[0];
    const auto* kernels = noc_blocks == 2 ? p.kernels.two_outer_products : p.kernels.outer_product;
    const int64_t all = p.run * p.lanes, most = c.block / noc_blocks, ncalls = (all + most - 1) / most;
    for (int64_t call = 0; call < ncalls; call++) {
      int64_t begin, end;
      split(all, ncalls, call, begin, end);
      const int64_t n = end - begin;
      kernels[n - 1](a);
      a.src += n;
      a.diff_wei += n * c.block;
    }
  }
}

// One block of output channels of groups narrower than a block, one row of the filter.
void add_lane_products(const Problem& p, const Chunk& chunk, int64_t oc_block, const std::vector<LaneMap>& maps,
                       int64_t kd, int64_t kh) {
  const Conv& c = p.conv;
  for (const LaneMap& map : maps)
    for (int64_t kw = 0; kw < c.kw; kw++) {
      WeightGradientArgs a = p.rectangle(chunk, map.src, oc_block, kd, kh, kw, 1);
      if (a.rows == 0) continue;
      const int64_t index[] = {oc_block * c.block, 0, kh, kw, kd};
      a.diff_wei = p.diff_wei + c.wei_md.off_v(index) + map.wei;
      switch (lanes_of(c)) {
        case Lane::Own:
          p.kernels.lane_product(a, nullptr);
          break;
        case Lane::Mapped:
        case Lane::Fours:
        case Lane::Eights:
          p.kernels.lane_product(a, &map);
          break;
        case Lane::Same:
          for (int64_t lane = 0; lane < map.lanes; lane++, a.src++, a.diff_wei += map.wei_lane)
            p.kernels.outer_product[0](a);
          break;
      }
    }
}

// One thread's part: threads share the blocks of src where that is the larger, else those of diff_dst.
void run_dense(const Problem& p, const std::vector<Chunk>& chunks, int64_t thread, int64_t team) {
  const Conv& c = p.conv;
  const int64_t rows = c.kd * c.kh, ics = p.ic_blocks * rows, ocs = p.oc_blocks();
  const bool src_is_larger = c.ic * c.ih * c.iw > c.oc * c.oh * c.ow;
  const int64_t ic_parts = std::min(ics, src_is_larger ? team : std::max<int64_t>(1, team / ocs));
  const int64_t oc_parts = std::min(ocs, team / ic_parts);
  if (thread >= ic_parts * oc_parts) return;
  int64_t ic_begin, ic_end, oc_begin, oc_end;
  split(ics, ic_parts, thread % ic_parts, ic_begin, ic_end);
  split(ocs, oc_parts, thread / ic_parts, oc_begin, oc_end);
  const int64_t tile = std::max<int64_t>(1, ic_tile_bytes / (chunk_pixels * c.block * int64_t(sizeof(float)))) * rows;
  const int64_t src_block = c.src_md.strides[1], dst_block = c.dst_block();
  for (const Chunk& chunk : chunks) {
    const int64_t next_chunk = (chunk.rows.end - chunk.rows.begin) * c.stride_h * c.src_md.strides[2];
    for (int64_t begin = ic_begin; begin < ic_end; begin += tile) {
      const int64_t end = std::min(ic_end, begin + tile);
      for (int64_t oc = oc_begin, noc; oc < oc_end; oc += noc) {
        noc = std::min<int64_t>(oc_end - oc, c.groups == 1 ? 2 : 1);
        for (int64_t ic = begin; ic < end; ic++) {
          const bool last_pass = oc + noc == oc_end, last_ic = ic + rows >= end;
          const Ahead ahead = {last_pass ? next_chunk
                               : last_ic ? 0
                                         : src_block,
                               last_pass || !last_ic ? 0 : noc * dst_block};
          add_outer_products(p, chunk, oc, noc, ic / rows, ic % rows / c.kh, ic % c.kh, ahead);
        }
      }
    }
  }
}

// One thread's part of oc_block x kd x kh.
void run_lane_wise(const Problem& p, const std::vector<Chunk>& chunks, int64_t thread, int64_t team) {
  const Conv& c = p.conv;
  const int64_t rows = c.kd * c.kh;
  int64_t begin, end;
  split(p.oc_blocks() * rows, team, thread, begin, end);
  const std::vector<int64_t> weights = channel_weights(c);
  std::vector<LaneMap> maps;
  for (int64_t oc_block = begin / rows; oc_block * rows < end; oc_block++) {
    lane_maps(c, oc_block, weights, maps);
    const Range tasks = Range(0, rows) & Range(begin - oc_block * rows, end - oc_block * rows);
    for (const Chunk& chunk : chunks)
      for (int64_t task = tasks.begin; task < tasks.end; task++)
        add_lane_products(p, chunk, oc_block, maps, task / c.kh, task % c.kh);
  }
}

// Padding times infinity is NaN: what was summed in the padding of diff_wei is cleared.
void clear_padding(const Conv& c, float* diff_wei) {
  const MemoryDesc& md = c.wei_md;
  const int64_t ocs = c.padded_oc(), ics = md.outer(1) * md.block(1);
  if (ocs == c.oc && ics == md.dims[1]) return;
  for (int64_t oc = 0; oc < ocs; oc++)
    for (int64_t ic = oc < c.oc ? md.dims[1] : 0; ic < ics; ic++)
      for (int64_t kd = 0; kd < c.kd; kd++)
        for (int64_t kh = 0; kh < c.kh; kh++)
          for (int64_t kw = 0; kw < c.kw; kw++) {
            const int64_t index[] = {oc, ic, kh, kw, kd};
            diff_wei[md.off_v(index)] = 0;
          }
}

// An image of few channels as the sums want it: channels innermost, its zero padding around it.
HugeBuffer channels_last_padded(Conv& c) {
  MemoryDesc md = c.src_md;
  const int64_t sizes[] = {c.n, c.id + 2 * c.pad_d, c.ih + 2 * c.pad_h, c.iw + 2 * c.pad_w, c.ic};
  const int axes[] = {0, 4, 2, 3, 1};
  int64_t stride = 1;
  for (int i = 4; i >= 0; i--) {
    md.strides[axes[i]] = stride;
    if (__builtin_mul_overflow(stride, sizes[i], &stride)) throw std::bad_alloc();
  }
  HugeBuffer padded(stride);
  parallel_for(c.n, c.nthreads, [&](int64_t begin, int64_t end) {
    std::fill(padded.data() + begin * md.strides[0], padded.data() + end * md.strides[0], 0.f);
  });
  const int64_t first[] = {0, 0, c.pad_h, c.pad_w, c.pad_d};
  float* inside = padded.data();
  for (int d = 2; d < 5; d++) inside += first[d] * md.strides[d];
  reorder(c.src_md, c.src, md, inside, sizeof(float), c.nthreads);
  c.src = padded.data();
  c.src_md = md;
  c.id = sizes[1], c.ih = sizes[2], c.iw = sizes[3];
  c.pad_d = c.pad_h = c.pad_w = 0;
  return padded;
}

// The way to the sums that is estimated to be fastest, of those that are allowed: Winograd's transforms, or null.
const WinogradTransforms* choose_winograd(const Conv& c) {
  const Winograd mode = get_winograd();
  if (mode == Winograd::Never || !can_winograd(c) || c.stride_h != 1) return nullptr;
  const WinogradTransforms* best = nullptr;
  double least = mode == Winograd::Auto ? direct_weight_gradient_seconds(c) : std::numeric_limits<double>::infinity();
  for (const auto& [its_mode, of] :
       {std::pair{Winograd::F4, &WinogradKernels::f4}, {Winograd::F2, &WinogradKernels::f2}}) {
    const WinogradTransforms& transforms = winograd_transforms(c, of);
    const double seconds = winograd_weight_gradient_seconds(c, transforms.m);
    if (!allows(mode, its_mode) || seconds >= least) continue;
    least = seconds;
    best = &transforms;
  }
  return best;
}

// Adds the products of all images to diff_wei, which lies as c.wei_md says.
void add_products(Conv c, const float* diff_dst, float* diff_wei) {
  if (const WinogradTransforms* const winograd = choose_winograd(c))
    return add_winograd_weight_gradient(c, *winograd, diff_dst, diff_wei);
  HugeBuffer padded;
  if (c.src_md.is_plain()) padded = channels_last_padded(c);
  const Problem problem(c, diff_dst, diff_wei);
  const std::vector<Chunk> chunks = make_chunks(c);
  parallel(c.nthreads, [&](int64_t thread, int64_t team) {
    (problem.lane_wise ? run_lane_wise : run_dense)(problem, chunks, thread, team);
  });
}

// Of half precision, through the cache in float32 some images at a time.
void add_widened_products(const Conv& given, const Values& diff_dst, float* diff_wei) {
  const int64_t src_image = elements(given.src_md) / given.n, dst_image = given.dst_image();
  const int64_t images = images_at_a_time(given, src_image + dst_image);
  const PooledBuffer src(images * src_image), diff(images * dst_image);
  Conv part = given;
  part.src = src.data();
  for (int64_t n = 0; n < given.n; n += images) {
    part.n = part.src_md.dims[0] = std::min(images, given.n - n);
    given.half_src.widen(n * src_image, part.n * src_image, src.data(), given.nthreads);
    diff_dst.widen(n * dst_image, part.n * dst_image, diff.data(), given.nthreads);
    add_products(part, diff.data(), diff_wei);
  }
}

}  // namespace

void convolve_weight_gradient(const Conv& given, const Values& diff_dst, float* diff_wei) {
  Conv c = given;
  c.wei_md = format(c);
  const int64_t count = elements(c.wei_md);
  const bool in_place = same_layout(c.wei_md, given.wei_md);
  HugeBuffer buffer;
  if (!in_place) buffer = HugeBuffer(count);
  float* const sums = in_place ? diff_wei : buffer.data();
  parallel_for(count, c.nthreads, [&](int64_t begin, int64_t end) { std::fill(sums + begin, sums + end, 0.f); });
  if (c.is_half())
    add_widened_products(c, diff_dst, sums);
  else
    add_products(c, static_cast<const float*>(diff_dst.data), sums);
  clear_padding(c, sums);
  if (!in_place) reorder(c.wei_md, sums, given.wei_md, diff_wei, sizeof(float), c.nthreads);
}

}  // namespace torch_blocked
