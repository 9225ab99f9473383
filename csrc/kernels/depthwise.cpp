#include "depthwise.h"

#include <utility>

#include "depthwise_rolling.h"
#include "lanes.h"
#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {  // one copy per tier: nothing here may be shared between them

// Src is fetched before the rows that are read anew are begun: the hardware's own prefetch does not follow several of
// them at once. Tile after tile it is one run of addresses, which memory is fastest at, in equal parts beside the
// multiplications of each call: a core has room for some tens of misses, and drops what a burst asks for beyond that.
template <FetchInto Into>
struct FetchAhead {
  static constexpr int64_t line = 64 / sizeof(float);

  // For a tile of as many new `pixels` in a row, whose first is src column `iw`.
  FetchAhead(const DepthwiseArgs& a, int64_t src_offset, int64_t iw, int64_t pixels, int64_t calls)
      : next(a.src + (src_offset + a.maps[0].src + a.ahead + iw * (a.ahead_rows - 1) * block)),
        lines(calls > 0 ? (a.ahead_rows * pixels * block + calls * line - 1) / (calls * line) : 0),
        far(a.far_ahead) {}

  [[gnu::always_inline]] static void fetch(const float* at, int64_t far) {
    __builtin_prefetch(at, 0, Into == FetchInto::L2 ? 2 : 3);
    if (Into == FetchInto::Both) __builtin_prefetch(at + far, 0, 2);
  }
  [[gnu::always_inline]] void fetch(int64_t i) const { fetch(next + i * line, far); }
  // All of a tile at once, where no register is left to count its parts.
  template <int Pixels>
  [[gnu::always_inline]] void fetch_all(int64_t rows) const {
    const float* at = next;
    for (int64_t row = 0; row < rows; row++, at += Pixels * block)
#pragma GCC unroll 64
      for (int i = 0; i < Pixels * block; i += line) fetch(at + i, far);
  }
  [[gnu::always_inline]] void to_next_call(int64_t fetched) { next += fetched * line; }

  const float* next;
  const int64_t lines;  // of each of the calls, where their number is given
  const int64_t far;
};

// Cols pixels of one block of channels, each channel with its own filter. src pixels are Stride apart; taps come in
// rows of Kw neighbours, and pixel i of a row is the k-th tap of dst column (i - k) / Stride.
template <Lane lane, int Kw, int Stride, int Cols, FetchInto Into>
struct Tile {
  static constexpr int pixels = (Cols - 1) * Stride + Kw;
  using Fetch = FetchAhead<Into>;
  // Whether src is fetched in parts, and beside how many pixels of a call: enough of them for square filters and
  // strides, and for so many channels a group. Where there may be far more calls, the lines of each are counted.
  static constexpr bool in_parts = lane != Lane::Own || max_cols > 8;
  static constexpr bool counted = Kw == 1 || lane == Lane::Mapped;
  static constexpr int channels = lane == Lane::Same ? block : lane == Lane::Mapped ? 2 : 1;
  static constexpr int fetching =
      Kw == 1 ? pixels : (Cols * Stride * Stride * block - 1) / (channels * Kw * Fetch::line) + 1;
  Register acc[1][Cols];

