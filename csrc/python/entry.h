// Calls what Inductor's C++ wrapper compiled as that does, without its lists of capsules.
#pragma once
#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace torch_blocked {

// The function that a compiled graph is.
class Entry {
 public:
  // Its address, and how many tensors it takes and returns.
  Entry(uintptr_t address, size_t inputs, size_t answers)
      : run_(reinterpret_cast<Run>(address)), inputs_(inputs), answers_(answers) {}
  // The answers for the inputs `values` and `others`, below autograd. TypeError where one is no tensor, or they are
  // not as many as it takes.
  pybind11::list operator()(const pybind11::tuple& values, const pybind11::list& others) const;

 private:
  // Takes the inputs for its own, gives the answers away.
  using Run = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* answers);
  const Run run_;
  const size_t inputs_, answers_;
};

}  // namespace torch_blocked
