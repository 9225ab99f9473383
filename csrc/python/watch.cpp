#include "watch.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "all_of.h"
#include "prefetch.h"

namespace torch_blocked {
namespace {

using Tensors = std::vector<c10::TensorImpl*>;

// What `is` reads of each.
void prefetch_all(const Tensors& tensors) {
  for (c10::TensorImpl* const tensor : tensors) prefetch(tensor);
  for (c10::TensorImpl* const tensor : tensors) __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
}

Tensors tensors_of(const pybind11::list& objects) {
  Tensors tensors;
  tensors.reserve(objects.size());
  for (const pybind11::handle object : objects) {
    if (!THPVariable_Check(object.ptr())) throw pybind11::type_error("Watch: not a tensor");
    tensors.push_back(THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl());
  }
  prefetch_all(tensors);
  return tensors;
}

}  // namespace

Content::Content(c10::TensorImpl* tensor)
    : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor->storage().unsafeGetStorageImpl())),
      data(tensor->data()),
      version(tensor->is_inference() ? 0 : tensor->version_counter().current_version()) {}

bool Content::is(c10::TensorImpl* tensor) const {
  return !tensor->is_inference() && data == tensor->data() && version == tensor->version_counter().current_version() &&
         !storage.expired();
}

bool Content::was(c10::TensorImpl* tensor) const { return data == tensor->data() && !is(tensor); }

Contents::Contents(const pybind11::list& tensors) {
  for (c10::TensorImpl* const tensor : tensors_of(tensors)) contents_.emplace_back(tensor, Content(tensor));
}

bool Contents::changed() const {
  using Each = std::pair<c10::TensorImpl*, Content>;
  return !all_of(
      contents_, [](const Each& each) { __builtin_prefetch(each.second.storage._unsafe_get_target()); },
      [](const Each& each) { return each.second.is(each.first); });
}

int64_t Watch::number(const pybind11::list& objects) {
  const Tensors tensors = tensors_of(objects);
  const auto is = [](const Content& content, c10::TensorImpl* tensor) { return content.is(tensor); };
  for (const auto& [number, list] : lists_)
    if (std::equal(list.begin(), list.end(), tensors.begin(), tensors.end(), is)) return number;
  for (auto it = lists_.begin(); it != lists_.end();) {
    bool gone = false;
    for (size_t i = 0; i < std::min(tensors.size(), it->second.size()) && !gone; i++)
      gone = it->second[i].storage.expired() || it->second[i].was(tensors[i]);
    it = gone ? lists_.erase(it) : std::next(it);
  }
  lists_.emplace(++last_, std::vector<Content>(tensors.begin(), tensors.end()));
  return last_;
}

}  // namespace torch_blocked
