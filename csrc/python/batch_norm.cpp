#include <ATen/ops/empty.h>
#include <ATen/ops/rsqrt.h>

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
    return op.call(src.physical, weight, bias, by_mean, by_var, eps);
  }
};

// The variance, or the inverse deviation, follows the mean.
std::optional<Handlers::BatchNorm> Handlers::read_batch_norm(Arguments args, size_t src, std::optional<size_t> weight,
                                                             std::optional<size_t> bias, size_t mean) const {
  auto x = read_tensor(type_, args[src]);
  if (!x || !is_blocked_by_channels(*x) || !is_precision(x->physical.scalar_type()) || !x->tensor.numel())
    return std::nullopt;
  BatchNorm norm{std::move(*x), {}, {}, {}, {}};
  const auto read = [&](std::optional<size_t> at, OptionalTensor& vector) {
    return !at || (read_vector(type_, args[*at], at::kFloat, vector) && fits(vector, norm.src));
  };
  const bool has_vectors = read(weight, norm.weight) && read(bias, norm.bias) && read(mean, norm.mean) &&
                           read(mean + 1, norm.var) && bool(norm.mean) == bool(norm.var);
  return has_vectors ? std::optional(std::move(norm)) : std::nullopt;
}

bool Handlers::batch_norm(Arguments args, Stack& answers) const {
  const bool training = args[5].toBool();
  const auto norm = training ? std::nullopt : read_batch_norm(args, 0, 1, 2, 3);
  if (!norm || !norm->mean) return false;
  push(norm->normalize(*norm->mean, *norm->var, args[7].toDouble()), norm->src, norm->src.sizes(), answers);
  return true;
}

bool Handlers::native_batch_norm(Arguments args, Stack& answers) const {
  const bool training = args[5].toBool();
  if (training) return batch_norm_of_batch(args, answers);
  if (!batch_norm(args, answers)) return false;
  answers.emplace_back(at::empty({0}, at::kFloat));
  answers.emplace_back(at::empty({0}, at::kFloat));
  return true;
}

bool Handlers::batch_norm_of_batch(Arguments args, Stack& answers) const {
  static const auto op = operator_of<decltype(batch_norm_statistics_cpu)>("torch_blocked::batch_norm_statistics");
  const auto norm = read_batch_norm(args, 0, 1, 2, 3);
  if (!norm) return false;
  // The vectors say in what precision the batch's are kept, without any src does.
  const bool has_vectors = norm->weight || norm->bias || norm->mean;
  if (!has_vectors && norm->src.physical.scalar_type() != at::kFloat) return false;
  const double momentum = args[6].toDouble(), eps = args[7].toDouble();
  const int64_t channels = norm->src.sizes()[1], count = norm->src.tensor.numel() / channels;
  const auto [mean, var] = op.call(norm->src.physical, channels);
  if (norm->mean) {
    // Not lerp_, by whose difference infinities become NaN.
    norm->mean->mul_(1 - momentum).add_(mean, momentum);
    norm->var->mul_(1 - momentum).add_(var.mul(count).div(count - 1), momentum);  // of one value NaN, as PyTorch's
  }
  const at::Tensor invstd = at::rsqrt(var.add(eps));
  push(norm->normalize(mean, var, eps), norm->src, norm->src.sizes(), answers);
  answers.emplace_back(mean);
  answers.emplace_back(invstd);
  return true;
}

bool Handlers::native_batch_norm_backward(Arguments args, Stack& answers) const {
  static const auto op = operator_of<decltype(batch_norm_backward_cpu)>("torch_blocked::batch_norm_backward");
  const bool training = args[7].toBool(), by_running = !training && !args[3].isNone() && !args[4].isNone();
  const int at = by_running ? 3 : 5;  // mean and inverse deviation of the batch, or mean and variance
  const auto norm = read_batch_norm(args, 1, 2, std::nullopt, at);
  const auto diff_dst = read_tensor(type_, args[0]);
  if (!norm || !norm->mean || !diff_dst || diff_dst->blocking != norm->src.blocking ||
      diff_dst->sizes() != norm->src.sizes() || diff_dst->physical.scalar_type() != norm->src.physical.scalar_type())
    return false;
  const at::Tensor invstd = by_running ? at::rsqrt(norm->var->add(args[8].toDouble())) : *norm->var;
  const auto [diff_src, diff_weight, diff_bias] =
      op.call(diff_dst->physical, norm->src.physical, norm->weight, *norm->mean, invstd, training);
  const auto [wants_src, wants_weight, wants_bias] = read_mask(args[9]);
  answers.emplace_back(wants_src ? type_.make(diff_src, *norm->src.blocking, norm->src.sizes()) : at::Tensor());
  answers.emplace_back(wants_weight ? diff_weight : at::Tensor());
  answers.emplace_back(wants_bias ? diff_bias : at::Tensor());
  return true;
}

}  // namespace torch_blocked
