// The memory descriptor as a plain struct: what the kernels know of a tensor besides its address.
#pragma once
#include <cstdint>

namespace torch_blocked {

constexpr int max_ndims = 12;

// Logical dims, outer strides in elements (the inner blocks are already inside them), and the dense inner blocks,
// outermost first. padded(d) and the address of an index follow.
struct MemoryDesc {
  int ndims = 0;
  int64_t dims[max_ndims] = {};
  int64_t strides[max_ndims] = {};
  int inner_nblks = 0;
  int64_t inner_blks[max_ndims] = {};
  int inner_idxs[max_ndims] = {};

  bool operator==(const MemoryDesc&) const = default;

  int64_t block(int d) const {
    int64_t size = 1;
    for (int i = 0; i < inner_nblks; i++)
      if (inner_idxs[i] == d) size *= inner_blks[i];
    return size;
  }

  int64_t inner_numel() const {
    int64_t size = 1;
    for (int i = 0; i < inner_nblks; i++) size *= inner_blks[i];
    return size;
  }

  int64_t outer(int d) const {
    const int64_t size = block(d);
    return size == 1 ? dims[d] : (dims[d] + size - 1) / size;  // a division takes as long as all the rest
  }
  int64_t padded(int d) const { return outer(d) * block(d); }

  // Element offset of a logical index (oneDNN's off_v): the inner blocks from last to first, then the outer strides.
  int64_t off_v(const int64_t* index) const {
    int64_t pos[max_ndims], off = 0, inner_stride = 1;
    for (int d = 0; d < ndims; d++) pos[d] = index[d];
    for (int i = inner_nblks - 1; i >= 0; i--) {
      int64_t& p = pos[inner_idxs[i]];
      off += p % inner_blks[i] * inner_stride;
      p /= inner_blks[i];
      inner_stride *= inner_blks[i];
    }
    for (int d = 0; d < ndims; d++) off += pos[d] * strides[d];
    return off;
  }

  bool is_plain() const { return inner_nblks == 0; }

  // Every inner block is one of channels: of a weight's output or input channels, or of an activation's.
  bool is_blocked_by_channels() const {
    for (int i = 0; i < inner_nblks; i++)
      if (inner_idxs[i] > 1) return false;
    return true;
  }

  // Exactly one inner block, of axis `axis`; its size or 0.
  int64_t single_block(int axis) const { return inner_nblks == 1 && inner_idxs[0] == axis ? inner_blks[0] : 0; }
};

}  // namespace torch_blocked
