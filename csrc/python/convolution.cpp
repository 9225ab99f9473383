#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <numeric>

#include "../library/operators.h"
#include "arguments.h"
#include "handlers.h"

namespace torch_blocked {

namespace py = pybind11;

// What the forward and the backward have in common, as the operators take it.
struct Handlers::Convolution {
  Operand src, weight;
  Numbers stride, padding, dilation;
  int64_t groups, block;  // channels in a block of dst
};

namespace {

// The channels in a block of dst; 0 where the kernels do not read src as it lies.
int64_t block_of(const Operand& src, const Operand& weight, int64_t groups) {
  const int64_t block = src.is_blocked() ? src.block(1) : weight.block(0);
  if (!is_kernel_block(block)) return 0;
  const bool as_it_lies = src.is_blocked() ? is_blocked_by_channels(src) : groups == 1 && src.sizes()[1] < block;
  return as_it_lies ? block : 0;
}

bool has_kernel(const Operand& src, const Operand& weight, int64_t groups) {
  const auto x = src.sizes(), w = weight.sizes();
  const auto empty = [](at::IntArrayRef size) { return std::find(size.begin(), size.end(), 0) != size.end(); };
  const at::ScalarType dtype = src.physical.scalar_type();
  return x.size() == w.size() && x.size() >= 3 && x.size() <= 5 && is_precision(dtype) &&
         weight.physical.scalar_type() == dtype && !empty(x.slice(1)) && !empty(w) && x[1] == w[1] * groups &&
         w[0] % groups == 0;
}

// The outer axes from outermost to innermost in memory; the logical order wherever the strides allow it.
c10::DimVector outer_order(const Operand& x) {
  const at::IntArrayRef size = x.physical.sizes(), stride = x.physical.strides();
  c10::DimVector order(x.sizes().size()), told;
  std::iota(order.begin(), order.end(), 0);
  for (const int64_t d : order)
    if (size[d] != 1) told.push_back(stride[d]);
  if (!std::is_sorted(told.begin(), told.end(), std::greater<>()))
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::pair(-stride[a], size[a] <= 1) < std::pair(-stride[b], size[b] <= 1);
    });
  return order;
}

// The rows of src that the last window does not reach, of each spatial dim.
Numbers output_padding(const Numbers& stride, const Numbers& padding, const Numbers& dilation, at::IntArrayRef src,
                       at::IntArrayRef weight, at::IntArrayRef dst) {
  Numbers rest;
  for (size_t i = 0; i < stride.size(); i++)
    rest.push_back(src[i + 2] -
                   ((dst[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight[i + 2] - 1) + 1));
  return rest;
}

// Over each image first: ATen is several times slower over axes that are not neighbours.
at::Tensor diff_bias(const Operand& diff_dst) {
  c10::DimVector spatial(diff_dst.sizes().size() - 2);
  std::iota(spatial.begin(), spatial.end(), 2);
  const at::Tensor sums = at::sum(diff_dst.physical, spatial, false, at::kFloat).sum(0).flatten();
  return sums.slice(0, 0, diff_dst.sizes()[1]).to(diff_dst.physical.scalar_type(), false, /*copy=*/true);
}

// Whether the transposed convolution reads a weight as it lies: blocked by its channels alone.
bool reads_transposed(const Operand& weight) {
  const at::IntArrayRef blocks = weight.blocks();  // (axis, size), and the next
  for (size_t i = 0; i < blocks.size(); i += 2)
    if (blocks[i] > 1) return false;
  return true;
}

}  // namespace

int64_t weight_reorders() {
  static const auto op = operator_of<int64_t()>("torch_blocked::weight_reorders");
  return answer(op);
}

std::optional<Handlers::Convolution> Handlers::read_convolution(Arguments args, size_t src, size_t weight,
                                                                size_t window, size_t groups) const {
  auto x = read_tensor(type_, args[src]), w = read_tensor(type_, args[weight]);
  if (!x || !w || torch::jit::tracer::isTracing()) return std::nullopt;
  const int64_t spatial = int64_t(x->sizes().size()) - 2;
  Convolution c{std::move(*x), std::move(*w), {}, {}, {}, 1, 0};
  Numbers number;
  if (!read_window(args[window], spatial, 1, c.stride) || !read_window(args[window + 1], spatial, 0, c.padding) ||
      !read_window(args[window + 2], spatial, 1, c.dilation) || !read_number(args[groups], 1, number))
    return std::nullopt;
  c.groups = number[0];
  if (!has_kernel(c.src, c.weight, c.groups)) return std::nullopt;
  c.block = block_of(c.src, c.weight, c.groups);
  return c.block ? std::optional(std::move(c)) : std::nullopt;
}

void Handlers::record_packing(const at::Tensor& weight, const Blocking* blocking, int64_t block) const {
  const py::gil_scoped_acquire lock;
  on_packing_(wrapped(weight), blocking ? py::handle(blocking->object) : py::handle(Py_None), block);
}

