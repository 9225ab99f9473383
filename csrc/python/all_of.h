// Looking at all of a model, which the convolutions of a call have put out of the caches: by all threads.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../parallel.h"

namespace torch_blocked {

// Whether `holds` is true of each item; `prefetch` fetches what it will read of one. Both run in several threads, in
// all but this one without the interpreter's lock, which this one keeps: they look and change nothing.
template <class Item, class Prefetch, class Holds>
bool all_of(const std::vector<Item>& items, const Prefetch& prefetch, const Holds& holds) {
  constexpr int64_t least = 32;  // items a thread
  const int64_t n = items.size(), nthreads = at::in_parallel_region() ? 1 : at::get_num_threads();
  std::atomic<bool> all = true;
  parallel_for(n, std::clamp<int64_t>(n / least, 1, nthreads), [&](int64_t begin, int64_t end) {
    std::for_each(items.begin() + begin, items.begin() + end, prefetch);
    if (!std::all_of(items.begin() + begin, items.begin() + end, holds)) all = false;
  });
  return all;
}

}  // namespace torch_blocked
