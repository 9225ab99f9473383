#include "module_versions.h"

#include <algorithm>

namespace torch_blocked {
namespace py = pybind11;
namespace {

PyObject* attributes_of(PyObject* object) {
  PyObject* const* const dict = _PyObject_GetDictPtr(object);
  if (dict == nullptr || *dict == nullptr) throw py::type_error("ModuleVersions: an object without attributes");
  return *dict;
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
  static uint64_t asked = 0;  // nothing is known to be as it was
  return ++asked;
#endif
}

}  // namespace

ModuleVersions::Dict::Dict(PyObject* dict) : dict(dict), version(version_of(dict)) {}

bool ModuleVersions::Dict::changed() const { return version_of(dict) != version; }

ModuleVersions::Module::Module(py::handle module)
    : reference(module),
      module(module.ptr()),
      type(Py_TYPE(module.ptr())),
      attributes(attributes_of(module.ptr())),
      held{Dict(held_in(attributes.dict, "_parameters")), Dict(held_in(attributes.dict, "_buffers")),
           Dict(held_in(attributes.dict, "_modules"))} {}

bool ModuleVersions::Module::exists() const { return PyWeakref_GET_OBJECT(reference.ptr()) == module; }

bool ModuleVersions::Module::changed() const {
  // In this order: each is known to exist by the one before.
  return !exists() || Py_TYPE(module) != type || attributes_of(module) != attributes.dict || attributes.changed() ||
         std::any_of(held.begin(), held.end(), [](const Dict& dict) { return dict.changed(); });
}

void ModuleVersions::Module::prefetch() const {
  __builtin_prefetch(reference.ptr());
  __builtin_prefetch(module);
  __builtin_prefetch(attributes.dict);
  for (const Dict& dict : held) __builtin_prefetch(dict.dict);
}

ModuleVersions::ModuleVersions(const std::vector<py::object>& modules) : modules_(modules.begin(), modules.end()) {}

bool ModuleVersions::hold(py::handle first) const {
  if (modules_.empty() || modules_.front().module != first.ptr()) return false;
  // The convolutions of a call put them out of the caches: all misses at once.
  for (const Module& module : modules_) module.prefetch();
  return std::none_of(modules_.begin(), modules_.end(), [](const Module& module) { return module.changed(); });
}

bool ModuleVersions::alive() const { return !modules_.empty() && modules_.front().exists(); }

}  // namespace torch_blocked
