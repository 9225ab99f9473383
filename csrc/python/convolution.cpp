#include <ATen/ops/sum.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>

#include "../library/operators.h"
#include "arguments.h"
#include "handlers.h"

namespace torch_blocked {

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

}  // namespace

int64_t weight_reorders() {
  static const auto op = operator_of<int64_t()>("torch_blocked::weight_reorders");
  return answer(op);
}

// From `window` on the arguments are the stride, the padding and the dilation.
std::optional<Handlers::Convolution> Handlers::read_convolution(py::handle src, py::handle weight,
                                                                const py::tuple& args, size_t window,
                                                                py::handle groups) const {
  auto x = type_.read(src), w = type_.read(weight);
  if (!x || !w || torch::jit::tracer::isTracing()) return std::nullopt;
  const int64_t spatial = int64_t(x->sizes().size()) - 2;
  Convolution c{std::move(*x), std::move(*w), {}, {}, {}, 1, 0};
  Numbers number;
  if (!read_numbers(argument(args, window), spatial, 1, 1, c.stride) ||
      !read_numbers(argument(args, window + 1), spatial, 0, 0, c.padding) ||
      !read_numbers(argument(args, window + 2), spatial, 1, 1, c.dilation) || !read_number(groups, 1, 1, number))
    return std::nullopt;
  c.groups = number[0];
  if (!has_kernel(c.src, c.weight, c.groups)) return std::nullopt;
  c.block = block_of(c.src, c.weight, c.groups);
  return c.block ? std::optional(std::move(c)) : std::nullopt;
}

// What `body`, an operator, gives; weights that it has reordered are recorded.
at::Tensor Handlers::recorded(py::handle weight, int64_t block, const std::function<at::Tensor()>& body) const {
  const int64_t before = weight_reorders();
  at::Tensor dst = unlocked(body);
  if (weight_reorders() != before) on_packing_(weight, block);
  return dst;
}

py::object Handlers::convolution(const py::tuple& args) const {
  const bool transposed = args[6].ptr() != Py_False;
  return transposed ? not_implemented() : convolve(args, args[8]);
}

py::object Handlers::conv2d(const py::tuple& args) const {
  const auto src = type_.read(args[0]);
  const bool has_batch = src && src->sizes().size() == 4;
  return has_batch ? convolve(args, argument(args, 6)) : not_implemented();
}

py::object Handlers::convolve(const py::tuple& args, py::handle groups) const {
  static const auto op = operator_of<decltype(convolution_cpu)>("torch_blocked::convolution");
  const auto c = read_convolution(args[0], args[1], args, 3, groups);
  OptionalTensor bias;
  if (!c || !read_vector(type_, argument(args, 2), c->src.physical.scalar_type(), bias) ||
      (bias && bias->sizes() != c->weight.sizes().slice(0, 1)))
    return not_implemented();
  const at::Tensor dst = recorded(args[1], c->block, [&] {
    return op.call(c->src.physical, c->src.list(), c->weight.physical, c->weight.sizes(), c->weight.list(), bias,
                   c->stride, c->padding, c->dilation, c->groups, c->block, {}, {}, {}, "none", 0, false, {});
  });
  c10::DimVector size(dst.sizes().begin(), dst.sizes().end() - 1);
  size[1] = c->weight.sizes()[0];
  return type_.make(dst, c->src.is_blocked() ? c->src.blocking : py::object(channels_[py::int_(c->block)]), size);
}

py::object Handlers::convolution_backward(const py::tuple& args) const {
  const bool transposed = args[7].ptr() != Py_False;
  const auto diff_dst = type_.read(args[0]);
  const auto c = transposed ? std::nullopt : read_convolution(args[1], args[2], args, 4, args[9]);
  std::array<bool, 3> wanted;
  if (!c || !diff_dst || diff_dst->block(1) != c->block || !is_blocked_by_channels(*diff_dst) ||
      diff_dst->physical.scalar_type() != c->src.physical.scalar_type() ||
      diff_dst->sizes().size() != c->src.sizes().size() || !c->weight.is_blocked() || !read_mask(args[10], wanted) ||
      (wanted[0] && !c->src.is_blocked()))
    return not_implemented();
  const py::object nothing = py::none();
  return py::make_tuple(wanted[0] ? diff_src(*c, *diff_dst, args[2]) : nothing,
                        wanted[1] ? diff_weight(*c, *diff_dst) : nothing, wanted[2] ? diff_bias(*diff_dst) : nothing);
}

py::object Handlers::diff_src(const Convolution& c, const Operand& diff_dst, py::handle weight) const {
  static const auto op = operator_of<decltype(convolution_transpose_cpu)>("torch_blocked::convolution_transpose");
  const Numbers rest =
      output_padding(c.stride, c.padding, c.dilation, c.src.sizes(), c.weight.sizes(), diff_dst.sizes());
  const at::Tensor diff = recorded(weight, c.block, [&] {
    return op.call(diff_dst.physical, diff_dst.list(), c.weight.physical, c.weight.sizes(), c.weight.list(), {},
                   c.stride, c.padding, rest, c.dilation, c.groups, c.block, {}, {}, {}, "none", 0, false);
  });
  return type_.make(diff, c.src.blocking, c.src.sizes());
}

py::object Handlers::diff_weight(const Convolution& c, const Operand& diff_dst) const {
  static const auto op =
      operator_of<decltype(convolution_weight_gradient_cpu)>("torch_blocked::convolution_weight_gradient");
  const c10::DimVector order = outer_order(c.weight);
  const at::Tensor diff = unlocked([&] {
    return op.call(c.src.physical, c.src.list(), diff_dst.physical, c.weight.sizes(), order, c.weight.list(), c.stride,
                   c.padding, c.dilation, c.groups);
  });
  return type_.make(diff, c.weight.blocking, c.weight.sizes());
}

// Over each image first: ATen is several times slower over axes that are not neighbours.
py::object Handlers::diff_bias(const Operand& diff_dst) const {
  c10::DimVector spatial(diff_dst.sizes().size() - 2);
  std::iota(spatial.begin(), spatial.end(), 2);
  return py::cast(unlocked([&] {
    const at::Tensor sums = at::sum(diff_dst.physical, spatial, false, at::kFloat).sum(0).flatten();
    return sums.slice(0, 0, diff_dst.sizes()[1]).to(diff_dst.physical.scalar_type(), false, /*copy=*/true);
  }));
}

}  // namespace torch_blocked
