// Handlers, as those of torch_blocked/dispatch/, of what a network's forward calls most, without Python in between.
//
// Each takes the arguments of an ATen operator in a tuple, where these need no reorder, no copy and no fallback, and
// answers NotImplemented to all others: they are for the handlers in Python, which give the same answers.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "blocked.h"

namespace torch_blocked {

// How often convolutions that this thread called have reordered their weights.
int64_t weight_reorders();

class Handlers {
 public:
  // The class BlockedTensor; for each block the blocking of channels; what is called with a weight and a block after a
  // convolution has reordered that weight.
  Handlers(pybind11::object type, pybind11::dict channels, pybind11::object on_packing);

  pybind11::object convolution(const pybind11::tuple& args) const;
  pybind11::object conv2d(const pybind11::tuple& args) const;             // which `inference_mode` delivers
  pybind11::object native_batch_norm(const pybind11::tuple& args) const;  // by the running statistics
  pybind11::object batch_norm(const pybind11::tuple& args) const;         // the same, of `inference_mode`
  pybind11::object mean(const pybind11::tuple& args) const;               // over H and W, their dims kept
  pybind11::object adaptive_avg_pool2d(const pybind11::tuple& args) const;
  pybind11::object cat(const pybind11::tuple& args) const;

 private:
  pybind11::object convolve(const pybind11::tuple& args, pybind11::handle groups) const;
  pybind11::object average(pybind11::handle src, at::IntArrayRef size) const;
  pybind11::object normalize(const pybind11::tuple& args, pybind11::handle eps) const;

  BlockedType type_;
  pybind11::dict channels_;
  pybind11::object on_packing_;
};

// A pointwise operator of blocked tensors: the same operator of the physical ones.
class Pointwise {
 public:
  // `name` and `overload` of the operator and, unless empty, `out`, that of the one that writes to another tensor: an
  // answer of `pooled` elements or more goes to memory of the pool. `keeps_zero`: of zeros it makes zeros.
  Pointwise(pybind11::object type, const std::string& name, const std::string& overload, const std::string& out,
            int64_t pooled, bool keeps_zero);
  pybind11::object operator()(const pybind11::tuple& args) const;

 private:
  struct Call;
  // False where the arguments are for the handlers in Python.
  bool read(const pybind11::tuple& args, Call& call) const;

  BlockedType type_;
  c10::OperatorHandle op_;
  std::optional<c10::OperatorHandle> out_;
  int64_t pooled_;
  bool keeps_zero_, in_place_;
};

}  // namespace torch_blocked
