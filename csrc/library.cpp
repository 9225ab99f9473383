// The operators as PyTorch sees them: schemas, checks, registration. The only file that includes torch.
//
// All take and return physical tensors (a blocked tensor's outer dims, then its inner blocks). A blocking is a flat
// list of (axis, size), outermost inner block first; empty for a plain tensor.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "batch_norm.h"
#include "conv/conv.h"
#include "isa.h"
#include "pool.h"
#include "pooling.h"
#include "reorder.h"

namespace torch_blocked {
namespace {

using at::IntArrayRef;
using at::Tensor;

int64_t num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// ---- memory

// For tests: outputs come filled with 0xff (NaN as floats) between guard bytes, which are looked at when they are
// freed.
constexpr size_t guard_bytes = 64;
constexpr unsigned char poison = 0xff;
std::atomic<bool> guards_on{false};
std::atomic<int64_t> guards_damaged{0};

struct PoolAllocator final : c10::Allocator {
  struct Context {
    unsigned char* block;
    size_t bytes, guard;
  };
  static void release(void* context) {
    Context* const c = static_cast<Context*>(context);
    const auto damaged = [&](size_t at) {
      return std::any_of(c->block + at, c->block + at + c->guard, [](unsigned char byte) { return byte != poison; });
    };
    if (c->guard && (damaged(0) || damaged(c->bytes - c->guard))) guards_damaged++;
    Pool::instance().release(c->block, c->bytes);
    delete c;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const size_t guard = guards_on ? guard_bytes : 0;
    Context c{nullptr, bytes + 2 * guard, guard};
    try {
      c.block = static_cast<unsigned char*>(Pool::instance().allocate(c.bytes));
    } catch (const std::bad_alloc&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "torch_blocked: can't allocate memory: you tried to allocate ", bytes,
                       " bytes; use a smaller batch");
    }
    if (guard) std::memset(c.block, poison, c.bytes);
    return {c.block + guard, new Context(c), &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

Tensor empty_pooled(IntArrayRef size, at::ScalarType dtype) {
  static PoolAllocator allocator;
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

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

void empty_cache() {
  Pool::instance().empty();
  PackedWeights::instance().empty();
}
int64_t cached_bytes() { return Pool::instance().cached_bytes(); }

// Turns guards on or off and returns how many outputs freed since the last call had theirs overwritten.
int64_t guard_outputs(bool on) {
  guards_on = on;
  return guards_damaged.exchange(0);
}

// ---- descriptors

// So that no product of block sizes overflows.
void check_inner_numel(const char* name, const MemoryDesc& md) {
  int64_t numel = 1;
  for (int i = 0; i < md.inner_nblks; i++) {
    numel *= md.inner_blks[i];
    TORCH_CHECK_VALUE(numel <= (1 << 20), name, ": the inner blocks hold at most 2**20 elements, got blocks ",
                      IntArrayRef(md.inner_blks, md.inner_nblks));
  }
}

// The descriptor of a physical tensor; checks that its shape is what the logical size and the blocking give.
MemoryDesc describe(const char* name, const Tensor& physical, IntArrayRef size, IntArrayRef blocking) {
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
  std::vector<int64_t> expected;
  for (int d = 0; d < md.ndims; d++) expected.push_back(md.outer(d));
  for (int i = 0; i < md.inner_nblks; i++) expected.push_back(md.inner_blks[i]);
  TORCH_CHECK_VALUE(physical.sizes() == IntArrayRef(expected), name, " of size ", size, " and blocking ", blocking,
                    " has the physical shape ", IntArrayRef(expected), ", got ", physical.sizes());
  for (int d = 0; d < md.ndims; d++) md.strides[d] = physical.stride(d);
  int64_t inner_stride = 1;
  for (int i = md.inner_nblks - 1; i >= 0; i--) {
    TORCH_CHECK_VALUE(md.inner_blks[i] == 1 || physical.stride(md.ndims + i) == inner_stride, name,
                      ": inner blocks are dense, got a physical tensor with strides ", physical.strides());
    inner_stride *= md.inner_blks[i];
  }
  return md;
}

// A dense physical tensor whose outer dims lie in memory in the order `order`.
Tensor empty_physical(const char* name, IntArrayRef size, IntArrayRef order, IntArrayRef blocking,
                      at::ScalarType dtype) {
  MemoryDesc md;
  md.ndims = size.size();
  std::copy(size.begin(), size.end(), md.dims);
  TORCH_CHECK_VALUE(blocking.size() % 2 == 0 && blocking.size() / 2 <= max_ndims, name, ": bad blocking ", blocking);
  md.inner_nblks = blocking.size() / 2;
  for (int i = 0; i < md.inner_nblks; i++) {
    const int64_t axis = blocking[2 * i], block = blocking[2 * i + 1];
    TORCH_CHECK_VALUE(axis >= 0 && axis < md.ndims && block > 0 && block <= (1 << 20), name, ": bad blocking ",
                      blocking);
    md.inner_idxs[i] = axis;
    md.inner_blks[i] = block;
  }
  check_inner_numel(name, md);
  std::vector<int64_t> in_memory, back(size.size(), -1);
  TORCH_CHECK_VALUE(order.size() == size.size(), name, ": order ", order, " names each of ", size.size(), " axes once");
  for (const int64_t axis : order) {
    TORCH_CHECK_VALUE(axis >= 0 && axis < md.ndims && back[axis] < 0, name, ": order ", order, " names each of ",
                      size.size(), " axes once");
    back[axis] = in_memory.size();
    in_memory.push_back(md.outer(axis));
  }
  for (int i = 0; i < md.inner_nblks; i++) {
    back.push_back(in_memory.size());
    in_memory.push_back(md.inner_blks[i]);
  }
  const Tensor dense = empty_pooled(in_memory, dtype);
  return std::is_sorted(back.begin(), back.end()) ? dense : dense.permute(back);
}

// ---- reorder

// Floating point to integer rounds to nearest even and saturates (NaN becomes 0); every other pair is torch's own.
Tensor convert(const Tensor& src, at::ScalarType dtype) {
  const bool rounds = at::isFloatingType(src.scalar_type()) && at::isIntegralType(dtype, /*includeBool=*/false);
  if (!rounds) return src.to(dtype);
  const Tensor exact = src.to(at::kDouble).nan_to_num(0.0).round();
  const int64_t bits = 8 * c10::elementSize(dtype);
  const bool is_signed = c10::isSignedType(dtype);
  const double upper = std::ldexp(1.0, is_signed ? bits - 1 : bits), lower = is_signed ? -upper : 0.0;
  if (bits < 64) return exact.clamp(lower, upper - 1).to(dtype);
  // 2^63 - 1 and 2^64 - 1 are no doubles: what reaches 2^63 or 2^64 is set apart.
  const int64_t largest = is_signed ? std::numeric_limits<int64_t>::max() : -1;  // -1 has the bits of 2^64 - 1
  const Tensor in_range = at::where(exact >= upper, at::full_like(exact, 0.0), exact.clamp_min(lower)).to(dtype);
  return at::where(exact >= upper, at::full_like(in_range.view(at::kLong), largest), in_range.view(at::kLong))
      .view(dtype);
}

Tensor reorder_cpu(const Tensor& src, IntArrayRef size, IntArrayRef src_blocking, IntArrayRef dst_order,
                   IntArrayRef dst_blocking, std::optional<at::ScalarType> dtype) {
  const at::ScalarType dst_dtype = dtype.value_or(src.scalar_type());
  describe("reorder: src", src, size, src_blocking);  // checked before anything is done
  Tensor dst = empty_physical("reorder: dst", size, dst_order, dst_blocking, dst_dtype);
  if (dst.numel() == 0) return dst;
  const Tensor converted = dst_dtype == src.scalar_type() ? src.resolve_conj().resolve_neg() : convert(src, dst_dtype);
  const MemoryDesc src_md = describe("reorder: src", converted, size, src_blocking);
  const MemoryDesc dst_md = describe("reorder: dst", dst, size, dst_blocking);
  or_out_of_memory("reorder", [&] {
    reorder(src_md, converted.const_data_ptr(), dst_md, dst.mutable_data_ptr(), dst.element_size(), num_threads());
  });
  return dst;
}

// ---- convolution

struct Activation {
  const char* name;
  bool clamp;
  float lower, upper;
};
constexpr Activation activations[] = {
    {"none", false, 0, 0},
    {"relu", true, 0, std::numeric_limits<float>::infinity()},
    {"relu6", true, 0, 6},
};

const Activation& find_activation(c10::string_view name) {
  for (const Activation& activation : activations)
    if (name == activation.name) return activation;
  TORCH_CHECK_VALUE(false, "convolution: activation is one of none, relu, relu6, got '", name, "'");
}

int64_t conv_dst_size(int64_t src, int64_t pad, int64_t kernel, int64_t dilation, int64_t stride) {
  return (src + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
}

// One number for each spatial dim.
void check_window(const char* name, IntArrayRef values, int64_t dims, int64_t least) {
  TORCH_CHECK_VALUE(
      int64_t(values.size()) == dims &&
          std::all_of(values.begin(), values.end(), [&](int64_t v) { return v >= least && v < (1 << 24); }),
      "convolution: ", name, " has one number of each of ", dims, " spatial dims, at least ", least, ", got ", values);
}

// A descriptor of 1, 2 or 3 spatial dims as convolutions see it (Conv): a height is put in, the depth goes last.
MemoryDesc height_and_width(const MemoryDesc& md) {
  static constexpr int places[3][5] = {{0, 1, 3}, {0, 1, 2, 3}, {0, 1, 4, 2, 3}};
  const int* const place = places[md.ndims - 3];
  MemoryDesc moved = md;
  moved.ndims = std::max(md.ndims, 4);
  moved.dims[2] = 1, moved.strides[2] = 0;
  for (int d = 2; d < md.ndims; d++) moved.dims[place[d]] = md.dims[d], moved.strides[place[d]] = md.strides[d];
  for (int i = 0; i < md.inner_nblks; i++) moved.inner_idxs[i] = place[md.inner_idxs[i]];
  return moved;
}

// A vector of one value a channel, dense; an undefined tensor where it is absent.
Tensor channel_vector(const char* name, const std::optional<Tensor>& tensor, int64_t channels) {
  if (!tensor.has_value() || !tensor->defined()) return {};
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == channels, name, " has one value a channel, [", channels,
                    "], got shape ", tensor->sizes());
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat, name, " is float32, got ", tensor->scalar_type());
  return tensor->contiguous();
}

const float* data_or_null(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

// Strides, paddings and dilations, from the innermost dim on; what is absent stays as it is.
void set_window(Conv& c, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  c.stride_h = c.dilation_h = 1;
  int64_t* const fields[][3] = {{&c.stride_w, &c.pad_w, &c.dilation_w},
                                {&c.stride_h, &c.pad_h, &c.dilation_h},
                                {&c.stride_d, &c.pad_d, &c.dilation_d}};
  const IntArrayRef values[] = {stride, padding, dilation};
  for (size_t d = 0; d < stride.size(); d++)
    for (int i = 0; i < 3; i++) *fields[d][i] = values[i][stride.size() - 1 - d];
}

// Sizes, strides and paddings; everything that does not depend on the data, but for the size of dst. The weight is
// (ic, oc, ...) where `transposed`.
Conv describe_problem(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
                      IntArrayRef weight_blocking, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                      int64_t groups, int64_t block, bool transposed = false) {
  const int64_t ndims = weight_size.size(), spatial = ndims - 2;
  TORCH_CHECK_VALUE(ndims >= 3 && ndims <= 5, "convolution: the weight has 3 to 5 dims (oc, ic, kd, kh, kw), got ",
                    weight_size);
  check_window("stride", stride, spatial, 1);
  check_window("padding", padding, spatial, 0);
  check_window("dilation", dilation, spatial, 1);
  TORCH_CHECK_VALUE(groups >= 1 && weight_size[0] % groups == 0, "convolution: ", weight_size[0],
                    " output channels do not split into ", groups, " groups");
  for (const int64_t size : weight_size)
    TORCH_CHECK_VALUE(size > 0, "convolution: the weight is empty, size ", weight_size);
  TORCH_CHECK_VALUE(block >= 1 && block <= 1024, "convolution: blocks of 1 to 1024 channels, got ", block);
  TORCH_CHECK_VALUE(src.dim() >= ndims, "convolution: src has as many logical dims as the weight, ", ndims,
                    ", got shape ", src.sizes());
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat,
                   "convolution: float32 only, got src ", src.scalar_type(), " and weight ", weight.scalar_type());
  Conv c{};
  c.groups = groups, c.block = block;
  c.ic = transposed ? weight_size[0] : weight_size[1] * groups;
  c.oc = weight_size[transposed ? 1 : 0];
  std::vector<int64_t> src_size = src.sizes().slice(0, ndims).vec();
  src_size[1] = c.ic;
  set_window(c, stride, padding, dilation);
  c.src_md = height_and_width(describe("convolution: src", src, src_size, src_blocking));
  c.wei_md = height_and_width(describe("convolution: weight", weight, weight_size, weight_blocking));
  c.n = src_size[0], c.ih = c.src_md.dims[2], c.iw = c.src_md.dims[3], c.kh = c.wei_md.dims[2], c.kw = c.wei_md.dims[3];
  if (ndims == 5) c.id = c.src_md.dims[4], c.kd = c.wei_md.dims[4];
  c.nthreads = num_threads();
  return c;
}

Conv problem(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
             IntArrayRef weight_blocking, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
             int64_t block) {
  Conv c = describe_problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups,
                            block);
  c.od = conv_dst_size(c.id, c.pad_d, c.kd, c.dilation_d, c.stride_d);
  c.oh = conv_dst_size(c.ih, c.pad_h, c.kh, c.dilation_h, c.stride_h);
  c.ow = conv_dst_size(c.iw, c.pad_w, c.kw, c.dilation_w, c.stride_w);
  TORCH_CHECK(c.id + 2 * c.pad_d > c.dilation_d * (c.kd - 1) && c.ih + 2 * c.pad_h > c.dilation_h * (c.kh - 1) &&
                  c.iw + 2 * c.pad_w > c.dilation_w * (c.kw - 1),
              "convolution: the padded src is ", c.id + 2 * c.pad_d, "x", c.ih + 2 * c.pad_h, "x", c.iw + 2 * c.pad_w,
              ", the dilated kernel ", c.dilation_d * (c.kd - 1) + 1, "x", c.dilation_h * (c.kh - 1) + 1, "x",
              c.dilation_w * (c.kw - 1) + 1, "; the kernel can't be greater than the src");
  return c;
}

// A new dst of as many dims as the weight has: n, oc and the spatial ones of the problem.
Tensor empty_dst(const Conv& c, int64_t ndims) {
  std::vector<int64_t> size = {c.n, c.oc};
  const int64_t spatial[] = {c.od, c.oh, c.ow};
  size.insert(size.end(), std::end(spatial) - (ndims - 2), std::end(spatial));
  static constexpr int64_t order[] = {0, 1, 2, 3, 4};
  return empty_physical("convolution: dst", size, IntArrayRef(order, ndims), {1, c.block}, at::kFloat);
}

// What weights packed from this tensor may be kept under. Only where every write to it is counted: not where it is
// plain or has plain views (blocks along one axis only), which may be written through `.data`; and not inference
// tensors, which count nothing.
std::optional<WeightKey> weight_key(const Tensor& weight, IntArrayRef weight_blocking) {
  if (weight_blocking.size() < 4 || weight.is_inference()) return std::nullopt;
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(weight.getIntrusivePtr());
  return WeightKey{weight.unsafeGetTensorImpl(), weight._version(), weight.const_data_ptr(), int64_t(weight.nbytes()),
                   [weak] { return !weak.expired(); }};
}

Tensor convolution_cpu(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
                       IntArrayRef weight_blocking, const std::optional<Tensor>& bias, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t block,
                       const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                       const std::optional<Tensor>& residual, c10::string_view activation) {
  Conv c = problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  const Activation& post = find_activation(activation);
  const Tensor dense_bias = channel_vector("convolution: bias", bias, c.oc);
  const Tensor dense_scale = channel_vector("convolution: scale", scale, c.oc);
  const Tensor dense_shift = channel_vector("convolution: shift", shift, c.oc);
  c.post_ops.bias = data_or_null(dense_bias);
  c.post_ops.scale = data_or_null(dense_scale);
  c.post_ops.shift = data_or_null(dense_shift);
  c.post_ops.clamp = post.clamp, c.post_ops.lower = post.lower, c.post_ops.upper = post.upper;
  Tensor dst = empty_dst(c, weight_size.size());
  Tensor dense_residual;
  if (residual.has_value() && residual->defined()) {
    TORCH_CHECK_VALUE(residual->sizes() == dst.sizes(), "convolution: the residual has dst's physical shape ",
                      dst.sizes(), ", got ", residual->sizes());
    TORCH_CHECK_TYPE(residual->scalar_type() == at::kFloat, "convolution: float32 only, got residual ",
                     residual->scalar_type());
    dense_residual = residual->contiguous();
    c.post_ops.residual = dense_residual.const_data_ptr<float>();
  }
  if (dst.numel() == 0) return dst;
  c.src = src.const_data_ptr<float>();
  c.wei = weight.const_data_ptr<float>();
  c.dst = dst.mutable_data_ptr<float>();
  const std::optional<WeightKey> key = weight_key(weight, weight_blocking);
  or_out_of_memory("convolution", [&] { convolve(c, key ? &*key : nullptr); });
  return dst;
}

int64_t transposed_dst_size(int64_t src, int64_t pad, int64_t kernel, int64_t stride, int64_t output_padding) {
  return (src - 1) * stride - 2 * pad + kernel + output_padding;
}

Tensor convolution_transpose_cpu(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight,
                                 IntArrayRef weight_size, IntArrayRef weight_blocking,
                                 const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                                 IntArrayRef output_padding, int64_t block) {
  static constexpr int64_t ones[] = {1, 1, 1};
  const int64_t ndims = weight_size.size();
  TORCH_CHECK_VALUE(ndims == 3 || ndims == 4,
                    "convolution_transpose: the weight has 3 or 4 dims (ic, oc, kh, kw), got ", weight_size);
  Conv c = describe_problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding,
                            IntArrayRef(ones, ndims - 2), 1, block, true);
  check_window("output_padding", output_padding, ndims - 2, 0);
  TORCH_CHECK_VALUE(c.src_md.single_block(1) == block && c.kernels() != nullptr,
                    "convolution_transpose: src has channels in blocks of ", block,
                    " that this CPU's kernels take, got ", src_blocking);
  for (int i = 0; i < c.wei_md.inner_nblks; i++)
    TORCH_CHECK_VALUE(c.wei_md.inner_idxs[i] < 2, "convolution_transpose: a weight is blocked by channels only, got ",
                      weight_blocking);
  c.oh = ndims == 3 ? 1 : transposed_dst_size(c.ih, c.pad_h, c.kh, c.stride_h, output_padding[0]);
  c.ow = transposed_dst_size(c.iw, c.pad_w, c.kw, c.stride_w, output_padding.back());
  constexpr int64_t most = int64_t(1) << 31;  // so that no size of dst overflows
  TORCH_CHECK(c.ih > 0 && c.iw > 0 && c.ih < most && c.iw < most && c.oh > 0 && c.ow > 0,
              "convolution_transpose: src of ", c.ih, "x", c.iw, " gives dst of ", c.oh, "x", c.ow,
              ", which is no size");
  const Tensor dense_bias = channel_vector("convolution_transpose: bias", bias, c.oc);
  c.post_ops.bias = data_or_null(dense_bias);
  Tensor dst = empty_dst(c, ndims);
  if (dst.numel() == 0) return dst;
  c.src = src.const_data_ptr<float>();
  c.wei = weight.const_data_ptr<float>();
  c.dst = dst.mutable_data_ptr<float>();
  const std::optional<WeightKey> key = weight_key(weight, weight_blocking);
  convolve_transposed(c, key ? &*key : nullptr);
  return dst;
}

std::tuple<std::string, std::string> convolution_algorithm(const Tensor& src, IntArrayRef src_blocking,
                                                           const Tensor& weight, IntArrayRef weight_size,
                                                           IntArrayRef weight_blocking, IntArrayRef stride,
                                                           IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                                           int64_t block) {
  const Conv c =
      problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  const std::optional<WeightKey> key = weight_key(weight, weight_blocking);
  const Choice choice = explain(c, key ? &*key : nullptr);
  return {choice.algorithm->name, choice.reason};
}

void set_winograd_by_name(c10::string_view mode, int64_t max_bytes) {
  static constexpr std::pair<const char*, Winograd> modes[] = {{"auto", Winograd::Auto},
                                                               {"never", Winograd::Never},
                                                               {"always", Winograd::Always},
                                                               {"f2", Winograd::F2},
                                                               {"f4", Winograd::F4}};
  for (const auto& [name, value] : modes)
    if (mode == name) {
      set_winograd(value);
      PackedWeights::instance().set_bound(max_bytes);
      return;
    }
  TORCH_CHECK_VALUE(false, "winograd: one of auto, never, always, f2, f4, got '", mode, "'");
}

int64_t packed_weights_bytes() { return PackedWeights::instance().bytes(); }

// ---- batch normalization

Tensor batch_norm_cpu(const Tensor& src, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      const Tensor& mean, const Tensor& var, double eps) {
  TORCH_CHECK_VALUE(mean.dim() == 1 && src.dim() >= 3,
                    "batch_norm: src is (n, blocks, ..., block), mean (channels), got ", src.sizes(), " and ",
                    mean.sizes());
  const int64_t channels = mean.size(0), block = src.size(-1);
  TORCH_CHECK_VALUE(block > 0 && src.size(1) == (channels + block - 1) / block, "batch_norm: ", channels,
                    " channels in blocks of ", block, " are not the ", src.size(1), " blocks of src");
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "batch_norm: float32 only, got src ", src.scalar_type());
  const Tensor dense = src.contiguous();
  const Tensor dense_weight = channel_vector("batch_norm: weight", weight, channels);
  const Tensor dense_bias = channel_vector("batch_norm: bias", bias, channels);
  const Tensor dense_mean = channel_vector("batch_norm: mean", mean, channels);
  const Tensor dense_var = channel_vector("batch_norm: var", var, channels);
  Tensor dst = empty_pooled(dense.sizes(), at::kFloat);
  if (dst.numel() == 0) return dst;
  batch_norm({dense.size(0), channels, dense.numel() / (dense.size(0) * dense.size(1) * block), block,
              dense.const_data_ptr<float>(), data_or_null(dense_weight), data_or_null(dense_bias),
              data_or_null(dense_mean), data_or_null(dense_var), eps, dst.mutable_data_ptr<float>(), num_threads()});
  return dst;
}

// ---- pooling and up-sampling

// At most 2^30, so that no product of two overflows.
void check_numbers(const char* name, IntArrayRef values, int64_t least) {
  TORCH_CHECK_VALUE(
      values.size() == 2 && std::min(values[0], values[1]) >= least && std::max(values[0], values[1]) <= (1 << 30),
      name, " is two numbers from ", least, " to 2**30, got ", values);
}

// `src`, copied where its blocks are not dense: keep it as long as what blocked_images makes of it.
Tensor check_images(const char* name, const Tensor& src) {
  TORCH_CHECK_VALUE(src.dim() == 5 && src.size(2) > 0 && src.size(3) > 0 && src.size(4) > 0, name,
                    ": src is (n, blocks, h, w, block), not empty, got ", src.sizes());
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, name, ": float32 only, got src ", src.scalar_type());
  return src.size(4) == 1 || src.stride(4) == 1 ? src : src.contiguous();
}

