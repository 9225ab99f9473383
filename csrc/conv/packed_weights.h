// Weights as loops read them where those are not the tensor's own (Winograd's; those of transposed convolutions), kept
// between calls.
//
// An entry belongs to one weight tensor as it was at one version: a write to the tensor drops it, and so does the
// tensor's end. What is kept is bounded; where it does not fit, those stay that save the most time a byte.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../memory_desc.h"
#include "../scratch.h"

namespace torch_blocked {

// Answers whether a tensor still is, at any later time; while it may be asked, no other tensor has the same address.
using Alive = std::function<bool()>;

// A weight tensor and the state it is in.
struct WeightKey {
  const void* tensor;
  int64_t version;
  const void* data;
  int64_t bytes;
  Alive (*watch)(const void* tensor);  // asked of one that is
  bool lasts = true;                   // whether many calls are expected of a tensor not seen before
  bool transposed = false;             // what the call is: one tensor serves a convolution and the gradient of its src
};

// Which of a filter's taps, where that is not all of them: the last and the step of each axis.
using Taps = std::array<int64_t, 6>;

// What packed weights are kept as: one tensor serves src of several blocks, any groups, strides and both kinds of
// convolution, and as many channels as its blocks have room for.
struct Packing {
  const void* algorithm = nullptr;  // null: as they are, in float32
  MemoryDesc weight{};              // one tensor may be read as of several formats
  int64_t block = 0, groups = 0, stride_w = 0;
  bool transposed = false;
  Taps taps{};

  bool operator==(const Packing&) const = default;
};

class PackedWeights {
 public:
  using Packed = std::shared_ptr<const HugeBuffer>;
  static PackedWeights& instance();

  // How many calls of its kind one packing of these weights serves, as far as their past tells: many, until they
  // change. `count`: this is one of them.
  double uses(const WeightKey& key, bool count);
  // The weights in a packing, by `pack` where they are not yet; null where there is no room for them beside those that
  // gain more, in seconds a call and byte.
  Packed get(const WeightKey& key, const Packing& packing, int64_t count, const std::function<double()>& gain,
             const std::function<void(float*)>& pack);

  // Whether `get` would answer.
  bool has(const WeightKey& key, const Packing& packing, int64_t count, double gain);

  // At most `bytes` kept; negative: twice the weights seen, but at least `least_bound`.
  void set_bound(int64_t bytes);
  int64_t bound();
  int64_t bytes();
  void empty();

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr int64_t least_bound = int64_t(256) << 20;
  static constexpr double many = 1e9;

  struct Form {  // the weights packed for one algorithm
    Packing packing;
    Packed packed;
    double gain_per_byte;
  };
  struct Uses {
    double now, before;  // of this version, of the one before
  };
  struct Entry {
    WeightKey key;
    Alive alive;
    std::array<Uses, 2> uses;  // by convolutions, by transposed ones
    std::vector<Form> forms;
  };
  static Entry entry_of(const WeightKey& key, const std::array<Uses, 2>& uses) {
    return {key, key.watch(key.tensor), uses, {}};
  }
  Entry& entry(const WeightKey& key);
  const Form* find(const WeightKey& key, const Packing& packing);
  // What would have to go for `bytes` more; nothing where even that is not enough.
  std::optional<std::vector<Form*>> in_the_way(int64_t bytes, double gain_per_byte);
  void drop_dead();
  int64_t bound_locked() const;
  int64_t bytes_locked() const;

  std::mutex mutex_;
  std::unordered_map<const void*, Entry> entries_;
  int64_t bound_ = -1;
};

}  // namespace torch_blocked
