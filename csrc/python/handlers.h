// Handlers of what forward and backward of a network call most (quick.h).
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "blocked.h"
#include "quick.h"

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
  Handlers(pybind11::object type, const pybind11::dict& channels, pybind11::object on_packing);

  bool convolution(Arguments args, Stack& answers) const;
  bool conv2d(Arguments args, Stack& answers) const;  // which `inference_mode` delivers
  bool convolution_backward(Arguments args, Stack& answers) const;
  bool native_batch_norm(Arguments args, Stack& answers) const;
  bool batch_norm(Arguments args, Stack& answers) const;  // the same by the running statistics alone
  bool native_batch_norm_backward(Arguments args, Stack& answers) const;
  bool mean(Arguments args, Stack& answers) const;  // over H and W, their dims kept
  bool sum(Arguments args, Stack& answers) const;
  bool adaptive_avg_pool2d(Arguments args, Stack& answers) const;
  bool cat(Arguments args, Stack& answers) const;
  bool detach(Arguments args, Stack& answers) const;

 private:
  struct Convolution;
  // From `window` on the arguments are the stride, the padding and the dilation.
  std::optional<Convolution> read_convolution(Arguments args, size_t src, size_t weight, size_t window,
                                              size_t groups) const;
  at::Tensor recorded(const at::Tensor& weight, int64_t block, const std::function<at::Tensor()>& body) const;
  bool convolve(Arguments args, size_t groups, Stack& answers, std::optional<size_t> spatial = {}) const;
  at::Tensor diff_src(const Convolution& c, const Operand& diff_dst) const;
  at::Tensor diff_weight(const Convolution& c, const Operand& diff_dst) const;

  struct BatchNorm;
  std::optional<BatchNorm> read_batch_norm(Arguments args, size_t src, std::optional<size_t> weight,
                                           std::optional<size_t> bias, size_t mean) const;
  bool batch_norm_of_batch(Arguments args, Stack& answers) const;

  // Of windows of src, or of the one that is all of H and W their sum.
  bool pool(const c10::IValue& src, at::IntArrayRef size, bool sum, Stack& answers) const;

  // A tensor blocked as `like`, appended to the answers.
  void push(const at::Tensor& physical, const Operand& like, at::IntArrayRef size, Stack& answers) const;

  BlockedType type_;
  std::vector<const Blocking*> channels_;
  pybind11::object on_packing_;
};

// All of `Handlers`, each for its operator.
std::vector<std::shared_ptr<Quick>> quick_handlers(std::shared_ptr<const Handlers> handlers);

}  // namespace torch_blocked
