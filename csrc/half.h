// Half precision: the kernels are float32, so what they read is widened before and what they write is rounded after,
// once, in parts that stay in a cache in between.
#pragma once
#include <cstdint>

#include "pool.h"

namespace torch_blocked {

enum class Precision { Single, BFloat16, Float16 };

// Values in memory, read as floats.
struct Values {
  const void* data;
  Precision precision;

  // `count` of them from `offset` on: where they lie, or widened into `scratch`.
  const float* read(int64_t offset, int64_t count, float* scratch) const;
  // Those of half precision into `dst`, by all threads.
  void widen(int64_t offset, int64_t count, float* dst, int64_t nthreads) const;
};

// Values in memory, written as floats.
struct Results {
  void* data;
  Precision precision;

  // Where those from `offset` on are to be put: where they are to lie, or `scratch`.
  float* place(int64_t offset, float* scratch) const;
  // Rounds the `count` that were put into scratch.
  void finish(int64_t offset, int64_t count, const float* placed) const;
  // Rounds all of `src` to half precision, by all threads.
  void narrow(int64_t offset, int64_t count, const float* src, int64_t nthreads) const;
};

// `count` floats of the pool's memory, 64-byte aligned. Throws std::bad_alloc.
class PooledBuffer {
 public:
  explicit PooledBuffer(int64_t count) : block_(Pool::instance().allocate(size_t(count) * sizeof(float))) {}
  ~PooledBuffer() { Pool::instance().release(block_); }
  PooledBuffer(const PooledBuffer&) = delete;
  PooledBuffer& operator=(const PooledBuffer&) = delete;
  float* data() const { return reinterpret_cast<float*>(block_->data); }

 private:
  Pool::Block* const block_;
};

}  // namespace torch_blocked
