// The sizes of a core's own caches, by which work is cut up.
#pragma once
#include <cstdint>

namespace torch_blocked {

struct Caches {
  int64_t l1, l2;  // bytes, of data
};

// As the CPU tells them, or by set_caches; 32 KiB and 1 MiB where it tells nothing.
Caches caches();
void set_caches(int64_t l1, int64_t l2);  // for tests; zeros: the CPU's again

// Cores with 2 MB of L2 have a slow last level cache behind it, as a mesh is; with less they share a fast one.
bool is_behind_mesh();

// Whether what is fetched ahead arrives as soon in L1 as in L2. Of AMD's cores those with 48 KiB of it (Zen 5) wait for
// as many lines there, those with less (Zen 4) for fewer; Intel's (Granite Rapids) were measured with L2.
bool fetches_into_l1();

}  // namespace torch_blocked
