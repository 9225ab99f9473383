// Calls what Inductor's C++ wrapper compiled as that does, without its lists of capsules.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_blocked {

// The function that a compiled graph is, and the first of the tensors that it takes.
class Entry {
 public:
  // Its address, and how many tensors it takes after `values` and returns. TypeError where a value is no tensor.
  Entry(uintptr_t address, const pybind11::tuple& values, size_t others, size_t answers);
  // The answers for the values and `others`, below autograd. TypeError where one is no tensor, or they are not as many
  // as it takes.
  pybind11::list operator()(const pybind11::list& others);

 private:
  // Takes the inputs for its own, gives the answers away.
  using Run = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* answers);
  using Handle = std::unique_ptr<at::Tensor>;  // what an AtenTensorHandle points to
  void make_handles();

  const Run run_;
  std::vector<at::Tensor> values_;
  const size_t others_, answers_;
  std::vector<Handle> handles_;  // of the values, for some calls to come
};

}  // namespace torch_blocked
