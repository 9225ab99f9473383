// Reorder: the same logical elements from one memory descriptor into another.
#pragma once
#include <cstdint>

#include "memory_desc.h"

namespace torch_blocked {

// Copies src into dst: the same dims, elements of 1, 2, 4, 8 or 16 bytes, any strides (src's may be
// negative) and inner blocks on either side.
// The pointers are those of the logical index 0, 0, ... . dst's padding is cleared, src's is not looked at, and no byte
// outside dst's padded dims is written. The two must not overlap.
void reorder(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst, int64_t element_size,
             int64_t nthreads);

// Bytes of dst a second of such a reorder's first tiles, as many as the first cache holds, by one thread again and
// again: what the instructions permit, with src's and dst's strides, but without what memory takes. 0 where there are
// no elements.
double reorder_tile_rate(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst,
                         int64_t element_size);

}  // namespace torch_blocked
