// A bounded cache of freed memory for the operators' outputs.
//
// The C library gives large blocks back to the system when they are freed, and every page of the next one faults on
// first touch: at 50 MB that costs more than the convolution that fills it. So segments of the system's memory are
// kept, and cut up into blocks as they are asked for; a freed block joins its free neighbours. A network's later and
// smaller outputs then lie where its first ones were, which the CPU's caches still hold. Blocks of less than a huge
// page are cut from one: memory in one piece takes few of the TLB's entries, and its lines are spread evenly over the
// sets of a cache.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

namespace torch_blocked {

class Pool {
 public:
  Pool();
  static Pool& instance();

  struct Block {
    char* data;  // 64-byte aligned
    size_t capacity;
    Block *before, *after;  // its neighbours in the segment, null at the ends
    bool free;
    size_t bytes = 0, guard = 0;  // its owner's: what was asked for, and how much of that at each end is a guard
  };
  // Of at least `bytes`, from the cache or new. Throws std::bad_alloc, after giving back all that is cached.
  Block* allocate(size_t bytes);
  void release(Block* block);
  // Gives every segment of which nothing is in use back to the system.
  void empty();
  size_t cached_bytes();
  // How many free bytes are kept at most, from now on, but in segments that are in use; returns the limit before.
  size_t set_limit(size_t bytes);

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  Block* reuse(size_t capacity);  // a free one, or null
  Block* add_segment(size_t capacity);
  std::vector<Block*>::iterator best_fit(size_t capacity);
  void cut(Block* block, size_t capacity);
  void join(Block* block);
  void free_oldest(size_t keep_bytes);

  std::mutex mutex_;
  std::vector<Block*> free_;  // most recently freed last
  size_t cached_bytes_ = 0, limit_;
};

}  // namespace torch_blocked
