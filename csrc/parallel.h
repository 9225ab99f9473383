// The thread shim: OpenMP as PyTorch uses it.
#pragma once
#include <algorithm>
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

// While it lives, this thread's arithmetic takes and gives zeros for denormals, which are a hundred times slower. Moves
// keep them. As much as a kernel's result may lose by it is below the smallest normal number.
class FlushDenormals {
#if defined(__x86_64__) || defined(_M_X64)
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | flush_to_zero | denormals_are_zero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
  const unsigned saved_;
#else
 public:
  FlushDenormals() {}
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
          const FlushDenormals flush;
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
  const FlushDenormals flush;
  body(int64_t(0), int64_t(1));
}

// Calls body(begin, end) on even parts of n things, one part a thread.
template <class Body>
void parallel_for(int64_t n, int64_t nthreads, const Body& body) {
  parallel(nthreads < n ? nthreads : n, [&](int64_t thread, int64_t team) {
    int64_t begin, end;
    split(n, team, thread, begin, end);
    if (begin < end) body(begin, end);
  });
}

}  // namespace torch_blocked
