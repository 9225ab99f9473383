// Winograd convolution F(4x4, 3x3) whose products are made on tiles of bfloat16, see kernels/amx.h.
//
// A run of dst tiles goes through the steps of winograd.cpp, with the same weights. The parts of one element of the
// transformed src, and those of its weights for two blocks of output channels, are made beside the products of the ones
// before. Weights are read, and their parts made, for every run: so runs are long, unless the parts of all weights stay
// in L2 beside a short one.
#include "winograd_amx.h"

#include <atomic>
#include <vector>

#include "../parallel.h"
#include "../scratch.h"
#include "amx_tiles.h"
#include "cost.h"

namespace torch_blocked {
namespace {

bool can(const Conv& c) { return amx_kernels_of(c) && can_winograd(c) && c.stride_h == 1 && c.ic > c.block; }

struct Plan : Tiles, WinogradAmxWork {
  using Tiles::ic_blocks, Tiles::planes;
  const AmxKernels& kernels;
  PaddedPostOps post_ops;
  bool stream;
  int64_t run_tiles;               // the most of a run, in whole units
  int64_t thread_pairs;            // the most pairs of output blocks of a thread
  std::vector<int64_t> src_steps;  // where the parts of each pair of input blocks begin

  explicit Plan(const Conv& c)
      : Tiles(c, winograd_transforms(c, &WinogradKernels::f4)),
        WinogradAmxWork(c),
        kernels(*amx_kernels_of(c)),
        post_ops(c),
        stream(streams_dst(c)),
        run_tiles(run_units * amx_rows),
        thread_pairs(split_oc ? (oc_pairs + c.nthreads - 1) / c.nthreads : oc_pairs) {
    for (int64_t pair = 0; pair < ic_pairs; pair++) src_steps.push_back(pair * amx_parts * src_part());
  }
  // From one part of a pair of input blocks to the next.
  int64_t src_part() const { return run_tiles * amx_row; }
  // Of one plane: all tiles of a run, and the weights of two output blocks.
  int64_t src_parts() const { return ic_pairs * amx_parts * src_part(); }
  int64_t wei_parts() const { return ic_pairs * amx_wei_step; }
  int64_t all_wei_parts() const { return (keeps_weights ? planes * thread_pairs : 2) * wei_parts(); }
  int64_t src_plane() const { return plane_of(ic_blocks * run_tiles); }
  int64_t dst_block() const { return run_tiles * conv.block; }
  int64_t dst_plane() const { return plane_of(thread_pairs * amx_most_blocks * run_tiles); }
  const float* weights(int64_t plane, int64_t oc_block, int64_t ic_block) const {
    return conv.wei + ((plane * oc_blocks + oc_block) * ic_blocks + ic_block) * conv.block * conv.block;
  }
};

// One thread's way through runs of tiles, each for output blocks [oc_begin, oc_end). A call multiplies one plane of all
// tiles for two of these.
class Worker {
 public:
  Worker(const Plan& plan, int64_t oc_begin, int64_t oc_end)
      : plan_(plan),
        oc_begin_(oc_begin),
        oc_end_(oc_end),
        pairs_((oc_end - oc_begin + 1) / 2),
        calls_(plan.planes * pairs_),
        src_(Scratch::get(plan.planes * (plan.src_plane() + plan.dst_plane()) +
                          (2 * plan.src_parts() + plan.all_wei_parts()) / 2)),
        products_(src_ + plan.planes * plan.src_plane()),
        src_parts_(reinterpret_cast<Part*>(products_ + plan.planes * plan.dst_plane())),
        wei_parts_(src_parts_ + 2 * plan.src_parts()),
        splits_(plan.kernels) {
    for (int64_t call = 0; plan.keeps_weights && call < calls_; call++) {
      add_weights(call);
      splits_.now();
    }
  }

  // Of units [begin, end).
  void compute(int64_t begin, int64_t end) {
    const Calls runs(end - begin, plan_.run_units);
    for (int64_t run = 0, unit = begin, size; run < runs.number; run++, unit += size) {
      size = runs.size(run);
      begin_ = unit * amx_rows;
      tiles_ = std::min((unit + size) * amx_rows, plan_.count) - begin_;
      compute_run();
    }
    if (plan_.stream) finish_streams();
  }
  bool is_in_bounds() const { return splits_.in_bounds(); }

 private:
  int64_t call_plane(int64_t call) const { return call / pairs_; }
  int64_t call_pair(int64_t call) const { return call % pairs_; }
  int64_t call_oc_block(int64_t call) const { return oc_begin_ + amx_most_blocks * call_pair(call); }
  Part* src_parts(int64_t plane) const { return src_parts_ + plane % 2 * plan_.src_parts(); }
  Part* wei_parts(int64_t call) const {
    return wei_parts_ + (plan_.keeps_weights ? call : call % 2) * plan_.wei_parts();
  }

  void compute_run();
  void add_src(int64_t plane, int64_t share, int64_t shares);
  void add_weights(int64_t call);
  void multiply(int64_t call);

