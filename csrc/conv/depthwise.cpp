// Grouped convolution of a blocked src, any number of channels a group; depthwise is one channel a group.
//
// Output channel o of a block reads the src channels of its group. With the j-th of them brought into lane o, a grouped
// convolution is a sum over j of depthwise ones: vectors of filters times vectors of pixels, no lane wasted. Where
// groups have whole blocks of output channels it is the same src channel for all lanes. Where groups of four or eight
// channels share a block, lanes keep their own channel and the filters are moved instead, once for a block.
//
// src is read where it lies. The kernels for whole rows of the filter pass over the pixels in the padding. For filters
// that have none the columns of dst fall into runs whose filters have the same columns inside src. A run's taps are
// listed row by row, so that the rows of the filter that are inside are a part of the list; those of a filter of one
// row are a part of the whole row's. 3x3 filters of narrow planes read each src row once, for three dst rows.
#include "../caches.h"
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "inline_memory.h"

namespace torch_blocked {
namespace {

// Src is fetched as far ahead of its use as so many dst rows take: what one row takes is less than memory does. The
// rows of a rolling kernel are short and take it a third of the time.
constexpr int64_t fetched_ahead = 2, rolling_ahead = 6;
// Into L1 src is fetched no further ahead than a third of L1; where it comes from memory, into L2 so many floats
// before.
constexpr int64_t parts_of_l1 = 3, far_ahead = 16 << 10;

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

// Dst columns [begin, end) whose filters have the same columns inside src. A whole row of dst may be one, and then
// takes columns at the edges too.
struct ColumnRun {
  int64_t begin, end;
  const DepthwiseKernel* kernels;   // by the number of columns
  int64_t cols;                     // in a tile
  std::pmr::vector<TapRange> rows;  // for each dst row, the taps inside src

  explicit ColumnRun(std::pmr::memory_resource* memory) : rows(memory) {}
};

// All that can be known before the rows: a plane may be no more than a few hundred multiplications.
struct Plan {
  const Conv& conv;
  PaddedPostOps post_ops;
  int64_t oc_blocks, dst_image;
  bool stream;
  Lane lane;
  bool rolling;                  // kernels read each src row once
  ExchangeWeights exchange;      // null where the kernels take weights as they are
  int64_t wei_kw, wei_plane;     // from one tap of a row, one plane of the filter to the next, as the kernels take them
  std::vector<int64_t> weights;  // of each channel of a group of several: where they begin
  InlineMemory<4096> memory;
  std::pmr::vector<ColumnRun> runs{&memory};
  std::pmr::vector<Tap> taps{&memory};  // of the whole filter row where it has one, else of each run
  std::pmr::vector<Inside> rows{&memory}, planes{&memory};  // of the filter, for each dst row and depth

