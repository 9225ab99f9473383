#include <ATen/ops/mul.h>

#include <algorithm>
#include <vector>

#include "../conv/conv.h"
#include "operators.h"

namespace torch_blocked {
namespace {

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
// (ic, oc / groups, ...) where `transposed`.
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
                    transposed ? " input" : " output", " channels do not split into ", groups, " groups");
  for (const int64_t size : weight_size)
    TORCH_CHECK_VALUE(size > 0, "convolution: the weight is empty, size ", weight_size);
  TORCH_CHECK_VALUE(block >= 1 && block <= 1024, "convolution: blocks of 1 to 1024 channels, got ", block);
  TORCH_CHECK_VALUE(src.dim() >= ndims, "convolution: src has as many logical dims as the weight, ", ndims,
                    ", got shape ", src.sizes());
  check_precision("convolution", "src", src);
  TORCH_CHECK_TYPE(weight.scalar_type() == src.scalar_type(), "convolution: src and weight have one dtype, got ",
                   src.scalar_type(), " and ", weight.scalar_type());
  Conv c{};
  c.groups = groups, c.block = block;
  c.ic = transposed ? weight_size[0] : weight_size[1] * groups;
  c.oc = transposed ? weight_size[1] * groups : weight_size[0];
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

// dst's physical shape: of as many dims as the weight has, then the block.
std::vector<int64_t> dst_shape(const Conv& c, int64_t ndims) {
  std::vector<int64_t> shape = {c.n, c.oc_blocks()};
  const int64_t spatial[] = {c.od, c.oh, c.ow};
  shape.insert(shape.end(), std::end(spatial) - (ndims - 2), std::end(spatial));
  shape.push_back(c.block);
  return shape;
}

Tensor empty_dst(const Conv& c, int64_t ndims, const Tensor& src) {
  return empty_pooled(dst_shape(c, ndims), src.scalar_type());
}

// What is of the dtype of src, in float32; others as they are.
std::optional<Tensor> in_float32(const std::optional<Tensor>& tensor, at::ScalarType dtype) {
  const bool is_one = tensor.has_value() && tensor->defined() && tensor->scalar_type() == dtype;
  return is_one ? std::optional<Tensor>(tensor->to(at::kFloat)) : tensor;
}

// What weights packed from this tensor may be kept under. Only where every write to it is counted: not where it is
// plain or has plain views (blocks along one axis only), which may be written through `.data`; and not inference
// tensors, which count nothing.
std::optional<WeightKey> weight_key(const Tensor& weight, IntArrayRef weight_blocking, bool transposed) {
  if (weight_blocking.size() < 4 || weight.is_inference()) return std::nullopt;
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(weight.getIntrusivePtr());
  return WeightKey{weight.unsafeGetTensorImpl(),
                   weight._version(),
                   weight.const_data_ptr(),
                   int64_t(weight.nbytes()),
                   [weak] { return !weak.expired(); },
                   weight.scalar_type() == at::kFloat,  // what autocast casts is gone after a few calls
                   transposed};
}

// The post-ops of a convolution: the arguments of its operator, dense, for as long as it runs.
struct PostOpArguments {
  Tensor bias, scale, shift, residual;

