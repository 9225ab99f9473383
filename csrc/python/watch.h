// What tells that parameters changed, for values that are computed from them once.
#pragma once
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace torch_blocked {

// What is in a tensor, as it was when last seen.
struct Content {
  // Weak: it keeps no memory, but tells freed memory from that which came back at the same address.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  uint32_t version;

  explicit Content(c10::TensorImpl* tensor);
  // Never of an inference tensor: nothing tells that one was written to.
  bool is(c10::TensorImpl* tensor) const;
  bool was(c10::TensorImpl* tensor) const;
};

// What is in each of a list of tensors, for one who knows that they exist.
class Contents {
 public:
  // TypeError where one is no tensor.
  explicit Contents(const pybind11::list& tensors);
  bool changed() const;

 private:
  std::vector<std::pair<c10::TensorImpl*, Content>> contents_;
};

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
  std::map<int64_t, std::vector<Content>> lists_;
  int64_t last_ = -1;
};

}  // namespace torch_blocked