BlockedImages blocked_images(const Tensor& src) {
  BlockedImages images{src.size(0), src.size(1), src.size(2), src.size(3), src.size(4), {}, nullptr};
  std::copy_n(src.strides().begin(), 4, images.strides);
  images.data = src.const_data_ptr<float>();
  return images;
}

PoolMode pool_mode(c10::string_view name) {
  TORCH_CHECK_VALUE(name == "max" || name == "avg", "pool: mode is max or avg, got '", name, "'");
  return name == "max" ? PoolMode::Max : PoolMode::Average;
}

// Sizes and windows; everything but where the answers go. `images` is what check_images returns.
Pooling pooling(const Tensor& images, int64_t channels, IntArrayRef output_size, c10::string_view mode,
                IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                bool count_include_pad, std::optional<int64_t> divisor_override) {
  Pooling p{};
  p.src = blocked_images(images), p.channels = channels, p.mode = pool_mode(mode);
  TORCH_CHECK_VALUE(channels >= 0 && p.src.c_blocks == channels / p.src.block + (channels % p.src.block != 0),
                    "pool: ", channels, " channels in blocks of ", p.src.block, " are not the ", p.src.c_blocks,
                    " of src");
  check_numbers("pool: output_size", output_size, 1);
  p.oh = output_size[0], p.ow = output_size[1], p.nthreads = num_threads();
  p.h = p.w = {0, 1, 0, 1};  // adaptive
  if (!kernel.empty()) {
    check_numbers("pool: kernel", kernel, 1);
    check_numbers("pool: stride", stride, 1);
    check_numbers("pool: padding", padding, 0);
    check_numbers("pool: dilation", dilation, 1);
    p.h = {kernel[0], stride[0], padding[0], dilation[0]}, p.w = {kernel[1], stride[1], padding[1], dilation[1]};
  }
  TORCH_CHECK_VALUE(!divisor_override || *divisor_override != 0, "pool: divisor_override is not 0");
  p.divisor = float(divisor_override.value_or(0)), p.count_include_pad = count_include_pad;
  return p;
}

