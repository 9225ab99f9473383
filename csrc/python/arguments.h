// What the handlers read their arguments with, and call the operators.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <optional>

#include "blocked.h"

namespace torch_blocked {

namespace py = pybind11;

using Numbers = c10::SmallVector<int64_t, 3>;
using OptionalTensor = std::optional<at::Tensor>;

inline py::object not_implemented() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Of an operator without arguments, whatever modes are on: they would have it answer them.
inline int64_t answer(const c10::TypedOperatorHandle<int64_t()>& op) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// What `body` gives; other threads may run meanwhile.
template <class Body>
auto unlocked(const Body& body) {
  const py::gil_scoped_release others_may_run;
  return body();
}

// None where it is left out: it has its default.
inline py::handle argument(const py::tuple& args, size_t i) { return i < args.size() ? args[i].ptr() : Py_None; }

// A number, appended; false where it is another thing, less than `least`, or one of those that the operators refuse as
// too large.
inline bool read_number(py::handle object, int64_t least, int64_t otherwise, Numbers& numbers) {
  if (!object.is_none() && !PyLong_CheckExact(object.ptr())) return false;
  int overflow = 0;
  numbers.push_back(object.is_none() ? otherwise : PyLong_AsLongLongAndOverflow(object.ptr(), &overflow));
  return !overflow && numbers.back() >= least && numbers.back() < (1 << 24);
}

// The numbers of a list, `count` or one for all; false where they are others, or any is less than `least`.
inline bool read_numbers(py::handle list, int64_t count, int64_t least, int64_t otherwise, Numbers& numbers) {
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

inline bool read_float(py::handle object, double& number) {
  if (!PyFloat_CheckExact(object.ptr())) return false;
  number = PyFloat_AS_DOUBLE(object.ptr());
  return true;
}

// Which of three answers are wanted.
inline bool read_mask(py::handle list, std::array<bool, 3>& wanted) {
  if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != 3) return false;
  for (int i = 0; i < 3; i++) wanted[i] = PyList_GET_ITEM(list.ptr(), i) == Py_True;
  return true;
}

// A plain vector, or none; false where it is another thing.
inline bool read_vector(const BlockedType& type, py::handle object, at::ScalarType dtype, OptionalTensor& vector) {
  if (object.is_none()) return true;
  auto operand = type.read(object);
  if (!operand || operand->is_blocked() || operand->physical.scalar_type() != dtype) return false;
  vector = std::move(operand->physical);
  return true;
}

inline bool is_precision(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline bool is_blocked_by_channels(const Operand& x) { return x.blocks.size() == 2 && x.blocks[0] == 1; }

inline bool is_kernel_block(int64_t block) {
  static const auto isa_block = operator_of<int64_t()>("torch_blocked::isa_block");
  return block == 8 || (block == 16 && answer(isa_block) == 16);
}

}  // namespace torch_blocked