  // Into `c`, checked.
  PostOpArguments(Conv& c, const Tensor& dst, const std::optional<Tensor>& bias, const std::optional<Tensor>& scale,
                  const std::optional<Tensor>& shift, const std::optional<Tensor>& residual,
                  c10::string_view activation, double alpha, bool residual_last)
      : bias(channel_vector("convolution: bias", in_float32(bias, dst.scalar_type()), c.oc)),
        scale(channel_vector("convolution: scale", in_float32(scale, dst.scalar_type()), c.oc)),
        shift(channel_vector("convolution: shift", in_float32(shift, dst.scalar_type()), c.oc)) {
    if (residual.has_value() && residual->defined()) {
      TORCH_CHECK_VALUE(residual->sizes() == dst.sizes(), "convolution: the residual has dst's physical shape ",
                        dst.sizes(), ", got ", residual->sizes());
      TORCH_CHECK_TYPE(residual->scalar_type() == dst.scalar_type(), "convolution: the residual has dst's dtype, ",
                       dst.scalar_type(), ", got ", residual->scalar_type());
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
};

// Makes channel blocks of `dst`, from the first_block-th on, the problem's dst.
void set_dst(Conv& c, const Tensor& dst, int64_t first_block, int64_t ndims, const Tensor& src) {
  std::vector<int64_t> shape = dst_shape(c, ndims);
  const int64_t blocks = shape[1];
  TORCH_CHECK_TYPE(dst.scalar_type() == at::kFloat && src.scalar_type() == at::kFloat,
                   "convolution: into a part of dst float32 only, got src ", src.scalar_type(), " and dst ",
                   dst.scalar_type());
  shape[1] = dst.dim() > 1 ? dst.size(1) : 0;
  TORCH_CHECK_VALUE(
      dst.sizes() == IntArrayRef(shape) && dst.is_contiguous() && first_block >= 0 && first_block <= shape[1] - blocks,
      "convolution: dst is dense and has shape ", IntArrayRef(shape), " with room for ", blocks,
      " blocks of channels from block ", first_block, " on, got ", dst.sizes());
  c.dst_blocks = shape[1];
  if (dst.numel() > 0) c.dst = dst.mutable_data_ptr<float>() + first_block * c.dst_block();
}

// The weights in float32; those of half precision are widened, once where there is a key to keep them under.
class FloatWeights {
 public:
  FloatWeights(const Tensor& weight, const WeightKey* key, int64_t nthreads) : weight_(weight) {
    if (weight.scalar_type() == at::kFloat) return;
    const int64_t count = weight.numel();
    const auto widen = [&](float* to) { values(weight).widen(0, count, to, nthreads); };
    PackedWeights& all = PackedWeights::instance();
    if (key && all.uses(*key, false) > 1) kept_ = all.get(*key, "float32", count, double(count) * seconds, widen);
    if (kept_) return;
    weight_ = empty_pooled(weight.sizes(), at::kFloat);
    widen(weight_.mutable_data_ptr<float>());
  }
  const float* data() const { return kept_ ? kept_->data() : weight_.const_data_ptr<float>(); }

 private:
  static constexpr double seconds = 3e-10;  // to widen one, about
  Tensor weight_;
  PackedWeights::Packed kept_;
};

// Tensors of half precision as they are converted: src in one piece image by image, weights in one piece.
Tensor readable_src(const Tensor& src) { return src.scalar_type() == at::kFloat ? src : src.contiguous(); }
Tensor readable_weight(const Tensor& weight) {
  return weight.scalar_type() == at::kFloat || weight.is_non_overlapping_and_dense() ? weight : weight.contiguous();
}

void set_operands(Conv& c, const Tensor& src, const FloatWeights& weights, const Tensor& dst) {
  c.wei = weights.data();
  if (src.scalar_type() == at::kFloat) {
    c.src = src.const_data_ptr<float>();
    if (!c.dst) c.dst = dst.mutable_data_ptr<float>();
  } else {
    c.half_src = values(src), c.half_dst = results(dst);
  }
}

// Runs a convolution or a transposed one, but for its operands described by `c`.
void run(const char* name, void (*convolve_it)(const Conv&, const WeightKey*), Conv& c, const Tensor& src,
         const Tensor& weight, IntArrayRef weight_blocking, const Tensor& dst) {
  const std::optional<WeightKey> key = weight_key(weight, weight_blocking, convolve_it == convolve_transposed);
  const WeightKey* const its_key = key ? &*key : nullptr;
  or_out_of_memory(name, [&] {
    const FloatWeights weights(weight, its_key, c.nthreads);
    set_operands(c, src, weights, dst);
    convolve_it(c, its_key);
  });
}

// The convolution of src times `src_scale`, a number of each image and channel, (n, ceil(ic / block), 1, ..., block):
// image by image, the weights times it, which are fewer numbers than src where that is large.
void convolve_scaled(Conv c, const Tensor& weight, const Tensor& src_scale) {
  const int64_t images = c.n, src_image = c.src_md.strides[0];
  c.n = c.src_md.dims[0] = 1;
  for (int64_t i = 0; i < images; i++) {
    const Tensor scaled = at::mul(weight, src_scale.select(0, i).unsqueeze(0).unsqueeze(-1));
    c.wei = scaled.const_data_ptr<float>();
    convolve(c, nullptr);
    c.src += src_image;
    c.advance_dst(c.dst_image());
  }
}

void check_src_scale(const Conv& c, const Tensor& src, IntArrayRef weight_blocking, const Tensor& weight,
                     const Tensor& src_scale) {
  const int64_t block = c.src_md.single_block(1);
  const bool fits = block > 0 && src.scalar_type() == at::kFloat && c.groups == 1 && weight_blocking.size() == 4 &&
                    weight_blocking[0] == 1 && weight_blocking[1] == block && weight_blocking[2] == 0 &&
                    weight.is_contiguous();
  TORCH_CHECK_VALUE(fits,
                    "convolution: with a src_scale there are no groups, src is float32 and has channels in blocks, and "
                    "so has a dense weight, then output channels; got src ",
                    src.scalar_type(), " ", src.sizes(), " and a weight blocked by ", weight_blocking, " for ",
                    c.groups, " groups");
  std::vector<int64_t> expected(src.dim(), 1);
  expected[0] = src.size(0), expected[1] = src.size(1), expected.back() = block;
  TORCH_CHECK_VALUE(src_scale.sizes() == IntArrayRef(expected) && src_scale.scalar_type() == at::kFloat,
                    "convolution: src_scale is float32 and has shape ", IntArrayRef(expected), ", got ",
                    src_scale.scalar_type(), " and ", src_scale.sizes());
}

}  // namespace

Tensor convolution_cpu(const Tensor& given_src, at::OptionalIntArrayRef maybe_src_blocking, const Tensor& given_weight,
                       IntArrayRef weight_size, at::OptionalIntArrayRef maybe_weight_blocking,
                       const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                       int64_t groups, int64_t block, const std::optional<Tensor>& scale,
                       const std::optional<Tensor>& shift, const std::optional<Tensor>& residual,
                       c10::string_view activation, double alpha, bool residual_last,
                       const std::optional<Tensor>& src_scale) {
  const IntArrayRef src_blocking = known(maybe_src_blocking), weight_blocking = known(maybe_weight_blocking);
  const Tensor src = readable_src(given_src), weight = readable_weight(given_weight);
  Conv c = problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  const bool scaled = src_scale.has_value() && src_scale->defined();
  if (scaled) check_src_scale(c, src, weight_blocking, weight, *src_scale);
  Tensor dst = empty_dst(c, weight_size.size(), src);
  const PostOpArguments post_ops(c, dst, bias, scale, shift, residual, activation, alpha, residual_last);
  if (dst.numel() == 0) return dst;
  if (scaled) {
    c.src = src.const_data_ptr<float>(), c.dst = dst.mutable_data_ptr<float>();
    or_out_of_memory("convolution", [&] { convolve_scaled(c, weight, *src_scale); });
  } else {
    run("convolution", convolve, c, src, weight, weight_blocking, dst);
  }
  return dst;
}

void convolution_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src,
                         at::OptionalIntArrayRef maybe_src_blocking, const Tensor& weight, IntArrayRef weight_size,
                         at::OptionalIntArrayRef maybe_weight_blocking, const std::optional<Tensor>& bias,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t block,
                         const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                         c10::string_view activation, double alpha) {
  const IntArrayRef src_blocking = known(maybe_src_blocking), weight_blocking = known(maybe_weight_blocking);
  Conv c = problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  set_dst(c, dst, first_block, weight_size.size(), src);
  const PostOpArguments post_ops(c, dst, bias, scale, shift, std::nullopt, activation, alpha, false);
  if (dst.numel() == 0) return;
  run("convolution", convolve, c, src, weight, weight_blocking, dst);
}

static int64_t transposed_dst_size(int64_t src, int64_t pad, int64_t kernel, int64_t dilation, int64_t stride,
                                   int64_t output_padding) {
  return (src - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1 + output_padding;
}

static void set_transposed_dst_size(Conv& c, int64_t spatial, IntArrayRef output_padding) {
  check_window("output_padding", output_padding, spatial, 0);
  const auto beyond = [&](int64_t from_last) {
    return from_last < spatial ? output_padding[spatial - 1 - from_last] : 0;
  };
  c.ow = transposed_dst_size(c.iw, c.pad_w, c.kw, c.dilation_w, c.stride_w, beyond(0));
  c.oh = transposed_dst_size(c.ih, c.pad_h, c.kh, c.dilation_h, c.stride_h, beyond(1));
  c.od = transposed_dst_size(c.id, c.pad_d, c.kd, c.dilation_d, c.stride_d, beyond(2));
  constexpr int64_t most = int64_t(1) << 31;  // so that no size of dst overflows
  TORCH_CHECK(std::min({c.id, c.ih, c.iw, c.od, c.oh, c.ow}) > 0 && std::max({c.id, c.ih, c.iw}) < most,
              "convolution_transpose: src of ", c.id, "x", c.ih, "x", c.iw, " gives dst of ", c.od, "x", c.oh, "x",
              c.ow, ", which is no size");
}

static Conv transposed_problem(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight,
                               IntArrayRef weight_size, IntArrayRef weight_blocking, IntArrayRef stride,
                               IntArrayRef padding, IntArrayRef output_padding, IntArrayRef dilation, int64_t groups,
                               int64_t block) {
  Conv c = describe_problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups,
                            block, true);
  TORCH_CHECK_VALUE(c.src_md.single_block(1) == block && c.kernels() != nullptr,
                    "convolution_transpose: src has channels in blocks of ", block,
                    " that this CPU's kernels take, got ", src_blocking);
  for (int i = 0; i < c.wei_md.inner_nblks; i++)
    TORCH_CHECK_VALUE(c.wei_md.inner_idxs[i] < 2, "convolution_transpose: a weight is blocked by channels only, got ",
                      weight_blocking);
  set_transposed_dst_size(c, weight_size.size() - 2, output_padding);
  return c;
}

Tensor convolution_transpose_cpu(const Tensor& given_src, IntArrayRef src_blocking, const Tensor& given_weight,
                                 IntArrayRef weight_size, IntArrayRef weight_blocking,
                                 const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                                 IntArrayRef output_padding, IntArrayRef dilation, int64_t groups, int64_t block,
                                 const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                                 const std::optional<Tensor>& residual, c10::string_view activation, double alpha,
                                 bool residual_last) {
  const Tensor src = readable_src(given_src), weight = readable_weight(given_weight);
  Conv c = transposed_problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, output_padding,
                              dilation, groups, block);
  Tensor dst = empty_dst(c, weight_size.size(), src);
  const PostOpArguments post_ops(c, dst, bias, scale, shift, residual, activation, alpha, residual_last);
  if (dst.numel() == 0) return dst;
  run("convolution_transpose", convolve_transposed, c, src, weight, weight_blocking, dst);
  return dst;
}

