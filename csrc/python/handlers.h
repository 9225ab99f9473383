// Handlers, as those of torch_blocked/dispatch/, of what forward and backward of a network call most, in C++.
//
// Each takes the arguments of an ATen operator in a tuple, where these need no reorder, no copy and no fallback, and
// answers NotImplemented to all others: they are for the handlers in Python, which give the same answers.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "blocked.h"

namespace torch_blocked {

// How often convolutions that this thread called have reordered their weights.
int64_t weight_reorders();

// The operator torch_blocked::reorder, below autograd, as Python calls it: a tensor, its size, its blocking, the order
// and the blocking of dst. Sizes and orders are tuples of numbers, blockings of (axis, size).
PyObject* reorder(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

class Handlers {
 public:
  // The class BlockedTensor; for each block the blocking of channels; what is called with a weight and a block after a
  // convolution has reordered that weight.
  Handlers(pybind11::object type, pybind11::dict channels, pybind11::object on_packing);

  pybind11::object convolution(const pybind11::tuple& args) const;
  pybind11::object conv2d(const pybind11::tuple& args) const;  // which `inference_mode` delivers
  pybind11::object convolution_backward(const pybind11::tuple& args) const;
  pybind11::object native_batch_norm(const pybind11::tuple& args) const;
  pybind11::object batch_norm(const pybind11::tuple& args) const;  // the same by the running statistics alone
  pybind11::object native_batch_norm_backward(const pybind11::tuple& args) const;
  pybind11::object mean(const pybind11::tuple& args) const;  // over H and W, their dims kept
  pybind11::object sum(const pybind11::tuple& args) const;
  pybind11::object adaptive_avg_pool2d(const pybind11::tuple& args) const;
  pybind11::object cat(const pybind11::tuple& args) const;
  pybind11::object detach(const pybind11::tuple& args) const;

 private:
  struct Convolution;
  std::optional<Convolution> read_convolution(pybind11::handle src, pybind11::handle weight,
                                              const pybind11::tuple& args, size_t window,
                                              pybind11::handle groups) const;
  at::Tensor recorded(pybind11::handle weight, int64_t block, const std::function<at::Tensor()>& body) const;
  pybind11::object convolve(const pybind11::tuple& args, pybind11::handle groups) const;
  pybind11::object diff_src(const Convolution& c, const Operand& diff_dst, pybind11::handle weight) const;
  pybind11::object diff_weight(const Convolution& c, const Operand& diff_dst) const;
  pybind11::object diff_bias(const Operand& diff_dst) const;

  struct BatchNorm;
  std::optional<BatchNorm> read_batch_norm(pybind11::handle src, pybind11::handle weight, pybind11::handle bias,
                                           pybind11::handle mean, pybind11::handle var) const;
  pybind11::object batch_norm_of_batch(const pybind11::tuple& args) const;

  // Of windows of src, or of the one that is all of H and W their sum.
  pybind11::object pool(pybind11::handle src, at::IntArrayRef size, bool sum) const;

  BlockedType type_;
  pybind11::dict channels_;
  pybind11::object on_packing_;
};

}  // namespace torch_blocked
