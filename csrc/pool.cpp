#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace torch_blocked {
namespace {

constexpr size_t huge_page = size_t(2) << 20;
constexpr size_t most_spare = 2;  // 4 saves little more and costs a few percent of resnet18's time

// A quarter of the machine's memory, so that a training step finds what the last one freed.
size_t default_limit() {
#ifdef __linux__
  return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGE_SIZE)) / 4;
#else
  return size_t(1) << 30;
#endif
}

// Eighths of a power of two: at most 12.5 % is lost, and there are few enough sizes for blocks to be found again.
size_t capacity_of(size_t bytes) {
  size_t step = 512;
  while (step * 16 < bytes) step *= 2;
  return (std::max(bytes, size_t(1)) + step - 1) / step * step;
}

void* system_allocate(size_t capacity) {
  const size_t alignment = capacity >= huge_page ? huge_page : 64;
  void* data = nullptr;
  if (posix_memalign(&data, alignment, capacity) != 0) return nullptr;
#ifdef __linux__
  if (alignment == huge_page) madvise(data, capacity, MADV_HUGEPAGE);
#endif
  return data;
}

}  // namespace

Pool::Pool() : limit_(default_limit()) {}

Pool& Pool::instance() {
  static Pool* const pool = new Pool;  // never destroyed: tensors may outlive every static object
  return *pool;
}

Pool::Block Pool::allocate(size_t bytes) {
  const size_t capacity = capacity_of(bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = best_fit(capacity);
    if (found != blocks_.end()) {
      const Block block = *found;
      cached_bytes_ -= block.capacity;
      blocks_.erase(found);
      return block;
    }
  }
  void* data = system_allocate(capacity);
  if (data == nullptr) {
    empty();
    data = system_allocate(capacity);
  }
  if (data == nullptr) throw std::bad_alloc();
  return {data, capacity};
}

// The smallest block of `capacity` to `most_spare` times that; of those of the same, the most recently freed.
std::vector<Pool::Block>::iterator Pool::best_fit(size_t capacity) {
  auto best = blocks_.end();
  for (auto block = blocks_.end(); block != blocks_.begin();) {
    --block;
    if (block->capacity == capacity) return block;
    if (block->capacity < capacity || block->capacity > most_spare * capacity) continue;
    if (best == blocks_.end() || block->capacity < best->capacity) best = block;
  }
  return best;
}

void Pool::release(Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.push_back(block);
  cached_bytes_ += block.capacity;
  free_oldest(limit_);
}

void Pool::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  free_oldest(0);
}

size_t Pool::set_limit(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_oldest(bytes);
  return std::exchange(limit_, bytes);
}

size_t Pool::cached_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return cached_bytes_;
}

void Pool::free_oldest(size_t keep_bytes) {
  auto block = blocks_.begin();
  for (; cached_bytes_ > keep_bytes; ++block) {
    cached_bytes_ -= block->capacity;
    std::free(block->data);
  }
  blocks_.erase(blocks_.begin(), block);
}

}  // namespace torch_blocked
