// What needs Python's C API, as a module: torch_blocked._python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "blocked.h"
#include "entry.h"
#include "handlers.h"
#include "module_versions.h"
#include "pointwise.h"
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
  m.def("share_version", &share_version);
  m.def("set_size", &set_size);
  m.def("weight_reorders", &weight_reorders);
  static PyMethodDef reorder_def = {"reorder", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&reorder)),
                                    METH_FASTCALL, nullptr};
  m.add_object("reorder", py::reinterpret_steal<py::object>(PyCFunction_New(&reorder_def, nullptr)));
  py::class_<Handlers>(m, "Handlers")
      .def(py::init<py::object, py::dict, py::object>())
      .def("convolution", torch::wrap_pybind_function(&Handlers::convolution))
      .def("conv2d", torch::wrap_pybind_function(&Handlers::conv2d))
      .def("convolution_backward", torch::wrap_pybind_function(&Handlers::convolution_backward))
      .def("native_batch_norm", torch::wrap_pybind_function(&Handlers::native_batch_norm))
      .def("batch_norm", torch::wrap_pybind_function(&Handlers::batch_norm))
      .def("native_batch_norm_backward", torch::wrap_pybind_function(&Handlers::native_batch_norm_backward))
      .def("mean", torch::wrap_pybind_function(&Handlers::mean))
      .def("sum", torch::wrap_pybind_function(&Handlers::sum))
      .def("adaptive_avg_pool2d", torch::wrap_pybind_function(&Handlers::adaptive_avg_pool2d))
      .def("cat", torch::wrap_pybind_function(&Handlers::cat))
      .def("detach", torch::wrap_pybind_function(&Handlers::detach));
  py::class_<Pointwise>(m, "Pointwise")
      .def(py::init<py::object, std::string, std::string, std::string, std::vector<double>, int64_t, bool>())
      .def("__call__", torch::wrap_pybind_function(&Pointwise::operator()));
  py::class_<Watch>(m, "Watch").def(py::init<>()).def("number", &Watch::number).def("holds", &Watch::holds);
}
