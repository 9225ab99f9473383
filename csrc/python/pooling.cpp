#include <cmath>

#include "../library/operators.h"
#include "arguments.h"
#include "handlers.h"

namespace torch_blocked {

// Arguments of the operator torch_blocked::pool. Without a window each pixel of dst has its part of src.
struct Handlers::Pooling {
  const char* mode;
  Numbers size = {}, kernel = {}, stride = {}, padding = {}, dilation = {};  // of h, w
  bool count_include_pad = true;
  std::optional<int64_t> divisor = std::nullopt;
  bool indices = false;

  // The windows, and how many there are of an image of size h, w; false where PyTorch says what is wrong.
  bool read_windows(at::IntArrayRef src_size, Arguments kernel_stride_padding, const c10::IValue* dilations,
                    bool ceil_mode) {
    const Arguments given = kernel_stride_padding;
    const bool has_stride = !given[1].isIntList() || !given[1].toListRef().empty();
    if (!read_window(given[0], 2, 1, kernel) || !read_window(given[has_stride ? 1 : 0], 2, 1, stride) ||
        !read_window(given[2], 2, 0, padding))
      return false;
    if (dilations == nullptr)
      dilation = {1, 1};
    else if (!read_window(*dilations, 2, 1, dilation))
      return false;
    for (size_t i = 0; i < 2; i++) {
      const int64_t last = src_size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1;  // a window begins here
      if (last < 0 || padding[i] > kernel[i] / 2) return false;
      const int64_t count = (last + (ceil_mode ? stride[i] - 1 : 0)) / stride[i] + 1;
      // None begins in the padding at the end.
      size.push_back(ceil_mode && (count - 1) * stride[i] >= src_size[i] + padding[i] ? count - 1 : count);
    }
    return true;
  }
};

// One that the kernels of pooling and up-sampling take.
std::optional<Operand> Handlers::read_image(const c10::IValue& value) const {
  auto src = read_tensor(type_, value);
  if (!src || !is_blocked_by_channels(*src) || (src->blocks()[1] != 8 && src->blocks()[1] != 16) ||
      src->sizes().size() != 4 || src->physical.scalar_type() != at::kFloat || !src->tensor.numel())
    return std::nullopt;
  return src;
}

void Handlers::pool(const Operand& src, const Pooling& p, Stack& answers) const {
  static const auto op = operator_of<decltype(pool_cpu)>("torch_blocked::pool");
  const auto [dst, indices] = op.call(src.physical, src.sizes()[1], c10::fromIntArrayRefSlow(p.size), p.mode, p.kernel,
                                      p.stride, p.padding, p.dilation, p.count_include_pad, p.divisor, p.indices);
  const c10::DimVector size = {src.sizes()[0], src.sizes()[1], p.size[0], p.size[1]};
  push(dst, src, size, answers);
  if (p.indices) push(indices, src, size, answers);
}

bool Handlers::max_pool(Arguments args, bool indices, Stack& answers) const {
  const auto src = read_image(args[0]);
  Pooling p{"max"};
  p.indices = indices;
  if (!src || !p.read_windows(src->sizes().slice(2), args.slice(1, 3), &args[4], args[5].toBool())) return false;
  pool(*src, p, answers);
  return true;
}

bool Handlers::max_pool2d(Arguments args, Stack& answers) const { return max_pool(args, /*indices=*/false, answers); }

bool Handlers::max_pool2d_with_indices(Arguments args, Stack& answers) const {
  return max_pool(args, /*indices=*/true, answers);
}

bool Handlers::avg_pool2d(Arguments args, Stack& answers) const {
  const auto src = read_image(args[0]);
  Pooling p{"avg"};
  p.count_include_pad = args[5].toBool();
  p.divisor = args[6].toOptional<int64_t>();
  if (!src || p.divisor == 0 || !p.read_windows(src->sizes().slice(2), args.slice(1, 3), nullptr, args[4].toBool()))
    return false;
  pool(*src, p, answers);
  return true;
}

bool Handlers::adaptive_pool(Arguments args, const char* mode, bool indices, Stack& answers) const {
  const auto src = read_image(args[0]);
  Pooling p{mode};
  p.indices = indices;
  if (!src || !read_numbers(args[1], 2, 1, p.size)) return false;
  pool(*src, p, answers);
  return true;
}

bool Handlers::adaptive_avg_pool2d(Arguments args, Stack& answers) const {
  return adaptive_pool(args, "avg", /*indices=*/false, answers);
}

bool Handlers::adaptive_max_pool2d(Arguments args, Stack& answers) const {
  return adaptive_pool(args, "max", /*indices=*/true, answers);
}

// Over H and W of images, their dims kept, in their dtype: one window.
bool Handlers::over_image(Arguments args, std::optional<int64_t> divisor, Stack& answers) const {
  Numbers axes;
  const bool keeps_dims = args[2].toBool();
  if (!keeps_dims || !args[3].isNone() || !read_numbers(args[1], 2, -2, axes)) return false;
  const auto are = [&](int64_t h, int64_t w) { return std::minmax(axes[0], axes[1]) == std::minmax(h, w); };
  if (!are(2, 3) && !are(-2, -1) && !are(2, -1) && !are(-2, 3)) return false;
  const auto src = read_image(args[0]);
  if (!src) return false;
  const Numbers whole(src->sizes().slice(2));
  pool(*src, {"avg", {1, 1}, whole, whole, {0, 0}, {1, 1}, true, divisor}, answers);
  return true;
}

bool Handlers::mean(Arguments args, Stack& answers) const { return over_image(args, {}, answers); }

bool Handlers::sum(Arguments args, Stack& answers) const { return over_image(args, 1, answers); }

bool Handlers::upsample(const Operand& src, const char* mode, at::IntArrayRef size, bool align_corners,
                        std::optional<double> scale_h, std::optional<double> scale_w, Stack& answers) const {
  static const auto op = operator_of<decltype(upsample_cpu)>("torch_blocked::upsample");
  const at::Tensor dst = op.call(src.physical, c10::fromIntArrayRefSlow(size), mode, align_corners, scale_h, scale_w);
  push(dst, src, {src.sizes()[0], src.sizes()[1], size[0], size[1]}, answers);
  return true;
}

// To a size, with factors that may be others.
bool Handlers::upsample_to(Arguments args, const char* mode, bool align_corners, Arguments scales,
                           Stack& answers) const {
  Numbers size;
  const auto src = read_image(args[0]);
  return src && read_numbers(args[1], 2, 1, size) &&
         upsample(*src, mode, size, align_corners, scales[0].toOptional<double>(), scales[1].toOptional<double>(),
                  answers);
}

// To a size or by factors, as `inference_mode` delivers it.
bool Handlers::upsample_by(Arguments args, const char* mode, bool align_corners, const c10::IValue& scales,
                           Stack& answers) const {
  Numbers size;
  const auto src = read_image(args[0]);
  if (!src || args[1].isNone() == scales.isNone()) return false;
  if (scales.isNone())
    return read_numbers(args[1], 2, 1, size) && upsample(*src, mode, size, align_corners, {}, {}, answers);
  const auto factors = scales.toDoubleVector();
  if (factors.size() != 2) return false;
  for (size_t i = 0; i < 2; i++) {
    const double exact = double(src->sizes()[2 + i]) * factors[i];
    if (!(exact >= 1 && exact < double(1 << 24))) return false;
    size.push_back(int64_t(exact));
  }
  return upsample(*src, mode, size, align_corners, factors[0], factors[1], answers);
}

bool Handlers::upsample_nearest2d(Arguments args, Stack& answers) const {
  return upsample_to(args, "nearest", false, args.slice(2), answers);
}

bool Handlers::upsample_nearest2d_vec(Arguments args, Stack& answers) const {
  return upsample_by(args, "nearest", false, args[2], answers);
}

bool Handlers::upsample_bilinear2d(Arguments args, Stack& answers) const {
  return upsample_to(args, "bilinear", args[2].toBool(), args.slice(3), answers);
}

bool Handlers::upsample_bilinear2d_vec(Arguments args, Stack& answers) const {
  return upsample_by(args, "bilinear", args[2].toBool(), args[3], answers);
}

}  // namespace torch_blocked
