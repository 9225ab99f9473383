#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#if defined(__linux__) && TORCH_BLOCKED_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torch_blocked {
namespace {

#if defined(__linux__) && TORCH_BLOCKED_X86
// The kernel keeps the tiles' 8 KB for no thread of a process that has not asked for it (since Linux 5.16).
bool is_amx_permitted() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & amx_bf16) && (edx & amx_tile) &&
         syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#else
bool is_amx_permitted() { return false; }
#endif

// Permission, which raises what the process needs for a signal's stack, is asked for only if AMX is wished for.
Isa detect(Isa wish) {
#if TORCH_BLOCKED_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) return wish == Isa::AMX && is_amx_permitted() ? Isa::AMX : Isa::AVX512;
  return avx2 ? Isa::AVX2 : Isa::Default;
#else
  return Isa::Default;
#endif
}

Isa wished_by_environment() {
  const char* text = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string wish = text ? text : "";
  return wish == "default" ? Isa::Default : wish == "avx2" ? Isa::AVX2 : wish == "avx512" ? Isa::AVX512 : Isa::AMX;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> tier{best_isa()};
  return tier;
}

}  // namespace

Isa best_isa() {
  static const Isa best = std::min(wished_by_environment(), detect(wished_by_environment()));
  return best;
}

Isa isa() { return current(); }

void set_isa(Isa tier) { current() = std::min(tier, best_isa()); }

const char* isa_name(Isa tier) {
  static constexpr const char* names[] = {"default", "avx2", "avx512", "amx"};
  return names[int(tier)];
}

}  // namespace torch_blocked
