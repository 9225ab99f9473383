// Handlers in C++, and how the dispatcher comes to them.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace torch_blocked {

using Arguments = c10::ArrayRef<c10::IValue>;
using Stack = torch::jit::Stack;

// A handler of an ATen operator, as those of torch_blocked/dispatch/, for arguments that need no reorder, no copy and
// no fallback.
//
// The dispatcher calls it in place of __torch_dispatch__, so that Python is not entered: an operator's call out of cold
// caches, as they are behind every convolution, costs half. What it does not take goes on to __torch_dispatch__, whose
// handlers give the same answers. All while a mode is on, which has to see the operator, and all of other subclasses.
class Quick {
 public:
  explicit Quick(const c10::OperatorHandle& op);
  virtual ~Quick() = default;
  // From now on it is called for its operator.
  static void install(const std::shared_ptr<Quick>& quick);

  // The dispatcher's call, which leaves the arguments that are not for it on the stack and says false.
  bool operator()(Stack& stack);

  const c10::OperatorHandle& op() const { return op_; }
  std::atomic<bool> enabled = true;
  std::atomic<int64_t> asked = 0, answered = 0;  // how often

 private:
  // Appends what the operator returns; false where the arguments are for the handlers in Python.
  virtual bool answer(Arguments args, Stack& answers) const = 0;
  // The same with bytes that are still to come (deferred.h); false where they are not to be waited for.
  virtual bool answer_later(Arguments, Stack&) const { return false; }

  const c10::OperatorHandle op_;
};

}  // namespace torch_blocked
