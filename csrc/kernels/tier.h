// The name of a kernel table in the build of one tier: TORCH_BLOCKED_TIER_NAME(reorder_kernels) is
// reorder_kernels_avx512 where the compiler is given -DTORCH_BLOCKED_TIER=avx512.
//
// A kernel file keeps everything but its table in an anonymous namespace: an inline function with a name that the
// linker sees is kept once for all tiers, and might be the copy that this CPU cannot run.
#pragma once

#define TORCH_BLOCKED_PASTE(name, tier) name##_##tier
#define TORCH_BLOCKED_PASTE_EXPANDED(name, tier) TORCH_BLOCKED_PASTE(name, tier)
#define TORCH_BLOCKED_TIER_NAME(name) TORCH_BLOCKED_PASTE_EXPANDED(name, TORCH_BLOCKED_TIER)
