#include "half.h"

#include "kernels/half.h"
#include "parallel.h"

namespace torch_blocked {
namespace {

const HalfKernels::Of& kernels(Precision precision) {
  const HalfKernels& table = TORCH_BLOCKED_KERNELS(half_kernels, isa());
  return precision == Precision::BFloat16 ? table.bfloat16 : table.float16;
}

// The address of a value of half precision.
const void* at(const void* data, int64_t offset) { return static_cast<const uint16_t*>(data) + offset; }
void* at(void* data, int64_t offset) { return static_cast<uint16_t*>(data) + offset; }

}  // namespace

const float* Values::read(int64_t offset, int64_t count, float* scratch) const {
  if (precision == Precision::Single) return static_cast<const float*>(data) + offset;
  kernels(precision).widen(at(data, offset), scratch, count);
  return scratch;
}

void Values::widen(int64_t offset, int64_t count, float* dst, int64_t nthreads) const {
  parallel_for(count, threads_for(count, nthreads), [&](int64_t begin, int64_t end) {
    kernels(precision).widen(at(data, offset + begin), dst + begin, end - begin);
  });
}

float* Results::place(int64_t offset, float* scratch) const {
  return precision == Precision::Single ? static_cast<float*>(data) + offset : scratch;
}

void Results::finish(int64_t offset, int64_t count, const float* placed) const {
  if (precision != Precision::Single) kernels(precision).narrow(placed, at(data, offset), count);
}

void Results::narrow(int64_t offset, int64_t count, const float* src, int64_t nthreads) const {
  parallel_for(count, threads_for(count, nthreads), [&](int64_t begin, int64_t end) {
    kernels(precision).narrow(src + begin, at(data, offset + begin), end - begin);
  });
}

}  // namespace torch_blocked
