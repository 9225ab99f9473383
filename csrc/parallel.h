// The thread shim: OpenMP as PyTorch uses it.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace torch_blocked {

// While it lives, this thread's arithmetic takes and gives zeros for denormals, which are a hundred times slower, or
// keeps them: what only compares does, as two of them would be equal. Moves keep them anyway.
class Denormals {
 public:
  enum What { Flushed, Kept };
#if defined(__x86_64__) || defined(_M_X64)
  explicit Denormals(What what) : saved_(_mm_getcsr()) {
    constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040, both = flush_to_zero | denormals_are_zero;
    _mm_setcsr(what == Flushed ? saved_ | both : saved_ & ~both);
  }
  ~Denormals() { _mm_setcsr(saved_); }
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
  const unsigned saved_;
#else
  explicit Denormals(What) {}
#endif
};

// Range [begin, end) of part `i` of `parts` of n things, as even as possible.
inline void split(int64_t n, int64_t parts, int64_t i, int64_t& begin, int64_t& end) {
  begin = n * i / parts;
  end = n * (i + 1) / parts;
}

// `parts`, or up to `most` of them where so many that each thread has the same number; there are `times` times as many.
inline int64_t even_parts(int64_t parts, int64_t times, int64_t most, int64_t nthreads) {
  if (times * parts % nthreads == 0) return parts;
  return std::min(most, (parts + nthreads - 1) / nthreads * nthreads);
}

// At most `nthreads` for work on so many values: of few, a second thread costs more than it saves.
inline int64_t threads_for(int64_t values, int64_t nthreads) {
  constexpr int64_t least_per_thread = 16 << 10;
  return std::min(nthreads, std::max<int64_t>(1, values / least_per_thread));
}

// Calls body(thread, nthreads) once in each of at most `nthreads` threads. An exception in any of them is thrown here.
//
// No num_threads clause: libgomp builds its team anew whenever that number changes, so the whole team starts and
// the threads beyond `nthreads` return at once.
template <class Body>
void parallel(int64_t nthreads, const Body& body) {
#ifdef _OPENMP
  if (nthreads > 1 && !omp_in_parallel()) {
    std::exception_ptr error;
    std::mutex error_mutex;
#pragma omp parallel
    {
      const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t n = nthreads < team ? nthreads : team;
      if (thread < n) try {
          const Denormals flushed(Denormals::Flushed);
          body(thread, n);
        } catch (...) {
          std::lock_guard<std::mutex> lock(error_mutex);
          error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  const Denormals flushed(Denormals::Flushed);
  body(int64_t(0), int64_t(1));
}

// n things that some threads share: each has an even share, in order, and one that is through with its own takes what
// the others have left, from the end. So the threads end together although one core may be slower than another or busy
// with something else, and each thing is mostly done where its data already is.
//
// A thread takes half of what is left of a share at a time, at least an eighth of the share, so that there are few
// ranges (each costs something) and the last ones are small. (Guided self-scheduling: Polychronopoulos and Kuck, 1987.)
class Ranges {
 public:
  Ranges(int64_t n, int64_t nthreads, int64_t least = 1)
      : n_(n),
        nshares_(std::clamp<int64_t>(std::min(n, nthreads), 1, most_shares)),
        pieces_(std::clamp<int64_t>(n / least / nshares_, 1, 8) * nshares_) {
    for (int64_t i = 0; i < nshares_; i++)
      shares_[i].left = range(pieces_ * i / nshares_, pieces_ * (i + 1) / nshares_);
  }

  // The next range [begin, end) for `thread`; false where nothing is left.
  bool take(int64_t thread, int64_t& begin, int64_t& end) {
    for (int64_t i = 0; i < nshares_; i++) {
      if (!take(shares_[(thread + i) % nshares_], i == 0, begin, end)) continue;
      begin = n_ * begin / pieces_;
      end = n_ * end / pieces_;
      return true;
    }
    return false;
  }

 private:
  static constexpr int64_t most_shares = 64;  // threads beyond begin with another's
  struct alignas(64) Share {
    uint64_t left;  // a range of pieces: its begin in the lower half, its end in the upper one
  };

  static uint64_t range(uint64_t begin, uint64_t end) { return begin | end << 32; }

  static bool take(Share& share, bool first, int64_t& begin, int64_t& end) {
    const std::atomic_ref<uint64_t> shared(share.left);
    uint64_t left = shared.load(std::memory_order_relaxed), rest;
    do {
      begin = left & 0xffffffff, end = left >> 32;
      if (begin == end) return false;
      const int64_t taken = std::max<int64_t>(1, (end - begin) / 2);
      rest = first ? range(begin + taken, end) : range(begin, end - taken);
      if (first)
        end = begin + taken;
      else
        begin = end - taken;
    } while (!shared.compare_exchange_weak(left, rest, std::memory_order_relaxed));
    return true;
  }

  const int64_t n_, nshares_, pieces_;
  std::array<Share, most_shares> shares_;  // those in use are set
};

// Calls body(begin, end) on ranges that are n things together, of at least `least` where there are as many a thread.
template <class Body>
void parallel_for(int64_t n, int64_t nthreads, const Body& body, int64_t least = 1) {
  if (n == 0) return;
  if (nthreads == 1 || n == 1) return parallel(1, [&](int64_t, int64_t) { body(0, n); });
  Ranges ranges(n, nthreads, least);
  parallel(std::min(n, nthreads), [&](int64_t thread, int64_t team) {
    int64_t begin = 0, end = n;
    if (team == 1) return body(begin, end);
    while (ranges.take(thread, begin, end)) body(begin, end);
  });
}

}  // namespace torch_blocked
