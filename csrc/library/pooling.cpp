#include "../pooling.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "operators.h"

namespace torch_blocked {
namespace {

// At most 2^30, so that no product of two overflows.
void check_numbers(const char* name, IntArrayRef values, int64_t least) {
  TORCH_CHECK_VALUE(
      values.size() == 2 && std::min(values[0], values[1]) >= least && std::max(values[0], values[1]) <= (1 << 30),
      name, " is two numbers from ", least, " to 2**30, got ", values);
}

// `src`, copied where its blocks are not dense: keep it as long as what blocked_images makes of it.
Tensor check_images(const char* name, const Tensor& src, const char* word = "src") {
  TORCH_CHECK_VALUE(src.dim() == 5 && src.size(2) > 0 && src.size(3) > 0 && src.size(4) > 0, name, ": ", word,
                    " is (n, blocks, h, w, block), not empty, got ", src.sizes());
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, name, ": float32 only, got ", word, " ", src.scalar_type());
  return src.size(4) == 1 || src.stride(4) == 1 ? src : src.contiguous();
}

BlockedImages blocked_images(const Tensor& src) {
  BlockedImages images{src.size(0), src.size(1), src.size(2), src.size(3), src.size(4), {}, nullptr};
  std::copy_n(src.strides().begin(), 4, images.strides);
  images.data = src.const_data_ptr<float>();
  return images;
}

// Windows along h and w; without a kernel those of adaptive pooling.
std::pair<PoolAxis, PoolAxis> pool_axes(IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef dilation) {
  if (kernel.empty()) return {{0, 1, 0, 1}, {0, 1, 0, 1}};
  check_numbers("pool: kernel", kernel, 1);
  check_numbers("pool: stride", stride, 1);
  check_numbers("pool: padding", padding, 0);
  check_numbers("pool: dilation", dilation, 1);
  return {{kernel[0], stride[0], padding[0], dilation[0]}, {kernel[1], stride[1], padding[1], dilation[1]}};
}

float divisor(std::optional<int64_t> divisor_override) {
  TORCH_CHECK_VALUE(!divisor_override || *divisor_override != 0, "pool: divisor_override is not 0");
  return float(divisor_override.value_or(0));
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
  std::tie(p.h, p.w) = pool_axes(kernel, stride, padding, dilation);
  p.divisor = divisor(divisor_override), p.count_include_pad = count_include_pad;
  return p;
}

}  // namespace

