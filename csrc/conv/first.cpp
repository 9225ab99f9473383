// Convolution of a plain src, whatever its strides: the first layer of a network, which reads an image of few channels.
//
// The filter's taps run over rows, columns and channels, so the sum is one loop over a table; dst is blocked. Where
// rows of src are dense, columns of dst read it in place if no tap of theirs is left or right of it, or those of the
// first alone are left; others read a window of it, one plane a channel (and filter plane).
#include <list>

#include "../caches.h"
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "inline_memory.h"
#include "window.h"

namespace torch_blocked {
namespace {

constexpr int64_t line = 16;                  // floats
constexpr int64_t fetched_ahead = 2;          // rows of dst that are computed while src of a later one is fetched
constexpr int64_t window_budget = 256 << 10;  // bytes: a part of a core's L2, which dst goes through, too

bool can(const Conv& c) { return c.groups == 1 && c.src_md.is_plain() && c.kernels() != nullptr; }

// Ohwi{b}o: the order of the taps.
MemoryDesc weights(const Conv& c) { return dense_desc(c.wei_md, {0, 2, 3, 1}, {{0, c.block}}); }

// Columns [begin, end) of dst whose src lies in one place.
struct Columns {
  int64_t begin, end;
  bool in_place;  // in src itself: no tap of theirs is left or right of it, but the first column's `left_taps`
  Conv conv;      // of them alone
  Window window;
  int64_t row, plane;  // floats from one src row, and from one plane of src, to the next
  int64_t left_taps;   // of a row of the filter
  std::pmr::vector<Tap> taps;
  std::pmr::vector<int64_t> ahead;  // from the src of a run of columns to the cache lines that a later row reads anew

  Columns(const Conv& c, int64_t first, int64_t last, bool stays, bool kernel_takes_stride, int64_t dst_rows,
          int64_t cols, std::pmr::memory_resource* memory)
      : begin(first),
        end(last),
        in_place(stays),
        conv(c),
        window(conv_of_columns(), 1, kernel_takes_stride),
        taps(memory),
        ahead(memory) {
    row = in_place ? c.src_md.strides[2] : window.row_size;
    plane = in_place ? c.src_md.strides[1] : window.size(dst_rows);
    left_taps = in_place && conv.pad_w > 0 ? (conv.pad_w - 1) / c.dilation_w + 1 : 0;
    taps.reserve(c.kd * c.kh * c.kw * c.ic);
    for (int64_t kd = 0; kd < c.kd; kd++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t kw = 0; kw < c.kw; kw++)
          for (int64_t channel = 0; channel < c.ic; channel++)
            taps.push_back({(in_place ? kh * c.dilation_h * row + kw * c.dilation_w : window.tap(kh, kw)) +
                                (kd * c.ic + channel) * plane,
                            int64_t(taps.size()) * c.block});
    if (in_place && !is_behind_mesh()) set_ahead(cols);
  }
  int64_t copied() const { return in_place ? 0 : conv.ic * conv.kd * plane; }

 private:
  const Conv& conv_of_columns() {
    conv.ow = end - begin;
    conv.pad_w -= begin * conv.stride_w;
    return conv;
  }
  // Behind a mesh a line that is asked for holds one of L1's few fill buffers long; the CPU's own prefetch, into L2,
  // does not, and follows as few rows by itself.
  void set_ahead(int64_t cols) {
    const int64_t rows = (conv.kh - 1) * conv.dilation_h + 1, read_anew = std::min(rows, conv.stride_h);
    const int64_t first = fetched_ahead * conv.stride_h + rows - read_anew;
    for (int64_t channel = 0; channel < conv.ic; channel++)
      for (int64_t h = first; h < first + read_anew; h++)
        for (int64_t w = 0; w < cols * conv.stride_w; w += line) ahead.push_back(channel * plane + h * row + w);
  }
};

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  int64_t pixel;  // columns of src from one dst pixel's to the next
  bool stream;
  PaddedPostOps post_ops;
  int64_t cols;    // of a row of dst in one call
  int64_t ntiles;  // of an image, each some dst rows
  InlineMemory<8192> memory;
  std::pmr::list<Columns> columns{&memory};

