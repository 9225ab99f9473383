// What tells that the modules of a model changed: CPython's count of the changes of a dict, up to 3.11.
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <vector>

namespace torch_blocked {

// Modules as they were when last seen: their types, attributes, parameters, buffers and submodules. It keeps none of
// them alive.
class ModuleVersions {
 public:
  // Each a torch.nn.Module. TypeError for what holds its parameters, buffers and submodules otherwise.
  explicit ModuleVersions(const std::vector<pybind11::object>& modules);
  // Whether `first` is the first of the modules, and all of them are as they were.
  bool hold(pybind11::handle first) const;
  // Whether the first of the modules still exists.
  bool alive() const;

 private:
  struct Dict {
    PyObject* dict;
    uint64_t version;  // no two dicts have the same
    explicit Dict(PyObject* dict);
    bool changed() const;
  };
  struct Module {
    pybind11::weakref reference;
    PyObject* module;  // may be gone: to compare and to prefetch
    PyTypeObject* type;
    Dict attributes;
    std::array<Dict, 3> held;  // in the attributes, so that they exist as long as those have had no change

    explicit Module(pybind11::handle module);
    bool exists() const;
    bool changed() const;
    void prefetch() const;
  };
  std::vector<Module> modules_;
};

}  // namespace torch_blocked
