// What tells that the modules of a model changed: CPython's count of the changes of a dict, up to 3.11.
#pragma once
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <vector>

#include "watch.h"

namespace torch_blocked {

// Modules as they were when last seen: their types, attributes, parameters, buffers and submodules, and of each tensor
// all but its values and where they lie. It keeps none of them alive.
class ModuleVersions {
 public:
  // Each a torch.nn.Module. TypeError for what holds its parameters, buffers and submodules otherwise.
  explicit ModuleVersions(const std::vector<pybind11::object>& modules);
  // Whether `first` is the first of the modules, and all of them are as they were.
  bool hold(pybind11::handle first) const;
  // And, where that is so, whether `contents` of tensors in them, if given, are too.
  std::pair<bool, bool> hold_with(pybind11::handle first, const Contents* contents) const;
  // Whether the first of the modules still exists.
  bool alive() const;

 private:
  struct Dict {
    PyObject* dict;
    uint64_t version;  // no two dicts have the same
    explicit Dict(PyObject* dict);
    bool changed() const;
  };
  struct Tensor {
    PyObject* tensor;  // in a dict without changes
    PyTypeObject* type;
    PyObject* attributes;  // of its own; null: none
    uint64_t version;
    c10::TensorImpl* impl;
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    bool requires_grad;
    c10::DimVector sizes, strides;

    explicit Tensor(PyObject* tensor);
    bool changed() const;
    void prefetch() const;
  };
  struct Module {
    pybind11::weakref reference;
    PyObject* module;  // may be gone: to compare and to prefetch
    PyTypeObject* type;
    Dict attributes;
    std::array<Dict, 3> held;  // in the attributes, so that they exist as long as those have had no change
    std::vector<Tensor> tensors;

    explicit Module(pybind11::handle module);
    void add_tensors(PyObject* dict, bool with_theirs);
    bool exists() const;
    bool changed() const;
    void prefetch() const;
  };
  std::vector<Module> modules_;
};

}  // namespace torch_blocked