  const Plan& plan_;
  const int64_t oc_begin_, oc_end_, pairs_, calls_;
  float *const src_, *const products_;
  Part *const src_parts_, *const wei_parts_;
  Splits splits_;
  int64_t begin_ = 0, tiles_ = 0;  // of the run
};

void Worker::compute_run() {
  plan_.transform_src(begin_, tiles_, 0, plan_.ic_blocks, src_, plan_.src_plane());
  add_src(0, 0, 1);
  if (!plan_.keeps_weights) add_weights(0);
  splits_.now();
  for (int64_t call = 0; call < calls_; call++) {
    if (call_plane(call) + 1 < plan_.planes) add_src(call_plane(call) + 1, call_pair(call), pairs_);
    if (!plan_.keeps_weights && call + 1 < calls_) add_weights(call + 1);
    multiply(call);
  }
  for (int64_t b = oc_begin_; b < oc_end_; b++)
    plan_.transform_dst(begin_, tiles_, b, products_ + (b - oc_begin_) * plan_.dst_block(), plan_.dst_plane(),
                        plan_.stream, plan_.post_ops);
}

// One of as many shares of a plane, whose vectors are those of a pair of input blocks after the other.
void Worker::add_src(int64_t plane, int64_t share, int64_t shares) {
  const int64_t pixel = plan_.conv.block, block = tiles_ * pixel;
  int64_t begin, end;
  split(plan_.ic_pairs * tiles_, shares, share, begin, end);
  for (int64_t count; begin < end; begin += count) {
    const int64_t pair = begin / tiles_, tile = begin % tiles_;
    count = std::min(tiles_ - tile, end - begin);
    const bool two = 2 * pair + 1 < plan_.ic_blocks;
    const float* const first = src_ + plane * plan_.src_plane() + 2 * pair * block + tile * pixel;
    splits_.add({first, two ? first + block : no_channels, pixel, two ? pixel : 0, count,
                 src_parts(plane) + plan_.src_steps[pair] + tile * amx_row, plan_.src_part(), plan_.src_plane()});
  }
}

// Those of a call; the next one's are fetched.
void Worker::add_weights(int64_t call) {
  const int64_t plane = call_plane(call), oc_block = call_oc_block(call), row = plan_.conv.block;
  const int64_t next = std::min(call + 1, calls_ - 1);
  const int64_t ahead = plan_.weights(call_plane(next), call_oc_block(next), 0) - plan_.weights(plane, oc_block, 0);
  for (int64_t pair = 0; pair < plan_.ic_pairs; pair++)
    for (int64_t b = 0; b < std::min<int64_t>(amx_most_blocks, oc_end_ - oc_block); b++) {
      const float* const first = plan_.weights(plane, oc_block + b, 2 * pair);
      const bool two = 2 * pair + 1 < plan_.ic_blocks;
      splits_.add({first, two ? first + row * row : no_channels, row, two ? row : 0, amx_rows,
                   wei_parts(call) + pair * amx_wei_step + b * amx_wei_block, amx_rows * amx_row, ahead});
    }
}

void Worker::multiply(int64_t call) {
  const int64_t plane = call_plane(call), oc_block = call_oc_block(call), steps = plan_.ic_pairs;
  const int64_t blocks = std::min<int64_t>(amx_most_blocks, oc_end_ - oc_block), pixel = plan_.conv.block;
  AmxProducts a;
  a.src = src_parts(plane), a.src_part = plan_.src_part();
  a.src_steps = plan_.src_steps.data();
  a.wei = wei_parts(call);
  a.steps = steps;
  a.sums_block = plan_.dst_block();
  a.sums = products_ + plane * plan_.dst_plane() + (oc_block - oc_begin_) * a.sums_block;
  const int64_t kernel_calls = (tiles_ + amx_pixels - 1) / amx_pixels;
  splits_.beside(kernel_calls * steps * amx_products, [&](SplitQueue& queue) {
    a.queue = &queue;
    for (int64_t tile = 0; tile < tiles_; tile += amx_pixels) {
      plan_.kernels.multiply[tiles_ - tile > amx_rows][blocks - 1](a);
      a.src += amx_pixels * amx_row, a.sums += amx_pixels * pixel;
    }
  });
}

// Calls body(worker) for output blocks [oc_begin, oc_end); false where the sums by parts may not be float32's.
template <class Body>
bool compute_by(const Plan& plan, int64_t oc_begin, int64_t oc_end, const Body& body) {
  Worker worker(plan, oc_begin, std::min(oc_end, plan.oc_blocks));
  body(worker);
  return worker.is_in_bounds();
}

// All of it; false as compute_by.
bool compute(const Plan& plan) {
  const int64_t nthreads = plan.conv.nthreads, shared = plan.split_oc ? plan.oc_pairs : plan.units;
  std::atomic<bool> in_bounds = true;
  Ranges ranges(shared, nthreads, plan.split_oc ? plan.thread_pairs : plan.run_units);
  parallel(nthreads, [&](int64_t thread, int64_t) {
    int64_t begin, end;
    if (!ranges.take(thread, begin, end)) return;
    const TileRegisters registers(plan.kernels);
    bool its = true;
    if (plan.split_oc) {
      do {
        for (int64_t size; begin < end; begin += size) {
          size = std::min(plan.thread_pairs, end - begin);
          its &= compute_by(plan, 2 * begin, 2 * (begin + size), [&](Worker& all) { all.compute(0, plan.units); });
        }
      } while (ranges.take(thread, begin, end));
    } else {
      its = compute_by(plan, 0, plan.oc_blocks, [&](Worker& worker) {
        do worker.compute(begin, end);
        while (ranges.take(thread, begin, end));
      });
    }
    if (!its) in_bounds = false;
  });
  return in_bounds;
}

// An image that is out of bounds, or all where the weights are, is computed anew by vectors: each for what is in it and
// in the weights alone.
void run(const Conv& c) {
  if (compute(Plan(c))) return;
  if (c.n == 1) return conv_winograd_f4.run(c);
  for (int64_t n = 0; n < c.n; n++) run(c.images(n, 1));
}

}  // namespace

const Algorithm conv_winograd_f4_amx = {
    "winograd_f4_amx", can, winograd_f4_weights, run, pack_winograd_f4, winograd_amx_seconds, winograd_pack_seconds<4>,
    &conv_winograd_f4};

}  // namespace torch_blocked