std::optional<ConvolutionCall> Handlers::read_call(Arguments args, size_t groups, std::optional<size_t> spatial) const {
  auto c = read_convolution(args, 0, 1, 3, groups);
  OptionalTensor bias;
  if (!c || c->stride.size() != spatial.value_or(c->stride.size()) ||
      !read_vector(type_, args[2], c->src.physical.scalar_type(), bias) ||
      (bias && bias->sizes() != c->weight.sizes().slice(0, 1)))
    return std::nullopt;
  const auto has_block = [&](const Blocking* channels) { return channels->blocks.back() == c->block; };
  const Blocking* const blocking =
      c->src.is_blocked() ? c->src.blocking : *std::find_if(channels_.begin(), channels_.end(), has_block);
  return ConvolutionCall{ConvolutionCall::Bytes(c->src),
                         ConvolutionCall::Bytes(c->weight),
                         std::move(bias),
                         std::move(c->stride),
                         std::move(c->padding),
                         std::move(c->dilation),
                         c->groups,
                         c->block,
                         blocking};
}

bool Handlers::convolve(const std::optional<ConvolutionCall>& call, Stack& answers) const {
  if (!call) return false;
  const int64_t before = weight_reorders();
  const at::Tensor dst = call->run();
  if (weight_reorders() != before) record_packing(call->weight.physical, call->weight.blocking, call->block);
  answers.emplace_back(type_.make(dst, *call->blocking, call->size()));
  return true;
}

bool Handlers::convolve_later(std::optional<ConvolutionCall> call, Stack& answers) const {
  const auto on_packing = [self = shared_from_this()](const ConvolutionCall& call) {
    self->record_packing(call.weight.physical, call.weight.blocking, call.block);
  };
  const auto deferred = call ? Deferred::of(std::move(*call), on_packing) : nullptr;
  if (deferred) answers.emplace_back(deferred->answer(type_));
  return bool(deferred);
}

bool Handlers::convolution(Arguments args, Stack& answers) const {
  const bool transposed = args[6].toBool();
  return !transposed && convolve(read_call(args, 8), answers);
}

bool Handlers::conv2d(Arguments args, Stack& answers) const {
  return convolve(read_call(args, 6, /*spatial=*/2), answers);
}

bool Handlers::convolution_later(Arguments args, Stack& answers) const {
  const bool transposed = args[6].toBool();
  return !transposed && Deferred::may_wait() && convolve_later(read_call(args, 8), answers);
}

bool Handlers::conv2d_later(Arguments args, Stack& answers) const {
  return Deferred::may_wait() && convolve_later(read_call(args, 6, /*spatial=*/2), answers);
}

bool Handlers::convolution_backward(Arguments args, Stack& answers) const {
  const bool transposed = args[7].toBool();
  const auto diff_dst = read_tensor(type_, args[0]);
  const auto c = transposed ? std::nullopt : read_convolution(args, 1, 2, 4, 9);
  const auto [wants_src, wants_weight, wants_bias] = read_mask(args[10]);
  if (!c || !diff_dst || diff_dst->block(1) != c->block || !is_blocked_by_channels(*diff_dst) ||
      diff_dst->physical.scalar_type() != c->src.physical.scalar_type() ||
      diff_dst->sizes().size() != c->src.sizes().size() || !c->weight.is_blocked() ||
      (wants_src && !(c->src.is_blocked() && reads_transposed(c->weight))))
    return false;
  answers.emplace_back(wants_src ? diff_src(*c, *diff_dst) : at::Tensor());
  answers.emplace_back(wants_weight ? diff_weight(*c, *diff_dst) : at::Tensor());
  answers.emplace_back(wants_bias ? diff_bias(*diff_dst) : at::Tensor());
  return true;
}

at::Tensor Handlers::diff_src(const Convolution& c, const Operand& diff_dst) const {
  static const auto op = operator_of<decltype(convolution_transpose_cpu)>("torch_blocked::convolution_transpose");
  const Numbers rest =
      output_padding(c.stride, c.padding, c.dilation, c.src.sizes(), c.weight.sizes(), diff_dst.sizes());
  const int64_t before = weight_reorders();
  const at::Tensor diff =
      op.call(diff_dst.physical, diff_dst.blocks(), c.weight.physical, c.weight.sizes(), c.weight.blocks(), {},
              c.stride, c.padding, rest, c.dilation, c.groups, c.block, {}, {}, {}, "none", 0, false);
  if (weight_reorders() != before) record_packing(c.weight.physical, c.weight.blocking, c.block);
  return type_.make(diff, *c.src.blocking, c.src.sizes());
}

at::Tensor Handlers::diff_weight(const Convolution& c, const Operand& diff_dst) const {
  static const auto op =
      operator_of<decltype(convolution_weight_gradient_cpu)>("torch_blocked::convolution_weight_gradient");
  const at::Tensor diff = op.call(c.src.physical, c.src.blocks(), diff_dst.physical, c.weight.sizes(),
                                  outer_order(c.weight), c.weight.blocks(), c.stride, c.padding, c.dilation, c.groups);
  return type_.make(diff, *c.weight.blocking, c.weight.sizes());
}

}  // namespace torch_blocked