  // Where the first pixel of the rows of taps is src column `iw`.
  [[gnu::always_inline]] void add(const DepthwiseArgs& a, int64_t src_offset, int64_t iw, TapRange taps) {
    const int64_t nmaps = lane == Lane::Own ? 1 : a.nmaps;
    const int64_t calls = nmaps * (lane == Lane::Same ? block : 1) * (taps.end - taps.begin);  // or a few less
    Fetch ahead(a, src_offset, iw, Cols * Stride, counted ? calls : 0);
    if constexpr (!in_parts) ahead.template fetch_all<Cols * Stride>(a.ahead_rows);
    for (int64_t t = taps.begin; t < taps.end; t++) {
      const float* const src = a.src + (src_offset + a.taps[t].src);
      const float* const wei = a.wei + a.taps[t].wei;
      for (int64_t m = 0; m < nmaps; m++) {
        const LaneMap& map = a.maps[m];
        const float *pixel = src + map.src, *row = wei + map.wei;
        for (int64_t i = 0; i < (lane == Lane::Same ? map.lanes : 1); i++, pixel++, row += map.wei_lane) {
          Vec w[Kw];
          UNROLL for (int k = 0; k < Kw; k++) w[k] = Vec::loadu(row + k * a.wei_kw);
          add_row(a, pixel, iw, Lanes(map), w, ahead);
          if constexpr (in_parts) ahead.to_next_call(counted ? ahead.lines : fetching);
        }
      }
    }
  }

  [[gnu::always_inline]] void add_row(const DepthwiseArgs& a, const float* src, int64_t iw, const Lanes& lanes,
                                      const Vec (&w)[Kw], const Fetch& ahead) {
#pragma GCC unroll 64
    for (int i = 0; i < pixels; i++) {
      if (in_parts && i < fetching && (!counted || i < ahead.lines)) ahead.fetch(i);
      if (!is_read(i) || is_outside(a, iw, i)) continue;
      const float* const pixel = src + i * block;
      const Vec x = lane == Lane::Same     ? Vec(*pixel)
                    : lane == Lane::Mapped ? lanes.move(pixel)
                                           : in_register(Vec::loadu(pixel));
      UNROLL for (int k = 0; k < Kw; k++) if (const int c = column(i, k); c >= 0) acc[0][c] =
          multiply_add(w[k], x, acc[0][c]);
    }
  }

  // Pixel i of a row of taps: whether a tap reads it, the column of dst whose k-th tap does (-1: none), whether it lies
  // in the padding.
  static constexpr bool is_read(int i) { return Kw > 1 || i % Stride == 0; }
  static constexpr int column(int i, int k) {
    return i >= k && (i - k) % Stride == 0 && (i - k) / Stride < Cols ? (i - k) / Stride : -1;
  }
  [[gnu::always_inline]] static bool is_outside(const DepthwiseArgs& a, int64_t iw, int i) {
    const bool left = i < Kw - 1 && iw + i < 0;
    const bool right = i > pixels - Kw && iw + i >= a.iw;
    return left || right;
  }
  [[gnu::always_inline]] static const float* pixel_at(const DepthwiseArgs& a, const float* src, int64_t iw, int i) {
    return is_outside(a, iw, i) ? a.zeros : src + i * block;
  }

  [[gnu::always_inline]] void store(const DepthwiseArgs& a, float* dst) {
    const int64_t dst_pixel = a.dst_step * block;
    if (!a.first) UNROLL for (int c = 0; c < Cols; c++) acc[0][c] = Vec(acc[0][c]) + Vec::loadu(dst + c * dst_pixel);
    if (a.last) {
      Epilogue epilogue = a.epilogue;
      if (epilogue.residual) epilogue.residual += dst - a.dst;
      finish(epilogue, 0, 0, 0, dst_pixel, acc);
    }
    const bool stream = a.stream;
    UNROLL for (int c = 0; c < Cols; c++) store_vector(Vec(acc[0][c]), dst + c * dst_pixel, stream);
  }
};

// Channels of a group whose lanes exchange their sums; 0 for others.
constexpr int exchanging(Lane lane) { return lane == Lane::Fours ? 4 : lane == Lane::Eights ? 8 : 0; }

// Every lane multiplies its own channel, for each output of its group in turn: that of lane i ^ r is in the r-th of its
// sums. In the end lanes exchange these, by halves (as a reduction by recursive doubling), and no pixel's lanes are
// moved.
template <Lane lane, int Kw, int Stride, int Cols, FetchInto Into>
  requires(exchanging(lane) > 0)
