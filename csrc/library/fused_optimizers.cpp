// PyTorch counts no write of its fused optimizers to the parameters: packed weights, and what a compiled graph computed
// from parameters once, would stay as they were. So they are counted here, as those of other optimizers are.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace torch_blocked {
namespace {

// The parameters are an optimizer's first argument.
void step_and_count(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::List<at::Tensor> parameters = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensorList();
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const at::Tensor& parameter : parameters)
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace torch_blocked

TORCH_LIBRARY_IMPL(aten, ADInplaceOrView, m) {
  for (const char* const name :
       {"_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_",
        "_fused_adamw_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&torch_blocked::step_and_count>());
}
