#include <ATen/ops/empty.h>
#include <ATen/ops/rsqrt.h>
#include <torch/csrc/utils/pybind.h>

#include "../library/operators.h"
#include "arguments.h"
#include "handlers.h"

namespace torch_blocked {

namespace {

// None, or a value for each channel.
bool fits(const OptionalTensor& vector, const Operand& src) {
  return !vector || (vector->dim() == 1 && vector->size(0) == src.sizes()[1]);
}

}  // namespace

// Blocked by channels, and vectors of float32 for each channel: those of the running statistics both or none.
struct Handlers::BatchNorm {
  Operand src;
  OptionalTensor weight, bias, mean, var;

  at::Tensor normalize(const at::Tensor& by_mean, const at::Tensor& by_var, double eps) const {
    static const auto op = operator_of<decltype(batch_norm_cpu)>("torch_blocked::batch_norm");
    return unlocked([&] { return op.call(src.physical, weight, bias, by_mean, by_var, eps); });
  }
};

std::optional<Handlers::BatchNorm> Handlers::read_batch_norm(py::handle src, py::handle weight, py::handle bias,
                                                             py::handle mean, py::handle var) const {
  auto x = type_.read(src);
  if (!x || !is_blocked_by_channels(*x) || !is_precision(x->physical.scalar_type()) || !x->tensor.numel())
    return std::nullopt;
  BatchNorm norm{std::move(*x), {}, {}, {}, {}};
  const bool has_vectors =
      read_vector(type_, weight, at::kFloat, norm.weight) && read_vector(type_, bias, at::kFloat, norm.bias) &&
      read_vector(type_, mean, at::kFloat, norm.mean) && read_vector(type_, var, at::kFloat, norm.var);
  if (!has_vectors || bool(norm.mean) != bool(norm.var)) return std::nullopt;
  for (const OptionalTensor* const vector : {&norm.weight, &norm.bias, &norm.mean, &norm.var})
    if (!fits(*vector, norm.src)) return std::nullopt;
  return norm;
}

py::object Handlers::batch_norm(const py::tuple& args) const {
  const auto norm = read_batch_norm(args[0], args[1], args[2], args[3], args[4]);
  const bool training = args[5].ptr() != Py_False;
  double eps;
  if (training || !norm || !norm->mean || !read_float(args[7], eps)) return not_implemented();
  return type_.make(norm->normalize(*norm->mean, *norm->var, eps), norm->src.blocking, norm->src.sizes());
}

py::object Handlers::native_batch_norm(const py::tuple& args) const {
  const bool training = args[5].ptr() != Py_False;
  if (training) return batch_norm_of_batch(args);
  const py::object dst = batch_norm(args);
  if (dst.ptr() == Py_NotImplemented) return dst;
  const auto nothing = [] { return py::cast(at::empty({0}, at::kFloat)); };
  return py::make_tuple(dst, nothing(), nothing());
}

py::object Handlers::batch_norm_of_batch(const py::tuple& args) const {
  static const auto op = operator_of<decltype(batch_norm_statistics_cpu)>("torch_blocked::batch_norm_statistics");
  const auto norm = read_batch_norm(args[0], args[1], args[2], args[3], args[4]);
  double momentum, eps;
  if (!norm || !read_float(args[6], momentum) || !read_float(args[7], eps)) return not_implemented();
  // The vectors say in what precision the batch's are kept, without any src does.
  const bool has_vectors = norm->weight || norm->bias || norm->mean;
  if (!has_vectors && norm->src.physical.scalar_type() != at::kFloat) return not_implemented();
  const int64_t channels = norm->src.sizes()[1], count = norm->src.tensor.numel() / channels;
  const auto [mean, var] = unlocked([&] { return op.call(norm->src.physical, channels); });
  if (norm->mean) {
    // Not lerp_, by whose difference infinities become NaN.
    norm->mean->mul_(1 - momentum).add_(mean, momentum);
    norm->var->mul_(1 - momentum).add_(var.mul(count).div(count - 1), momentum);  // of one value NaN, as PyTorch's
  }
  const at::Tensor invstd = at::rsqrt(var.add(eps)), dst = norm->normalize(mean, var, eps);
  return py::make_tuple(type_.make(dst, norm->src.blocking, norm->src.sizes()), mean, invstd);
}

py::object Handlers::native_batch_norm_backward(const py::tuple& args) const {
  static const auto op = operator_of<decltype(batch_norm_backward_cpu)>("torch_blocked::batch_norm_backward");
  const bool training = args[7].ptr() != Py_False, by_running = !training && !args[3].is_none() && !args[4].is_none();
  const int at = by_running ? 3 : 5;  // mean and inverse deviation of the batch, or mean and variance
  const auto norm = read_batch_norm(args[1], args[2], py::none(), args[at], args[at + 1]);
  const auto diff_dst = type_.read(args[0]);
  double eps;
  std::array<bool, 3> wanted;
  if (!norm || !norm->mean || !diff_dst || diff_dst->blocks != norm->src.blocks ||
      diff_dst->sizes() != norm->src.sizes() || diff_dst->physical.scalar_type() != norm->src.physical.scalar_type() ||
      !read_float(args[8], eps) || !read_mask(args[9], wanted))
    return not_implemented();
  const auto [diff_src, diff_weight, diff_bias] = unlocked([&] {
    const at::Tensor invstd = by_running ? at::rsqrt(norm->var->add(eps)) : *norm->var;
    return op.call(diff_dst->physical, norm->src.physical, norm->weight, *norm->mean, invstd, training);
  });
  const py::object nothing = py::none();
  return py::make_tuple(wanted[0] ? type_.make(diff_src, norm->src.blocking, norm->src.sizes()) : nothing,
                        wanted[1] ? py::cast(diff_weight) : nothing, wanted[2] ? py::cast(diff_bias) : nothing);
}

}  // namespace torch_blocked
