#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../conv/packed_weights.h"

namespace torch_blocked {

int64_t num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// ---- memory

namespace {

// For tests: outputs come filled with 0xff (NaN as floats) between guard bytes, which are looked at when they are
// freed.
constexpr size_t guard_bytes = 64;
constexpr unsigned char poison = 0xff;
std::atomic<bool> guards_on{false};
std::atomic<int64_t> guards_damaged{0};

struct PoolAllocator final : c10::Allocator {
  static bool is_damaged(const Pool::Block& block) {
    const auto damaged = [&](const char* guard) {
      return std::any_of(guard, guard + block.guard, [](unsigned char byte) { return byte != poison; });
    };
    return damaged(block.data) || damaged(block.data + block.bytes - block.guard);
  }
  static void release(void* context) {
    Pool::Block* const block = static_cast<Pool::Block*>(context);
    if (block->guard && is_damaged(*block)) guards_damaged++;
    Pool::instance().release(block);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const size_t guard = guards_on ? guard_bytes : 0;
    Pool::Block* block = nullptr;
    try {
      block = Pool::instance().allocate(bytes + 2 * guard);
    } catch (const std::bad_alloc&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "torch_blocked: can't allocate memory: you tried to allocate ", bytes,
                       " bytes; use a smaller batch");
    }
    block->bytes = bytes + 2 * guard, block->guard = guard;
    if (guard) std::memset(block->data, poison, block->bytes);
    return {block->data + guard, block, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

PoolAllocator* pool_allocator() {
  static PoolAllocator allocator;
  return &allocator;
}

constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);

}  // namespace

Tensor empty_pooled(IntArrayRef size, at::ScalarType dtype) {
  return at::detail::empty_generic(size, pool_allocator(), cpu, dtype, std::nullopt);
}

Tensor empty_like_cpu(const Tensor& like) {
  const Tensor dense = empty_pooled(like.sizes(), like.scalar_type());
  if (like.is_contiguous()) return dense;
  TORCH_CHECK_VALUE(like.is_non_overlapping_and_dense(), "empty_like: a dense tensor, got strides ", like.strides());
  return dense.as_strided(like.sizes(), like.strides());
}

Tensor new_empty_cpu(const Tensor& like, SymIntArrayRef symbolic_size) {
  const IntArrayRef size = known(symbolic_size);
  for (const int64_t n : size) TORCH_CHECK_VALUE(n >= 0, "new_empty: sizes are not negative, got ", size);
  return empty_pooled(size, like.scalar_type());
}

void copy_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src) {
  const auto same_but_blocks = [&] {
    for (int64_t d = 0; d < dst.dim(); d++)
      if (d != 1 && src.size(d) != dst.size(d)) return false;
    return true;
  };
  TORCH_CHECK_VALUE(dst.dim() > 1 && src.dim() == dst.dim() && same_but_blocks() && first_block >= 0 &&
                        first_block <= dst.size(1) - src.size(1),
                    "copy_out: dst of shape ", dst.sizes(), " has no room for src of shape ", src.sizes(),
                    " from block ", first_block, " on");
  TORCH_CHECK_TYPE(src.scalar_type() == dst.scalar_type(), "copy_out: src is of dst's dtype ", dst.scalar_type(),
                   ", got ", src.scalar_type());
  dst.narrow(1, first_block, src.size(1)).copy_(src);
}

void empty_cache() {
  Pool::instance().empty();
  PackedWeights::instance().empty();
}
int64_t set_cache_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_cache_limit: bytes are not negative, got ", bytes);
  return int64_t(Pool::instance().set_limit(size_t(bytes)));
}
int64_t cached_bytes() { return Pool::instance().cached_bytes(); }

int64_t guard_outputs(bool on) {
  guards_on = on;
  return guards_damaged.exchange(0);
}

// ---- descriptors

// So that no product of block sizes overflows.
static void check_inner_numel(const char* name, const MemoryDesc& md) {
  int64_t numel = 1;
  for (int i = 0; i < md.inner_nblks; i++) {
    numel *= md.inner_blks[i];
    TORCH_CHECK_VALUE(numel <= (1 << 20), name, ": the inner blocks hold at most 2**20 elements, got blocks ",
                      IntArrayRef(md.inner_blks, md.inner_nblks));
  }
}

// All but the strides.
static MemoryDesc dims_and_blocks(const char* name, IntArrayRef size, IntArrayRef blocking) {
  MemoryDesc md;
  md.ndims = size.size();
  TORCH_CHECK_VALUE(md.ndims <= max_ndims, name, ": at most ", max_ndims, " dims, got size ", size);
  TORCH_CHECK_VALUE(blocking.size() % 2 == 0 && blocking.size() / 2 <= max_ndims, name, ": a blocking is at most ",
                    max_ndims, " (axis, size) pairs in one list, got ", blocking);
  md.inner_nblks = blocking.size() / 2;
  for (int d = 0; d < md.ndims; d++) {
    TORCH_CHECK_VALUE(size[d] >= 0, name, ": sizes are not negative, got ", size);
    md.dims[d] = size[d];
  }
  for (int i = 0; i < md.inner_nblks; i++) {
    const int64_t axis = blocking[2 * i], block = blocking[2 * i + 1];
    TORCH_CHECK_VALUE(axis >= 0 && axis < md.ndims && block > 0 && block <= (1 << 20), name, ": block of ", block,
                      " along axis ", axis, " of a tensor of ", md.ndims, " dims");
    md.inner_idxs[i] = axis;
    md.inner_blks[i] = block;
  }
  check_inner_numel(name, md);
  return md;
}

