#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <vector>

#include "../conv/conv.h"
#include "operators.h"
#include "problem.h"

namespace torch_blocked {
namespace {

Tensor empty_dst(const Conv& c, int64_t ndims, const Tensor& src) {
  return empty_pooled(dst_shape(c, ndims), src.scalar_type());
}

// Some blocks of each image of `dst` are written while `read` is read. Of several images neither is dense where both
// are parts of one tensor, as in a concatenation, and ATen does not tell: then all images are as the first ones are.
void check_no_overlap(const Tensor& dst, const Tensor& read) {
  at::assert_no_overlap(dst, read);
  if (dst.numel() == 0 || read.numel() == 0 || !dst.is_alias_of(read)) return;
  if (read.size(0) < 2 || read.stride(0) != dst.stride(0)) return;
  const int64_t period = dst.stride(0), from_dst = read.storage_offset() - dst.storage_offset();
  const auto span = [](const Tensor& image) {
    int64_t last = 0;
    for (int64_t d = 0; d < image.dim(); d++) last += (image.size(d) - 1) * image.stride(d);
    return last + 1;
  };
  if (from_dst >= span(dst) || -from_dst >= span(read)) return;
  const int64_t distance = (from_dst % period + period) % period;
  TORCH_CHECK(distance >= span(dst[0]) && distance + span(read[0]) <= period,
              "convolution: src and weight are not part of what is written of dst: make a copy of them before, got "
              "bytes of the same tensor in both");
}

// Makes channel blocks of `dst`, from the first_block-th on, the problem's dst.
void set_dst(Conv& c, const Tensor& dst, int64_t first_block, int64_t ndims, const Tensor& src, const Tensor& weight) {
  Shape shape = dst_shape(c, ndims);
  const int64_t blocks = shape[1];
  TORCH_CHECK_TYPE(dst.scalar_type() == at::kFloat && src.scalar_type() == at::kFloat,
                   "convolution: into a part of dst float32 only, got src ", src.scalar_type(), " and dst ",
                   dst.scalar_type());
  shape[1] = dst.dim() > 1 ? dst.size(1) : 0;
  TORCH_CHECK_VALUE(
      dst.sizes() == IntArrayRef(shape) && dst.is_contiguous() && first_block >= 0 && first_block <= shape[1] - blocks,
      "convolution: dst is dense and has shape ", IntArrayRef(shape), " with room for ", blocks,
      " blocks of channels from block ", first_block, " on, got ", dst.sizes());
  for (const Tensor& read : {src, weight}) check_no_overlap(dst.narrow(1, first_block, blocks), read);
  if (!dst.is_inference()) dst.unsafeGetTensorImpl()->bump_version();
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
    const auto gain = [&] { return double(count) * seconds; };
    if (key && all.uses(*key, false) > 1) kept_ = all.get(*key, Packing(), count, gain, widen);
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

void check_src_scale(const Conv& c, const Tensor& src, IntArrayRef weight_blocking, const Tensor& weight,
                     const Tensor& src_scale) {
  const int64_t block = c.block, both[] = {1, block, 0, block};
  const bool fits = c.src_md.single_block(1) == block && src.scalar_type() == at::kFloat && c.groups == 1 &&
                    weight_blocking == IntArrayRef(both) && weight.is_contiguous();
  TORCH_CHECK_VALUE(fits,
                    "convolution: with a src_scale there are no groups, src is float32 and has channels in blocks "
                    "of dst's ",
                    block, ", and so has a dense weight, then output channels; got src ", src.scalar_type(), " ",
                    src.sizes(), " and a weight blocked by ", weight_blocking, " for ", c.groups, " groups");
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
    const Tensor scale = src_scale->contiguous();
    c.src = src.const_data_ptr<float>(), c.dst = dst.mutable_data_ptr<float>(), c.wei = weight.const_data_ptr<float>();
    or_out_of_memory("convolution", [&] { convolve_scaled(c, scale.const_data_ptr<float>()); });
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
  set_dst(c, dst, first_block, weight_size.size(), src, weight);
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
  constexpr int64_t most = int64_t(1) << 31;  // so that no size of dst overflows
  TORCH_CHECK(std::max({c.id, c.ih, c.iw}) < most,
              "convolution_transpose: src is below 2**31 in each spatial dim, got ", c.id, "x", c.ih, "x", c.iw);
  const auto beyond = [&](int64_t from_last) {
    return from_last < spatial ? output_padding[spatial - 1 - from_last] : 0;
  };
  c.ow = transposed_dst_size(c.iw, c.pad_w, c.kw, c.dilation_w, c.stride_w, beyond(0));
  c.oh = transposed_dst_size(c.ih, c.pad_h, c.kh, c.dilation_h, c.stride_h, beyond(1));
  c.od = transposed_dst_size(c.id, c.pad_d, c.kd, c.dilation_d, c.stride_d, beyond(2));
  TORCH_CHECK(std::min({c.id, c.ih, c.iw, c.od, c.oh, c.ow}) > 0, "convolution_transpose: src of ", c.id, "x", c.ih,
              "x", c.iw, " gives dst of ", c.od, "x", c.oh, "x", c.ow, ", which is no size");
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
  TORCH_CHECK_VALUE(c.wei_md.is_blocked_by_channels(),
                    "convolution_transpose: a weight is blocked by channels only, got ", weight_blocking);
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
  set_dst(c, dst, first_block, weight_size.size(), src, weight);
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
  const MemoryDesc weight_md =
      describe_dense("convolution_weight_gradient", weight_size, weight_order, weight_blocking);
  const Tensor diff_weight = empty_physical(weight_md, src.scalar_type());
  Conv c =
      problem(src, src_blocking, diff_weight, weight_size, weight_blocking, stride, padding, dilation, groups, block);
  TORCH_CHECK_VALUE(
      c.kernels() != nullptr && (c.src_md.single_block(1) == block || (c.src_md.is_plain() && groups == 1)),
      "convolution_weight_gradient: src is plain, without groups, or has channels in blocks of ", block,
      " that this CPU's kernels take, got ", src_blocking, " and ", groups, " groups");
  const Shape expected = dst_shape(c, weight_size.size());
  TORCH_CHECK_VALUE(diff_dst.sizes() == IntArrayRef(expected), "convolution_weight_gradient: diff_dst has dst's shape ",
                    IntArrayRef(expected), ", got ", diff_dst.sizes());
  if (c.n == 0) return diff_weight.zero_();
  const Tensor dense = diff_dst.contiguous();
  const bool half = src.scalar_type() != at::kFloat;
  const Tensor sums = half ? empty_physical(weight_md, at::kFloat) : diff_weight;
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
