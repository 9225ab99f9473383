#include "amx.h"

#include <algorithm>
#include <limits>

#include "tier.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace torch_blocked {
namespace {

#if defined(__AMX_BF16__)

constexpr int row_bytes = 64;

// The operand of LDTILECFG: eight tiles of whole rows. A constant: compilers do not see that all of it is read.
constexpr struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {row_bytes, row_bytes, row_bytes, row_bytes, row_bytes, row_bytes, row_bytes, row_bytes};
  uint8_t rows[16] = {amx_rows, amx_rows, amx_rows, amx_rows, amx_rows, amx_rows, amx_rows, amx_rows};
} tile_config;

void configure() { _tile_loadconfig(&tile_config); }
void release() { _tile_release(); }

// The upper bits of x, rounded to bfloat16: x less them is exact.
inline __m512i upper(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000), mask = _mm512_set1_epi32(0xffff0000);
  return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), mask);
}

// Their bfloat16s in turn.
inline __m512i in_turn(__m512i even, __m512i odd) {
  const __m512i mask = _mm512_set1_epi32(0xffff0000);
  constexpr int a_or_b_and_c = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, mask, a_or_b_and_c);
}

// Works off a queue, all of whose fields stay where they are: a copy in wider pieces than they were written in would
// wait for every store before it.
class Splitting {
 public:
  explicit Splitting(SplitQueue& queue) : queue_(queue) {}
  ~Splitting() {
    if (_mm512_reduce_max_epu32(largest_) >= amx_bound_bits << 1) queue_.in_bounds = false;
  }

  // So many vectors.
  void split(int64_t count) {
    for (int64_t n; count > 0 && queue_.run != queue_.end; count -= n) {
      SplitRun& run = *queue_.run;
      n = std::min(count, run.count);
      split_vectors(run, n);
      if ((run.count -= n) == 0) queue_.run++;
    }
  }

 private:
  [[gnu::always_inline]] void split_vectors(SplitRun& run, int64_t count) {
    const float *first = run.first, *second = run.second;
    const int64_t first_stride = run.first_stride, second_stride = run.second_stride;
    const int64_t dst_part = run.dst_part, ahead = run.ahead;
    Part* dst = run.dst;
    for (int64_t i = 0; i < count; i++, first += first_stride, second += second_stride, dst += amx_row) {
      __m512 x = _mm512_loadu_ps(first), y = _mm512_loadu_ps(second);
      __builtin_prefetch(first + ahead, 0, 2);
      __builtin_prefetch(second + ahead, 0, 2);
      const __m512i without_sign = _mm512_slli_epi32(_mm512_castps_si512(x), 1);
      const __m512i larger = _mm512_max_epu32(without_sign, _mm512_slli_epi32(_mm512_castps_si512(y), 1));
      largest_ = _mm512_max_epu32(largest_, larger);
      UNROLL for (int part = 0; part < amx_parts - 1; part++) {
        const __m512i even = upper(x), odd = upper(y);
        _mm512_storeu_si512(dst + part * dst_part, in_turn(even, odd));
        x = _mm512_sub_ps(x, _mm512_castsi512_ps(even));
        y = _mm512_sub_ps(y, _mm512_castsi512_ps(odd));
      }
      const __m512i last = in_turn(_mm512_castps_si512(x), _mm512_castps_si512(y));
      _mm512_storeu_si512(dst + (amx_parts - 1) * dst_part, last);
    }
    run.first = first, run.second = second, run.dst = dst;
  }

  SplitQueue& queue_;
  __m512i largest_ = _mm512_setzero_si512();  // of the numbers' bits, as unsigned ones, without their signs
};

void split(SplitQueue& queue) { Splitting(queue).split(std::numeric_limits<int64_t>::max()); }

