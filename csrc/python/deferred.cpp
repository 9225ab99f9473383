#include "deferred.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "handlers.h"

namespace torch_blocked {

namespace py = pybind11;

namespace {

// A network's shortcut waits while the convolutions beside it do.
constexpr size_t most_waiting = 2;
thread_local std::vector<std::shared_ptr<Deferred>> waiting_here;  // the oldest first

void finish_oldest() {
  const std::shared_ptr<Deferred> oldest = waiting_here.front();
  std::erase(waiting_here, oldest);  // also where another thread has done it
  oldest->finish();
}

std::atomic<bool> enabled = true;

// What waits, of all threads. Never freed: tensors may outlive it when the process ends. In a forked process the other
// threads are gone, with what they had locked: it has a registry of its own.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Deferred>> all;
  std::atomic<int64_t> count = 0;
};
std::atomic<Registry*> registry = new Registry;
const int renewed_in_forks = pthread_atfork(nullptr, nullptr, [] { registry = new Registry; });

std::vector<std::shared_ptr<Deferred>> all_waiting() {
  std::vector<std::shared_ptr<Deferred>> waiting;
  Registry& known = *registry;
  const std::lock_guard lock(known.mutex);
  for (const auto& each : known.all)
    if (auto deferred = each.lock()) waiting.push_back(std::move(deferred));
  return waiting;
}

// While one waits for a lock, the thread that has it may need the interpreter's.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

// As when the convolution was called, for the kernels alone, whatever asks for the bytes.
struct AsCalled {
  const c10::InferenceMode inference;
  const c10::impl::ExcludeDispatchKeyGuard kernels_alone{
      c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
      c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python)};
};

// As clone(), which takes several times as long for so few values.
at::Tensor copy_of(const at::Tensor& vector) {
  if (!vector.is_contiguous()) return vector.clone();
  const at::Tensor copy = at::detail::empty_cpu(vector.sizes(), vector.scalar_type());
  std::memcpy(copy.mutable_data_ptr(), vector.const_data_ptr(), vector.nbytes());
  return copy;
}

// A tensor's own copy of what others may write to; None where that takes long, next to the convolution.
std::optional<at::Tensor> kept(const at::Tensor& plain, int64_t dst_numel) {
  constexpr int64_t times = 4;
  return plain.numel() * times <= dst_numel ? std::optional(plain.clone()) : std::nullopt;
}

std::array<at::Tensor, 3> operands(const ConvolutionCall& call) {
  return {call.src.physical, call.weight.physical, call.residual.value_or(at::Tensor())};
}

std::array<int64_t, 3> versions(const ConvolutionCall& call) {
  std::array<int64_t, 3> versions{};
  for (size_t i = 0; const at::Tensor& tensor : operands(call))
    versions[i++] = tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
  return versions;
}

}  // namespace

// ---- What waits, and where

bool Deferred::may_wait() { return enabled && !at::GradMode::is_enabled(); }

std::shared_ptr<Deferred> Deferred::of(ConvolutionCall call, const ConvolutionCall::OnPacking& on_packing) {
  const int64_t dst_numel = c10::multiply_integers(call.size());
  if (dst_numel == 0 || !call.weight.blocking || is_exposed(call.weight.physical) ||
      (call.src.blocking && is_exposed(call.src.physical)))
    return nullptr;
  if (!call.src.blocking) {
    const auto own = kept(call.src.physical, dst_numel);
    if (!own) return nullptr;
    call.src.physical = *own;
  }
  if (call.bias) call.bias = copy_of(*call.bias);
  std::erase_if(waiting_here, [](const auto& deferred) { return deferred->done_.load(); });
  if (waiting_here.size() == most_waiting) finish_oldest();
  return std::shared_ptr<Deferred>(new Deferred(std::move(call), on_packing));
}

void Deferred::enlist() {
  waiting_here.push_back(shared_from_this());
  Registry& known = *registry;
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.all, [](const auto& deferred) { return deferred.expired(); });
  known.all.push_back(shared_from_this());
}

std::shared_ptr<Deferred> Deferred::waiting(const c10::IValue& tensor) {
  if (waiting_here.empty() || !tensor.isTensor()) return nullptr;
  const auto pending = pending_of(tensor.toTensor());
  for (const auto& deferred : waiting_here)
    if (deferred == pending && deferred->is_last(tensor.unsafeToTensorImpl()) &&
        deferred->inference_ == c10::InferenceMode::is_enabled())
      return deferred;
  return nullptr;
}

bool Deferred::is_last(const c10::TensorImpl* tensor) const {
  const WithoutInterpreter others_may_run;
  const std::lock_guard lock(mutex_);
  const auto answer = done_ ? nullptr : stages_.back().answer.lock();
  return answer && answer->wrapper == tensor;
}