  explicit Plan(const Conv& c);
  bool takes_stride() const { return pixel == conv.stride_w; }
  void split_columns(int64_t dst_rows);
};

Plan::Plan(const Conv& c)
    : conv(c),
      kernels(*c.kernels()),
      pixel(c.stride_w <= conv_max_plain_stride ? c.stride_w : 1),
      stream(c.block == line && streams_dst(c)),  // by half lines it takes 1.3 times as long (Zen 3)
      post_ops(c) {
  const int64_t ncalls = (c.ow + kernels.cols - 1) / kernels.cols;
  cols = (c.ow + ncalls - 1) / ncalls;
  const Window window(c, 1, takes_stride());
  int64_t tile = 1;
  while (tile < c.oh && c.ic * c.kd * window.size(tile + 1) * int64_t(sizeof(float)) <= window_budget) tile++;
  ntiles = even_parts((c.oh + tile - 1) / tile, c.n * c.od, c.oh, c.nthreads);
  split_columns((c.oh + ntiles - 1) / ntiles);
}

// Whole calls, of which those that see all columns inside src, or all but their first, read it in place.
void Plan::split_columns(int64_t dst_rows) {
  const Conv& c = conv;
  const bool can_stay = takes_stride() && c.src_md.strides[3] == 1 && c.kd == 1 && c.pad_d == 0;
  const int64_t right = c.iw + c.pad_w - (c.kw - 1) * c.dilation_w;  // dst columns whose src begins before see all
  const int64_t left = std::max<int64_t>(0, (c.pad_w + c.stride_w - 1) / c.stride_w);  // those that see padding
  int64_t begin = left <= 1 ? 0 : (left + cols - 1) / cols * cols;
  int64_t end = right <= 0 ? 0 : std::min(c.ow, (right + c.stride_w - 1) / c.stride_w);
  if (end < c.ow) end = end / cols * cols;
  if (!can_stay || begin >= end) begin = end = 0;
  const auto add = [&](int64_t first, int64_t last, bool stays) {
    if (first < last) columns.emplace_back(c, first, last, stays, takes_stride(), dst_rows, cols, &memory);
  };
  add(0, begin, false);
  add(begin, end, true);
  add(end, c.ow, false);
}

// Some dst rows, from row `oh` of a plane on: the plane of src that they read and copies of its parts.
struct Rows {
  const float* src;
  const float* copies;
  int64_t oh, count;
  int64_t dst;  // where they begin
};

// The columns of one row of dst, which the kernel finds at `src` and writes at `dst`.
void compute_columns(const Plan& plan, const Columns& columns, const float* src, int64_t dst,
                     const ConvKernel* kernel_of_cols, ConvArgs& a) {
  const Conv& c = plan.conv;
  const auto compute = [&](int64_t begin, int64_t cols, int64_t runs) {
    if (cols == 0 || runs == 0) return;
    const int64_t at = dst + begin * c.block;
    a.src = src + (begin - columns.begin) * plan.pixel;
    a.left_taps = begin == columns.begin ? columns.left_taps * c.ic : 0;
    a.runs = runs;
    a.dst = c.dst + at;
    if (c.post_ops.residual) a.epilogue.residual = c.post_ops.residual + at;
    kernel_of_cols[cols - 1](a);
  };
  const int64_t rest = (columns.end - columns.begin) % plan.cols;
  compute(columns.begin, plan.cols, (columns.end - columns.begin) / plan.cols);
  compute(columns.end - rest, rest, 1);
}

// One or two blocks of output channels.
void compute_rows(const Plan& plan, const Rows& rows, int64_t oc_block) {
  const Conv& c = plan.conv;
  const int64_t blocks = std::min<int64_t>(2, c.oc_blocks() - oc_block), row_taps = c.kd * c.kw * c.ic;
  ConvArgs a{};
  a.wei_block = c.wei_md.strides[0];
  a.dst_block = c.dst_block();
  a.tap_cols = c.kw * c.ic;
  a.stream = plan.stream;
  a.in_turn = stores_in_turn(c, plan.stream);
  // Behind a mesh cores take lines of dst by themselves.
  a.fetch_dst = !plan.stream && !c.dst_cached && !is_behind_mesh();
  const int64_t dst = rows.dst + oc_block * c.dst_block();
  a.epilogue = plan.post_ops.at(oc_block, blocks, dst);
  const ConvKernel* const kernels = plan.kernels.plain_row[plan.pixel - 1][blocks - 1];
  for (int64_t row = 0; row < rows.count; row++) {
    const float* copy = rows.copies;
    for (const Columns& columns : plan.columns) {
      const TapRange inside = columns.in_place ? tap_rows(c, rows.oh + row, 1) : TapRange{0, c.kh};
      const int64_t ih = (rows.oh + row) * c.stride_h - c.pad_h + inside.begin * c.dilation_h;
      const float* const src = columns.in_place ? rows.src + ih * columns.row + columns.begin * c.stride_w - c.pad_w
                                                : copy + row * columns.window.rows_per_dst * columns.row;
      a.taps = columns.taps.data();
      a.ntaps = (inside.end - inside.begin) * row_taps;
      a.wei = c.wei + oc_block * a.wei_block + inside.begin * row_taps * c.block;
      a.ahead = columns.ahead.data();
      a.nahead = oc_block == 0 ? int64_t(columns.ahead.size()) : 0;
      compute_columns(plan, columns, src, dst + row * c.dst_row(), kernels, a);
      copy += columns.copied();
    }
  }
}

// What of an image's src plane `od` is not read in place.
void copy_src(const Plan& plan, const float* src, int64_t od, int64_t oh, int64_t rows, float* to) {
  for (const Columns& columns : plan.columns) {
    const Conv& c = columns.conv;
    for (int64_t plane = 0; plane < c.kd * c.ic && !columns.in_place; plane++, to += columns.plane)
      columns.window.fill(src + plane % c.ic * c.src_md.strides[1], od, plane / c.ic, oh, rows, to,
                          plan.kernels.copy_plain);
  }
}

void run(const Conv& c) {
  const Plan plan(c);
  int64_t copied = 0;
  for (const Columns& columns : plan.columns) copied += columns.copied();
  parallel_for(c.n * c.od * plan.ntiles, c.nthreads, [&](int64_t tile_begin, int64_t tile_end) {
    float* const copies = Scratch::get(copied);
    for (int64_t tile = tile_begin; tile < tile_end; tile++) {
      const int64_t n = tile / plan.ntiles / c.od, od = tile / plan.ntiles % c.od;
      int64_t begin, end;
      split(c.oh, plan.ntiles, tile % plan.ntiles, begin, end);
      const float* const src = c.src + n * c.src_md.strides[0];
      copy_src(plan, src, od, begin, end - begin, copies);
      const int64_t dst = n * c.dst_image() + od * c.dst_plane() + begin * c.dst_row();
      const Rows rows{src + od * c.stride_d * c.src_md.strides[4], copies, begin, end - begin, dst};
      for (int64_t oc_block = 0; oc_block < c.oc_blocks(); oc_block += 2)  // two blocks' weights stay in L1
        compute_rows(plan, rows, oc_block);
    }
    if (plan.stream) finish_streams();
  });
}

}  // namespace

const Algorithm conv_first = {"first", can, weights, run, nullptr, direct_seconds};

}  // namespace torch_blocked