std::tuple<Tensor, Tensor> pool_cpu(const Tensor& src, int64_t channels, IntArrayRef output_size, c10::string_view mode,
                                    IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                    bool count_include_pad, std::optional<int64_t> divisor_override, bool indices) {
  const Tensor images = check_images("pool", src);
  Pooling p = pooling(images, channels, output_size, mode, kernel, stride, padding, dilation, count_include_pad,
                      divisor_override);
  TORCH_CHECK_VALUE(!indices || p.mode == PoolMode::Max, "pool: indices are those of maxima, got mode '", mode, "'");
  TORCH_CHECK_VALUE(!indices || p.src.ih <= std::numeric_limits<int32_t>::max() / p.src.iw,
                    "pool: indices are of planes of less than 2**31 pixels, got ", p.src.ih, "x", p.src.iw);
  const int64_t dst_size[] = {p.src.n, p.src.c_blocks, p.oh, p.ow, p.src.block};
  const Tensor dst = empty_pooled(dst_size, at::kFloat);
  const Tensor dst_indices = indices ? empty_pooled(dst_size, at::kLong) : empty_pooled({0}, at::kLong);
  if (dst.numel() == 0) return {dst, dst_indices};
  p.dst = dst.mutable_data_ptr<float>();
  if (indices) p.indices = dst_indices.mutable_data_ptr<int64_t>();
  pool(p);
  return {dst, dst_indices};
}

