// Direct convolution on tiles of bfloat16, see kernels/amx.h: dense, of a blocked src, any filter.
//
// The pixels of dst are taken in one row, whatever lies between them in memory. A tile of them is computed from some
// steps after the other, each a tap of two blocks of input channels: the parts of the src that a step reads lie in
// scratch, a row for each pixel, zeros in the padding (of several taps in windows, see amx.h), and so do those of the
// weights of two blocks of output channels for the steps of one call, while all pixels of the tile are multiplied with
// them. Products leave the vectors idle: they make the parts that are multiplied next (those of windows are few, and
// made before).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../parallel.h"
#include "../scratch.h"
#include "amx_plan.h"
#include "cost.h"

namespace torch_blocked {
namespace {

std::atomic<bool> always = false;

bool can(const Conv& c) {
  return amx_kernels_of(c) && c.groups == 1 && c.ic >= c.block && c.src_md.single_block(1) == c.block &&
         c.src_md.strides[3] == c.block && AmxWork(c).fits() && (always || amx_seconds(c) < direct_seconds(c));
}

// One thread's way through ranges of pixels, each for output blocks [oc_begin, oc_end).
class Worker {
 public:
  Worker(const AmxPlan& plan, int64_t oc_begin, int64_t oc_end)
      : plan_(plan),
        conv_(plan.conv),
        oc_begin_(oc_begin),
        oc_end_(oc_end),
        src_(reinterpret_cast<Part*>(Scratch::get(plan.src_floats() + plan.wei_floats() + plan.sums_floats()))),
        wei_(src_ + plan.src_floats() * 2),
        sums_(reinterpret_cast<float*>(wei_ + plan.wei_floats() * 2)),
        splits_(plan.kernels) {}

  template <class NextTile>
  void compute(const NextTile& next_tile);
  bool is_in_bounds() const { return splits_.in_bounds(); }

 private:
  // Of a tile, as many as a call of a kernel takes.
  struct Piece {
    PixelRange pixels;
    int64_t dst;  // where block 0 of them lies in dst, if their sums can, too; else -1
  };
  // All pixels of a tile and a chunk of steps, of which this is the first, for some output blocks.
  struct Call {
    int64_t tile, chunk, oc_block;
  };
  struct Sums {
    float* at;
    int64_t block;  // to those of the next output block
  };
  // Sums that are to be added up or, the last, to become dst.
  struct Ready {
    PixelRange pixels{0, 0};
    int64_t oc_block = 0;
    Sums sums{};
    float* part = nullptr;
    bool last = false;  // with the epilogue
  };

  const PixelRange& pixels(const Call& at) const { return tiles_[at.tile % 2]; }
  int64_t chunk_end(const Call& at) const { return std::min(at.chunk + plan_.chunk, plan_.steps()); }
  int64_t blocks(const Call& at) const { return std::min<int64_t>(amx_most_blocks, oc_end_ - at.oc_block); }
  bool begins_chunk(const Call& at) const { return at.oc_block == oc_begin_; }
  // To the next; false at the end of the last tile that is known.
  bool advance_chunk(Call& at) const;
  bool advance(Call& at) const;

  // Steps after `chunk` of a tile, or the same of the next one, are in the other half; windows there where they are.
  Part* src(const Call& at) const {
    if (plan_.windows) return src_;
    const int64_t chunks = (plan_.steps() + plan_.chunk - 1) / plan_.chunk;
    return src_ + (at.tile * chunks + at.chunk / plan_.chunk) % 2 * plan_.src_floats();
  }
  Part* wei(const Call& at, int64_t call) const {
    if (!plan_.keeps_weights) return wei_ + call % 2 * plan_.chunk * amx_wei_step;
    return wei_ + ((at.oc_block - oc_begin_) * plan_.steps() + at.chunk * amx_most_blocks) * amx_wei_block;
  }

