// What tells that parameters changed, for values that are computed from them once.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <vector>

namespace torch_blocked {

// A list of tensors as it was when last seen.
class Watch : public torch::CustomClassHolder {
 public:
  // Whether the tensors have been written to or replaced since the last call; true the first time. Nothing tells that
  // an inference tensor was written to: with one among them always true.
  bool changed(const std::vector<at::Tensor>& tensors);

 private:
  struct Seen {
    // Weak: it keeps no memory, but tells freed memory from that which came back at the same address.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    uint32_t version;

    explicit Seen(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;
  };
  std::vector<Seen> seen_;
};

}  // namespace torch_blocked
