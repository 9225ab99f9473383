#include "entry.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "prefetch.h"

namespace torch_blocked {
namespace py = pybind11;
namespace {

const at::Tensor& tensor_of(py::handle object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("Entry: not a tensor");
  return THPVariable_Unpack(object.ptr());
}

AtenTensorHandle given_away(std::unique_ptr<at::Tensor>& handle) {
  return reinterpret_cast<AtenTensorHandle>(handle.release());
}

}  // namespace

Entry::Entry(uintptr_t address, const py::tuple& values, size_t others, size_t answers)
    : run_(reinterpret_cast<Run>(address)), others_(others), answers_(answers) {
  for (const py::handle value : values) values_.push_back(tensor_of(value));
}

// A handle counts itself at its tensor, which other work has put out of the caches: that is done for many calls at
// once.
void Entry::make_handles() {
  constexpr size_t calls = 32;
  std::vector<Handle> handles;  // kept only if whole: a call takes the last ones
  handles.reserve(calls * values_.size());
  for (size_t call = 0; call < calls; call++)
    for (const at::Tensor& value : values_) handles.push_back(std::make_unique<at::Tensor>(value));
  handles_ = std::move(handles);
}

py::list Entry::operator()(const py::list& others) {
  if (others.size() != others_) throw py::type_error("Entry: as many tensors as the graph takes");
  for (const at::Tensor& value : values_) prefetch(value.unsafeGetTensorImpl());
  std::vector<Handle> given;
  for (const py::handle other : others) given.push_back(std::make_unique<at::Tensor>(tensor_of(other)));
  if (handles_.size() < values_.size()) make_handles();
  const auto first = handles_.end() - ptrdiff_t(values_.size());
  std::vector<AtenTensorHandle> inputs, answers(answers_);
  inputs.reserve(values_.size() + others_);
  std::transform(first, handles_.end(), std::back_inserter(inputs), given_away);
  std::transform(given.begin(), given.end(), std::back_inserter(inputs), given_away);
  handles_.erase(first, handles_.end());
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