std::tuple<Tensor, Tensor> pool_cpu(const Tensor& src, c10::SymInt channels, SymIntArrayRef symbolic_output_size,
                                    c10::string_view mode, at::OptionalIntArrayRef kernel,
                                    at::OptionalIntArrayRef stride, at::OptionalIntArrayRef padding,
                                    at::OptionalIntArrayRef dilation, bool count_include_pad,
                                    std::optional<int64_t> divisor_override, bool indices) {
  const IntArrayRef output_size = known(symbolic_output_size);
  const Tensor images = check_images("pool", src);
  Pooling p = pooling(images, channels.expect_int(), output_size, mode, known(kernel), known(stride), known(padding),
                      known(dilation), count_include_pad, divisor_override);
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

static UpsampleMode upsample_mode(c10::string_view name) {
  static constexpr std::pair<const char*, UpsampleMode> modes[] = {{"nearest", UpsampleMode::Nearest},
                                                                   {"nearest-exact", UpsampleMode::NearestExact},
                                                                   {"bilinear", UpsampleMode::Bilinear}};
  for (const auto& [mode, value] : modes)
    if (name == mode) return value;
  TORCH_CHECK_VALUE(false, "upsample: mode is one of nearest, nearest-exact, bilinear, got '", name, "'");
}

Tensor upsample_cpu(const Tensor& src, SymIntArrayRef symbolic_output_size, c10::string_view mode, bool align_corners,
                    std::optional<double> scale_h, std::optional<double> scale_w) {
  const IntArrayRef output_size = known(symbolic_output_size);
  const Tensor images = check_images("upsample", src);
  check_numbers("upsample: output_size", output_size, 1);
  Upsampling u{blocked_images(images),
               {upsample_mode(mode), align_corners, scale_h.value_or(0), scale_w.value_or(0)},
               output_size[0],
               output_size[1],
               nullptr,
               num_threads()};
  Tensor dst = empty_pooled({u.src.n, u.src.c_blocks, u.oh, u.ow, u.src.block}, at::kFloat);
  if (dst.numel() == 0) return dst;
  u.dst = dst.mutable_data_ptr<float>();
  upsample(u);
  return dst;
}

// ---- The gradients with respect to src

// A new diff_src of diff_dst's blocks and the size `src_size`, (h, w); checked.
static Tensor empty_diff_src(const char* name, const Tensor& diff_dst, IntArrayRef src_size) {
  check_numbers(name, src_size, 1);
  return empty_pooled({diff_dst.size(0), diff_dst.size(1), src_size[0], src_size[1], diff_dst.size(4)}, at::kFloat);
}

Tensor max_pool_backward_cpu(const Tensor& diff_dst, const Tensor& indices, SymIntArrayRef symbolic_src_size) {
  const IntArrayRef src_size = known(symbolic_src_size);
  const Tensor dense = check_images("max_pool_backward", diff_dst, "diff_dst").contiguous();
  TORCH_CHECK_VALUE(indices.sizes() == dense.sizes(), "max_pool_backward: indices are of the shape of diff_dst, got ",
                    indices.sizes(), " and ", dense.sizes());
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kLong, "max_pool_backward: indices are int64, got ",
                   indices.scalar_type());
  const Tensor dense_indices = indices.contiguous();
  Tensor diff_src = empty_diff_src("max_pool_backward: src_size", dense, src_size);
  if (diff_src.numel() == 0) return diff_src;
  max_pool_backward({dense.size(0) * dense.size(1), dense.size(4), dense.size(2) * dense.size(3), src_size[0],
                     src_size[1], dense.const_data_ptr<float>(), dense_indices.const_data_ptr<int64_t>(),
                     diff_src.mutable_data_ptr<float>(), num_threads()});
  return diff_src;
}

Tensor avg_pool_backward_cpu(const Tensor& diff_dst, SymIntArrayRef symbolic_src_size, IntArrayRef kernel,
                             IntArrayRef stride, IntArrayRef padding, bool count_include_pad,
                             std::optional<int64_t> divisor_override) {
  const IntArrayRef src_size = known(symbolic_src_size);
  const Tensor images = check_images("avg_pool_backward", diff_dst, "diff_dst");
  const auto [h, w] = pool_axes(kernel, stride, padding, {1, 1});
  const float by = divisor(divisor_override);
  Tensor diff_src = empty_diff_src("avg_pool_backward: src_size", images, src_size);
  if (diff_src.numel() == 0) return diff_src;
  average_pool_backward({blocked_images(images), h, w, count_include_pad, by, src_size[0], src_size[1],
                         diff_src.mutable_data_ptr<float>(), num_threads()});
  return diff_src;
}

Tensor upsample_backward_cpu(const Tensor& diff_dst, SymIntArrayRef symbolic_src_size, c10::string_view mode,
                             bool align_corners, std::optional<double> scale_h, std::optional<double> scale_w) {
  const IntArrayRef src_size = known(symbolic_src_size);
  const Tensor images = check_images("upsample_backward", diff_dst, "diff_dst");
  const Interpolation how{upsample_mode(mode), align_corners, scale_h.value_or(0), scale_w.value_or(0)};
  Tensor diff_src = empty_diff_src("upsample_backward: src_size", images, src_size);
  if (diff_src.numel() == 0) return diff_src;
  upsample_backward(
      {blocked_images(images), how, src_size[0], src_size[1], diff_src.mutable_data_ptr<float>(), num_threads()});
  return diff_src;
}

}  // namespace torch_blocked
