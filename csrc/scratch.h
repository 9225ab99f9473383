// Per-thread scratch memory for the kernels: it only grows, and is reused by every call the thread makes.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torch_blocked {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `count` floats of unspecified content, valid until this thread's next call. Throws std::bad_alloc.
  static float* get(int64_t count) {
    static thread_local Scratch scratch;
    return scratch.grow(count);
  }

 private:
  // Huge pages, so that TLB misses never matter.
  static constexpr int64_t page = int64_t(2) << 20;

  float* grow(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(float)) + page - 1) / page * page;
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(page, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
#ifdef __linux__
      madvise(data_, bytes, MADV_HUGEPAGE);
#endif
      bytes_ = bytes;
    }
    return data_;
  }

  float* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace torch_blocked
