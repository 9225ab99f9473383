// Handlers of pointwise operators (quick.h).
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "blocked.h"
#include "deferred.h"
#include "quick.h"

namespace torch_blocked {

// A pointwise operator of blocked tensors, and of numbers and small plain tensors: the same operator of the physical
// ones, or another that computes the same.
class Pointwise : public Quick {
 public:
  struct Computed {
    std::string name, overload;
    std::vector<double> rest;  // numbers that it takes after the arguments
  };
  // `name` and `overload` of the operator and what is computed for it. Unless empty, `out` is the latter's overload
  // that writes to another tensor: an answer of `pooled` elements or more goes to memory of the pool. `keeps_zero`: of
  // zeros it makes zeros.
  Pointwise(pybind11::object type, const std::string& name, const std::string& overload, const Computed& as,
            const std::string& out, int64_t pooled, bool keeps_zero);

 private:
  struct Call;
  // False where the arguments are for the handlers in Python.
  bool read(Arguments args, Call& call) const;
  bool answer(Arguments args, Stack& answers) const override;
  bool answer_later(Arguments args, Stack& answers) const override;
  // The post-op that the operator is; false where `call` cannot have it.
  bool add_post_op(Arguments args, size_t at, ConvolutionCall& call, Stack& stack) const;
  Stack all_arguments(Stack given) const;

  BlockedType type_;
  c10::OperatorHandle computed_;
  std::optional<c10::OperatorHandle> out_;
  std::vector<double> rest_;
  int64_t pooled_;
  bool keeps_zero_, in_place_;
};

}  // namespace torch_blocked
