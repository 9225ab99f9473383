#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros_like.h>

#include "../library/operators.h"
#include "arguments.h"
#include "handlers.h"

namespace torch_blocked {

// Those of the batch, of which there are none by the running ones.
static void push_no_statistics(Stack& answers) {
  for (int i = 0; i < 2; i++) answers.emplace_back(at::empty({0}, at::kFloat));
}

// Of float32, a value for each channel; those of the running statistics both or none.
struct Handlers::BatchNormVectors {
  OptionalTensor weight, bias, mean, var;
};

// Blocked by channels.
struct Handlers::BatchNorm : BatchNormVectors {
  Operand src;

  at::Tensor normalize(const at::Tensor& by_mean, const at::Tensor& by_var, double eps) const {
    static const auto op = operator_of<decltype(batch_norm_cpu)>("torch_blocked::batch_norm");
    return op.call(src.physical, weight, bias, by_mean, by_var, eps);
  }
};

// The variance, or the inverse deviation, follows the mean.
std::optional<Handlers::BatchNormVectors> Handlers::read_vectors(Arguments args, int64_t channels,
                                                                 std::optional<size_t> weight,
                                                                 std::optional<size_t> bias, size_t mean) const {
  BatchNormVectors vectors;
  const auto read = [&](std::optional<size_t> at, OptionalTensor& vector) {
    return !at || (read_vector(type_, args[*at], at::kFloat, vector) &&
                   (!vector || vector->sizes() == at::IntArrayRef(channels)));
  };
  const bool has_vectors = read(weight, vectors.weight) && read(bias, vectors.bias) && read(mean, vectors.mean) &&
                           read(mean + 1, vectors.var) && bool(vectors.mean) == bool(vectors.var);
  return has_vectors ? std::optional(std::move(vectors)) : std::nullopt;
}

std::optional<Handlers::BatchNorm> Handlers::read_batch_norm(Arguments args, size_t src, std::optional<size_t> weight,
                                                             std::optional<size_t> bias, size_t mean) const {
  auto x = read_tensor(type_, args[src]);
  if (!x || !is_blocked_by_channels(*x) || !is_precision(x->physical.scalar_type()) || !x->tensor.numel())
    return std::nullopt;
  auto vectors = read_vectors(args, x->sizes()[1], weight, bias, mean);
  return vectors ? std::optional(BatchNorm{std::move(*vectors), std::move(*x)}) : std::nullopt;
}

// As the scale and the shift of a convolution that waits.
bool Handlers::batch_norm_later(Arguments args, Stack& answers) const {
  using ScaleShift = decltype(batch_norm_scale_shift_cpu);
  static const auto op = operator_of<ScaleShift>("torch_blocked::batch_norm_scale_shift");
  const bool training = args[5].toBool();
  const auto waiting = training ? nullptr : Deferred::waiting(args[0]);
  if (!waiting) return false;
  ConvolutionCall call = waiting->call();
  if (!call.blocking || call.has_post_ops()) return false;
  const auto vectors = read_vectors(args, call.size()[1], 1, 2, 3);
  if (!vectors || !vectors->mean) return false;
  const auto [scale, shift] =
      op.call(vectors->weight, vectors->bias, *vectors->mean, *vectors->var, args[7].toDouble());
  call.scale = scale, call.shift = shift;
  const auto step = [scale = scale, shift = shift](const at::Tensor& src) {
    const at::Tensor zeros = at::zeros_like(shift), ones = at::ones_like(scale);
    return operator_of<decltype(batch_norm_cpu)>("torch_blocked::batch_norm").call(src, scale, shift, zeros, ones, 0);
  };
  at::Tensor dst = waiting->then(type_, std::move(call), step);
  if (dst.defined()) answers.emplace_back(std::move(dst));
  return !answers.empty();
}

bool Handlers::native_batch_norm_later(Arguments args, Stack& answers) const {
  if (!batch_norm_later(args, answers)) return false;
  push_no_statistics(answers);
  return true;
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
  push_no_statistics(answers);
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
