#include "quick.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <vector>

#include "deferred.h"

namespace torch_blocked {
namespace {

// The keys above Python's, which PyTorch's own way to __torch_dispatch__ excludes: it is below autograd.
constexpr c10::DispatchKeySet above_python =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) -
    c10::DispatchKeySet(c10::DispatchKey::Python);

// In place of the kernel that PyTorch has for all operators at this key, which it calls in turn.
class AtPythonKey : public c10::OperatorKernel {
 public:
  explicit AtPythonKey(Quick& quick)
      : quick_(quick), pytorchs_(quick.op().getComputedKernelForDispatchKey(c10::DispatchKey::Python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (quick_.enabled && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      const c10::impl::ExcludeDispatchKeyGuard below_autograd(above_python);
      if (quick_(*stack)) return;
    }
    pytorchs_.callBoxed(op, keys, stack);
  }

 private:
  Quick& quick_;
  const c10::SafeKernelFunction pytorchs_;
};

}  // namespace

Quick::Quick(const c10::OperatorHandle& op) : op_(op) {}

void Quick::install(const std::shared_ptr<Quick>& quick) {
  // Neither is destroyed: when the process ends the dispatcher and Python may be gone.
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Python, __FILE__, __LINE__);
  static auto* const installed = new std::vector<std::shared_ptr<Quick>>;
  installed->push_back(quick);
  const c10::OperatorName& name = quick->op().operator_name();
  library->impl(name.overload_name.empty() ? name.name.c_str() : (name.name + "." + name.overload_name).c_str(),
                torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AtPythonKey>(*quick)));
}

bool Quick::operator()(Stack& stack) {
  const size_t count = op_.schema().arguments().size();
  Stack answers;
  asked.fetch_add(1, std::memory_order_relaxed);
  const Arguments args = torch::jit::last(stack, count);
  if (!answer_later(args, answers)) {
    if (Deferred::finish_here() && op_.schema().is_mutable())
      for (const c10::IValue& value : args)
        if (value.isTensor()) Deferred::finish_readers(value.toTensor());
    if (!answer(args, answers)) return false;
  }
  answered.fetch_add(1, std::memory_order_relaxed);
  torch::jit::drop(stack, count);
  for (c10::IValue& value : answers) stack.push_back(std::move(value));
  return true;
}

}  // namespace torch_blocked
