// Memory for an object's own lists, inside it, as far as they fit: a band of a chain makes such objects for a few rows.
#pragma once
#include <cstddef>
#include <memory_resource>

namespace torch_blocked {

template <size_t bytes>
class InlineMemory : public std::pmr::monotonic_buffer_resource {
 public:
  InlineMemory() : monotonic_buffer_resource(buffer_, bytes) {}

 private:
  alignas(std::max_align_t) std::byte buffer_[bytes];
};

}  // namespace torch_blocked
