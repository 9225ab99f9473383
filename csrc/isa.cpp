#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

namespace torch_blocked {
namespace {

Isa detect() {
#if TORCH_BLOCKED_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? Isa::AVX512 : avx2 ? Isa::AVX2 : Isa::Default;
#else
  return Isa::Default;
#endif
}

Isa lowered_by_environment(Isa tier) {
  const char* text = std::getenv("ATEN_CPU_CAPABILITY");
  if (text == nullptr) return tier;
  const std::string wish = text;
  if (wish == "default") return Isa::Default;
  if (wish == "avx2") return std::min(tier, Isa::AVX2);
  return tier;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> tier{best_isa()};
  return tier;
}

}  // namespace

Isa best_isa() {
  static const Isa best = lowered_by_environment(detect());
  return best;
}

Isa isa() { return current(); }

void set_isa(Isa tier) { current() = std::min(tier, best_isa()); }

const char* isa_name(Isa tier) { return tier == Isa::AVX512 ? "avx512" : tier == Isa::AVX2 ? "avx2" : "default"; }

}  // namespace torch_blocked
