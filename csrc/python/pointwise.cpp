#include "pointwise.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../library/operators.h"
#include "arguments.h"

namespace torch_blocked {
namespace {

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

}  // namespace

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
  if (args.size() > arguments.size()) return false;
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