MemoryDesc describe(const char* name, const Physical& physical, IntArrayRef size, IntArrayRef blocking) {
  MemoryDesc md = dims_and_blocks(name, size, blocking);
  c10::SmallVector<int64_t, 2 * max_ndims> expected;
  for (int d = 0; d < md.ndims; d++) expected.push_back(md.outer(d));
  for (int i = 0; i < md.inner_nblks; i++) expected.push_back(md.inner_blks[i]);
  TORCH_CHECK_VALUE(physical.sizes == IntArrayRef(expected), name, " of size ", size, " and blocking ", blocking,
                    " has the physical shape ", IntArrayRef(expected), ", got ", physical.sizes);
  for (int d = 0; d < md.ndims; d++) md.strides[d] = physical.strides[d];
  int64_t inner_stride = 1;
  for (int i = md.inner_nblks - 1; i >= 0; i--) {
    TORCH_CHECK_VALUE(md.inner_blks[i] == 1 || physical.strides[md.ndims + i] == inner_stride, name,
                      ": inner blocks are dense, got a physical tensor with strides ", physical.strides);
    inner_stride *= md.inner_blks[i];
  }
  return md;
}

// A number of elements that no int64 holds is PyTorch's own error.
static int64_t times(int64_t numel, int64_t dim, IntArrayRef size) {
  int64_t product;
  TORCH_CHECK(!c10::mul_overflows(numel, dim, &product), "Storage size calculation overflowed with sizes=", size);
  return product;
}

MemoryDesc describe_dense(const char* name, IntArrayRef size, IntArrayRef order, IntArrayRef blocking) {
  MemoryDesc md = dims_and_blocks(name, size, blocking);
  unsigned named = 0;
  for (const int64_t axis : order)
    if (axis >= 0 && axis < md.ndims) named |= 1u << axis;
  TORCH_CHECK_VALUE(order.size() == size.size() && named + 1 == 1u << md.ndims, name, ": order ", order,
                    " names each of ", size.size(), " axes once");
  int64_t stride = md.inner_numel();
  for (int i = md.ndims; i-- > 0;) {
    md.strides[order[i]] = stride;
    stride = times(stride, std::max<int64_t>(md.outer(order[i]), 1), size);
  }
  return md;
}

Tensor empty_physical(const MemoryDesc& md, at::ScalarType dtype) {
  c10::SmallVector<int64_t, 2 * max_ndims> sizes, strides;
  for (int d = 0; d < md.ndims; d++) sizes.push_back(md.outer(d)), strides.push_back(md.strides[d]);
  int64_t inner_stride = md.inner_numel();
  for (int i = 0; i < md.inner_nblks; i++) {
    sizes.push_back(md.inner_blks[i]);
    strides.push_back(inner_stride /= md.inner_blks[i]);
  }
  return at::detail::empty_strided_generic(sizes, strides, pool_allocator(), cpu, dtype);
}

static std::optional<Precision> precision_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Precision::Single;
    case at::kBFloat16:
      return Precision::BFloat16;
    case at::kHalf:
      return Precision::Float16;
    default:
      return std::nullopt;
  }
}

BlockedShape blocked_shape(const char* name, const Tensor& src, int64_t channels) {
  TORCH_CHECK_VALUE(src.dim() >= 3, name, ": src is (n, blocks, ..., block), got ", src.sizes());
  const int64_t block = src.size(-1);
  TORCH_CHECK_VALUE(block > 0 && channels >= 0 && src.size(1) == channels / block + (channels % block != 0), name, ": ",
                    channels, " channels in blocks of ", block, " are not the ", src.size(1), " blocks of src");
  int64_t pixels = 1;
  for (int64_t d = 2; d + 1 < src.dim(); d++) pixels *= src.size(d);
  return {src.size(0), channels, pixels, block, num_threads()};
}

void check_precision(const char* name, const char* word, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(precision_of(dtype), name, ": float32, bfloat16 or float16, got ", word, " ", dtype);
}

Values values(const Tensor& tensor) { return {tensor.const_data_ptr(), *precision_of(tensor.scalar_type())}; }
Results results(const Tensor& tensor) { return {tensor.mutable_data_ptr(), *precision_of(tensor.scalar_type())}; }

Tensor channel_vector(const char* name, const std::optional<Tensor>& tensor, int64_t channels) {
  if (!tensor.has_value() || !tensor->defined()) return {};
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == channels, name, " has one value a channel, [", channels,
                    "], got shape ", tensor->sizes());
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat, name, " is float32, got ", tensor->scalar_type());
  return tensor->contiguous();
}

const float* data_or_null(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

}  // namespace torch_blocked