// Tiles 0 to 3 hold the sums, [src tile][block], 4 and 5 src, 6 and 7 weights.
template <int Tiles, int Blocks>
inline void store_sums(float* sums, int64_t block_stride) {
  _tile_stored(0, sums, row_bytes);
  if constexpr (Blocks == 2) _tile_stored(1, sums + block_stride, row_bytes);
  if constexpr (Tiles == 2) _tile_stored(2, sums + amx_rows * block, row_bytes);
  if constexpr (Tiles == 2 && Blocks == 2) _tile_stored(3, sums + block_stride + amx_rows * block, row_bytes);
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int Tiles>
inline void load_src(const Part* src) {
  _tile_loadd(4, src, row_bytes);
  if constexpr (Tiles == 2) _tile_loadd(5, src + amx_rows * amx_row, row_bytes);
}

template <int Blocks>
inline void load_wei(const Part* wei) {
  _tile_loadd(6, wei, row_bytes);
  if constexpr (Blocks == 2) _tile_loadd(7, wei + amx_wei_block, row_bytes);
}

template <int Tiles, int Blocks>
inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (Blocks == 2) _tile_dpbf16ps(1, 4, 7);
  if constexpr (Tiles == 2) _tile_dpbf16ps(2, 5, 6);
  if constexpr (Tiles == 2 && Blocks == 2) _tile_dpbf16ps(3, 5, 7);
}

// The parts that are multiplied, in an order in which most products need one side's tiles only.
constexpr struct {
  int src, wei;
} products[amx_products] = {{0, 0}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 2}};

template <int Tiles, int Blocks>
void multiply(const AmxProducts& a) {
  const Part* wei = a.wei;
  Splitting splitting(*a.queue);
  zero_sums();
  for (int64_t step = 0; step < a.steps; step++, wei += amx_wei_step) {
    const Part* const src = a.src + a.src_steps[step];
    UNROLL for (int i = 0; i < amx_products; i++) {
      const auto [s, w] = products[i];
      if (i == 0 || s != products[i - 1].src) load_src<Tiles>(src + s * a.src_part);
      if (i == 0 || w != products[i - 1].wei) load_wei<Blocks>(wei + w * amx_rows * amx_row);
      add_products<Tiles, Blocks>();
      splitting.split(a.queue->pace);
    }
  }
  store_sums<Tiles, Blocks>(a.sums, a.sums_block);
}

void add(const float* part, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; i += block) (Vec::loadu(sums + i) + Vec::loadu(part + i)).store(sums + i);
}

template <int Pixels>
inline void finish_pixels(const float* sums, const Epilogue& e, int64_t channel, float* dst, int64_t dst_block,
                          int64_t dst_pixel, bool stream) {
  const Vec bias = e.bias ? Vec::loadu(e.bias + channel) : Vec(0.f);
  Register acc[1][Pixels];
  UNROLL for (int i = 0; i < Pixels; i++) acc[0][i] = Vec::loadu(sums + i * block) + bias;
  finish(e, channel, dst_block, 0, dst_pixel, acc);
  UNROLL for (int i = 0; i < Pixels; i++) store_vector(Vec(acc[0][i]), dst + i * dst_pixel, stream);
}

void finish_all(const float* sums, int64_t sums_block, int64_t blocks, Epilogue& e, float* dst, int64_t dst_block,
                int64_t dst_pixel, int64_t count, bool stream) {
  constexpr int at_once = 8;
  const float* const residual = e.residual;
  for (int64_t b = 0; b < blocks; b++, sums += sums_block, dst += dst_block)
    for (int64_t i = 0, n; i < count; i += n) {
      n = count - i < at_once ? 1 : at_once;
      if (residual) e.residual = residual + i * dst_pixel;
      const auto finish_some = n == 1 ? finish_pixels<1> : finish_pixels<at_once>;
      finish_some(sums + i * block, e, b * block, dst + i * dst_pixel, dst_block, dst_pixel, stream);
    }
}

constexpr AmxKernels make_table() {
  return {configure, release,   split, {{multiply<1, 1>, multiply<1, 2>}, {multiply<2, 1>, multiply<2, 2>}},
          add,       finish_all};
}

#else

constexpr AmxKernels make_table() { return {}; }

#endif

}  // namespace

extern const AmxKernels TORCH_BLOCKED_TIER_NAME(amx_kernels) = make_table();

}  // namespace torch_blocked