  // The weights of a call's first output block.
  const float* wei_block(const Call& at) const { return conv_.wei + at.oc_block * conv_.wei_md.strides[0]; }

  void list_src_row(const float* src, int64_t pair, int64_t first, int64_t cols, Part* dst);
  void list_windows(const PixelRange& tile);
  void list_src(const Call& at);
  void list_pieces(const PixelRange& tile);
  void list_weights(const Call& at, int64_t call);
  void take_src(int64_t calls);
  void multiply(const Call& at, int64_t call);
  void finish();

  const AmxPlan& plan_;
  const Conv& conv_;
  const int64_t oc_begin_, oc_end_;
  const bool has_epilogue_ = !conv_.post_ops.are_none();
  Part *const src_, *const wei_;
  float* const sums_;
  PixelRange tiles_[2];  // that is computed, and the next one
  int64_t ntiles_ = 0;
  std::vector<SplitRun> src_runs_;  // of the next chunk of src
  size_t src_run_ = 0;              // the first of these that is left
  int64_t src_left_ = 0;            // vectors of those
  Splits splits_;
  std::vector<Piece> pieces_;  // of the tile
  Ready ready_;
};

bool Worker::advance_chunk(Call& at) const {
  at.chunk += plan_.chunk;
  if (at.chunk >= plan_.steps()) at.chunk = 0, at.tile++;
  at.oc_block = oc_begin_;
  return at.tile < ntiles_;
}

bool Worker::advance(Call& at) const {
  at.oc_block += amx_most_blocks;
  return at.oc_block < oc_end_ || advance_chunk(at);
}

// So many pixels of a row of src, a stride from each other, the first in column `first`; zeros in the padding.
void Worker::list_src_row(const float* src, int64_t pair, int64_t first, int64_t cols, Part* dst) {
  const Conv& c = conv_;
  const int64_t src_cols = plan_.windows || plan_.cols == c.ow ? c.iw : plan_.cols;
  // The first and the end of those that read src.
  const auto before = [&](int64_t iw) {
    return iw <= first ? 0 : std::min(cols, (iw - first + c.stride_w - 1) / c.stride_w);
  };
  const int64_t begin = src ? before(0) : cols, end = src ? std::max(begin, before(src_cols)) : cols;
  for (int part = 0; part < amx_parts; part++) {
    std::fill_n(dst + part * plan_.src_part, begin * amx_row, Part(0));
    std::fill_n(dst + part * plan_.src_part + end * amx_row, (cols - end) * amx_row, Part(0));
  }
  if (begin == end) return;
  src_left_ += end - begin;
  const int64_t stride = c.stride_w * c.block;
  const float* const from = src + (first + begin * c.stride_w) * c.block;
  const bool two = plan_.has_second(pair);
  src_runs_.push_back({from, two ? from + c.src_md.strides[1] : no_channels, stride, two ? stride : 0, end - begin,
                       dst + begin * amx_row, plan_.src_part, 0});
}

// Of one tap a tile's src for the steps of a chunk. What is behind its last pixel is of an older tile: no dst is made
// of its sums.
void Worker::list_src(const Call& at) {
  const Conv& c = conv_;
  const PixelRange tile = pixels(at);
  const int64_t dst_rows = plan_.rows / (c.n * c.od);
  for (int64_t i = at.chunk; i < chunk_end(at); i++) {
    const AmxPlan::Step& step = plan_.step_list[i];
    Part* dst = src(at) + plan_.src_steps[i];
    for (int64_t begin = tile.begin; begin < tile.end; begin += amx_pixels, dst += plan_.src_piece)
      plan_.for_each_row(begin, std::min(begin + amx_pixels, tile.end),
                         [&](int64_t row, int64_t col, int64_t cols, int64_t pixel) {
                           const int64_t ih = row % dst_rows * c.stride_h - c.pad_h;
                           list_src_row(plan_.src_row(row / dst_rows, step.pair, step.kd, ih), step.pair,
                                        col * c.stride_w - c.pad_w, cols, dst + pixel * amx_row);
                         });
  }
}

// The windows of all channels for a tile's rows of dst.
void Worker::list_windows(const PixelRange& tile) {
  const Conv& c = conv_;
  const int64_t first_row = tile.begin / plan_.cols, rows = (tile.end - tile.begin) / plan_.cols + plan_.shift_h;
  const int64_t plane = first_row / c.oh, top = first_row % c.oh * c.stride_h - c.pad_h;
  const int64_t down = c.kh > 1 ? c.stride_h : 1, across = c.kw > 1 ? c.stride_w : 1;  // phases
  for (int64_t i = 0; i < plan_.ic_pairs * c.kd; i++)
    for (int64_t phase = 0; phase < down * across; phase++) {
      Part* dst =
          src_ + i * amx_parts * plan_.src_part + phase * (plan_.tile_rows + plan_.shift_h) * plan_.cols * amx_row;
      for (int64_t row = 0; row < rows; row++, dst += plan_.cols * amx_row)
        list_src_row(plan_.src_row(plane, i / c.kd, i % c.kd, top + phase / across + row * c.stride_h), i / c.kd,
                     phase % across - c.pad_w, plan_.cols, dst);
    }
}

// The weights of a call; those of the one after it are fetched meanwhile.
void Worker::list_weights(const Call& at, int64_t call) {
  if (plan_.keeps_weights && at.tile > 0) return;
  const Conv& c = conv_;
  Call after = at;
  const bool more = advance(after) && after.chunk + chunk_end(at) - at.chunk <= plan_.steps();
  const int64_t to_next = more ? wei_block(after) - wei_block(at) : 0;
  for (int64_t i = 0; i < chunk_end(at) - at.chunk; i++)
    for (int64_t b = 0; b < blocks(at); b++) {
      const AmxPlan::Step& step = plan_.step_list[at.chunk + i];
      const float* const first = wei_block(at) + b * c.wei_md.strides[0] + step.wei;
      const int64_t ahead = more ? to_next + plan_.step_list[after.chunk + i].wei - step.wei : 0;
      splits_.add({first, step.has_second ? first + c.kd * plan_.wei_ic_block() : no_channels, c.block,
                   step.has_second ? c.block : 0, c.block, wei(at, call) + i * amx_wei_step + b * amx_wei_block,
                   amx_rows * amx_row, ahead});
    }
}

// Some of the src that is left, so that `calls` calls take all.
void Worker::take_src(int64_t calls) {
  for (int64_t wanted = (src_left_ + calls - 1) / calls, n; wanted > 0; wanted -= n) {
    SplitRun& run = src_runs_[src_run_];
    n = std::min(wanted, run.count);
    splits_.add({run.first, run.second, run.first_stride, run.second_stride, n, run.dst, run.dst_part, run.ahead});
    run.first += n * run.first_stride, run.second += n * run.second_stride;
    run.dst += n * amx_row;
    run.count -= n;
    src_run_ += run.count == 0;
    src_left_ -= n;
  }
  if (src_left_ == 0) src_runs_.clear(), src_run_ = 0;
}

// The sums can lie in dst where whole tile registers can be stored there.
void Worker::list_pieces(const PixelRange& tile) {
  const int64_t image = plan_.pixels / conv_.n;
  pieces_.clear();
  for (int64_t begin = tile.begin, end; begin < tile.end; begin = end) {
    end = std::min(begin + amx_pixels, tile.end);
    const bool in_dst = plan_.one_image && (end - begin) % amx_rows == 0 && begin / image == (end - 1) / image;
    pieces_.push_back({{begin, end}, in_dst ? plan_.dst_offset(begin / plan_.cols, begin % plan_.cols, 0) : -1});
  }
}

// The sums of the last call of a kernel; one call later, so that the tiles' products are not waited for.
void Worker::finish() {
  const Conv& c = conv_;
  const int64_t oc_block = ready_.oc_block, begin = ready_.pixels.begin, end = ready_.pixels.end;
  const int64_t blocks = std::min<int64_t>(amx_most_blocks, oc_end_ - oc_block);
  const Sums sums = ready_.sums;
  for (int64_t b = 0; ready_.part && b < blocks; b++)
    plan_.kernels.add(ready_.part + b * plan_.sums_block(), sums.at + b * sums.block, (end - begin) * c.block);
  ready_.part = nullptr;
  if (!ready_.last) return;
  ready_.last = false;
  plan_.for_each_row(begin, end, [&](int64_t row, int64_t col, int64_t cols, int64_t pixel) {
    if (plan_.windows) cols = std::min(cols, c.ow - col);  // at most 0 beside dst
    const int64_t offset = plan_.dst_offset(row, col, oc_block);
    Epilogue epilogue = plan_.post_ops.at(oc_block, blocks, offset);
    plan_.kernels.finish(sums.at + pixel * c.block, sums.block, blocks, epilogue, c.dst + offset, c.dst_block(),
                         c.dst_pixel(), cols, plan_.stream);
  });
}

// Two tile registers of pixels at a time. The sums of the first chunk are whole ones; those of another are a part that
// is added to them.
void Worker::multiply(const Call& at, int64_t call) {
  const int64_t end = chunk_end(at), steps = end - at.chunk, calls = pieces_.size();
  AmxProducts a;
  a.src = src(at), a.src_part = plan_.src_part;
  a.src_steps = plan_.src_steps.data() + at.chunk;
  a.wei = wei(at, call);
  a.steps = steps;
  const Conv& c = conv_;
  const int64_t sums_block = plan_.sums_block(), oc_block = plan_.is_one_chunk() ? 0 : at.oc_block - oc_begin_;
  const bool in_part = at.chunk > 0, last = end == plan_.steps();
  float *whole = sums_ + oc_block * sums_block, *part = sums_ + plan_.whole_sums_floats();
  splits_.beside(calls * steps * amx_products, [&](SplitQueue& queue) {
    a.queue = &queue;
    for (const auto& [pixels, dst] : pieces_) {
      if (calls == 1) finish();
      const Sums sums =
          dst < 0 ? Sums{whole, sums_block} : Sums{c.dst + dst + at.oc_block * c.dst_block(), c.dst_block()};
      a.sums = in_part ? part : sums.at;
      a.sums_block = in_part ? sums_block : sums.block;
      plan_.kernels.multiply[pixels.end - pixels.begin > amx_rows][blocks(at) - 1](a);
      finish();
      ready_ = {pixels, at.oc_block, sums, in_part ? part : nullptr, last && (dst < 0 || has_epilogue_)};
      a.src += plan_.src_piece;
      whole += amx_pixels * c.block, part += amx_pixels * c.block;
    }
  });
}

// All tiles that next_tile(pixels) gives, until it returns false.
template <class NextTile>
void Worker::compute(const NextTile& next_tile) {
  if (!next_tile(tiles_[0])) return;
  ntiles_ = 1;
  Call at{0, 0, oc_begin_};
  int64_t call = 0, calls_left = 1;
  if (!plan_.windows) list_src(at);
  list_weights(at, call);
  take_src(1);
  splits_.now();
  for (bool more = true; more; call++) {
    if (begins_chunk(at)) {
      if (at.chunk == 0) {
        finish();
        list_pieces(pixels(at));
        ntiles_ += next_tile(tiles_[(at.tile + 1) % 2]);
        if (plan_.windows) {
          list_windows(pixels(at));
          take_src(1);
          splits_.now();
        }
      }
      Call chunk = at;
      if (advance_chunk(chunk) && !plan_.windows) list_src(chunk);
      calls_left = (oc_end_ - oc_begin_ + 1) / 2;
    }
    Call next = at;
    more = advance(next);
    if (more) list_weights(next, call + 1);
    take_src(calls_left--);
    multiply(at, call);
    at = next;
  }
  finish();
  if (plan_.stream) finish_streams();
}

// The tiles of the ranges that a thread takes of all units, as even as possible.
class Tiles {
 public:
  Tiles(const AmxPlan& plan, Ranges& ranges, int64_t thread) : plan_(plan), ranges_(ranges), thread_(thread) {}

