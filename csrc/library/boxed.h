// Our functions as the dispatcher calls them: it holds each tensor of a `Tensor?[]` in a box, and such a list costs it
// two blocks of memory.
#pragma once
#include <c10/util/SmallVector.h>

#include "operators.h"

namespace torch_blocked {

// What the dispatcher has in place of an argument of type T, and the way from one to the other and back.
template <class T>
struct Boxed {
  using type = T;
  static T box(T argument) { return argument; }
  static T unbox(T argument) { return argument; }
};
template <>
struct Boxed<OptionalTensors> {
  using type = const c10::List<std::optional<Tensor>>&;
  static c10::List<std::optional<Tensor>> box(OptionalTensors tensors) {
    return c10::List<std::optional<Tensor>>(c10::ArrayRef<std::optional<Tensor>>(tensors));
  }
  static c10::SmallVector<std::optional<Tensor>, 4> unbox(type boxes) { return {boxes.begin(), boxes.end()}; }
};

template <auto function>
struct Registered;
template <class R, class... A, R (*function)(A...)>
struct Registered<function> {
  static R call(typename Boxed<A>::type... arguments) { return function(Boxed<A>::unbox(arguments)...); }
};

}  // namespace torch_blocked
