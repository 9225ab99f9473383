#include "handlers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "../library/operators.h"

namespace py = pybind11;

namespace torch_blocked {
namespace {

using Numbers = c10::SmallVector<int64_t, 3>;
using OptionalTensor = std::optional<at::Tensor>;

py::object not_implemented() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Of an operator without arguments, whatever modes are on: they would have it answer them.
int64_t answer(const c10::TypedOperatorHandle<int64_t()>& op) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// What `body` gives; other threads may run meanwhile.
template <class Body>
at::Tensor unlocked(const Body& body) {
  const py::gil_scoped_release others_may_run;
  return body();
}

// None where it is left out: it has its default.
py::handle argument(const py::tuple& args, size_t i) { return i < args.size() ? args[i].ptr() : Py_None; }

// A number, appended; false where it is another thing or less than `least`.
bool read_number(py::handle object, int64_t least, int64_t otherwise, Numbers& numbers) {
  if (!object.is_none() && !PyLong_CheckExact(object.ptr())) return false;
  int overflow = 0;
  numbers.push_back(object.is_none() ? otherwise : PyLong_AsLongLongAndOverflow(object.ptr(), &overflow));
  return !overflow && numbers.back() >= least;
}

// The numbers of a list, `count` or one for all; false where they are others, or any is less than `least`.
bool read_numbers(py::handle list, int64_t count, int64_t least, int64_t otherwise, Numbers& numbers) {
  if (list.is_none()) {
    numbers.push_back(otherwise);
  } else {
    if (!PyList_CheckExact(list.ptr())) return false;
    for (const py::handle item : py::reinterpret_borrow<py::list>(list))
      if (!read_number(item, least, least, numbers)) return false;
  }
  if (numbers.size() == 1) numbers.resize(std::max<int64_t>(count, 0), numbers[0]);
  return int64_t(numbers.size()) == count;
}

// A plain vector, or none; false where it is another thing.
bool read_vector(const BlockedType& type, py::handle object, at::ScalarType dtype, OptionalTensor& vector) {
  if (object.is_none()) return true;
  auto operand = type.read(object);
  if (!operand || operand->is_blocked() || operand->physical.scalar_type() != dtype) return false;
  vector = std::move(operand->physical);
  return true;
}

bool is_precision(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

bool is_blocked_by_channels(const Operand& x) { return x.blocks.size() == 2 && x.blocks[0] == 1; }

bool is_kernel_block(int64_t block) {
  static const auto isa_block = operator_of<int64_t()>("torch_blocked::isa_block");
  return block == 8 || (block == 16 && answer(isa_block) == 16);
}

// The channels in a block of a convolution's dst; 0 where the kernels do not read src as it lies.
int64_t block_of(const Operand& src, const Operand& weight, int64_t groups) {
  const int64_t block = src.is_blocked() ? src.block(1) : weight.block(0);
  if (!is_kernel_block(block)) return 0;
  const bool as_it_lies = src.is_blocked() ? is_blocked_by_channels(src) : groups == 1 && src.sizes()[1] < block;
  return as_it_lies ? block : 0;
}

bool has_kernel(const Operand& src, const Operand& weight, const OptionalTensor& bias, int64_t groups) {
  const auto x = src.sizes(), w = weight.sizes();
  const auto none = [](at::IntArrayRef size) { return std::find(size.begin(), size.end(), 0) != size.end(); };
  const at::ScalarType dtype = src.physical.scalar_type();
  return x.size() == w.size() && x.size() >= 3 && x.size() <= 5 && is_precision(dtype) &&
         weight.physical.scalar_type() == dtype && !none(x.slice(1)) && !none(w) && groups > 0 &&
         x[1] == w[1] * groups && w[0] % groups == 0 && (!bias || bias->sizes() == w.slice(0, 1));
}

// The size of `a` and `b` broadcast together, which are blocked alike; false where a blocked axis broadcasts.
bool broadcast(const Operand& a, const Operand& b, c10::DimVector& size) {
  if (a.blocks != b.blocks || a.sizes().size() != b.sizes().size()) return false;
  for (size_t d = 0; d < size.size(); d++) {
    const int64_t m = size[d], n = b.sizes()[d];
    if (m != n && (a.block(d) > 1 || (m != 1 && n != 1))) return false;
    if (m == 1) size[d] = n;
  }
  return true;
}

// Whether `b` can be joined to `a` along an axis.
bool can_follow(const Operand& a, const Operand& b, size_t axis) {
  if (a.blocks != b.blocks || a.physical.scalar_type() != b.physical.scalar_type() ||
      a.sizes().size() != b.sizes().size())
    return false;
  for (size_t d = 0; d < a.sizes().size(); d++)
    if (d != axis && a.sizes()[d] != b.sizes()[d]) return false;
  return b.sizes()[axis] > 0;
}

}  // namespace

int64_t weight_reorders() {
  static const auto op = operator_of<int64_t()>("torch_blocked::weight_reorders");
  return answer(op);
}

Handlers::Handlers(py::object type, py::dict channels, py::object on_packing)
    : type_(std::move(type)), channels_(std::move(channels)), on_packing_(std::move(on_packing)) {}

py::object Handlers::convolution(const py::tuple& args) const {
  const bool transposed = args[6].ptr() != Py_False;
  return transposed ? not_implemented() : convolve(args, args[8]);
}

py::object Handlers::conv2d(const py::tuple& args) const {
  const auto src = type_.read(args[0]);
  const bool has_batch = src && src->sizes().size() == 4;
  return has_batch ? convolve(args, argument(args, 6)) : not_implemented();
}

py::object Handlers::convolve(const py::tuple& args, py::handle number_of_groups) const {
  static const auto op = operator_of<decltype(convolution_cpu)>("torch_blocked::convolution");
  const auto src = type_.read(args[0]), weight = type_.read(args[1]);
  if (!src || !weight || torch::jit::tracer::isTracing()) return not_implemented();
  const int64_t spatial = int64_t(src->sizes().size()) - 2;
  Numbers stride, padding, dilation, groups;
  OptionalTensor bias;
  if (!read_numbers(argument(args, 3), spatial, 1, 1, stride) ||
      !read_numbers(argument(args, 4), spatial, 0, 0, padding) ||
      !read_numbers(argument(args, 5), spatial, 1, 1, dilation) || !read_number(number_of_groups, 1, 1, groups) ||
      !read_vector(type_, argument(args, 2), src->physical.scalar_type(), bias) ||
      !has_kernel(*src, *weight, bias, groups[0]))
    return not_implemented();
  const int64_t block = block_of(*src, *weight, groups[0]), reorders = weight_reorders();
  if (!block) return not_implemented();

  const at::Tensor dst = unlocked([&] {
    return op.call(src->physical, at::IntArrayRef(src->blocks), weight->physical, weight->sizes(),
                   at::IntArrayRef(weight->blocks), bias, stride, padding, dilation, groups[0], block, {}, {}, {},
                   "none", 0, false, {});
  });
  if (weight_reorders() != reorders) on_packing_(args[1], block);
  c10::DimVector size(dst.sizes().begin(), dst.sizes().end() - 1);
  size[1] = weight->sizes()[0];
  return type_.make(dst, src->is_blocked() ? src->blocking : py::object(channels_[py::int_(block)]), size);
}

py::object Handlers::native_batch_norm(const py::tuple& args) const {
  const bool training = args[5].ptr() != Py_False;
  const py::object dst = training ? not_implemented() : normalize(args, args[7]);
  if (dst.ptr() == Py_NotImplemented) return dst;
  const auto nothing = [] { return py::cast(at::empty({0}, at::kFloat)); };
  return py::make_tuple(dst, nothing(), nothing());
}

py::object Handlers::batch_norm(const py::tuple& args) const {
  const bool training = args[5].ptr() != Py_False;
  return training ? not_implemented() : normalize(args, args[7]);
}

py::object Handlers::normalize(const py::tuple& args, py::handle eps) const {
  static const auto op = operator_of<decltype(batch_norm_cpu)>("torch_blocked::batch_norm");
  const auto src = type_.read(args[0]);
  OptionalTensor weight, bias, mean, var;
  if (!src || !PyFloat_CheckExact(eps.ptr()) || !is_blocked_by_channels(*src) ||
      !is_precision(src->physical.scalar_type()) || !src->tensor.numel() ||
      !read_vector(type_, args[1], at::kFloat, weight) || !read_vector(type_, args[2], at::kFloat, bias) ||
      !read_vector(type_, args[3], at::kFloat, mean) || !read_vector(type_, args[4], at::kFloat, var) || !mean || !var)
    return not_implemented();
  const double epsilon = eps.cast<double>();
  const at::Tensor dst = unlocked([&] { return op.call(src->physical, weight, bias, *mean, *var, epsilon); });
  return type_.make(dst, src->blocking, src->sizes());
}

py::object Handlers::mean(const py::tuple& args) const {
  Numbers axes;
  const bool keeps_dims = argument(args, 2).ptr() == Py_True;
  if (!keeps_dims || !read_numbers(args[1], 2, -2, 0, axes)) return not_implemented();
  const auto is = [&](int64_t h, int64_t w) { return std::minmax(axes[0], axes[1]) == std::minmax(h, w); };
  return is(2, 3) || is(-2, -1) || is(2, -1) || is(-2, 3) ? average(args[0], {1, 1}) : not_implemented();
}

py::object Handlers::adaptive_avg_pool2d(const py::tuple& args) const {
  Numbers size;
  return read_numbers(args[1], 2, 1, 0, size) ? average(args[0], size) : not_implemented();
}

py::object Handlers::average(py::handle object, at::IntArrayRef size) const {
  static const auto op = operator_of<decltype(pool_cpu)>("torch_blocked::pool");
  const auto src = type_.read(object);
  if (!src || !is_blocked_by_channels(*src) || !(src->blocks[1] == 8 || src->blocks[1] == 16) ||
      src->sizes().size() != 4 || src->physical.scalar_type() != at::kFloat || !src->tensor.numel())
    return not_implemented();
  const at::Tensor dst = unlocked([&] {
    const auto windows = c10::fromIntArrayRefSlow(size);
    return std::get<0>(op.call(src->physical, src->sizes()[1], windows, "avg", {}, {}, {}, {}, true, {}, false));
  });
  return type_.make(dst, src->blocking, {src->sizes()[0], src->sizes()[1], size[0], size[1]});
}

py::object Handlers::cat(const py::tuple& args) const {
  if (!PyList_CheckExact(args[0].ptr())) return not_implemented();
  std::optional<Operand> first;
  std::vector<at::Tensor> parts;
  c10::DimVector size;
  Numbers axis;
  for (const py::handle object : py::reinterpret_borrow<py::list>(args[0])) {
    auto part = type_.read(object);
    if (!part || !part->is_blocked()) return not_implemented();
    if (!first) {
      size = part->sizes();
      const int64_t ndim = size.size();
      if (!read_number(argument(args, 1), -ndim, 0, axis) || axis[0] >= ndim) return not_implemented();
      if (axis[0] < 0) axis[0] += ndim;
    } else {
      // What comes before is of whole blocks.
      if (!can_follow(*first, *part, axis[0]) || size[axis[0]] % first->block(axis[0])) return not_implemented();
      size[axis[0]] += part->sizes()[axis[0]];
    }
    parts.push_back(part->physical);
    if (!first) first = std::move(part);
  }
  if (!first) return not_implemented();
  const at::Tensor dst = unlocked([&] { return at::cat(parts, axis[0]); });
  return type_.make(dst, first->blocking, size);
}

Pointwise::Pointwise(py::object type, const std::string& name, const std::string& overload, const std::string& out,
                     int64_t pooled, bool keeps_zero)
    : type_(std::move(type)),
      op_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())),
      pooled_(pooled),
      keeps_zero_(keeps_zero),
      in_place_(op_.schema().is_mutable()) {
  if (!out.empty()) out_ = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), out.c_str());
}

