// What needs Python's C API, as a module: torch_blocked._python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "blocked.h"
#include "deferred.h"
#include "entry.h"
#include "handlers.h"
#include "module_versions.h"
#include "pointwise.h"
#include "quick.h"
#include "watch.h"

namespace py = pybind11;
using namespace torch_blocked;

PYBIND11_MODULE(_python, m) {
  py::class_<Contents>(m, "Contents").def(py::init<const py::list&>());
  py::class_<Entry>(m, "Entry")
      .def(py::init<uintptr_t, const py::tuple&, size_t, size_t>())
      .def("__call__", torch::wrap_pybind_function(&Entry::operator()));
  py::class_<ModuleVersions>(m, "ModuleVersions")
      .def(py::init<const std::vector<py::object>&>())
      .def("hold", &ModuleVersions::hold)
      .def("hold_with", &ModuleVersions::hold_with)
      .def("alive", &ModuleVersions::alive);
  m.def("wrap", &wrap);
  m.def("set_physical", &set_physical);
  m.def("share_version", &share_version);
  m.def("is_taken_from_another", &is_taken_from_another);
  m.def("set_size", &set_size);
  m.def("weight_reorders", &weight_reorders);
  m.def("finish", &finish);
  m.def("expose", &Deferred::expose);
  m.def("is_exposed", &is_exposed);
  m.def("enable_deferred", &Deferred::enable);
  m.def("finish_deferred", &Deferred::finish_here);
  m.def("finish_readers", py::overload_cast<const at::Tensor&>(&Deferred::finish_readers));
  static PyMethodDef reorder_def = {"reorder", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&reorder)),
                                    METH_FASTCALL, nullptr};
  m.add_object("reorder", py::reinterpret_steal<py::object>(PyCFunction_New(&reorder_def, nullptr)));
  py::class_<Quick, std::shared_ptr<Quick>>(m, "Quick")
      .def_property_readonly("name", [](const Quick& q) { return q.op().operator_name().name; })
      .def_property_readonly("overload", [](const Quick& q) { return q.op().operator_name().overload_name; })
      .def_property_readonly("asked", [](const Quick& q) { return q.asked.load(); })
      .def_property_readonly("answered", [](const Quick& q) { return q.answered.load(); })
      .def_property(
          "enabled", [](const Quick& q) { return q.enabled.load(); }, [](Quick& q, bool on) { q.enabled = on; });
  py::class_<Pointwise::Computed>(m, "Computed").def(py::init<std::string, std::string, std::vector<double>>());
  py::class_<Pointwise, Quick, std::shared_ptr<Pointwise>>(m, "Pointwise")
      .def(py::init<py::object, std::string, std::string, Pointwise::Computed, std::string, int64_t, bool>());
  m.def("quick_handlers", [](py::object type, const py::dict& channels, py::object on_packing) {
    return quick_handlers(std::make_shared<Handlers>(std::move(type), channels, std::move(on_packing)));
  });
  m.def("install", &Quick::install);
  py::class_<Watch>(m, "Watch").def(py::init<>()).def("number", &Watch::number).def("holds", &Watch::holds);
}