  bool next(PixelRange& tile) {
    if (begin_ == end_ && !ranges_.take(thread_, begin_, end_)) return false;
    tile.begin = begin_ * plan_.unit;
    const int64_t oh = plan_.conv.oh;  // rows in windows are of one plane
    if (plan_.windows)
      begin_ += Calls(std::min(end_ - begin_, oh - begin_ % oh), plan_.tile_rows).size(0);
    else
      begin_ += Calls(end_ - begin_, plan_.tile / plan_.unit).size(0);
    tile.end = std::min(begin_ * plan_.unit, plan_.pixels);
    return true;
  }

 private:
  const AmxPlan& plan_;
  Ranges& ranges_;
  const int64_t thread_;
  int64_t begin_ = 0, end_ = 0;
};

bool is_in_bounds(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float x) { return std::abs(x) < amx_bound; });
}

// Whether all pixels of image n are.
bool is_in_bounds(const Conv& c, int64_t n) {
  const int64_t* strides = c.src_md.strides;
  for (int64_t block = 0; block < (c.ic + c.block - 1) / c.block; block++)
    for (int64_t id = 0; id < c.id; id++)
      for (int64_t ih = 0; ih < c.ih; ih++) {
        const int64_t row = n * strides[0] + block * strides[1] + id * strides[4] + ih * strides[2];
        if (!is_in_bounds(c.src + row, c.iw * c.block)) return false;
      }
  return true;
}

