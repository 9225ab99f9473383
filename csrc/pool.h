// A bounded cache of freed memory blocks for the operators' outputs.
//
// The C library gives large blocks back to the system when they are freed, and every page of the next one faults on
// first touch: at 50 MB that costs more than the convolution that fills it. Few sizes are asked for twice within one
// network, so that a block also serves what is somewhat smaller.
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
    void* data;  // 64-byte aligned
    size_t capacity;
  };
  // Of at least `bytes`, from the cache or new. Throws std::bad_alloc, after giving back all that is cached.
  Block allocate(size_t bytes);
  void release(Block block);
  // Gives every cached block back to the system.
  void empty();
  size_t cached_bytes();
  // How many bytes are kept at most, from now on; returns the limit before.
  size_t set_limit(size_t bytes);

 private:
  std::vector<Block>::iterator best_fit(size_t capacity);
  void free_oldest(size_t keep_bytes);

  std::mutex mutex_;
  std::vector<Block> blocks_;  // most recently freed last
  size_t cached_bytes_ = 0, limit_;
};

}  // namespace torch_blocked
