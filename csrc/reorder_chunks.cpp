// In which pieces of memory a plan reads src, where it reads it in the order of memory.
#include "reorder_plan.h"

namespace torch_blocked::reorder_plan {
namespace {

// The bytes of the src that the tile reads with the loops from `first` on, where they are one piece of memory, else 0.
int64_t piece_of_src(const Plan& plan, size_t first) {
  std::vector<std::pair<int64_t, int64_t>> parts;  // the distance of neighbours, and how many there are
  for (size_t a = 0; a < plan.axes.size(); a++) {
    const Axis& axis = plan.axes[a];
    const int64_t size = a < first ? std::min(axis.step, axis.dim) : axis.dim;
    if (size > 1 && !axis.src.affine()) return 0;
    if (size > 1) parts.emplace_back(axis.src.stride, size);
  }
  std::sort(parts.begin(), parts.end());
  int64_t bytes = plan.element_size;
  for (const auto& [stride, size] : parts) {
    if (stride != bytes) return 0;
    bytes *= size;
  }
  return bytes;
}

// Whether the loops outside of `first` read pieces of `bytes` bytes one after the other.
bool follow_each_other(const Plan& plan, size_t first, int64_t bytes) {
  while (first-- > 0) {
    const Axis& axis = plan.axes[first];
    if (axis.steps() == 1) continue;
    if (axis.src.at(axis.step) != bytes) return false;
    bytes = axis.src.at(axis.dim);
  }
  return true;
}

}  // namespace

void find_chunks(Plan& plan) {
  constexpr int64_t most = 256 << 10;  // bytes: two of them within a core's L2
  for (size_t loop = plan.axes.size() + 1; plan.chunk == 0 && loop-- > 0;) {
    const int64_t bytes = piece_of_src(plan, loop);
    if (bytes > most) return;
    if (bytes == 0 || !follow_each_other(plan, loop, bytes)) continue;
    plan.chunk = bytes;
    plan.chunk_loop = loop;
    for (size_t a = loop; a < plan.axes.size(); a++) plan.chunk_tiles *= plan.axes[a].steps();
  }
}

}  // namespace torch_blocked::reorder_plan
