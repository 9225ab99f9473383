#include "pointwise.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../library/operators.h"
#include "arguments.h"

namespace torch_blocked {
namespace {

// Broadcasts `size`, of operands blocked as `x`, with x's; false where a blocked axis broadcasts.
bool broadcast(const Operand& x, c10::DimVector& size) {
  if (x.sizes().size() != size.size()) return false;
  for (size_t d = 0; d < size.size(); d++) {
    const int64_t m = size[d], n = x.sizes()[d];
    if (m != n && (x.block(d) > 1 || (m != 1 && n != 1))) return false;
    if (m == 1) size[d] = n;
  }
  return true;
}

// A plain tensor as it broadcasts against `like`, its physical one a view: of one element along a blocked axis, which
// it may have been expanded to, or, along that of channels in whole blocks, of a value each, with nothing behind it.
// None: it has to be reordered.
std::optional<Operand> laid_out(Operand plain, const Operand& like) {
  const int64_t dims = like.tensor.dim();
  if (plain.tensor.dim() > dims) return std::nullopt;
  while (plain.tensor.dim() < dims) plain.tensor = plain.tensor.unsqueeze(0);
  plain.physical = plain.tensor;
  for (size_t i = 0; i < like.blocks.size(); i += 2) {
    const int64_t axis = like.blocks[i], block = like.blocks[i + 1], count = plain.sizes()[axis];
    if (count == 1 || plain.tensor.stride(axis) == 0) {
      plain.physical = plain.physical.narrow(axis, 0, std::min<int64_t>(count, 1)).unsqueeze(-1);
    } else {
      const at::IntArrayRef behind = plain.sizes().slice(axis + 1);
      const bool is_vector = std::all_of(behind.begin(), behind.end(), [](int64_t n) { return n == 1; });
      if (like.blocks.size() > 2 || !is_vector || count % block) return std::nullopt;
      plain.physical = plain.physical.unflatten(axis, {count / block, block}).movedim(axis + 1, -1);
    }
  }
  return plain;
}

// A real number in place of a tensor, as the dispatcher makes one of it; none: another thing.
std::optional<at::Tensor> read_number(py::handle object) {
  int overflow = 0;
  if (PyFloat_CheckExact(object.ptr())) return at::native::wrapped_scalar_tensor(PyFloat_AS_DOUBLE(object.ptr()));
  if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
  const int64_t value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  return overflow ? std::nullopt : std::optional(at::native::wrapped_scalar_tensor(value));
}

}  // namespace

Pointwise::Pointwise(py::object type, const std::string& name, const std::string& overload, const std::string& out,
                     const std::vector<double>& rest, int64_t pooled, bool keeps_zero)
    : type_(std::move(type)),
      op_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())),
      rest_(rest),
      pooled_(pooled),
      keeps_zero_(keeps_zero),
      in_place_(op_.schema().is_mutable()) {
  if (!out.empty()) out_ = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), out.c_str());
}

// The arguments with the physical tensors in place of the blocked ones, and what these broadcast to.
struct Pointwise::Call {
  std::optional<Operand> first, whole;  // the first blocked one, and the first as large as all broadcast together
  c10::DimVector size;
  torch::jit::Stack stack;
  bool keeps_padding = true;  // all are blocked: of zeros in the padding

  // False where it is none for the handlers here, or does not fit those before.
  bool add(const BlockedType& type, py::handle object) {
    if (first)
      if (const auto number = read_number(object)) return push(*number, false);
    std::optional<Operand> operand = type.read(object);
    if (!operand || !(operand->is_blocked() || first) || !operand->physical.is_floating_point()) return false;
    if (!first) {
      size = operand->sizes();
      whole = first = std::move(operand);
      return push(first->physical, true);
    }
    const bool is_blocked = operand->is_blocked();
    if (is_blocked ? operand->blocks != first->blocks : !(operand = laid_out(std::move(*operand), *first)))
      return false;
    if (operand->physical.scalar_type() != first->physical.scalar_type() || !broadcast(*operand, size)) return false;
    push(operand->physical, is_blocked);
    if (is_blocked && whole->sizes() != at::IntArrayRef(size)) whole = std::move(operand);
    return true;
  }

  bool push(const at::Tensor& physical, bool is_blocked) {
    stack.emplace_back(physical);
    keeps_padding = keeps_padding && is_blocked;
    return true;
  }
};

bool Pointwise::read(const py::tuple& args, Call& call) const {
  const auto& arguments = op_.schema().arguments();
  if (args.size() > arguments.size()) return false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& type = arguments[i].type();
    if (i >= args.size()) {
      if (i - args.size() < rest_.size())
        call.stack.emplace_back(rest_[i - args.size()]);
      else if (arguments[i].default_value())
        call.stack.push_back(*arguments[i].default_value());
      else
        return false;
    } else if (type->kind() != c10::TypeKind::TensorType) {
      call.keeps_padding = false;
      call.stack.push_back(torch::jit::toIValue(args[i], type));
      if (call.stack.back().isComplexDouble()) return false;  // so is the answer
    } else if (!call.add(type_, args[i])) {
      return false;
    }
  }
  const bool clears_padding = call.first->is_padded() && !(keeps_zero_ && call.keeps_padding);
  return !clears_padding && !(in_place_ && call.size != call.first->sizes());
}

py::object Pointwise::operator()(const py::tuple& args) const {
  static const auto empty_like = operator_of<decltype(empty_like_cpu)>("torch_blocked::empty_like");
  Call call;
  if (!read(args, call)) return not_implemented();
  const at::Tensor& whole = call.whole->physical;
  const bool pooled =
      out_ && call.whole->sizes() == at::IntArrayRef(call.size) && whole.numel() >= pooled_ && whole.is_contiguous();
  const at::Tensor dst = unlocked([&] {
    if (pooled) call.stack.emplace_back(empty_like.call(whole));
    (pooled ? *out_ : op_).callBoxed(call.stack);
    return call.stack[0].toTensor();
  });
  if (!in_place_) return type_.make(dst, call.first->blocking, call.size);
  const at::Tensor& src = call.first->physical;
  if (!src.is_inference()) src.unsafeGetTensorImpl()->bump_version();
  return args[0];
}

}  // namespace torch_blocked
