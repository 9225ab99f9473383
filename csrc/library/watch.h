// What tells that parameters changed, for values that are computed from them once.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace torch_blocked {

// Lists of tensors as they were when last seen: one for each model of those that run the same compiled code.
class Watch : public torch::CustomClassHolder {
 public:
  // The number of the list `tensors`: the one it had when it was last seen, or where a tensor has been written to or
  // replaced since, a new one. Nothing tells that an inference tensor was written to: with one among them, always a new
  // one.
  int64_t number(const std::vector<at::Tensor>& tensors);
  // False after one of its tensors was written to, as far as a later call of `number` told, or freed.
  bool holds(int64_t number);

 private:
  struct Seen {
    // Weak: it keeps no memory, but tells freed memory from that which came back at the same address.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    uint32_t version;

    explicit Seen(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;
    bool was(const at::Tensor& tensor) const { return data == tensor.const_data_ptr() && !is(tensor); }
  };
  std::mutex mutex_;
  std::map<int64_t, std::vector<Seen>> lists_;
  int64_t last_ = -1;
};

}  // namespace torch_blocked
