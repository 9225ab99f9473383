#include "watch.h"

#include <algorithm>

namespace torch_blocked {

Watch::Seen::Seen(const at::Tensor& tensor)
    : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
      data(tensor.const_data_ptr()),
      version(tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version()) {}

bool Watch::Seen::is(const at::Tensor& tensor) const {
  return !tensor.is_inference() && data == tensor.const_data_ptr() &&
         version == tensor.unsafeGetTensorImpl()->version_counter().current_version() && !storage.expired();
}

int64_t Watch::number(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is = [](const Seen& seen, const at::Tensor& tensor) { return seen.is(tensor); };
  for (const auto& [number, list] : lists_)
    if (std::equal(list.begin(), list.end(), tensors.begin(), tensors.end(), is)) return number;
  for (auto it = lists_.begin(); it != lists_.end();) {
    bool gone = false;
    for (size_t i = 0; i < std::min(tensors.size(), it->second.size()) && !gone; i++)
      gone = it->second[i].storage.expired() || it->second[i].was(tensors[i]);
    it = gone ? lists_.erase(it) : std::next(it);
  }
  lists_.emplace(++last_, std::vector<Seen>(tensors.begin(), tensors.end()));
  return last_;
}

bool Watch::holds(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lists_.count(number) > 0;
}

}  // namespace torch_blocked
