// What tells that parameters changed, for values that are computed from them once.
#pragma once
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <vector>

namespace torch_blocked {

// Lists of tensors as they were when last seen: one for each model of those that run the same compiled code.
class Watch {
 public:
  // The number of the list `tensors`: the one it had when it was last seen, or where a tensor has been written to or
  // replaced since, a new one. Nothing tells that an inference tensor was written to: with one among them, always a new
  // one. TypeError where one is no tensor.
  int64_t number(const pybind11::list& tensors);
  // False after one of its tensors was written to, as far as a later call of `number` told, or freed.
  bool holds(int64_t number) const { return lists_.count(number) > 0; }

 private:
  struct Seen {
    // Weak: it keeps no memory, but tells freed memory from that which came back at the same address.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    uint32_t version;

    explicit Seen(c10::TensorImpl* tensor);
    bool is(c10::TensorImpl* tensor) const;
    bool was(c10::TensorImpl* tensor) const;
  };
  std::map<int64_t, std::vector<Seen>> lists_;
  int64_t last_ = -1;
};

}  // namespace torch_blocked
