// Writing past the caches: a line of dst is not read before it is written, and takes no other's place.
#pragma once
#include <atomic>
#include <cstdint>

#include "caches.h"

namespace torch_blocked {

// Bytes of src and dst together that fit what is left to one operator of a shared last level, about; what the system
// says is often the sum of many. Beyond, a reader of dst loses less than is gained here: on two cores of a Zen 4 that
// share 32 MB with others, 13 MB gain and 9 MB lose. Depthwise convolution, pooling and up-sampling have little to do
// while memory takes their stores: of 13 to 19 MB they and what reads their dst take 1.1 to 2.3 times as long past the
// caches. Reorders do even less, but alone with few threads: of 9 to 15 MB they take 1.1 to 1.9 times as long past the
// caches of a Zen 5 of 32 MB, with a reader 1.4 to 2.4 times, and of 18 MB one thread gains and two lose. The last
// level behind a mesh is larger: of 26 MB reorders take up to 1.35 times as long past it.
constexpr int64_t cache_room = 12 << 20, little_work_cache_room = 20 << 20;
inline int64_t reorder_cache_room() { return is_behind_mesh() ? 32 << 20 : 16 << 20; }

inline bool outgrows_caches(int64_t bytes, int64_t room = cache_room) { return bytes > room; }

// Whether vectors of any tier can be streamed to it.
inline bool is_streamable(const void* dst) { return reinterpret_cast<uintptr_t>(dst) % 64 == 0; }

// In each thread that has streamed: such stores keep no order of their own.
inline void finish_streams() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace torch_blocked