UpsampleMode upsample_mode(c10::string_view name) {
  static constexpr std::pair<const char*, UpsampleMode> modes[] = {{"nearest", UpsampleMode::Nearest},
                                                                   {"nearest-exact", UpsampleMode::NearestExact},
                                                                   {"bilinear", UpsampleMode::Bilinear}};
  for (const auto& [mode, value] : modes)
    if (name == mode) return value;
  TORCH_CHECK_VALUE(false, "upsample: mode is one of nearest, nearest-exact, bilinear, got '", name, "'");
}

Tensor upsample_cpu(const Tensor& src, IntArrayRef output_size, c10::string_view mode, bool align_corners,
                    std::optional<double> scale_h, std::optional<double> scale_w) {
  const Tensor images = check_images("upsample", src);
  check_numbers("upsample: output_size", output_size, 1);
  Upsampling u{blocked_images(images), upsample_mode(mode), align_corners, scale_h.value_or(0), scale_w.value_or(0),
               output_size[0],         output_size[1],      nullptr,       num_threads()};
  Tensor dst = empty_pooled({u.src.n, u.src.c_blocks, u.oh, u.ow, u.src.block}, at::kFloat);
  if (dst.numel() == 0) return dst;
  u.dst = dst.mutable_data_ptr<float>();
  upsample(u);
  return dst;
}

