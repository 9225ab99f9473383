// Direct convolution of a blocked src: dense, or groups that begin and end on block borders.
//
// A tile of dst rows is computed from some channel blocks of src after the other, all output channels, two blocks at a
// time, while these are in the cache. Most src is read from a window (window.h), a copy with its padding; in place
// where no call of a kernel sees padding beside src: without padding, height and width as one long row where they are
// one in src and dst, or where the columns of dst are cut where the filter's columns begin to see src or cease to. Of a
// 1x1 filter windows, too, are one long row; others are computed by such columns where that is less work. Nor do groups
// of a stride of 2 need a window: they have so few products for a pixel that the copy would take a tenth of the time.
// With a depth each plane of dst is by itself: every pair of a channel block and a plane of the filter counts as a
// channel block.
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "inline_memory.h"
#include "window.h"

namespace torch_blocked {
namespace {

// Bytes: together most of a core's L2, beside the weights that stream through it.
constexpr int64_t window_budget = 384 << 10, dst_budget = 384 << 10;

bool can(const Conv& c) {
  const bool aligned = c.groups == 1 || (c.group_ic() % c.block == 0 && c.group_oc() % c.block == 0);
  return aligned && c.src_md.single_block(1) == c.block && c.kernels() != nullptr;
}

// OIhw{b}i{b}o; with fewer input channels than a block Ohwi{b}o, so that only the real ones are multiplied.
MemoryDesc weights(const Conv& c) {
  if (c.group_ic() < c.block) return dense_desc(c.wei_md, {0, 2, 3, 1}, {{0, c.block}});
  return by_blocks(c);
}

int64_t group_oc_blocks(const Conv& c) { return (c.group_oc() + c.block - 1) / c.block; }

// Whether groups are read where they lie: no column sees padding on its right. So there is at most one on the left,
// that only the filter's first column sees, from the first column of dst.
bool reads_strided(const Conv& c) {
  const int64_t last_col = (c.ow - 1) * c.stride_w + (c.kw - 1) * c.dilation_w - c.pad_w;
  return c.groups > 1 && group_oc_blocks(c) <= 4 && c.stride_w == 2 && c.kw > 1 && c.one_plane() && c.pad_w <= 1 &&
         last_col < c.iw && c.src_md.strides[3] == c.block;
}

// From one dst row to the next that reads some of the same src rows, by other taps. Those of a tile are so far from
// each other: of a dilated filter neighbouring dst rows have few src rows in common.
int64_t rows_apart(const Conv& c) { return c.kh == 1 ? 1 : c.dilation_h / std::gcd(c.dilation_h, c.stride_h); }

// Columns of dst that are computed by the same columns of the filter. Their taps lie in a list of all, for each row of
// the filter these columns.
struct Segment {
  int64_t col, cols;
  TapRange kw;
  int64_t taps;
  int64_t width() const { return kw.end - kw.begin; }
};

// What a tap costs the calls for some columns of some rows and blocks, in products. Two FMAs a cycle need eight sums,
// each of which takes four cycles; and each call reads its weights from L2.
int64_t work_of_tap(int64_t rows, int64_t blocks, int64_t cols, int64_t most_cols) {
  constexpr int64_t fewest_sums = 8, reads_weights = 4;
  const Calls calls(cols, most_cols);
  const auto of_call = [&](int64_t n) { return std::max(rows * blocks * n, fewest_sums) + blocks * reads_weights; };
  return calls.wider * of_call(calls.fewest + 1) + (calls.number - calls.wider) * of_call(calls.fewest);
}

// What of the work one call of `tile` does, and how it is cut up.
struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  bool strided;  // src is read where it lies, with a stride of 2
  InlineMemory<2048> memory;
  std::pmr::vector<Segment> segments{&memory};
  std::pmr::vector<Tap> taps{&memory};
  bool in_place, flat;  // src is read where it lies; height and width as one long row
  bool joined;          // the rows of a tile are one long row, in a window and in dst
  int64_t apart;        // dst rows from one of a tile to the next
  Window window;
  PaddedPostOps post_ops;
  bool stream;                   // dst, past the caches: where each element is one sum, written once
  int64_t ic_blocks, oc_blocks;  // of a group; those of ic times the filter's depth
  int64_t ic_chunk;              // channel blocks of src at a time, in a window or in place
  int64_t units, tile;           // dst rows (flat: runs of kernels.cols pixels) of a plane; the most in a tile
  bool split_oc;                 // threads share the output channels, not the tiles

