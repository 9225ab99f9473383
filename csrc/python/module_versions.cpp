#include "module_versions.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>

#include "all_of.h"
#include "prefetch.h"

namespace torch_blocked {
namespace py = pybind11;
namespace {

PyObject* attributes_if_any(PyObject* object) {
  PyObject* const* const dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
}

PyObject* attributes_of(PyObject* object) {
  PyObject* const dict = attributes_if_any(object);
  if (dict == nullptr) throw py::type_error("ModuleVersions: an object without attributes");
  return dict;
}

PyObject* held_in(PyObject* attributes, const char* name) {
  PyObject* const dict = PyDict_GetItemString(attributes, name);
  if (dict == nullptr || !PyDict_Check(dict)) throw py::type_error("ModuleVersions: a module without dicts");
  return dict;
}

uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  static std::atomic<uint64_t> asked = 0;  // nothing is known to be as it was
  return ++asked;
#endif
}

uint64_t version_if_any(PyObject* dict) { return dict == nullptr ? 0 : version_of(dict); }

c10::TensorImpl* impl_of(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }

}  // namespace

ModuleVersions::Tensor::Tensor(PyObject* tensor)
    : tensor(tensor),
      type(Py_TYPE(tensor)),
      attributes(attributes_if_any(tensor)),
      version(version_if_any(attributes)),
      impl(impl_of(tensor)),
      keys(impl->key_set()),
      dtype(impl->dtype()),
      requires_grad(impl->requires_grad()) {
  if (impl->has_symbolic_sizes_strides()) throw py::type_error("ModuleVersions: a tensor of unknown size");
  sizes.assign(impl->sizes_default().begin(), impl->sizes_default().end());
  strides.assign(impl->strides_default().begin(), impl->strides_default().end());
}

bool ModuleVersions::Tensor::changed() const {
  return Py_TYPE(tensor) != type || attributes_if_any(tensor) != attributes || version_if_any(attributes) != version ||
         impl_of(tensor) != impl || impl->key_set() != keys || impl->dtype() != dtype ||
         impl->requires_grad() != requires_grad || impl->has_symbolic_sizes_strides() ||
         impl->sizes_default() != sizes || impl->strides_default() != strides;
}

void ModuleVersions::Tensor::prefetch() const {
  __builtin_prefetch(tensor);
  torch_blocked::prefetch(impl);
  if (attributes != nullptr) __builtin_prefetch(attributes);
}

ModuleVersions::Dict::Dict(PyObject* dict) : dict(dict), version(version_of(dict)) {}

bool ModuleVersions::Dict::changed() const { return version_of(dict) != version; }

ModuleVersions::Module::Module(py::handle module)
    : reference(module),
      module(module.ptr()),
      type(Py_TYPE(module.ptr())),
      attributes(attributes_of(module.ptr())),
      held{Dict(held_in(attributes.dict, "_parameters")), Dict(held_in(attributes.dict, "_buffers")),
           Dict(held_in(attributes.dict, "_modules"))} {
  for (PyObject* const dict : {attributes.dict, held[0].dict, held[1].dict}) add_tensors(dict, true);
}

// `with_theirs`: a blocked tensor's physical one is among its attributes. It exists as long as those have no change, so
// that it comes after.
void ModuleVersions::Module::add_tensors(PyObject* dict, bool with_theirs) {
  Py_ssize_t at = 0;
  for (PyObject *name, *value; PyDict_Next(dict, &at, &name, &value);) {
    if (!THPVariable_Check(value)) continue;
    tensors.emplace_back(value);
    PyObject* const its = tensors.back().attributes;
    if (with_theirs && its != nullptr) add_tensors(its, false);
  }
}

bool ModuleVersions::Module::exists() const { return PyWeakref_GET_OBJECT(reference.ptr()) == module; }

bool ModuleVersions::Module::changed() const {
  // In this order: each is known to exist by the one before.
  return !exists() || Py_TYPE(module) != type || attributes_of(module) != attributes.dict || attributes.changed() ||
         std::any_of(held.begin(), held.end(), [](const Dict& dict) { return dict.changed(); }) ||
         std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return tensor.changed(); });
}

void ModuleVersions::Module::prefetch() const {
  __builtin_prefetch(reference.ptr());
  __builtin_prefetch(module);
  __builtin_prefetch(attributes.dict);
  for (const Dict& dict : held) __builtin_prefetch(dict.dict);
  for (const Tensor& tensor : tensors) tensor.prefetch();
}

ModuleVersions::ModuleVersions(const std::vector<py::object>& modules) : modules_(modules.begin(), modules.end()) {}

bool ModuleVersions::hold(py::handle first) const {
  if (modules_.empty() || modules_.front().module != first.ptr()) return false;
  return all_of(
      modules_, [](const Module& module) { module.prefetch(); },
      [](const Module& module) { return !module.changed(); });
}

std::pair<bool, bool> ModuleVersions::hold_with(py::handle first, const Contents* contents) const {
  const bool held = hold(first);
  return {held, held && contents != nullptr && !contents->changed()};
}

bool ModuleVersions::alive() const { return !modules_.empty() && modules_.front().exists(); }

}  // namespace torch_blocked