void convolution_transpose_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src, IntArrayRef src_blocking,
                                   const Tensor& weight, IntArrayRef weight_size, IntArrayRef weight_blocking,
                                   const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef output_padding, IntArrayRef dilation, int64_t groups, int64_t block,
                                   const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                                   c10::string_view activation, double alpha) {
  Conv c = transposed_problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, output_padding,
                              dilation, groups, block);
  set_dst(c, dst, first_block, weight_size.size(), src);
  const PostOpArguments post_ops(c, dst, bias, scale, shift, std::nullopt, activation, alpha, false);
  if (dst.numel() == 0) return;
  run("convolution_transpose", convolve_transposed, c, src, weight, weight_blocking, dst);
}

Tensor convolution_weight_gradient_cpu(const Tensor& given_src, IntArrayRef src_blocking, const Tensor& diff_dst,
                                       IntArrayRef weight_size, IntArrayRef weight_order, IntArrayRef weight_blocking,
                                       IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups) {
  const Tensor src = readable_src(given_src);
  TORCH_CHECK_TYPE(diff_dst.scalar_type() == src.scalar_type(),
                   "convolution_weight_gradient: src and diff_dst have one dtype, got ", src.scalar_type(), " and ",
                   diff_dst.scalar_type());
  TORCH_CHECK_VALUE(diff_dst.dim() == int64_t(weight_size.size()) + 1,
                    "convolution_weight_gradient: diff_dst is blocked, of the weight's dims and a block, got shape ",
                    diff_dst.sizes());
  const int64_t block = diff_dst.size(-1);
  const auto empty = [&](at::ScalarType dtype) {
    return empty_physical("convolution_weight_gradient", weight_size, weight_order, weight_blocking, dtype);
  };
  const Tensor diff_weight = empty(src.scalar_type());
  Conv c =
      problem(src, src_blocking, diff_weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  TORCH_CHECK_VALUE(
      c.kernels() != nullptr && (c.src_md.single_block(1) == block || (c.src_md.is_plain() && groups == 1)),
      "convolution_weight_gradient: src is plain, without groups, or has channels in blocks of ", block,
      " that this CPU's kernels take, got ", src_blocking, " and ", groups, " groups");
  const std::vector<int64_t> expected = dst_shape(c, weight_size.size());
  TORCH_CHECK_VALUE(diff_dst.sizes() == IntArrayRef(expected), "convolution_weight_gradient: diff_dst has dst's shape ",
                    IntArrayRef(expected), ", got ", diff_dst.sizes());
  if (c.n == 0) return diff_weight.zero_();
  const Tensor dense = diff_dst.contiguous();
  const bool half = src.scalar_type() != at::kFloat;
  const Tensor sums = half ? empty(at::kFloat) : diff_weight;
  if (half)
    c.half_src = values(src);
  else
    c.src = src.const_data_ptr<float>();
  or_out_of_memory("convolution_weight_gradient",
                   [&] { convolve_weight_gradient(c, values(dense), sums.mutable_data_ptr<float>()); });
  return half ? diff_weight.copy_(sums) : diff_weight;
}

std::tuple<std::string, std::string> convolution_algorithm(const Tensor& src, IntArrayRef src_blocking,
                                                           const Tensor& weight, IntArrayRef weight_size,
                                                           IntArrayRef weight_blocking, IntArrayRef stride,
                                                           IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                                           int64_t block) {
  const Conv c =
      problem(src, src_blocking, weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  const std::optional<WeightKey> key = weight_key(weight, weight_blocking, false);
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

}  // namespace torch_blocked
