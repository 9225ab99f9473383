#include "caches.h"

#include <unistd.h>

#include <atomic>

#include "isa.h"

namespace torch_blocked {
namespace {

Caches detect() {
  Caches found{0, 0};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  found = {sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE)};
#endif
  return {found.l1 > 0 ? found.l1 : 32 << 10, found.l2 > 0 ? found.l2 : 1 << 20};
}

std::atomic<int64_t> set_l1{0}, set_l2{0};

}  // namespace

Caches caches() {
  static const Caches detected = detect();
  const int64_t l1 = set_l1, l2 = set_l2;
  return {l1 > 0 ? l1 : detected.l1, l2 > 0 ? l2 : detected.l2};
}

bool is_behind_mesh() { return caches().l2 >= 2 << 20; }

bool fetches_into_l1() {
#if TORCH_BLOCKED_X86
  return __builtin_cpu_is("amd") && caches().l1 >= 48 << 10;
#else
  return false;
#endif
}

void set_caches(int64_t l1, int64_t l2) { set_l1 = l1, set_l2 = l2; }

}  // namespace torch_blocked
