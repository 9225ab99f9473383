#include "entry.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "prefetch.h"

namespace torch_blocked {
namespace py = pybind11;
namespace {

using Handle = std::unique_ptr<at::Tensor>;  // what an AtenTensorHandle points to

const at::Tensor& tensor_of(py::handle object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("Entry: not a tensor");
  return THPVariable_Unpack(object.ptr());
}

AtenTensorHandle given_away(Handle& handle) { return reinterpret_cast<AtenTensorHandle>(handle.release()); }

}  // namespace

Entry::Entry(uintptr_t address, const py::tuple& values, size_t others, size_t answers)
    : run_(reinterpret_cast<Run>(address)), others_(others), answers_(answers) {
  for (const py::handle value : values) values_.push_back(tensor_of(value));
}

py::list Entry::operator()(const py::list& others) const {
  if (others.size() != others_) throw py::type_error("Entry: as many tensors as the graph takes");
  for (const at::Tensor& value : values_) prefetch(value.unsafeGetTensorImpl());
  std::vector<Handle> handles;
  handles.reserve(values_.size() + others_);
  for (const at::Tensor& value : values_) handles.push_back(std::make_unique<at::Tensor>(value));
  for (const py::handle other : others) handles.push_back(std::make_unique<at::Tensor>(tensor_of(other)));
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