// ---- the CPU

std::string isa_now() { return isa_name(isa()); }
int64_t isa_block_now() { return isa_block(isa()); }
void set_isa_by_name(c10::string_view name) {
  for (const Isa tier : {Isa::Default, Isa::AVX2, Isa::AVX512})
    if (name == isa_name(tier)) return set_isa(tier);
  TORCH_CHECK_VALUE(false, "set_isa: one of default, avx2, avx512, got '", name, "'");
}

}  // namespace
}  // namespace torch_blocked

// Not operators: called for every BlockedTensor that is made.
extern "C" {

// `tensor` counts its versions together with `other`: a write to either is a write to both.
__attribute__((visibility("default"))) void torch_blocked_share_version(void* tensor, void* other) {
  auto* const impl = static_cast<c10::TensorImpl*>(tensor);
  auto* const counted = static_cast<c10::TensorImpl*>(other);
  if (!impl->is_inference() && !counted->is_inference()) impl->set_version_counter(counted->version_counter());
}

// A wrapper subclass has a storage without bytes; code that does not know reads address 0. From here on it gets an
// error. Its versions are those of the physical tensor.
__attribute__((visibility("default"))) void torch_blocked_wrap(void* wrapper, void* physical) {
  static_cast<c10::TensorImpl*>(wrapper)
      ->unsafe_storage()
      .unsafeGetStorageImpl()
      ->release_data_and_set_meta_custom_data_ptr_error_msg_(
          "a BlockedTensor has no bytes of its own: use .physical, or .to_dense() for a plain tensor");
  torch_blocked_share_version(wrapper, physical);
}

// The logical size, after an operator that changes a tensor's own shape.
__attribute__((visibility("default"))) void torch_blocked_set_size(void* wrapper, const int64_t* size, int64_t ndim) {
  auto* const impl = static_cast<c10::TensorImpl*>(wrapper);
  const bool allowed = impl->allow_tensor_metadata_change();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_sizes_contiguous(c10::IntArrayRef(size, ndim));
  impl->set_allow_tensor_metadata_change(allowed);
}
}