// The images whose sums by parts may not be float32's, anew by vectors: each for what is in it and in the weights
// alone.
void run_out_of_bounds(const Conv& c) {
  if (!is_in_bounds(c.wei, elements(c.wei_md))) return conv_direct.run(c);
  for (int64_t n = 0; n < c.n; n++)
    if (!is_in_bounds(c, n)) conv_direct.run(c.images(n, 1));
}

void run(const Conv& c) {
  const AmxPlan plan(c);
  std::atomic<bool> in_bounds = true;
  const int64_t pairs = (plan.oc_blocks + 1) / 2, units = plan.units();
  const auto compute = [&](int64_t oc_begin, int64_t oc_end, Ranges& ranges, int64_t thread) {
    Worker worker(plan, oc_begin, oc_end);
    Tiles tiles(plan, ranges, thread);
    worker.compute([&](PixelRange& tile) { return tiles.next(tile); });
    if (!worker.is_in_bounds()) in_bounds = false;
  };
  const int64_t least = plan.windows ? std::min(plan.tile_rows, std::max<int64_t>(1, units / c.nthreads)) : 4;
  Ranges shared(plan.split_oc ? pairs : units, c.nthreads,
                plan.split_oc ? std::max<int64_t>(1, pairs / c.nthreads) : least);
  parallel(c.nthreads, [&](int64_t thread, int64_t) {
    const TileRegisters registers(plan.kernels);
    if (!plan.split_oc) return compute(0, plan.oc_blocks, shared, thread);
    for (int64_t begin, end; shared.take(thread, begin, end);) {
      Ranges all(units, 1, units);
      compute(2 * begin, std::min(2 * end, plan.oc_blocks), all, 0);
    }
  });
  if (!in_bounds) run_out_of_bounds(c);
}

}  // namespace

void set_amx_always(bool on) { always = on; }
bool amx_always() { return always; }

const Algorithm conv_amx = {"direct_amx", can, by_blocks, run, nullptr, amx_seconds};

}  // namespace torch_blocked
