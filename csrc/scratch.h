// Memory of the kernels' own, in huge pages so that TLB misses never matter, and each thread's scratch made of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torch_blocked {

// `count` floats of unspecified content. Throws std::bad_alloc.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(int64_t count) {
    if (count > (std::numeric_limits<int64_t>::max() - page) / int64_t(sizeof(float))) throw std::bad_alloc();
    const int64_t wanted = count * int64_t(sizeof(float)), alignment = wanted < page ? 64 : page;
    const int64_t bytes = (wanted + alignment - 1) / alignment * alignment;
    data_ = static_cast<float*>(std::aligned_alloc(alignment, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    count_ = bytes / sizeof(float);
#ifdef __linux__
    if (alignment == page) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  HugeBuffer(HugeBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
    other.count_ = 0;
  }
  HugeBuffer& operator=(HugeBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~HugeBuffer() { std::free(data_); }

  float* data() const { return data_; }
  int64_t count() const { return count_; }  // rounded up to whole cache lines or pages

  static constexpr int64_t page = int64_t(2) << 20;  // bytes

 private:
  float* data_ = nullptr;
  int64_t count_ = 0;
};

enum class ScratchOf { Kernel, Chain };  // a chain holds its own while its convolutions' kernels run

class Scratch {
 public:
  // At least `count` floats of unspecified content, valid until this thread's next call for the same user. It only
  // grows, and every call the thread makes reuses it. Throws std::bad_alloc.
  template <ScratchOf = ScratchOf::Kernel>
  static float* get(int64_t count) {
    static thread_local HugeBuffer scratch;
    if (scratch.count() < count) {
      scratch = HugeBuffer();
      scratch = HugeBuffer(std::max(count, HugeBuffer::page / int64_t(sizeof(float))));
    }
    return scratch.data();
  }
};

}  // namespace torch_blocked