struct Tile<lane, Kw, Stride, Cols, Into> : Tile<Lane::Mapped, Kw, Stride, Cols, Into> {
  using Base = Tile<Lane::Mapped, Kw, Stride, Cols, Into>;
  static constexpr int n = exchanging(lane);
  static constexpr int fetching = (Cols * Stride * Stride * block - 1) / (Kw * Base::Fetch::line) + 1;

  [[gnu::always_inline]] void add(const DepthwiseArgs& a, int64_t src_offset, int64_t iw, TapRange taps) {
    Vec sums[n][Cols];
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int c = 0; c < Cols; c++) sums[r][c] = Vec(0.f);
    typename Base::Fetch ahead(a, src_offset, iw, Cols * Stride, 0);
    const DepthwiseArgs edges = a;  // in registers: else GCC branches at each pixel, and keeps sums in memory there
    for (int64_t t = taps.begin; t < taps.end; t++) {
      const float* const src = a.src + (src_offset + a.maps[0].src + a.taps[t].src);
      const float* wei = a.wei + a.taps[t].wei;
      UNROLL for (int i = 0; i < fetching; i++) ahead.fetch(i);
      UNROLL for (int k = 0; k < Kw; k++, wei += n * block) {
        Vec x[Cols];
        UNROLL for (int c = 0; c < Cols; c++) x[c] =
            in_register(Vec::loadu(Base::pixel_at(edges, src, iw, c * Stride + k)));
        UNROLL for (int r = 0; r < n; r++) {
          const Vec w = in_register(Vec::loadu(wei + r * block));
          UNROLL for (int c = 0; c < Cols; c++) sums[r][c] = multiply_add(w, x[c], sums[r][c]);
        }
      }
      ahead.to_next_call(fetching);
    }
    add_exchanged<n>(sums);
    UNROLL for (int c = 0; c < Cols; c++) this->acc[0][c] = Vec(this->acc[0][c]) + sums[0][c];
  }

  template <int count>
  [[gnu::always_inline]] static void add_exchanged(Vec (&sums)[n][Cols]) {
    if constexpr (constexpr int half = count / 2; half > 0) {
      UNROLL for (int r = 0; r < half; r++) UNROLL for (int c = 0; c < Cols; c++) sums[r][c] =
          sums[r][c] + exchange<half>(sums[r + half][c]);
      add_exchanged<half>(sums);
    }
  }
};

// w[i] of lane j becomes what w[i ^ j] was, as far as the bits from `bit` on.
template <int bit, int n>
[[gnu::always_inline]] inline void exchange_vectors(Vec (&w)[n]) {
  if constexpr (bit < n) {
    Vec mixed[n];
    UNROLL for (int i = 0; i < n; i++) mixed[i] = by_bit<bit>(w[i], w[i ^ bit]);
    UNROLL for (int i = 0; i < n; i++) w[i] = mixed[i];
    exchange_vectors<2 * bit>(w);
  }
}

template <int... r>
void exchange_weights(const float* wei, const int64_t* channels, float* to, std::integer_sequence<int, r...>) {
  Vec w[] = {Vec::loadu(wei + channels[r])...};
  exchange_vectors<1>(w);
  (exchange<r>(w[r]).store(to + r * block), ...);
}

template <Lane lane>
void exchange_weights(const float* wei, const int64_t* channels, float* to) {
  exchange_weights(wei, channels, to, std::make_integer_sequence<int, exchanging(lane)>());
}

