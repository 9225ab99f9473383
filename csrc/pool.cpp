#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <utility>

#include "fork.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace torch_blocked {
namespace {

constexpr size_t huge_page = size_t(2) << 20;
// A block serves what is at least a sixteenth of it: else what a program keeps of a small output would hold the memory
// of a large one.
constexpr size_t most_larger = 16;
// What is cut off is worth an entry of its own if it is at least an eighth of what is asked for.
constexpr size_t least_rest = 8;

#ifdef __linux__
// What this process may use: the machine's memory, or its container's (Linux's documentation of cgroups, 2 and 1).
size_t memory_limit() {
  size_t least = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGE_SIZE)), bytes;
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
    if (std::ifstream(path) >> bytes) least = std::min(least, bytes);  // not where it is "max"
  return least;
}
#else
size_t memory_limit() { return size_t(4) << 30; }
#endif

// A quarter of the memory, so that a training step finds what the last one freed.
size_t default_limit() { return memory_limit() / 4; }

// Eighths of a power of two: at most 12.5 % is lost, and there are few enough sizes for blocks to be found again.
size_t capacity_of(size_t bytes) {
  size_t step = 512;
  while (step * 16 < bytes) step *= 2;
  return (std::max(bytes, size_t(1)) + step - 1) / step * step;
}

// AddressSanitizer is told what of a segment is in use, and finds what is written behind a block.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t red_zone = 64;
void set_used(const void* data, size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
void set_free(const void* data, size_t bytes) { __asan_poison_memory_region(data, bytes); }
#else
constexpr size_t red_zone = 0;
void set_used(const void*, size_t) {}
void set_free(const void*, size_t) {}
#endif

// Of a segment for a block of `capacity`: where that is less than a huge page a whole one, from which other blocks are
// cut, too.
size_t segment_of(size_t capacity) {
  return capacity < huge_page / most_larger ? capacity : std::max(capacity, huge_page);
}

void* system_allocate(size_t bytes) {
  const size_t alignment = bytes >= huge_page ? huge_page : 64;
  void* data = nullptr;
  if (posix_memalign(&data, alignment, bytes) != 0) return nullptr;
#ifdef __linux__
  if (alignment == huge_page) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

}  // namespace

Pool::Pool() : limit_(default_limit()) {}

Pool& Pool::instance() {
  static Pool* const pool = [] {  // never destroyed: tensors may outlive every static object
    hold_in_forks<Pool>();
    return new Pool;
  }();
  return *pool;
}

Pool::Block* Pool::allocate(size_t bytes) {
  const size_t capacity = capacity_of(bytes + red_zone);
  Block* block = reuse(capacity);
  if (block == nullptr) block = add_segment(capacity);
  set_free(block->data, block->capacity);
  set_used(block->data, bytes);
  return block;
}

Pool::Block* Pool::add_segment(size_t capacity) {
  const size_t bytes = segment_of(capacity);
  auto block = std::make_unique<Block>(Block{nullptr, bytes, nullptr, nullptr, false});
  void* data = system_allocate(bytes);
  if (data == nullptr) {
    empty();
    data = system_allocate(bytes);
  }
  if (data == nullptr) throw std::bad_alloc();
  block->data = static_cast<char*>(data);
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    cut(block.get(), capacity);
  } catch (const std::bad_alloc&) {  // for an entry there is no memory: it stays whole
  }
  cached_bytes_ += bytes - block->capacity;
  return block.release();
}

Pool::Block* Pool::reuse(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = best_fit(capacity);
  if (found == free_.end()) return nullptr;
  Block* const block = *found;
  cut(block, capacity);  // first: where there is no memory for an entry, nothing has changed
  std::erase(free_, block);
  block->free = false;
  cached_bytes_ -= block->capacity;
  return block;
}

// The smallest free block of `capacity` to `most_larger` times that; of those of the same, the most recently freed.
std::vector<Pool::Block*>::iterator Pool::best_fit(size_t capacity) {
  auto best = free_.end();
  for (auto block = free_.end(); block != free_.begin();) {
    const size_t its = (*--block)->capacity;
    if (its == capacity) return block;
    if (its < capacity || its > most_larger * capacity) continue;
    if (best == free_.end() || its < (*best)->capacity) best = block;
  }
  return best;
}

// Makes what the block has beyond `capacity` a free one.
void Pool::cut(Block* block, size_t capacity) {
  if ((block->capacity - capacity) * least_rest < capacity) return;
  free_.reserve(free_.size() + 1);
  Block* const rest = new Block{block->data + capacity, block->capacity - capacity, block, block->after, true};
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->capacity = capacity;
  free_.push_back(rest);
}

// With the block after it.
void Pool::join(Block* block) {
  Block* const after = block->after;
  block->capacity += after->capacity;
  block->after = after->after;
  if (block->after) block->after->before = block;
  delete after;
}

void Pool::release(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  cached_bytes_ += block->capacity;
  set_free(block->data, block->capacity);
  for (Block* const neighbour : {block->before, block->after})
    if (neighbour && neighbour->free) std::erase(free_, neighbour);
  if (block->after && block->after->free) join(block);
  if (block->before && block->before->free) join(block = block->before);
  block->free = true;
  free_.push_back(block);
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
  if (cached_bytes_ <= keep_bytes) return;
  std::erase_if(free_, [&](Block* block) {
    if (cached_bytes_ <= keep_bytes || block->before || block->after) return false;
    cached_bytes_ -= block->capacity;
    set_used(block->data, block->capacity);
    std::free(block->data);
    delete block;
    return true;
  });
}

}  // namespace torch_blocked
