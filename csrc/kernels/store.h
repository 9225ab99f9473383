// Vectors stored past the caches, for kernel files (tier.h says why everything is in an anonymous namespace).
#pragma once
#include <ATen/cpu/vec/vec.h>

namespace torch_blocked {
namespace {

// Past the caches, where there is an instruction for it; dst is aligned to the vector.
template <class Vec>
inline void store_streamed(const Vec& vec, float* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_stream_ps(dst, vec);
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_stream_ps(dst, vec);
#else
  vec.store(dst);
#endif
}

template <class Vec>
inline void store_vector(const Vec& vec, float* dst, bool stream) {
  if (stream)
    store_streamed(vec, dst);
  else
    vec.store(dst);
}

}  // namespace
}  // namespace torch_blocked
