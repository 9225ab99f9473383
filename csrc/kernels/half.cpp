#include "half.h"

#include <ATen/cpu/vec/vec.h>

#include <type_traits>

#include "tier.h"

namespace torch_blocked {
namespace {

using Float = at::vec::Vectorized<float>;

template <class T>
auto to_floats(const at::vec::Vectorized<T>& half) {
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    return at::vec::convert_bfloat16_float(half);
  else
    return at::vec::convert_half_float(half);
}

template <class T>
auto from_floats(const Float& low, const Float& high) {
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    return at::vec::convert_float_bfloat16(low, high);
  else
    return at::vec::convert_float_half(low, high);
}

template <class T>
void widen(const void* src, float* dst, int64_t count) {
  using Half = at::vec::Vectorized<T>;
  const T* const from = static_cast<const T*>(src);
  int64_t i = 0;
  for (; i + Half::size() <= count; i += Half::size()) {
    const auto [low, high] = to_floats<T>(Half::loadu(from + i));
    low.store(dst + i);
    high.store(dst + i + Float::size());
  }
  if (i == count) return;
  float rest[Half::size()];
  const auto [low, high] = to_floats<T>(Half::loadu(from + i, count - i));
  low.store(rest);
  high.store(rest + Float::size());
  for (int64_t j = i; j < count; j++) dst[j] = rest[j - i];
}

template <class T>
void narrow(const float* src, void* dst, int64_t count) {
  using Half = at::vec::Vectorized<T>;
  T* const to = static_cast<T*>(dst);
  int64_t i = 0;
  for (; i + Half::size() <= count; i += Half::size())
    from_floats<T>(Float::loadu(src + i), Float::loadu(src + i + Float::size())).store(to + i);
  if (i == count) return;
  float rest[Half::size()] = {};
  for (int64_t j = i; j < count; j++) rest[j - i] = src[j];
  from_floats<T>(Float::loadu(rest), Float::loadu(rest + Float::size())).store(to + i, count - i);
}

}  // namespace

extern const HalfKernels TORCH_BLOCKED_TIER_NAME(half_kernels) = {{widen<c10::BFloat16>, narrow<c10::BFloat16>},
                                                                  {widen<c10::Half>, narrow<c10::Half>}};

}  // namespace torch_blocked
