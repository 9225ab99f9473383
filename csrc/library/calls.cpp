#include "calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <bit>
#include <string>
#include <string_view>
#include <tuple>

#include "boxed.h"
#include "operators.h"

namespace torch_blocked {
namespace {

class Words {
 public:
  explicit Words(const int64_t* words) : next_(words) {}
  int64_t number() { return *next_++; }
  template <class T>
  T* address() {
    return reinterpret_cast<T*>(number());
  }
  template <class T>
  at::ArrayRef<T> list() {
    const T* const data = address<const T>();
    return {data, size_t(number())};
  }

 private:
  const int64_t* next_;
};

// How an argument of a type is read.
template <class T>
struct Argument;

template <>
struct Argument<const Tensor&> {
  static const Tensor& read(Words& words) { return *words.address<const Tensor>(); }
};
template <>
struct Argument<const std::optional<Tensor>&> {
  static std::optional<Tensor> read(Words& words) {
    const Tensor* const* const tensor = words.address<const Tensor* const>();
    return tensor ? std::optional<Tensor>(**tensor) : std::nullopt;
  }
};
template <>
struct Argument<at::TensorList> {
  static c10::SmallVector<Tensor, 4> read(Words& words) {
    c10::SmallVector<Tensor, 4> tensors;
    for (const Tensor* const tensor : words.list<const Tensor*>()) tensors.push_back(*tensor);
    return tensors;
  }
};
template <>
struct Argument<OptionalTensors> {
  static c10::SmallVector<std::optional<Tensor>, 4> read(Words& words) {
    c10::SmallVector<std::optional<Tensor>, 4> tensors;
    for (const Tensor* const* const tensor : words.list<const Tensor* const*>())
      tensors.push_back(tensor ? std::optional<Tensor>(**tensor) : std::nullopt);
    return tensors;
  }
};
template <class T>
struct Argument<at::ArrayRef<T>> {
  static at::ArrayRef<T> read(Words& words) { return words.list<T>(); }
};
template <>
struct Argument<SymIntArrayRef> {
  static SymIntArrayRef read(Words& words) { return c10::fromIntArrayRefSlow(words.list<int64_t>()); }
};
template <>
struct Argument<at::OptionalIntArrayRef> {
  static at::OptionalIntArrayRef read(Words& words) {
    const int64_t* const* const data = words.address<const int64_t* const>();
    const size_t size = words.number();
    return data ? at::OptionalIntArrayRef(IntArrayRef(*data, size)) : std::nullopt;
  }
};
template <class T>
struct Argument<std::optional<T>> {
  static std::optional<T> read(Words& words) {
    const T* const value = words.address<const T>();
    return value ? std::optional<T>(*value) : std::nullopt;
  }
};
template <>
struct Argument<c10::string_view> {
  static c10::string_view read(Words& words) { return words.address<const char>(); }
};
template <>
struct Argument<double> {
  static double read(Words& words) { return std::bit_cast<double>(words.number()); }
};
template <>
struct Argument<int64_t> {
  static int64_t read(Words& words) { return words.number(); }
};
template <>
struct Argument<c10::SymInt> {
  static c10::SymInt read(Words& words) { return words.number(); }
};
template <>
struct Argument<bool> {
  static bool read(Words& words) { return words.number() != 0; }
};

// Puts what a function returns where the words say.
void give(Words& words, Tensor&& result) {
  if (Tensor** const to = words.address<Tensor*>()) *to = new Tensor(std::move(result));
}
template <class... T>
void give(Words& words, std::tuple<T...>&& results) {
  std::apply([&](T&... result) { (give(words, std::move(result)), ...); }, results);
}

// Past the dispatcher, but where somebody listens: it tells profilers what the arguments are.
template <class R, class... A>
void call(const char* name, R (*function)(A...), Words words) {
  std::tuple<decltype(Argument<A>::read(words))...> arguments{Argument<A>::read(words)...};
  const auto result = [&](auto&... each) {
    if (!at::hasCallbacks()) return function(each...);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    return op.template typed<R(typename Boxed<A>::type...)>().call(Boxed<A>::box(each)...);
  };
  if constexpr (std::is_void_v<R>)
    std::apply(result, arguments);
  else
    give(words, std::apply(result, arguments));
}

struct Entry {
  const char* name;
  void (*run)(const int64_t* words);
};

#define ENTRY(name) \
  {"torch_blocked::" #name, [](const int64_t* words) { call("torch_blocked::" #name, name##_cpu, Words(words)); }}
const Entry entries[] = {ENTRY(convolution),
                         ENTRY(convolution_out),
                         ENTRY(convolution_chain),
                         ENTRY(convolution_transpose),
                         ENTRY(convolution_transpose_out),
                         ENTRY(copy_out),
                         ENTRY(layer_norm_channels),
                         ENTRY(linear),
                         ENTRY(new_empty),
                         ENTRY(pool)};
#undef ENTRY

// FNV-1a (Fowler, Noll and Vo).
int64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return int64_t(hash);
}

}  // namespace

int64_t entry_point(int64_t schema_hash) {
  for (const auto& [name, run] : entries) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    if (hash_of(toString(op.schema())) == schema_hash) return reinterpret_cast<int64_t>(run);
  }
  TORCH_CHECK_VALUE(false, "torch_blocked: no operator has the schema that this code was compiled for, by another ",
                    "version of torch_blocked: compile or package it again");
}

}  // namespace torch_blocked
