// What needs Python's C API, as a module: torch_blocked._python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "module_versions.h"
#include "watch.h"

namespace py = pybind11;
using namespace torch_blocked;

PYBIND11_MODULE(_python, m) {
  py::class_<ModuleVersions>(m, "ModuleVersions")
      .def(py::init<const std::vector<py::object>&>())
      .def("hold", &ModuleVersions::hold)
      .def("alive", &ModuleVersions::alive);
  py::class_<Watch>(m, "Watch").def(py::init<>()).def("number", &Watch::number).def("holds", &Watch::holds);
}