  explicit Plan(const Conv& c);
  bool copies() const { return !in_place && !strided; }
  bool has_long_rows() const { return flat || joined; }
  int64_t wei_tap() const { return std::min(conv.block, conv.group_ic()) * conv.block; }
  int64_t wei_ic_block() const { return conv.kh * conv.kw * wei_tap(); }
  const float* weights(int64_t oc_block, int64_t ic_block) const {
    return conv.wei + oc_block * conv.wei_md.strides[0] + ic_block * wei_ic_block();
  }
  bool choose_segments();
  void choose_tiles();
  void list_taps();

  // A unit: its row (flat: run), and how many units from it on one tile may have. All rows come first that are a
  // multiple of `apart` from row 0, then those from row 1 and so on: of `longer` such series, and of the others.
  struct Unit {
    int64_t row, most;
  };
  Unit unit(int64_t i) const {
    if (flat) return {i, units - i};
    const int64_t longer = units % apart, size = units / apart;
    const bool in_longer = i < longer * (size + 1);
    const int64_t of_series = size + in_longer, at = in_longer ? i : i - longer * (size + 1);
    const int64_t first = (in_longer ? 0 : longer) + at / of_series;
    return {first + at % of_series * apart, of_series - at % of_series};
  }
};

Plan::Plan(const Conv& c)
    : conv(c),
      kernels(*c.kernels()),
      strided(reads_strided(c)),
      in_place(choose_segments() && c.stride_w == 1 && c.src_md.strides[3] == c.block && c.kd == 1 && c.pad_d == 0 &&
               (c.od - 1) * c.stride_d < c.id),
      apart(in_place || strided ? 1 : rows_apart(c)),
      window(c, c.block, false, apart),
      post_ops(c) {
  const bool pixels = c.kh == 1 && c.kw == 1 && c.pad_h == 0 && c.pad_w == 0;  // a dst pixel is made of one of src
  const bool dense_dst = c.dst_step() == 1 && c.dst_row() == c.ow * c.block;
  const bool dense_src = c.ih == 1 || c.src_md.strides[2] == c.iw * c.block;
  flat = in_place && pixels && dense_src && dense_dst && c.stride_h == 1 && c.oh == c.ih && c.ow == c.iw;
  joined = copies() && pixels && dense_dst && segments.size() == 1;  // all columns see src
  ic_blocks = c.group_ic_blocks();
  oc_blocks = group_oc_blocks(c);
  choose_tiles();
  list_taps();
  stream = streams_dst(c) && ic_blocks <= sum_blocks(c, c.kh * c.kw);
}

// The first dst column after `col` that some column of the filter begins to see src from, or ceases to.
int64_t next_border(const Conv& c, int64_t col) {
  int64_t next = c.ow;
  for (int64_t kw = 0; kw < c.kw; kw++)
    for (const int64_t iw : {int64_t(0), c.iw}) {
      const int64_t at = iw + c.pad_w - kw * c.dilation_w;
      const int64_t border = at <= 0 ? 0 : (at + c.stride_w - 1) / c.stride_w;
      if (border > col) next = std::min(next, border);
    }
  return next;
}

// Cuts dst into columns that see the same columns of the filter, if that is no more work than all columns of dst with
// all of the filter, padding included. Returns whether it is cut so: then no call sees padding beside src.
bool Plan::choose_segments() {
  const Conv& c = conv;
  int64_t work = 0;
  for (int64_t col = 0, cols; col < c.ow && !strided; col += cols) {
    cols = next_border(c, col) - col;
    segments.push_back({col, cols, tap_cols(c, col), 0});
    work += segments.back().width() * work_of_tap(1, 2, cols, kernels.cols);
  }
  if (!strided && work <= c.kw * work_of_tap(1, 2, c.ow, kernels.cols)) return true;
  segments.assign(1, {0, c.ow, {0, c.kw}, 0});
  return false;
}

void Plan::list_taps() {
  const Conv& c = conv;
  taps.reserve(c.kh * c.kw * segments.size());
  for (Segment& segment : segments) {
    segment.taps = taps.size();
    for (int64_t kh = 0; kh < c.kh; kh++)
      for (int64_t kw = segment.kw.begin; kw < segment.kw.end; kw++)
        taps.push_back(
            {copies() ? window.tap(kh, kw) : kh * c.dilation_h * c.src_md.strides[2] + kw * c.dilation_w * c.block,
             (kh * c.kw + kw) * wei_tap()});
  }
}

void Plan::choose_tiles() {
  const int64_t wei_size = conv.oc * conv.group_ic() * conv.kd * conv.kh * conv.kw;
  const int64_t src_size = conv.n * conv.ic * conv.id * conv.ih * conv.iw;
  const int64_t blocks = conv.groups * oc_blocks;
  split_oc = blocks >= conv.nthreads && (wei_size > src_size || (conv.groups > 1 && blocks % conv.nthreads == 0));
  const int64_t pixel_bytes = conv.block * sizeof(float);
  ic_chunk = ic_blocks;
  tile = 1;
  if (strided) {
    units = tile = conv.oh;
  } else if (flat) {
    units = (conv.oh * conv.ow + kernels.cols - 1) / kernels.cols;
    tile = std::max<int64_t>(2, window_budget / (ic_chunk * pixel_bytes * kernels.cols));
  } else {
    // As few channels as are summed in one go: sums of more are added to dst anyway.
    units = conv.oh;
    const int64_t step = sum_blocks(conv, conv.kh * conv.kw);
    const int64_t dst_blocks = split_oc && conv.groups == 1 ? (blocks + conv.nthreads - 1) / conv.nthreads : oc_blocks;
    const int64_t dst_row = dst_blocks * conv.ow * pixel_bytes;
    const auto src_bytes = [&](int64_t rows) {
      const int64_t reach = std::min(conv.ih, (rows - 1) * conv.stride_h + (conv.kh - 1) * conv.dilation_h + 1);
      return in_place ? reach * conv.iw * pixel_bytes : window.size(rows) * int64_t(sizeof(float));
    };
    while (tile < units && step * src_bytes(tile + 1) <= window_budget && (tile + 1) * dst_row <= dst_budget) tile++;
    const int64_t chunk_bytes = std::max<int64_t>(1, step * src_bytes(tile));  // src may be all padding
    const int64_t most = std::max<int64_t>(1, window_budget / chunk_bytes);    // sums in a chunk
    ic_chunk = Calls((ic_blocks + step - 1) / step, most).size(0) * step;
    ic_chunk = std::min(ic_blocks, ic_chunk);
  }
}

// One tile: `rows` dst rows from `row` on, columns [col, col + cols) of image n at depth od, some channel blocks of
// src.
struct Tile {
  int64_t n, od, row, rows, col, cols;
  int64_t ic_begin, ic_end;
  const float* src;  // the window's first channel block, or src in place where the first tap of this tile reads it
  int64_t src_block, src_row;
  const float *next = nullptr, *next_end = nullptr;  // what is to be fetched of the src that is read after this