template <Lane lane, int Kw, int Stride, int Cols, FetchInto Into>
[[gnu::always_inline]] inline void compute_rows(const DepthwiseArgs& a) {
  const Vec start = a.first && a.epilogue.bias ? Vec::loadu(a.epilogue.bias) : Vec(0.f);
  for (int64_t row = 0; row < a.nrows; row++) {
    const TapRange taps = a.rows[row];
    int64_t src_offset = a.src_offset + row * a.src_row, iw = a.iw_begin;
    float* dst = a.dst + row * a.dst_row;
    for (int64_t tile = 0; tile < a.ntiles; tile++) {
      Tile<lane, Kw, Stride, Cols, Into> t;
      UNROLL for (int c = 0; c < Cols; c++) t.acc[0][c] = start;
      t.add(a, src_offset, iw, taps);
      t.store(a, dst);
      src_offset += a.src_tile;
      iw += a.tile_columns;
      dst += Cols * a.dst_step * block;
    }
  }
}

template <Lane lane, int Kw, int Stride, int Cols>
[[gnu::noinline]] void depthwise(const DepthwiseArgs& a) {
  // Grouped multiplies long enough for what is fetched to arrive in L1 in any case.
  if (lane != Lane::Own) return compute_rows<lane, Kw, Stride, Cols, FetchInto::L1>(a);
  if constexpr (lane == Lane::Own) switch (a.ahead_into) {
      case FetchInto::L2:
        return compute_rows<lane, Kw, Stride, Cols, FetchInto::L2>(a);
      case FetchInto::L1:
        return compute_rows<lane, Kw, Stride, Cols, FetchInto::L1>(a);
      case FetchInto::Both:
        return compute_rows<lane, Kw, Stride, Cols, FetchInto::Both>(a);
    }
}

// Most columns of a call: of narrow rows of taps the weights leave room for more sums. Lanes that exchange theirs have
// several a column, for which only AVX-512 has the registers.
constexpr int narrow_kw = 3;
constexpr int most_cols(Lane lane, [[maybe_unused]] int kw) {
#if defined(CPU_CAPABILITY_AVX512)
  if (exchanging(lane)) return lane == Lane::Fours ? 6 : 3;
#else
  if (exchanging(lane)) return 0;
#endif
#if defined(CPU_CAPABILITY_AVX2)
  if (lane != Lane::Mapped && kw <= narrow_kw) return 10;
#endif
  return max_cols;
}

template <Lane lane, int Width, int Stride, size_t... I>
constexpr void fill_cols(DepthwiseKernels& table, std::index_sequence<I...>) {
  constexpr int kw = depthwise_kw[Width];
  table.cols[int(lane)][Width] = sizeof...(I);
  ((table.kernels[int(lane)][Width][Stride - 1][I] = depthwise<lane, kw, Stride, int(I) + 1>), ...);
}

template <Lane lane, size_t... Width>
constexpr void fill(DepthwiseKernels& table, std::index_sequence<Width...>) {
  if constexpr (exchanging(lane) > 0 && most_cols(lane, 1) > 0)
    table.exchange_weights[int(lane)] = exchange_weights<lane>;
  ((fill_cols<lane, Width, 1>(table, std::make_index_sequence<most_cols(lane, depthwise_kw[Width])>()),
    fill_cols<lane, Width, 2>(table, std::make_index_sequence<most_cols(lane, depthwise_kw[Width])>())),
   ...);
}

template <size_t... I>
constexpr void fill_rolling(DepthwiseKernels& table, std::index_sequence<I...>) {
  table.rolling_cols = sizeof...(I);
  ((table.rolling[I] = depthwise_rolling<int(I) + 1>), ...);
}

constexpr DepthwiseKernels make_table() {
  DepthwiseKernels table{};
  constexpr auto widths = std::make_index_sequence<std::size(depthwise_kw)>();
  fill<Lane::Own>(table, widths);
  fill<Lane::Mapped>(table, widths);
  fill<Lane::Same>(table, widths);
  fill<Lane::Fours>(table, widths);
  fill<Lane::Eights>(table, widths);
  fill_rolling(table, std::make_index_sequence<rolling_cols>());
  return table;
}

}  // namespace

extern const DepthwiseKernels TORCH_BLOCKED_TIER_NAME(depthwise_kernels) = make_table();

}  // namespace torch_blocked