// The arguments with the physical tensors in place of the blocked ones, and what these broadcast to.
struct Pointwise::Call {
  std::optional<Operand> first;
  c10::DimVector size;
  torch::jit::Stack stack;
  bool of_one_size = true, of_tensors_only = true;

  // False where it is no blocked tensor or does not fit those before.
  bool add(std::optional<Operand> operand) {
    if (!operand || !operand->is_blocked() || !operand->physical.is_floating_point()) return false;
    stack.emplace_back(operand->physical);
    if (!first) {
      size = operand->sizes();
      first = std::move(operand);
      return true;
    }
    of_one_size = of_one_size && operand->sizes() == first->sizes();
    return operand->physical.scalar_type() == first->physical.scalar_type() && broadcast(*first, *operand, size);
  }
};

bool Pointwise::read(const py::tuple& args, Call& call) const {
  const auto& arguments = op_.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& type = arguments[i].type();
    if (i >= args.size()) {
      if (!arguments[i].default_value()) return false;
      call.stack.push_back(*arguments[i].default_value());
    } else if (type->kind() != c10::TypeKind::TensorType) {
      call.of_tensors_only = false;
      call.stack.push_back(torch::jit::toIValue(args[i], type));
    } else if (!call.add(type_.read(args[i]))) {
      return false;
    }
  }
  const bool clears_padding = call.first->is_padded() && !(keeps_zero_ && call.of_tensors_only);
  return !clears_padding && !(in_place_ && call.size != call.first->sizes());
}

py::object Pointwise::operator()(const py::tuple& args) const {
  static const auto empty_like = operator_of<decltype(empty_like_cpu)>("torch_blocked::empty_like");
  Call call;
  if (!read(args, call)) return not_implemented();
  const at::Tensor& src = call.first->physical;
  const bool pooled = out_ && call.of_one_size && src.numel() >= pooled_ && src.is_contiguous();
  const at::Tensor dst = unlocked([&] {
    if (pooled) call.stack.emplace_back(empty_like.call(src));
    (pooled ? *out_ : op_).callBoxed(call.stack);
    return call.stack[0].toTensor();
  });
  if (!in_place_) return type_.make(dst, call.first->blocking, call.size);
  if (!src.is_inference()) src.unsafeGetTensorImpl()->bump_version();
  return args[0];
}

}  // namespace torch_blocked
