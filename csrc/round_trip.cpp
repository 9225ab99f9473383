#include "round_trip.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <vector>

namespace torch_blocked {

#ifdef __linux__
namespace {

// Up to 15 of the others, evenly apart.
std::vector<int> other_cpus(int cpu) {
  constexpr size_t most = 15;
  cpu_set_t allowed;
  std::vector<int> others, some;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return {};
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &allowed) && i != cpu) others.push_back(i);
  for (size_t i = 0, n = std::min(most, others.size()); i < n; i++)
    some.push_back(others[(i + 1) * others.size() / n - 1]);
  return some;
}

class Line {
 public:
  // Until the other core has written `value`. It gives way from time to time: the two threads may share a core.
  void wait_for(int value) const {
    for (int i = 1; value_.load(std::memory_order_acquire) != value; i++)
      if (i % 4096 == 0) std::this_thread::yield();
  }
  void write(int value) { value_.store(value, std::memory_order_release); }

 private:
  alignas(64) std::atomic<int> value_ = 0;
};

// The fastest of some runs, each long enough for the clock: what disturbs one is not the distance. This thread stays
// where it is, as the other core is busy.
double round_trip_to(int cpu) {
  constexpr int runs = 10, trips = 50;
  Line line;
  std::thread other([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
    for (int i = 1; i <= runs * trips; i++) line.wait_for(2 * i - 1), line.write(2 * i);
  });
  double fastest = std::numeric_limits<double>::infinity();
  for (int i = 1; i <= runs * trips;) {
    const auto start = std::chrono::steady_clock::now();
    for (int end = i + trips; i < end; i++) line.write(2 * i - 1), line.wait_for(2 * i);
    fastest =
        std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / trips);
  }
  other.join();
  return fastest;
}

}  // namespace

double core_round_trip() {
  double slowest = 0;
  for (const int cpu : other_cpus(sched_getcpu())) slowest = std::max(slowest, round_trip_to(cpu));
  return slowest;
}
#else
double core_round_trip() { return 0; }
#endif

}  // namespace torch_blocked
