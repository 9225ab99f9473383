// As the handlers of handlers.h, of pointwise operators.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "blocked.h"

namespace torch_blocked {

// A pointwise operator of blocked tensors, and of numbers and small plain tensors: the same operator of the physical
// ones.
class Pointwise {
 public:
  // `name` and `overload` of the operator and, unless empty, `out`, that of the one that writes to another tensor: an
  // answer of `pooled` elements or more goes to memory of the pool. `rest`: numbers that it takes after the arguments.
  // `keeps_zero`: of zeros it makes zeros.
  Pointwise(pybind11::object type, const std::string& name, const std::string& overload, const std::string& out,
            const std::vector<double>& rest, int64_t pooled, bool keeps_zero);
  pybind11::object operator()(const pybind11::tuple& args) const;

 private:
  struct Call;
  // False where the arguments are for the handlers in Python.
  bool read(const pybind11::tuple& args, Call& call) const;

  BlockedType type_;
  c10::OperatorHandle op_;
  std::optional<c10::OperatorHandle> out_;
  std::vector<double> rest_;
  int64_t pooled_;
  bool keeps_zero_, in_place_;
};

}  // namespace torch_blocked