  explicit Plan(const Conv& c);
  void list_runs();
  void list_taps(const Inside& columns, int64_t step);
  Inside columns(int64_t ow) const { return {ow * conv.stride_w - conv.pad_w, conv.kw, conv.dilation_w, conv.iw}; }
  bool maps_lanes() const { return lane != Lane::Own && !exchange; }
  int64_t exchanged_size() const { return exchange ? conv.kd * wei_plane : 0; }
};

// The index into depthwise_kw of the kernels that take a row of the filter at once; 0 where they go tap by tap.
int row_kernel(const Conv& c) {
  const auto* const found = std::find(std::begin(depthwise_kw), std::end(depthwise_kw), c.kw);
  const int64_t right = (c.ow - 1) * c.stride_w + c.kw - c.pad_w - c.iw;
  const bool can_share =
      c.dilation_w == 1 && std::max(c.pad_w, right) < c.kw && c.src_md.strides[3] == c.block && column_stride(c) > 0;
  return can_share && found != std::end(depthwise_kw) ? int(found - std::begin(depthwise_kw)) : 0;
}

// Groups of whole blocks run direct, but for one block of output channels a group the rows of taps are faster: direct
// kernels load a pixel for each multiplication.
bool can(const Conv& c) {
  if (c.groups == 1 || c.src_md.single_block(1) != c.block || c.block > max_lanes || !c.kernels()) return false;
  const bool whole_blocks = c.group_ic() % c.block == 0 && c.group_oc() % c.block == 0;
  return !whole_blocks || (c.group_ic() == c.block && c.group_oc() == c.block && row_kernel(c) > 0);
}

// Whether rolling kernels take it. Of wide planes they would read a few columns at a time, which memory is slow at.
bool rolls(const Conv& c, Lane lane) {
  const auto padding = [](int64_t pad, int64_t dst, int64_t src) { return std::max(pad, dst + 2 - pad - src); };
  const int64_t cols = c.kernels()->depthwise->rolling_cols;
  return lane == Lane::Own && c.ow <= 2 * cols && c.one_plane() && c.kh == 3 && c.kw == 3 && c.stride_h == 1 &&
         c.stride_w == 1 && c.dilation_h == 1 && row_kernel(c) > 0 && c.dst_step() == 1 &&
         padding(c.pad_h, c.oh, c.ih) <= 1 && padding(c.pad_w, c.ow, c.iw) <= 1;
}

Plan::Plan(const Conv& c)
    : conv(c),
      post_ops(c),
      oc_blocks(c.oc_blocks()),
      dst_image(c.dst_image()),
      stream(c.kd == 1 && streams_dst(c)),
      lane(lanes_of(c)),
      rolling(rolls(c, lane)),
      exchange(c.kernels()->depthwise->exchange_weights[int(lane)]),
      wei_kw(exchange ? c.group_ic() * c.block : c.wei_md.strides[3]),
      wei_plane(exchange ? c.kh * c.kw * wei_kw : c.wei_md.strides[4]) {
  if (lane != Lane::Own) weights = channel_weights(c);
  rows.reserve(c.oh);
  planes.reserve(c.od);
  for (int64_t oh = 0; oh < c.oh; oh++) rows.emplace_back(oh * c.stride_h - c.pad_h, c.kh, c.dilation_h, c.ih);
  for (int64_t od = 0; od < c.od; od++) planes.emplace_back(od * c.stride_d - c.pad_d, c.kd, c.dilation_d, c.id);
  list_runs();
}

void Plan::list_taps(const Inside& columns, int64_t step) {
  const Conv& c = conv;
  const int64_t* const strides = c.src_md.strides;
  for (int64_t kh = 0; kh < c.kh; kh++)
    for (int64_t kw = columns.begin; kw < columns.end; kw += step) {
      const int64_t index[] = {0, 0, kh, kw, 0};
      taps.push_back({kh * c.dilation_h * strides[2] + kw * c.dilation_w * strides[3],
                      exchange ? (kh * c.kw + kw) * wei_kw : c.wei_md.off_v(index)});
    }
}

void Plan::list_runs() {
  const Conv& c = conv;
  const DepthwiseKernels& all = *c.kernels()->depthwise;
  const int kernel = row_kernel(c), step = depthwise_kw[kernel];
  const int64_t stride = column_stride(c);
  const int64_t most = rolling ? all.rolling_cols : stride == 0 ? 1 : all.cols[int(lane)][kernel];
  const Inside whole(0, c.kw, 1, c.kw);
  const auto taken = [&](int64_t ow) { return kernel ? whole : columns(ow); };
  if (c.kh == 1) list_taps(whole, step);
  for (int64_t begin = 0, end; begin < c.ow; begin = end) {
    const Inside inside = taken(begin);
    for (end = begin + 1; end < c.ow && taken(end) == inside;) end++;
    const int64_t ntiles = (end - begin + most - 1) / most, taps_per_row = (inside.end - inside.begin) / step;
    const int64_t first = c.kh == 1 ? inside.begin / step : int64_t(taps.size());
    if (c.kh > 1) list_taps(inside, step);
    ColumnRun run(&memory);
    run.begin = begin;
    run.end = end;
    run.kernels = rolling ? all.rolling : all.kernels[int(lane)][kernel][std::max<int64_t>(1, stride) - 1];
    run.cols = (end - begin + ntiles - 1) / ntiles;
    run.rows.reserve(c.oh);
    for (const Inside& row : rows)
      run.rows.push_back({first + row.begin * taps_per_row, first + row.end * taps_per_row});
    runs.push_back(std::move(run));
  }
}

}  // namespace

Lane lanes_of(const Conv& c) {
  if (c.group_ic() == 1 && c.group_oc() == 1) return Lane::Own;
  const bool exchanges = c.shares_blocks() && (c.group_ic() == 4 || c.group_ic() == 8) && c.kernels();
  const Lane exchanging = c.group_ic() == 4 ? Lane::Fours : Lane::Eights;
  if (exchanges && c.kernels()->depthwise->exchange_weights[int(exchanging)]) return exchanging;
  return c.group_oc() % c.block == 0 ? Lane::Same : Lane::Mapped;
}

std::vector<int64_t> channel_weights(const Conv& c) {
  std::vector<int64_t> offsets;
  offsets.reserve(c.group_ic());
  for (int64_t j = 0; j < c.group_ic(); j++) {
    const int64_t index[] = {0, j, 0, 0, 0};
    offsets.push_back(c.wei_md.off_v(index));
  }
  return offsets;
}

// Appends a src channel that all lanes read: to the last map, where it is the next neighbour of that one's channels.
static void add_same(int64_t src, int64_t wei, std::vector<LaneMap>& maps) {
  LaneMap* const last = maps.empty() ? nullptr : &maps.back();
  const int64_t wei_lane = last ? wei - last->wei - (last->lanes - 1) * last->wei_lane : 0;
  if (!last || src != last->src + last->lanes || (last->lanes > 1 && wei_lane != last->wei_lane))
    return maps.push_back({src, wei, 1, 0, {}, {}});
  last->wei_lane = wei_lane;
  last->lanes++;
}

void lane_maps(const Conv& c, int64_t oc_block, const std::vector<int64_t>& weights, std::vector<LaneMap>& maps) {
  maps.clear();
  const Lane kind = lanes_of(c);
  if (kind == Lane::Own) return maps.push_back({oc_block * c.src_md.strides[1], 0, 1, 0, {}, {}});
  const int64_t lanes = std::min(c.block, c.oc - oc_block * c.block);
  int64_t first_channels[max_lanes];  // of src, that each lane reads: divided once, not for each of a group's channels
  for (int64_t lane = 0; lane < lanes; lane++)
    first_channels[lane] = (oc_block * c.block + lane) / c.group_oc() * c.group_ic();
  const int shift = __builtin_ctzll(c.block);
  const auto src_block = [&](int64_t channel) { return (channel >> shift) * c.src_md.strides[1]; };
  for (int64_t j = 0; j < c.group_ic(); j++) {
    const size_t first = maps.size();
    if (kind == Lane::Same) {
      const int64_t channel = first_channels[0] + j;
      add_same(src_block(channel) + (channel & (c.block - 1)), weights[j], maps);
      continue;
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
      const int64_t channel = first_channels[lane] + j, src = src_block(channel);
      const auto same = [&](const LaneMap& map) { return map.src == src; };
      auto map = std::find_if(maps.begin() + first, maps.end(), same);
      if (map == maps.end()) map = maps.insert(map, LaneMap{src, weights[j], 1, 0, {}, {}});
      map->from[lane] = int32_t(channel & (c.block - 1));
      map->use[lane] = -1;
    }
  }
}

namespace {

// Neighbouring rows of a plane of dst: as many of those from the index-th on as lie in one plane and before `end`.
struct Strip {
  int64_t n, oc_block, od, oh, rows;
  int64_t dst;  // where it begins
  Strip(const Plan& plan, int64_t index, int64_t end) {
    const Conv& c = plan.conv;
    const int64_t plane = index / c.oh, block = plane / c.od;
    n = block / plan.oc_blocks;
    oc_block = block - n * plan.oc_blocks;
    od = plane - block * c.od;
    oh = index - plane * c.oh;
    rows = std::min(end - index, c.oh - oh);
    dst = n * plan.dst_image + oc_block * c.dst_block() + od * c.dst_plane() + oh * c.dst_row();
  }
};

// What all strips have in common.
DepthwiseArgs arguments(const Plan& plan) {
  alignas(64) static constexpr float zeros[max_lanes] = {};
  const Conv& c = plan.conv;
  DepthwiseArgs a{};
  a.src_row = c.stride_h * c.src_md.strides[2];
  a.iw = c.iw;
  a.zeros = zeros;
  const int64_t filter_rows = (c.kh - 1) * c.dilation_h + 1;
  a.ahead_rows = std::min(c.stride_h, filter_rows);  // those that the dst row before it has not read
  a.ahead_into = !fetches_into_l1() ? FetchInto::L2 : plan.stream ? FetchInto::Both : FetchInto::L1;
  a.far_ahead = far_ahead;
  int64_t ahead = plan.rolling ? rolling_ahead : fetched_ahead;
  const int64_t row = std::max<int64_t>(1, a.src_row) * sizeof(float);  // sequences have one, without a stride
  if (a.ahead_into != FetchInto::L2) ahead = std::clamp<int64_t>(caches().l1 / parts_of_l1 / row, 1, ahead);
  a.ahead = (ahead * c.stride_h + filter_rows - a.ahead_rows) * c.src_md.strides[2];
  a.wei_kw = plan.wei_kw;
  a.dst_step = c.dst_step();
  a.dst_row = c.dst_row();
  a.stream = plan.stream;
  return a;
}

// The columns of a run, where the filter's rows begin at `src_row`: tiles of one width, then what is left.
void compute_columns(const Plan& plan, const Strip& strip, const ColumnRun& run, int64_t src_row, DepthwiseArgs& a) {
  const Conv& c = plan.conv;
  a.taps = plan.taps.data();
  for (int64_t col = run.begin, cols = run.cols; col < run.end; col += cols * a.ntiles) {
    cols = std::min(cols, run.end - col);
    a.ntiles = (run.end - col) / cols;
    a.iw_begin = col * c.stride_w - c.pad_w;
    a.tile_columns = cols * c.stride_w;
    a.src_tile = a.tile_columns * c.src_md.strides[3];
    a.src_offset = src_row + a.iw_begin * c.src_md.strides[3];
    const int64_t dst = strip.dst + col * c.dst_pixel();
    a.dst = c.dst + dst;
    a.epilogue = plan.post_ops.at(strip.oc_block, 1, dst);
    run.kernels[cols - 1](a);
  }
}

void compute_strip(const Plan& plan, const Strip& strip, const float* wei, DepthwiseArgs& a) {
  const Conv& c = plan.conv;
  const Inside planes = plan.planes[strip.od];
  const std::vector<TapRange> none(planes.begin == planes.end ? strip.rows : 0);  // the filter lies in the padding
  a.src = c.src + strip.n * c.src_md.strides[0];
  a.nrows = strip.rows;
  const int64_t last = std::max(planes.begin, planes.end - 1);
  for (int64_t kd = planes.begin; kd <= last; kd++) {
    const int64_t id = strip.od * c.stride_d - c.pad_d + kd * c.dilation_d;
    const int64_t src_row = id * c.src_md.strides[4] + (strip.oh * c.stride_h - c.pad_h) * c.src_md.strides[2];
    a.wei = wei + kd * plan.wei_plane;
    a.first = kd == planes.begin;
    a.last = kd == last;
    for (const ColumnRun& run : plan.runs) {
      a.rows = none.empty() ? run.rows.data() + strip.oh : none.data();
      compute_columns(plan, strip, run, src_row, a);
    }
  }
}

// The weights of a block of output channels as the kernels take them, which may be in `exchanged`.
const float* block_weights(const Plan& plan, int64_t oc_block, float* exchanged) {
  const Conv& c = plan.conv;
  const float* const wei = c.wei + oc_block * c.wei_md.strides[0];
  if (!plan.exchange) return wei;
  for (int64_t kd = 0, tap = 0; kd < c.kd; kd++)
    for (int64_t kh = 0; kh < c.kh; kh++)
      for (int64_t kw = 0; kw < c.kw; kw++, tap++) {
        const int64_t index[] = {0, 0, kh, kw, kd};
        plan.exchange(wei + c.wei_md.off_v(index), plan.weights.data(), exchanged + tap * plan.wei_kw);
      }
  return exchanged;
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * plan.oc_blocks * c.od * c.oh, c.nthreads, [&](int64_t begin, int64_t end) {
    DepthwiseArgs a = arguments(plan);
    LaneMap own{};
    std::vector<LaneMap> maps;
    a.maps = &own;
    a.nmaps = 1;
    float* const exchanged = Scratch::get(plan.exchanged_size());
    const float* wei = nullptr;
    for (int64_t index = begin, oc_block = -1; index < end;) {
      const Strip strip(plan, index, end);
      if (oc_block != strip.oc_block) {
        oc_block = strip.oc_block;
        own.src = oc_block * c.src_md.strides[1];
        wei = block_weights(plan, oc_block, exchanged);
        if (plan.maps_lanes()) {
          lane_maps(c, oc_block, plan.weights, maps);
          a.maps = maps.data();
          a.nmaps = maps.size();
        }
      }
      compute_strip(plan, strip, wei, a);
      index += strip.rows;
    }
    if (plan.stream) finish_streams();
  });
}

// Any format by channels whose innermost block is one of output channels, else Oihw{b}o: from one tap to the next there
// is one stride.
MemoryDesc weights(const Conv& c) {
  const MemoryDesc& md = c.wei_md;
  const int last = md.inner_nblks - 1;
  if (last >= 0 && md.inner_idxs[last] == 0 && md.inner_blks[last] == c.block && md.block(0) == c.block &&
      md.is_blocked_by_channels())
    return md;
  return dense_desc(md, {0, 1, 2, 3}, {{0, c.block}});
}

}  // namespace

const Algorithm conv_depthwise = {"depthwise", can, weights, run, nullptr, depthwise_seconds};

}  // namespace torch_blocked
