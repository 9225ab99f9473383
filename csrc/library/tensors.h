// What the operators share: outputs and scratch memory, descriptors of physical tensors, checks.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <cstdint>
#include <new>
#include <optional>

#include "../blocked_shape.h"
#include "../half.h"
#include "../memory_desc.h"
#include "../pool.h"

namespace torch_blocked {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;

// The numbers of a `SymInt[]`: code that Inductor's C++ wrapper compiled passes them as that, and the dispatcher would
// not convert them for a function that takes an IntArrayRef.
inline IntArrayRef known(SymIntArrayRef size) { return C10_AS_INTARRAYREF_SLOW(size); }
// Those of an `int[]?`: an absent list is empty.
inline IntArrayRef known(const at::OptionalIntArrayRef& list) { return list.value_or(IntArrayRef()); }

int64_t num_threads();

Tensor empty_pooled(IntArrayRef size, at::ScalarType dtype);

// Runs what may want scratch memory; where there is none, PyTorch's own error.
template <class Body>
void or_out_of_memory(const char* name, const Body& body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    Pool::instance().empty();  // what was kept for reuse may be what is missing
    TORCH_CHECK_WITH(OutOfMemoryError, false, name, ": can't allocate scratch memory; use a smaller batch");
  }
}

// A physical tensor but for its data.
struct Physical {
  IntArrayRef sizes, strides;
  at::ScalarType dtype;
  Physical(IntArrayRef its_sizes, IntArrayRef its_strides, at::ScalarType its_dtype)
      : sizes(its_sizes), strides(its_strides), dtype(its_dtype) {}
  Physical(const Tensor& tensor) : Physical(tensor.sizes(), tensor.strides(), tensor.scalar_type()) {}
};

// The descriptor of a physical tensor; checks that its shape is what the logical size and the blocking give.
MemoryDesc describe(const char* name, const Physical& physical, IntArrayRef size, IntArrayRef blocking);

// That of a dense one whose outer dims lie in memory in the order `order`, and a new such tensor.
MemoryDesc describe_dense(const char* name, IntArrayRef size, IntArrayRef order, IntArrayRef blocking);
Tensor empty_physical(const MemoryDesc& md, at::ScalarType dtype);

// The shape of `src`, (n, blocks, ..., block) of `channels` channels; checked. Its pixels are those of a dense one.
BlockedShape blocked_shape(const char* name, const Tensor& src, int64_t channels);

// TypeError unless a tensor called `word` is float32, bfloat16 or float16.
void check_precision(const char* name, const char* word, at::ScalarType dtype);
// The bytes of a tensor of such a dtype.
Values values(const Tensor& tensor);
Results results(const Tensor& tensor);

// A vector of one value a channel, dense; an undefined tensor where it is absent.
Tensor channel_vector(const char* name, const std::optional<Tensor>& tensor, int64_t channels);
const float* data_or_null(const Tensor& tensor);

}  // namespace torch_blocked
