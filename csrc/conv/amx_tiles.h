// What the convolutions on tiles have in common: a thread's registers, and what it splits into parts beside products.
#pragma once
#include <vector>

#include "../kernels/amx.h"
#include "conv.h"

namespace torch_blocked {

// This CPU's kernels on tiles for blocks of conv.block channels; null where it has none.
inline const AmxKernels* amx_kernels_of(const Conv& c) {
  return isa() == Isa::AMX && c.block == isa_block(Isa::AMX) ? &TORCH_BLOCKED_KERNELS(amx_kernels, Isa::AMX) : nullptr;
}

// This thread's tiles, in their first state again afterwards: a thread that has none is switched to and from faster.
class TileRegisters {
 public:
  explicit TileRegisters(const AmxKernels& kernels) : kernels_(kernels) { kernels_.configure(); }
  ~TileRegisters() { kernels_.release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  const AmxKernels& kernels_;
};

// Where the second block of a pair is missing.
inline constexpr float no_channels[amx_rows] = {};

// What is split beside the products of the next call. What is written for it is read as it was written, number by
// number: in wider pieces, as a vector's two pointers or a copy of a run, it would wait for all sums that are stored.
class Splits {
 public:
  explicit Splits(const AmxKernels& kernels) : kernels_(kernels), runs_(64) {}
  bool in_bounds() const { return in_bounds_; }

  void add(const SplitRun& given) {
    if (count_ == int64_t(runs_.size())) runs_.resize(2 * runs_.size());
    SplitRun& run = runs_[count_++];
    run.first = given.first, run.second = given.second;
    run.first_stride = given.first_stride, run.second_stride = given.second_stride;
    run.count = given.count;
    run.dst = given.dst, run.dst_part = given.dst_part;
    run.ahead = given.ahead;
    vectors_ += given.count;
  }

  // Calls body(queue), which multiplies `products` times and splits meanwhile, and splits what it leaves.
  template <class Body>
  void beside(int64_t products, const Body& body) {
    SplitQueue queue{runs_.data(), runs_.data() + count_, (vectors_ + products - 1) / products};
    body(queue);
    kernels_.split(queue);
    in_bounds_ &= queue.in_bounds;
    count_ = vectors_ = 0;
  }
  void now() {
    beside(1, [](SplitQueue&) {});
  }

 private:
  const AmxKernels& kernels_;
  std::vector<SplitRun> runs_;  // the first `count_` of them
  int64_t count_ = 0, vectors_ = 0;
  bool in_bounds_ = true;  // all so far
};

}  // namespace torch_blocked
