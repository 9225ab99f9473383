#include "problem.h"

#include <ATen/MapAllocator.h>

#include <algorithm>

namespace torch_blocked {
namespace {

int64_t conv_dst_size(int64_t src, int64_t pad, int64_t kernel, int64_t dilation, int64_t stride) {
  return (src + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
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

// What is of the dtype of src, in float32; others as they are.
std::optional<Tensor> in_float32(const std::optional<Tensor>& tensor, at::ScalarType dtype) {
  const bool is_one = tensor.has_value() && tensor->defined() && tensor->scalar_type() == dtype;
  return is_one ? std::optional<Tensor>(tensor->to(at::kFloat)) : tensor;
}

}  // namespace

void check_window(const char* name, IntArrayRef values, int64_t dims, int64_t least) {
  TORCH_CHECK_VALUE(
      int64_t(values.size()) == dims &&
          std::all_of(values.begin(), values.end(), [&](int64_t v) { return v >= least && v < (1 << 24); }),
      "convolution: ", name, " has one number of each of ", dims, " spatial dims, at least ", least,
      " and below 2**24, got ", values);
}

Conv describe_problem(const Physical& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
                      IntArrayRef weight_blocking, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                      int64_t groups, int64_t block, bool transposed) {
  const int64_t ndims = weight_size.size(), spatial = ndims - 2;
  TORCH_CHECK_VALUE(ndims >= 3 && ndims <= 5, "convolution: the weight has 3 to 5 dims (oc, ic, kd, kh, kw), got ",
                    weight_size);
  check_window("stride", stride, spatial, 1);
  check_window("padding", padding, spatial, 0);
  check_window("dilation", dilation, spatial, 1);
  TORCH_CHECK_VALUE(groups >= 1 && weight_size[0] % groups == 0, "convolution: ", weight_size[0],
                    transposed ? " input" : " output", " channels do not split into ", groups, " groups");
  for (const int64_t size : weight_size)
    TORCH_CHECK_VALUE(size > 0, "convolution: the weight is empty, size ", weight_size);
  TORCH_CHECK_VALUE(block >= 1 && block <= 1024, "convolution: blocks of 1 to 1024 channels, got ", block);
  TORCH_CHECK_VALUE(int64_t(src.sizes.size()) >= ndims, "convolution: src has as many logical dims as the weight, ",
                    ndims, ", got shape ", src.sizes);
  check_precision("convolution", "src", src.dtype);
  TORCH_CHECK_TYPE(weight.scalar_type() == src.dtype, "convolution: src and weight have one dtype, got ", src.dtype,
                   " and ", weight.scalar_type());
  Conv c{};
  c.groups = groups, c.block = block;
  c.ic = transposed ? weight_size[0] : weight_size[1] * groups;
  c.oc = transposed ? weight_size[1] * groups : weight_size[0];
  Shape src_size(src.sizes.begin(), src.sizes.begin() + ndims);
  src_size[1] = c.ic;
  set_window(c, stride, padding, dilation);
  c.src_md = height_and_width(describe("convolution: src", src, src_size, src_blocking));
  c.wei_md = height_and_width(describe("convolution: weight", weight, weight_size, weight_blocking));
  c.n = src_size[0], c.ih = c.src_md.dims[2], c.iw = c.src_md.dims[3], c.kh = c.wei_md.dims[2], c.kw = c.wei_md.dims[3];
  if (ndims == 5) c.id = c.src_md.dims[4], c.kd = c.wei_md.dims[4];
  c.nthreads = num_threads();
  return c;
}

Conv problem(const Physical& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
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

Shape dst_shape(const Conv& c, int64_t ndims) {
  Shape shape = {c.n, c.oc_blocks()};
  const int64_t spatial[] = {c.od, c.oh, c.ow};
  shape.append(std::end(spatial) - (ndims - 2), std::end(spatial));
  shape.push_back(c.block);
  return shape;
}

static Alive watch(const void* tensor) {
  auto* const impl = static_cast<c10::TensorImpl*>(const_cast<void*>(tensor));
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl));
  return [weak] { return !weak.expired(); };
}

static bool is_shared(const Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  const at::MapAllocator* map = at::MapAllocator::fromDataPtr(data);
  if (map == nullptr) map = at::RefcountedMapAllocator::fromDataPtr(data);
  return map != nullptr && (map->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
}

std::optional<WeightKey> weight_key(const Tensor& weight, IntArrayRef weight_blocking, bool transposed) {
  if (weight_blocking.size() < 4 || weight.is_inference() || is_shared(weight)) return std::nullopt;
  return WeightKey{weight.unsafeGetTensorImpl(),
                   weight._version(),
                   weight.const_data_ptr(),
                   int64_t(weight.nbytes()),
                   watch,
                   weight.scalar_type() == at::kFloat,  // what autocast casts is gone after a few calls
                   transposed};
}

PostOpArguments::PostOpArguments(Conv& c, const Physical& dst, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                                 const std::optional<Tensor>& residual, c10::string_view activation, double alpha,
                                 bool residual_last)
    : bias(channel_vector("convolution: bias", in_float32(bias, dst.dtype), c.oc)),
      scale(channel_vector("convolution: scale", in_float32(scale, dst.dtype), c.oc)),
      shift(channel_vector("convolution: shift", in_float32(shift, dst.dtype), c.oc)) {
  if (residual.has_value() && residual->defined()) {
    TORCH_CHECK_VALUE(residual->sizes() == dst.sizes, "convolution: the residual has dst's physical shape ", dst.sizes,
                      ", got ", residual->sizes());
    TORCH_CHECK_TYPE(residual->scalar_type() == dst.dtype, "convolution: the residual has dst's dtype, ", dst.dtype,
                     ", got ", residual->scalar_type());
    this->residual = residual->contiguous().to(at::kFloat);
  }
  const Activation* const found = find_activation({activation.data(), activation.size()});
  TORCH_CHECK_VALUE(found, "convolution: activation is one of ", c10::Join(", ", activation_names()), ", got '",
                    activation, "'");
  c.post_ops = {data_or_null(this->bias),
                data_or_null(this->scale),
                data_or_null(this->shift),
                data_or_null(this->residual),
                found,
                float(alpha),
                residual_last};
}

}  // namespace torch_blocked