TORCH_LIBRARY(torch_blocked, m) {
  m.def(
      "reorder(Tensor src, SymInt[] size, int[] src_blocking, int[] dst_order, int[] dst_blocking, "
      "ScalarType? dtype=None) -> Tensor");
  m.def(
      "convolution(Tensor src, int[] src_blocking, Tensor weight, int[] weight_size, int[] weight_blocking, Tensor? "
      "bias, "
      "int[] stride, int[] padding, int[] dilation, int groups, int block, Tensor? scale=None, Tensor? shift=None, "
      "Tensor? residual=None, str activation='none') -> Tensor");
  m.def(
      "convolution_transpose(Tensor src, int[] src_blocking, Tensor weight, int[] weight_size, int[] weight_blocking, "
      "Tensor? bias, int[] stride, int[] padding, int[] output_padding, int block) -> Tensor");
  m.def(
      "convolution_algorithm(Tensor src, int[] src_blocking, Tensor weight, int[] weight_size, int[] weight_blocking, "
      "int[] stride, int[] padding, int[] dilation, int groups, int block) -> (str, str)");
  m.def("set_winograd(str mode, int max_bytes) -> ()", torch_blocked::set_winograd_by_name);
  m.def("packed_weights_bytes() -> int", torch_blocked::packed_weights_bytes);
  m.def("batch_norm(Tensor src, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, float eps) -> Tensor");
  m.def(
      "pool(Tensor src, SymInt channels, SymInt[] output_size, str mode, int[] kernel=[], int[] stride=[], "
      "int[] padding=[], int[] dilation=[], bool count_include_pad=True, int? divisor_override=None, "
      "bool indices=False) -> (Tensor, Tensor)");
  m.def(
      "upsample(Tensor src, SymInt[] output_size, str mode, bool align_corners=False, float? scale_h=None, "
      "float? scale_w=None) -> Tensor");
  m.def("empty_cache() -> ()", torch_blocked::empty_cache);
  m.def("cached_bytes() -> int", torch_blocked::cached_bytes);
  m.def("guard_outputs(bool on) -> int", torch_blocked::guard_outputs);
  m.def("isa() -> str", torch_blocked::isa_now);
  m.def("isa_block() -> int", torch_blocked::isa_block_now);
  m.def("set_isa(str name) -> ()", torch_blocked::set_isa_by_name);
}

TORCH_LIBRARY_IMPL(torch_blocked, CPU, m) {
  m.impl("reorder", torch_blocked::reorder_cpu);
  m.impl("convolution", torch_blocked::convolution_cpu);
  m.impl("convolution_transpose", torch_blocked::convolution_transpose_cpu);
  m.impl("convolution_algorithm", torch_blocked::convolution_algorithm);
  m.impl("batch_norm", torch_blocked::batch_norm_cpu);
  m.impl("pool", torch_blocked::pool_cpu);
  m.impl("upsample", torch_blocked::upsample_cpu);
}
