// What the handlers read their arguments with, and call the operators.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <optional>

#include "blocked.h"

namespace torch_blocked {

using Numbers = c10::SmallVector<int64_t, 3>;
using OptionalTensor = std::optional<at::Tensor>;

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Of an operator without arguments, whatever modes are on: they would have it answer them.
inline int64_t answer(const c10::TypedOperatorHandle<int64_t()>& op) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// A number, appended; false where it is symbolic, less than `least`, or one of those that the operators refuse as too
// large.
inline bool read_number(const c10::IValue& value, int64_t least, Numbers& numbers) {
  if (!value.isInt()) return false;
  numbers.push_back(value.toInt());
  return numbers.back() >= least && numbers.back() < (1 << 24);
}

// The numbers of a list; false where they are others, or any is less than `least`.
inline bool read_list(const c10::IValue& list, int64_t least, Numbers& numbers) {
  if (!list.isIntList()) return false;
  for (const c10::IValue& item : list.toListRef())
    if (!read_number(item, least, numbers)) return false;
  return true;
}

// `count` of them.
inline bool read_numbers(const c10::IValue& list, int64_t count, int64_t least, Numbers& numbers) {
  return read_list(list, least, numbers) && int64_t(numbers.size()) == count;
}

// The same of a convolution's window, where one number stands for all.
inline bool read_window(const c10::IValue& list, int64_t count, int64_t least, Numbers& numbers) {
  if (!read_list(list, least, numbers)) return false;
  if (numbers.size() == 1) numbers.resize(std::max<int64_t>(count, 0), numbers[0]);
  return int64_t(numbers.size()) == count;
}

// Which of three answers are wanted.
inline std::array<bool, 3> read_mask(const c10::IValue& list) {
  const auto wanted = list.toBoolList();
  return {wanted.get(0), wanted.get(1), wanted.get(2)};
}

// A tensor, or none.
inline std::optional<Operand> read_tensor(const BlockedType& type, const c10::IValue& value) {
  return value.isTensor() ? type.read(value.toTensor()) : std::nullopt;
}

// A plain vector, or none; false where it is another thing.
inline bool read_vector(const BlockedType& type, const c10::IValue& value, at::ScalarType dtype,
                        OptionalTensor& vector) {
  if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) return true;
  auto operand = read_tensor(type, value);
  if (!operand || operand->is_blocked() || operand->physical.scalar_type() != dtype) return false;
  vector = std::move(operand->physical);
  return true;
}

inline bool is_precision(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline bool is_blocked_by_channels(const Operand& x) { return x.blocks().size() == 2 && x.blocks()[0] == 1; }

inline bool is_kernel_block(int64_t block) {
  static const auto isa_block = operator_of<int64_t()>("torch_blocked::isa_block");
  return block == 8 || (block == 16 && answer(isa_block) == 16);
}

}  // namespace torch_blocked
