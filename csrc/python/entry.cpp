#include "entry.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace torch_blocked {
namespace py = pybind11;
namespace {

using Handle = std::unique_ptr<at::Tensor>;  // what an AtenTensorHandle points to

template <class List>
void add_handles(const List& objects, std::vector<Handle>& handles) {
  for (const py::handle object : objects) __builtin_prefetch(object.ptr());
  for (const py::handle object : objects) {
    if (!THPVariable_Check(object.ptr())) throw py::type_error("Entry: not a tensor");
    handles.push_back(std::make_unique<at::Tensor>(THPVariable_Unpack(object.ptr())));
  }
}

AtenTensorHandle given_away(Handle& handle) { return reinterpret_cast<AtenTensorHandle>(handle.release()); }

}  // namespace

py::list Entry::operator()(const py::tuple& values, const py::list& others) const {
  if (values.size() + others.size() != inputs_) throw py::type_error("Entry: as many tensors as the graph takes");
  std::vector<Handle> handles;
  handles.reserve(inputs_);
  add_handles(values, handles);
  add_handles(others, handles);
  std::vector<AtenTensorHandle> inputs, answers(answers_);
  for (Handle& handle : handles) inputs.push_back(given_away(handle));
  {
    const at::AutoDispatchBelowAutograd below;
    run_(inputs.data(), answers.data());
  }
  py::list result;
  for (const AtenTensorHandle answer : answers) {
    const Handle tensor(reinterpret_cast<at::Tensor*>(answer));
    result.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(*tensor))));
  }
  return result;
}

}  // namespace torch_blocked