  // Floats from the beginning of dst to its plane of an output channel block.
  int64_t dst(const Conv& c, int64_t oc_block) const {
    return n * c.dst_image() + oc_block * c.dst_block() + od * c.dst_plane();
  }
};

int64_t taps_of_row(const Conv& c, int64_t oh) {
  const TapRange taps = tap_rows(c, oh, 1);
  return taps.end - taps.begin;
}

// Whether two dst rows see src by the same rows of the filter.
bool same_taps(const Conv& c, int64_t oh, int64_t other) {
  const TapRange one = tap_rows(c, oh, 1), next = tap_rows(c, other, 1);
  return one.begin == next.begin && one.end == next.end;
}

const ConvKernel* kernels_of(const Plan& plan, bool two_rows, int64_t blocks) {
  const ConvKernels& kernels = plan.kernels;
  if (plan.strided) return two_rows ? kernels.strided_two_rows[blocks - 1] : kernels.strided_row[blocks - 1];
  return two_rows ? kernels.two_rows[blocks - 1] : kernels.one_row[blocks - 1];
}

int64_t cols_of_two_rows(const ConvKernels& kernels, int64_t blocks) {
  return blocks == 1 ? kernels.cols : kernels.cols_two;
}

// Whether two rows at a time are faster than one after the other: always for a single block, which so fills the
// registers.
bool takes_two_rows(const Plan& plan, int64_t blocks, int64_t cols) {
  int64_t of_one = 0, of_two = 0;
  for (const Segment& segment : plan.segments) {
    const int64_t n = plan.has_long_rows() ? cols : segment.cols;
    of_one += segment.width() * work_of_tap(1, blocks, n, plan.kernels.cols);
    of_two += segment.width() * work_of_tap(2, blocks, n, cols_of_two_rows(plan.kernels, blocks));
  }
  return blocks == 1 || of_two < 2 * of_one;
}

// What all calls for some output channel blocks of a tile share.
ConvArgs shared_args(const Plan& plan, const Tile& tile, int64_t first_block, int64_t blocks) {
  const Conv& c = plan.conv;
  ConvArgs a;
  a.src_block = tile.src_block;
  a.nblocks = tile.ic_end - tile.ic_begin;
  a.lanes = std::min(c.block, c.group_ic());
  a.half_blocks = std::max<int64_t>(0, c.half_blocks() - (plan.ic_blocks - tile.ic_end));
  a.sum_blocks = sum_blocks(c, c.kh * c.kw);
  a.tap_cols = c.kw;
  a.wei_block = c.wei_md.strides[0];
  a.wei_ic_block = plan.wei_ic_block();
  a.dst_block = c.dst_block();
  a.dst_row = plan.apart * c.dst_row();
  a.dst_step = c.dst_step();
  a.first = tile.ic_begin == 0;
  a.last = tile.ic_end == plan.ic_blocks;
  a.src_row = tile.src_row;
  a.stream = plan.stream;
  a.fetch_dst = !plan.stream && !c.dst_cached;
  a.epilogue = plan.post_ops.at(first_block, blocks, tile.dst(c, first_block));
  return a;
}

// The weights that are read after those of `calls` for the last row of a tile, the last two calls fetch: so memory is
// busy then, too, and what is evicted for them is not read again.
void fetch_weights(const Calls& calls, int64_t call, const float* next, ConvArgs& a) {
  const int64_t before = std::max<int64_t>(0, calls.number - 2);
  if (call < before) {
    a.runs = std::min(a.runs, before - call);
    return;
  }
  const bool two = calls.number > 1;  // a block each
  a.runs = 1;
  a.next = next + (two && call > before ? a.wei_block : 0);
  a.next_block = two ? 0 : a.wei_block;
}

// What the calls from `call` on fetch, and as a.runs how many of them do it alike: the next part of `tile.next`; where
// none is left the weights at `next`, unless that is null; the first call of a tile its own weights.
void fetch(const Plan& plan, Tile& tile, const Calls& calls, int64_t call, bool first, const float* next, ConvArgs& a) {
  a.runs = first ? 1 : calls.alike(call);
  a.next = nullptr;
  a.next_block = a.next_run = 0;
  if (first) return;
  if (tile.next == tile.next_end || a.ntaps == 0) {
    if (next) fetch_weights(calls, call, next, a);
    return;
  }
  a.next = tile.next;
  a.next_run = a.nblocks * a.ntaps * a.lanes * plan.conv.block;
  a.runs = std::min(a.runs, (tile.next_end - tile.next + a.next_run - 1) / a.next_run);
  tile.next = std::min(tile.next + a.runs * a.next_run, tile.next_end);
}

// One or two output channel blocks over the whole tile; the weights at `next` are read after theirs. Of an odd number
// of rows the one with the fewest taps, the first or the last, is by itself.
void multiply(const Plan& plan, Tile& tile, int64_t first_block, int64_t blocks, const float* next, bool prefetch) {
  const Conv& c = plan.conv;
  ConvArgs a = shared_args(plan, tile, first_block, blocks);
  const int64_t dst = tile.dst(c, first_block);
  const float* const residual = a.epilogue.residual;
  const int64_t rows = plan.joined ? 1 : tile.rows, long_row = plan.joined ? tile.rows * c.ow : tile.cols;
  const bool pairs_of_rows = takes_two_rows(plan, blocks, long_row);
  const bool first_alone =
      rows % 2 == 1 && taps_of_row(c, tile.row) < taps_of_row(c, tile.row + (rows - 1) * plan.apart);
  const auto pair = [&](int64_t row) {
    if (!pairs_of_rows || row + 1 == rows || (row == 0 && first_alone)) return false;
    const int64_t oh = tile.row + row * plan.apart;
    return plan.copies() || same_taps(c, oh, oh + plan.apart);
  };
  a.wei = plan.weights(first_block, tile.ic_begin);
  for (int64_t row = 0, two; row < rows; row += 1 + two) {
    two = pair(row);
    const TapRange kh = tap_rows(c, tile.row + row * plan.apart, 1 + two, plan.apart);
    const ConvKernel* const kernels = kernels_of(plan, two, blocks);
    const int64_t most_cols = two ? cols_of_two_rows(plan.kernels, blocks) : plan.kernels.cols;
    for (const Segment& segment : plan.segments) {
      const Calls calls(plan.has_long_rows() ? long_row : segment.cols, most_cols);
      const bool last = row + 1 + two == rows && &segment == &plan.segments.back();
      a.taps = plan.taps.data() + segment.taps + kh.begin * segment.width();
      a.ntaps = (kh.end - kh.begin) * segment.width();
      for (int64_t call = 0, begin = segment.col, cols; call < calls.number; call += a.runs, begin += a.runs * cols) {
        cols = calls.size(call);
        a.src = tile.src + row * tile.src_row + begin * (plan.strided ? c.stride_w : 1) * c.block;
        a.left_taps = plan.strided && begin == 0 ? c.pad_w : 0;
        a.src_prefetch = prefetch ? cols * c.block : 0;
        const int64_t pixel = tile.row * c.dst_row() + row * a.dst_row + (tile.col + begin) * c.dst_pixel();
        if (residual) a.epilogue.residual = residual + pixel;
        a.dst = c.dst + dst + pixel;
        fetch(plan, tile, calls, call, row + begin == 0, last ? next : nullptr, a);
        kernels[cols - 1](a);
      }
    }
  }
}

// The src that the tile reads for channel blocks [ic_begin, ic_end) of a group.
void read_src(const Plan& plan, Tile& tile, int64_t group, float* scratch) {
  const Conv& c = plan.conv;
  const int64_t* strides = c.src_md.strides;
  const float* const src = c.src + tile.n * strides[0] + group * (plan.ic_blocks / c.kd) * strides[1];
  if (!plan.copies()) {
    tile.src = src + tile.ic_begin * strides[1] + tile.od * c.stride_d * strides[4] +
               (tile.row * c.stride_h - c.pad_h) * strides[2] + (tile.col - c.pad_w) * c.block;
    tile.src_block = strides[1];
    tile.src_row = c.stride_h * strides[2];
    return;
  }
  tile.src = scratch;
  tile.src_block = plan.window.size(tile.rows);
  tile.src_row = plan.window.rows_per_dst * plan.window.row_size;
  for (int64_t k = tile.ic_begin; k < tile.ic_end; k++, scratch += tile.src_block)
    plan.window.fill(src + k / c.kd * strides[1], tile.od, k % c.kd, tile.row, tile.rows, scratch,
                     plan.kernels.copy_pixels);
}

// Has the src fetched that is read after this tile's of `group`: the next group's before group `last`, else that of
// group `first` of the next image; where each is one piece of memory. Groups have so few products for a pixel that
// waiting for src from memory would take a sixth of the time.
void fetch_next(const Plan& plan, Tile& tile, int64_t group, int64_t first, int64_t last) {
  const Conv& c = plan.conv;
  const int64_t* strides = c.src_md.strides;
  const bool one_piece = c.groups > 1 && !plan.in_place && c.id == 1 && c.kd == 1 && tile.rows == c.oh &&
                         plan.ic_chunk == plan.ic_blocks && strides[2] == c.iw * c.block &&
                         strides[1] == c.ih * strides[2];
  const bool same_image = group + 1 < last;
  tile.next = tile.next_end = nullptr;
  if (!one_piece || (!same_image && tile.n + 1 == c.n)) return;
  const int64_t n = same_image ? tile.n : tile.n + 1, next = same_image ? group + 1 : first;
  tile.next = c.src + n * strides[0] + next * plan.ic_blocks * strides[1];
  tile.next_end = tile.next + plan.ic_blocks * strides[1];
}

// Output channel blocks [oc_begin, oc_end) of as many units of a plane, the first one at `row` (flat: run).
void compute_tile(const Plan& plan, int64_t plane, int64_t row, int64_t units, int64_t oc_begin, int64_t oc_end) {
  const Conv& c = plan.conv;
  Tile tile;
  tile.n = plane / c.od;
  tile.od = plane % c.od;
  tile.row = plan.flat ? 0 : row;
  tile.rows = plan.flat ? 1 : units;
  tile.col = plan.flat ? row * plan.kernels.cols : 0;
  tile.cols = plan.flat ? std::min((row + units) * plan.kernels.cols, c.oh * c.ow) - tile.col : c.ow;
  float* const scratch = plan.copies() ? Scratch::get(plan.ic_chunk * plan.window.size(tile.rows)) : nullptr;
  const int64_t first_group = oc_begin / plan.oc_blocks, last_group = (oc_end + plan.oc_blocks - 1) / plan.oc_blocks;
  for (int64_t group = first_group; group < last_group; group++) {
    const int64_t from = std::max(oc_begin, group * plan.oc_blocks);
    const int64_t to = std::min(oc_end, (group + 1) * plan.oc_blocks);
    for (tile.ic_begin = 0; tile.ic_begin < plan.ic_blocks; tile.ic_begin = tile.ic_end) {
      tile.ic_end = std::min(plan.ic_blocks, tile.ic_begin + plan.ic_chunk);
      read_src(plan, tile, group, scratch);
      fetch_next(plan, tile, group, first_group, last_group);
      for (int64_t block = from; block < to; block += 2) {
        const float* const next = block + 2 < to                 ? plan.weights(block + 2, tile.ic_begin)
                                  : tile.ic_end < plan.ic_blocks ? plan.weights(from, tile.ic_end)
                                                                 : nullptr;
        multiply(plan, tile, block, std::min<int64_t>(2, to - block), next, plan.flat && block == from);
      }
    }
  }
}

// The same of units [begin, end) of all planes, in tiles as even as possible.
void compute_units(const Plan& plan, int64_t begin, int64_t end, int64_t oc_begin, int64_t oc_end) {
  for (int64_t units; begin < end; begin += units) {
    const Plan::Unit first = plan.unit(begin % plan.units);
    const int64_t left = std::min(end - begin, first.most), ntiles = (left + plan.tile - 1) / plan.tile;
    units = (left + ntiles - 1) / ntiles;
    compute_tile(plan, begin / plan.units, first.row, units, oc_begin, oc_end);
  }
  if (plan.stream) finish_streams();
}

void run(const Conv& c) {
  const Plan plan(c);
  const int64_t units = c.n * c.od * plan.units, oc_blocks = c.groups * plan.oc_blocks;
  if (plan.split_oc) {
    // Each range reads all of src: where that is copied, few of them; one a thread where it is more than a tile.
    const int64_t share = oc_blocks / c.nthreads;
    const int64_t least = plan.in_place ? 2 : std::max<int64_t>(2, units > plan.tile ? share : share / 2);
    return parallel_for(
        oc_blocks, c.nthreads, [&](int64_t begin, int64_t end) { compute_units(plan, 0, units, begin, end); }, least);
  }
  parallel_for(
      units, c.nthreads, [&](int64_t begin, int64_t end) { compute_units(plan, begin, end, 0, oc_blocks); },
      plan.flat ? 2 : 4);
}

}  // namespace

const Algorithm conv_direct = {"direct", can, weights, run, nullptr, direct_seconds};

}  // namespace torch_blocked
