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

bool Watch::changed(const std::vector<at::Tensor>& tensors) {
  const auto same = [](const Seen& seen, const at::Tensor& tensor) { return seen.is(tensor); };
  if (std::equal(seen_.begin(), seen_.end(), tensors.begin(), tensors.end(), same)) return false;
  seen_.clear();
  for (const at::Tensor& tensor : tensors) seen_.emplace_back(tensor);
  return true;
}

}  // namespace torch_blocked
