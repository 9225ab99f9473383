// A bounded cache of freed memory blocks for the operators' outputs.
//
// The C library gives large blocks back to the system when they are freed, and every page of the next one faults on
// first touch: at 50 MB that costs more than the convolution that fills it.
#pragma once
#include <cstddef>
#include <list>
#include <mutex>

namespace torch_blocked {

class Pool {
 public:
  Pool();
  static Pool& instance();

  // `bytes` rounded up to what is kept together; every block of that capacity serves every request of it.
  static size_t capacity_of(size_t bytes);
  // A block of capacity_of(bytes), 64-byte aligned. Throws std::bad_alloc, after giving back all that is cached.
  void* allocate(size_t bytes);
  void release(void* data, size_t bytes);
  // Gives every cached block back to the system.
  void empty();
  size_t cached_bytes();
  // How many bytes are kept at most, from now on; returns the limit before.
  size_t set_limit(size_t bytes);

 private:
  struct Block {
    void* data;
    size_t capacity;
  };
  void free_oldest(size_t keep_bytes);

  std::mutex mutex_;
  std::list<Block> blocks_;  // most recently freed first
  size_t cached_bytes_ = 0, limit_;
};

}  // namespace torch_blocked
