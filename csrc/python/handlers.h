// Handlers of what forward and backward of a network call most (quick.h).
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "blocked.h"
#include "deferred.h"
#include "quick.h"

namespace torch_blocked {

// How often convolutions that this thread called have reordered their weights.
int64_t weight_reorders();

// The operator torch_blocked::reorder, below autograd, as Python calls it: a tensor, its size, its blocking, the order
// and the blocking of dst. Sizes and orders are tuples of numbers, blockings of (axis, size).
PyObject* reorder(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

class Handlers : public std::enable_shared_from_this<Handlers> {
 public:
  // The class BlockedTensor; for each block the blocking of channels; what is called with a weight's physical tensor,
  // its blocking, None if it is plain, and a block after a convolution has reordered that weight.
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
  bool adaptive_max_pool2d(Arguments args, Stack& answers) const;
  bool avg_pool2d(Arguments args, Stack& answers) const;
  bool max_pool2d(Arguments args, Stack& answers) const;  // which `inference_mode` delivers
  bool max_pool2d_with_indices(Arguments args, Stack& answers) const;
  bool upsample_nearest2d(Arguments args, Stack& answers) const;
  bool upsample_nearest2d_vec(Arguments args, Stack& answers) const;  // likewise
  bool upsample_bilinear2d(Arguments args, Stack& answers) const;
  bool upsample_bilinear2d_vec(Arguments args, Stack& answers) const;  // likewise
  bool cat(Arguments args, Stack& answers) const;
  bool detach(Arguments args, Stack& answers) const;

  // Of bytes that are to come (deferred.h).
  bool convolution_later(Arguments args, Stack& answers) const;
  bool conv2d_later(Arguments args, Stack& answers) const;
  bool native_batch_norm_later(Arguments args, Stack& answers) const;
  bool batch_norm_later(Arguments args, Stack& answers) const;

 private:
  struct Convolution;
  // From `window` on the arguments are the stride, the padding and the dilation.
  std::optional<Convolution> read_convolution(Arguments args, size_t src, size_t weight, size_t window,
                                              size_t groups) const;
  void record_packing(const at::Tensor& weight, const Blocking* blocking, int64_t block) const;
  std::optional<ConvolutionCall> read_call(Arguments args, size_t groups, std::optional<size_t> spatial = {}) const;
  bool convolve(const std::optional<ConvolutionCall>& call, Stack& answers) const;
  bool convolve_later(std::optional<ConvolutionCall> call, Stack& answers) const;
  at::Tensor diff_src(const Convolution& c, const Operand& diff_dst) const;
  at::Tensor diff_weight(const Convolution& c, const Operand& diff_dst) const;

  struct BatchNorm;
  struct BatchNormVectors;
  std::optional<BatchNormVectors> read_vectors(Arguments args, int64_t channels, std::optional<size_t> weight,
                                               std::optional<size_t> bias, size_t mean) const;
  std::optional<BatchNorm> read_batch_norm(Arguments args, size_t src, std::optional<size_t> weight,
                                           std::optional<size_t> bias, size_t mean) const;
  bool batch_norm_of_batch(Arguments args, Stack& answers) const;

  struct Pooling;
  std::optional<Operand> read_image(const c10::IValue& value) const;
  void pool(const Operand& src, const Pooling& pooling, Stack& answers) const;
  bool max_pool(Arguments args, bool indices, Stack& answers) const;
  bool adaptive_pool(Arguments args, const char* mode, bool indices, Stack& answers) const;
  bool over_image(Arguments args, std::optional<int64_t> divisor, Stack& answers) const;
  bool upsample(const Operand& src, const char* mode, at::IntArrayRef size, bool align_corners,
                std::optional<double> scale_h, std::optional<double> scale_w, Stack& answers) const;
  bool upsample_to(Arguments args, const char* mode, bool align_corners, Arguments scales, Stack& answers) const;
  bool upsample_by(Arguments args, const char* mode, bool align_corners, const c10::IValue& scales,
                   Stack& answers) const;

  // A tensor blocked as `like`, appended to the answers.
  void push(const at::Tensor& physical, const Operand& like, at::IntArrayRef size, Stack& answers) const;

  BlockedType type_;
  std::vector<const Blocking*> channels_;
  pybind11::object on_packing_;
};

// All of `Handlers`, each for its operator.
std::vector<std::shared_ptr<Quick>> quick_handlers(std::shared_ptr<const Handlers> handlers);

}  // namespace torch_blocked
