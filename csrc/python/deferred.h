// Convolutions that wait until their answer is needed, so that what is called on it meanwhile becomes their post-ops.
//
// Without gradients a convolution makes a blocked tensor without bytes, and the batch normalization, the addition and
// the activation called on it next make others. Whatever asks for the bytes of one of them runs the convolution, with
// all that was called so far. A tensor in between that somebody still holds is computed, too, and what follows by
// itself: nothing is computed twice.
//
// Its arguments must not change before. So it waits only where their bytes have never been shown as a plain tensor,
// which could be written to unseen; a thread runs all that waits in it before any other operator of blocked tensors;
// and one that writes runs what waits in other threads to read the same bytes.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "blocked.h"
#include "convolution_call.h"

namespace torch_blocked {

class Deferred : public Pending, public std::enable_shared_from_this<Deferred> {
 public:
  // An operator by itself: of the physical tensor before it.
  using Step = std::function<at::Tensor(const at::Tensor&)>;

  // Whether the convolutions of this thread wait at all: without gradients.
  static bool may_wait();
  // One that does; null where its arguments may be written to unseen.
  static std::shared_ptr<Deferred> of(ConvolutionCall call, const ConvolutionCall::OnPacking& on_packing);
  // What waits in this thread to be the bytes of `tensor`; null where they are there, or another thread's.
  static std::shared_ptr<Deferred> waiting(const c10::IValue& tensor);

  // Runs what waits in this thread; whether something waits in others.
  static bool finish_here();
  // Runs what waits in any thread to read the bytes of a blocked tensor, or of a storage.
  static void finish_readers(const at::Tensor& tensor);
  static void finish_readers(const void* storage);
  // From now on a plain tensor shares the memory of a physical one: what waits to read it runs, and nothing will wait.
  static void expose(const at::Tensor& physical);
  // Runs what waits in this thread. From now on convolutions of all threads wait, or do not.
  static void enable(bool on);

  ~Deferred() override;
  ConvolutionCall call() const;  // without a blocking where it has run
  // The convolution's answer.
  at::Tensor answer(const BlockedType& type);
  // That of another operator, `step`, which makes it `call`; undefined where it has run meanwhile.
  at::Tensor then(const BlockedType& type, ConvolutionCall call, Step step);
  // The same in place of the answer that there is; false where it has run meanwhile.
  bool then_in_place(ConvolutionCall call, Step step);
  void finish() override;

 private:
  // What was called, and its answer; null where what comes next wrote to it.
  struct Stage {
    Step step;  // none: the convolution
    std::weak_ptr<Awaiting> answer;
  };

  using Stages = c10::SmallVector<Stage, 4>;

  Deferred(ConvolutionCall call, ConvolutionCall::OnPacking on_packing);
  void enlist();
  bool add(ConvolutionCall call, Stage stage, bool in_place = false);
  bool is_last(const c10::TensorImpl* tensor) const;
  bool reads(const void* storage) const;
  void set_call(ConvolutionCall call);

  mutable std::recursive_mutex mutex_;  // of what follows; Python code that is called meanwhile may need the answer
  ConvolutionCall call_;                // all of it
  std::array<int64_t, 3> versions_;
  Stages stages_;
  const ConvolutionCall::OnPacking on_packing_;
  const bool inference_;
  std::atomic<bool> done_ = false;
  std::atomic<int64_t>& count_;                         // of those that wait; a forked process has another
  std::array<std::atomic<const void*>, 3> storages_{};  // that it reads; asked without the lock
};

}  // namespace torch_blocked