bool Deferred::finish_here() {
  while (!waiting_here.empty()) finish_oldest();
  return registry.load()->count > 0;
}

void Deferred::finish_readers(const at::Tensor& tensor) {
  if (const void* const storage = storage_of(tensor)) finish_readers(storage);
}

void Deferred::finish_readers(const void* storage) {
  for (const auto& deferred : all_waiting())
    if (deferred->reads(storage)) deferred->finish();
}

void Deferred::expose(const at::Tensor& physical) {
  if (!torch_blocked::expose(physical)) return;
  if (finish_here()) finish_readers(physical.storage().unsafeGetStorageImpl());
}

void Deferred::enable(bool on) {
  finish_here();
  enabled = on;
}

// ---- One of them

Deferred::Deferred(ConvolutionCall call, ConvolutionCall::OnPacking on_packing)
    : on_packing_(std::move(on_packing)), inference_(c10::InferenceMode::is_enabled()), count_(registry.load()->count) {
  set_call(std::move(call));
  count_++;
}

Deferred::~Deferred() {
  if (!done_) count_--;
}

ConvolutionCall Deferred::call() const {
  const WithoutInterpreter others_may_run;
  const std::lock_guard lock(mutex_);
  return call_;
}

void Deferred::set_call(ConvolutionCall call) {
  call_ = std::move(call);
  versions_ = versions(call_);
  for (size_t i = 0; const at::Tensor& tensor : operands(call_))
    storages_[i++] = tensor.defined() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

at::Tensor Deferred::answer(const BlockedType& type) {
  Stage& stage = stages_.emplace_back();
  at::Tensor answer = type.make(shared_from_this(), call_.dtype(), *call_.blocking, call_.size(), stage.answer);
  enlist();
  return answer;
}

at::Tensor Deferred::then(const BlockedType& type, ConvolutionCall call, Step step) {
  Stage stage{std::move(step), {}};
  const at::Tensor answer = type.make(shared_from_this(), call.dtype(), *call.blocking, call.size(), stage.answer);
  return add(std::move(call), std::move(stage)) ? answer : at::Tensor();
}

bool Deferred::then_in_place(ConvolutionCall call, Step step) {
  return add(std::move(call), Stage{std::move(step), {}}, /*in_place=*/true);
}

// False where it has run meanwhile, or cannot any more.
bool Deferred::add(ConvolutionCall call, Stage stage, bool in_place) {
  const WithoutInterpreter others_may_run;
  const std::lock_guard lock(mutex_);
  if (done_ || versions_ != versions(call_)) return false;
  if (in_place) stage.answer = std::exchange(stages_.back().answer, {});
  set_call(std::move(call));
  stages_.push_back(std::move(stage));
  return true;
}

bool Deferred::reads(const void* storage) const {
  return !done_ && std::any_of(storages_.begin(), storages_.end(), [&](const auto& each) { return each == storage; });
}

namespace {

// Whether someone may ask for the bytes of an answer in between.
template <class Stages>
bool holds_any_before_last(const Stages& stages) {
  return std::any_of(stages.begin(), stages.end() - 1, [](const auto& stage) { return !stage.answer.expired(); });
}

// The physical tensors of the answers, or of the last one.
template <class Stages>
std::vector<at::Tensor> computed(const ConvolutionCall& call, const Stages& stages) {
  if (!holds_any_before_last(stages)) return {call.run()};
  std::vector<at::Tensor> values;
  at::Tensor value = call.without_post_ops().run();
  for (const auto& stage : stages) {
    if (stage.step) value = stage.step(value);
    values.push_back(value);
  }
  return values;
}

}  // namespace

void Deferred::finish() {
  // What is let go of here may call Python code: without the lock, and without what AsCalled sets.
  ConvolutionCall call;
  Stages stages;
  bool packed;
  {
    const WithoutInterpreter others_may_run;
    const std::lock_guard lock(mutex_);
    if (done_) return;
    std::erase(waiting_here, shared_from_this());  // now: what fails is told here, and again where it is asked for
    TORCH_CHECK(versions_ == versions(call_),
                "a convolution that waited for its post-ops finds what it reads written to by code that blocked "
                "tensors do not see: call torch_blocked.fuse('never') before");
    call = call_, stages = stages_;
    const int64_t before = weight_reorders();
    const std::vector<at::Tensor> values = [&] {
      const AsCalled as_called{c10::InferenceMode(inference_)};
      return computed(call, stages);
    }();
    packed = weight_reorders() != before;
    for (size_t i = 0, first = stages.size() - values.size(); i < values.size(); i++)
      deliver(stages[first + i].answer, values[i]);
    if (!done_) count_--;
    done_ = true;
    call_ = {}, stages_.clear();
  }
  if (packed) on_packing_(call);
}

}  // namespace torch_blocked
