#include "pointwise.h"

#include <cmath>

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
  for (size_t i = 0; i < like.blocks().size(); i += 2) {
    const int64_t axis = like.blocks()[i], block = like.blocks()[i + 1], count = plain.sizes()[axis];
    if (count == 1 || plain.tensor.stride(axis) == 0) {
      plain.physical = plain.physical.narrow(axis, 0, std::min<int64_t>(count, 1)).unsqueeze(-1);
    } else {
      const at::IntArrayRef behind = plain.sizes().slice(axis + 1);
      const bool is_vector = std::all_of(behind.begin(), behind.end(), [](int64_t n) { return n == 1; });
      if (like.blocks().size() > 2 || !is_vector || count % block) return std::nullopt;
      plain.physical = plain.physical.unflatten(axis, {count / block, block}).movedim(axis + 1, -1);
    }
  }
  return plain;
}

}  // namespace

static c10::OperatorHandle find(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

Pointwise::Pointwise(pybind11::object type, const std::string& name, const std::string& overload, const Computed& as,
                     const std::string& out, int64_t pooled, bool keeps_zero)
    : Quick(find(name, overload)),
      type_(std::move(type)),
      computed_(find(as.name, as.overload)),
      rest_(as.rest),
      pooled_(pooled),
      keeps_zero_(keeps_zero),
      in_place_(computed_.schema().is_mutable()) {
  if (!out.empty()) out_ = find(as.name, out);
}

// The arguments with the physical tensors in place of the blocked ones, and what these broadcast to.
struct Pointwise::Call {
  std::optional<Operand> first, whole;  // the first blocked one, and the first as large as all broadcast together
  c10::DimVector size;
  Stack stack;
  bool keeps_padding = true;  // all are blocked: of zeros in the padding

  // False where it is none for the handlers here, or does not fit those before.
  bool add(const BlockedType& type, const c10::IValue& value) {
    std::optional<Operand> operand = read_tensor(type, value);
    if (!operand || !(operand->is_blocked() || first)) return false;
    if (operand->physical.unsafeGetTensorImpl()->is_wrapped_number())
      return !operand->physical.is_complex() && operand->physical.scalar_type() != at::kBool &&
             push(operand->physical, false);
    if (!operand->physical.is_floating_point()) return false;
    if (!first) {
      size = operand->sizes();
      whole = first = std::move(operand);
      return push(first->physical, true);
    }
    const bool is_blocked = operand->is_blocked();
    if (is_blocked ? operand->blocking != first->blocking : !(operand = laid_out(std::move(*operand), *first)))
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

bool Pointwise::read(Arguments args, Call& call) const {
  const auto& given = op().schema().arguments();
  for (size_t i = 0; i < args.size(); i++) {
    if (given[i].type()->kind() == c10::TypeKind::TensorType) {
      if (!call.add(type_, args[i])) return false;
      continue;
    }
    const bool is_default = given[i].default_value() && args[i] == *given[i].default_value();
    if (!is_default && (given[i].kwarg_only() || args[i].isComplexDouble())) return false;
    call.keeps_padding = call.keeps_padding && is_default;
    call.stack.push_back(args[i]);
  }
  call.stack = all_arguments(std::move(call.stack));
  // Laid out as the one that all broadcast to; where there is none, strides of another may be the answer's.
  const Operand& laid_out = in_place_ ? *call.first : *call.whole;
  const bool clears_padding = call.first->is_padded() && !(keeps_zero_ && call.keeps_padding);
  return !clears_padding && laid_out.sizes() == at::IntArrayRef(call.size);
}

// Of what is computed: those given, and the rest.
Stack Pointwise::all_arguments(Stack given) const {
  for (const double number : rest_) given.emplace_back(number);
  const auto& taken = computed_.schema().arguments();
  for (size_t i = given.size(); i < taken.size(); i++) given.push_back(*taken[i].default_value());
  return given;
}

bool Pointwise::answer(Arguments args, Stack& answers) const {
  static const auto empty_like = operator_of<decltype(empty_like_cpu)>("torch_blocked::empty_like");
  Call call;
  if (!read(args, call)) return false;
  const at::Tensor& whole = call.whole->physical;
  const bool pooled = out_ && whole.numel() >= pooled_ && whole.is_contiguous();
  if (pooled) call.stack.emplace_back(empty_like.call(whole));
  (pooled ? *out_ : computed_).callBoxed(call.stack);
  if (in_place_) {
    const at::Tensor& src = call.first->physical;
    if (!src.is_inference()) src.unsafeGetTensorImpl()->bump_version();
    answers.push_back(args[0]);
  } else {
    answers.emplace_back(type_.make(call.stack[0].toTensor(), *call.first->blocking, call.size));
  }
  return true;
}

// ---- As post-ops of a convolution that waits

namespace {

// The activation of a convolution that an operator is, by its name without the underscore.
struct ActivationOf {
  const char *op, *activation;
  // Whether it is, by its further arguments, and the parameter.
  std::optional<double> (*parameter)(Arguments rest);
};

constexpr auto no_parameter = [](Arguments) { return std::optional(0.); };
constexpr ActivationOf activations[] = {
    {"relu", "relu", no_parameter},
    {"relu6", "relu6", no_parameter},
    {"hardtanh", "relu6",
     [](Arguments rest) {
       const bool is = rest[0].toScalar().toDouble() == 0 && rest[1].toScalar().toDouble() == 6;
       return is ? std::optional(0.) : std::nullopt;
     }},
    {"leaky_relu", "leaky_relu",
     [](Arguments rest) {  // an infinite slope makes NaN of the zeros in the padding
       const double slope = rest[0].toScalar().toDouble();
       return std::isfinite(slope) ? std::optional(slope) : std::nullopt;
     }},
    {"sigmoid", "sigmoid", no_parameter},
    {"silu", "silu", no_parameter},
    {"hardsigmoid", "hardsigmoid", no_parameter},
    {"hardswish", "hardswish", no_parameter},
    {"gelu", "gelu",
     [](Arguments rest) { return rest[0].toStringView() == "none" ? std::optional(0.) : std::nullopt; }},
};

}  // namespace

// args[at] is the convolution's answer; `stack`, the arguments of what is computed, gets the physical one of the other.
bool Pointwise::add_post_op(Arguments args, size_t at, ConvolutionCall& call, Stack& stack) const {
  std::string_view name = op().schema().name();
  name.remove_prefix(std::string_view("aten::").size());
  if (name.back() == '_') name.remove_suffix(1);
  if (name == "add") {
    const auto other = read_tensor(type_, args[1 - at]);
    if (!other || args[2] != 1 || call.residual || other->blocking != call.blocking ||
        other->sizes() != at::IntArrayRef(call.size()) || other->physical.scalar_type() != call.dtype() ||
        !other->physical.is_contiguous() || is_exposed(other->physical))
      return false;
    call.residual = other->physical, call.residual_last = call.activation != "none";
    stack[1 - at] = other->physical;
    return true;
  }
  for (const auto& [of, activation, parameter] : activations)
    if (name == of && call.activation == "none" && (keeps_zero_ || call.size()[1] % call.block == 0)) {
      const auto alpha = parameter(args.slice(1));
      call.activation = activation, call.alpha = alpha.value_or(0);
      return alpha.has_value();
    }
  return false;
}

bool Pointwise::answer_later(Arguments args, Stack& answers) const {
  size_t at = 0;
  auto waiting = Deferred::waiting(args[0]);
  if (!waiting && !in_place_ && args.size() > 1 && (waiting = Deferred::waiting(args[1]))) at = 1;
  if (!waiting) return false;
  ConvolutionCall call = waiting->call();
  Stack stack = all_arguments(Stack(args.begin(), args.end()));
  if (!call.blocking || !add_post_op(args, at, call, stack)) return false;
  stack[at] = c10::IValue();
  auto step = [stack = std::move(stack), at, op = computed_](const at::Tensor& src) {
    Stack arguments = stack;
    arguments[at] = src;
    op.callBoxed(arguments);
    return arguments[0].toTensor();
  };
  if (!in_place_) {
    at::Tensor dst = waiting->then(type_, std::move(call), std::move(step));
    if (dst.defined()) answers.emplace_back(std::move(dst));
    return !answers.empty();
  }
  if (!waiting->then_in_place(std::move(call), std::move(step))) return false;
  const at::Tensor& src = args[0].toTensor();
  if (!src.is_inference()) src.unsafeGetTensorImpl()->bump_version();
  answers.push_back(args[0]);
  return true;
}

}  // namespace torch_blocked
