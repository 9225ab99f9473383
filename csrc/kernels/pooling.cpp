#include "pooling.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <limits>

#include "store.h"
#include "tier.h"

namespace torch_blocked {
namespace {

using Vec = at::vec::Vectorized<float>;
using Index = at::vec::Vectorized<int32_t>;
static_assert(Vec::size() == Index::size());

// Some lanes of every pixel, from `first` on: a whole vector, or what is left of a block.
struct WholeVector {
  int64_t first;
  bool stream;
  Vec load(const float* pixel) const { return Vec::loadu(pixel + first); }
  void store(const Vec& v, float* pixel) const { store_vector(v, pixel + first, stream); }
  int count() const { return Vec::size(); }
};
struct PartOfVector {
  int64_t first;
  int lanes;
  Vec load(const float* pixel) const { return Vec::loadu(pixel + first, lanes); }
  void store(const Vec& v, float* pixel) const { v.store(pixel + first, lanes); }
  int count() const { return lanes; }
};

// Calls row(lanes) on the parts of a block, one vector at a time: what a row reads stays in the L1 cache.
template <class Row>
void for_each_vector(int64_t block, bool stream, const Row& row) {
  stream = stream && block == Vec::size();  // whole cache lines, one after another
  int64_t first = 0;
  for (; first + Vec::size() <= block; first += Vec::size()) row(WholeVector{first, stream});
  if (first < block) row(PartOfVector{first, int(block - first)});
}

// The share of a dst pixel of what is fetched. Rows of a block are short: the CPU's own prefetch starts anew on each,
// and alone takes two to three times as long. Pixel after pixel it is one run of addresses, which memory is fastest at.
inline void fetch_ahead(const PoolRow& a, int64_t ow) {
  constexpr int64_t line = 64 / sizeof(float);
  const float* const first = a.ahead + ow * a.ahead_lines * line;
  for (int64_t i = 0; i < a.ahead_lines; i++) __builtin_prefetch(first + i * line);
}

constexpr int64_t longest_run = 64;  // pixels

// Calls tap(pixel of src, its index in the plane) on all that the dst pixel of `col` sees; `Width` of a row, if not 0.
// run_end() follows each run: a row, or where that is longer some pixels of it.
template <int Width, class Tap, class RunEnd>
inline void for_each_tap_of(const PoolRow& a, const Window& col, const Tap& tap, const RunEnd& run_end) {
  const int64_t width = Width ? Width : col.taps;
  for (int64_t i = 0; i < a.window.taps; i++) {
    const int64_t h = a.window.begin + i * a.dilation_h;
    const float* const row = a.src.data + h * a.src.row;
    for (int64_t first = 0; first < width; first += longest_run) {
      for (int64_t j = first; j < std::min(width, first + longest_run); j++) {
        const int64_t w = col.begin + j * a.dilation_w;
        tap(row + w * a.src.pixel, h * a.iw + w);
      }
      run_end();
    }
  }
}

// Most windows are small: with a width known to the compiler they have one loop, not two.
template <class Tap, class RunEnd = void (*)()>
inline void for_each_tap(const PoolRow& a, int64_t ow, const Tap& tap, const RunEnd& run_end = [] {}) {
  const Window& col = a.windows[ow];
  fetch_ahead(a, ow);
  if (col.taps == 2) return for_each_tap_of<2>(a, col, tap, run_end);
  if (col.taps == 3) return for_each_tap_of<3>(a, col, tap, run_end);
  for_each_tap_of<0>(a, col, tap, run_end);
}

// Each takes a copy of its row's numbers: what it stores might else be some of them, and they were read anew for every
// pixel.

constexpr float lowest = -std::numeric_limits<float>::infinity();

void max(const PoolRow& row) {
  const PoolRow a = row;
  for_each_vector(a.src.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.ow; j++) {
      Vec most(lowest);
      for_each_tap(a, j, [&](const float* pixel, int64_t) { most = at::vec::maximum(most, lanes.load(pixel)); });
      lanes.store(most, a.dst + j * a.src.block);
    }
  });
}

// The index is that of the first maximum, or of the last NaN; of an empty window where it begins.
void max_with_indices(const PoolRow& row) {
  const PoolRow a = row;
  for_each_vector(a.src.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.ow; j++) {
      Vec most(lowest);
      Index at(int32_t(a.window.begin * a.iw + a.windows[j].begin));
      for_each_tap(a, j, [&](const float* pixel, int64_t index) {
        const Vec value = lanes.load(pixel), takes = (value > most) | value.isnan();
        most = Vec::blendv(most, value, takes);
        at = Index::blendv(at, Index(int32_t(index)), at::vec::cast<int32_t>(takes));
      });
      lanes.store(most, a.dst + j * a.src.block);
      int32_t found[Index::size()];
      at.store(found);
      int64_t* const indices = a.indices + j * a.src.block + lanes.first;
      for (int i = 0; i < lanes.count(); i++) indices[i] = found[i];
    }
  });
}

void average(const PoolRow& row) {
  const PoolRow a = row;
  for_each_vector(a.src.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.ow; j++) {
      // A short sum is more exact than a long one: those of runs, of as many of them, of as many of these, of all.
      Vec all(0.f), many(0.f), sum(0.f), run_sum(0.f);
      int64_t runs = 0;
      const auto tap = [&](const float* pixel, int64_t) { run_sum = run_sum + lanes.load(pixel); };
      const auto run_end = [&] {
        sum = sum + run_sum, run_sum = Vec(0.f);
        if (++runs % longest_run == 0) many = many + sum, sum = Vec(0.f);
        if (runs % (longest_run * longest_run) == 0) all = all + many, many = Vec(0.f);
      };
      for_each_tap(a, j, tap, run_end);
      sum = all + (many + sum);
      const float divisor = a.divisor != 0 ? a.divisor : float(a.window.count * a.windows[j].count);
      lanes.store(sum * Vec(1 / divisor), a.dst + j * a.src.block);
    }
  });
}

void nearest(const UpsampleRow& row) {
  const UpsampleRow a = row;
  const float* const src = a.src.data + a.neighbors.low * a.src.row;
  for_each_vector(a.src.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.ow; j++)
      lanes.store(lanes.load(src + a.neighbors_of[j].low * a.src.pixel), a.dst + j * a.src.block);
  });
}

void bilinear(const UpsampleRow& row) {
  const UpsampleRow a = row;
  const float* const top = a.src.data + a.neighbors.low * a.src.row;
  const float* const bottom = a.src.data + a.neighbors.high * a.src.row;
  const Vec bottom_weight(a.neighbors.weight), top_weight(1 - a.neighbors.weight);
  for_each_vector(a.src.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.ow; j++) {
      const Neighbors& n = a.neighbors_of[j];
      const int64_t left = n.low * a.src.pixel, right = n.high * a.src.pixel;
      const Vec right_weight(n.weight), left_weight(1 - n.weight);
      const Vec above = left_weight * lanes.load(top + left) + right_weight * lanes.load(top + right);
      const Vec below = left_weight * lanes.load(bottom + left) + right_weight * lanes.load(bottom + right);
      lanes.store(top_weight * above + bottom_weight * below, a.dst + j * a.src.block);
    }
  });
}

// The shares of one pixel of diff_src: sums over h of sums over w; `Width` of a row, if not 0.
template <int Width, class Lanes>
inline Vec sum_of_shares(const ShareRow& a, const Shares& cols, const Lanes& lanes) {
  const int64_t width = Width ? Width : cols.count;
  const int64_t ahead = a.rows.count * a.diff_dst.row;  // below, which the next row of diff_src reads
  Vec sum(0.f);
  for (int64_t h = 0; h < a.rows.count; h++) {
    const float* const first = a.diff_dst.data + (a.rows.begin + h) * a.diff_dst.row + cols.begin * a.diff_dst.pixel;
    Vec row_sum(0.f);
    for (int64_t w = 0; w < width; w++) {
      const float* const pixel = first + w * a.diff_dst.pixel;
      __builtin_prefetch(pixel + ahead);
      row_sum = row_sum + lanes.load(pixel) * Vec(cols.weights[w]);
    }
    sum = sum + row_sum * Vec(a.rows.weights[h]);
  }
  return sum;
}

// One row of diff_src, of averages and of up-sampling alike.
void add_shares(const ShareRow& row) {
  const ShareRow a = row;
  for_each_vector(a.diff_dst.block, a.stream, [&](auto lanes) {
    for (int64_t j = 0; j < a.iw; j++) {
      const Shares& cols = a.cols[j];
      const Vec sum = cols.count == 1   ? sum_of_shares<1>(a, cols, lanes)
                      : cols.count == 2 ? sum_of_shares<2>(a, cols, lanes)
                      : cols.count == 4 ? sum_of_shares<4>(a, cols, lanes)
                                        : sum_of_shares<0>(a, cols, lanes);
      lanes.store(sum, a.diff_src + j * a.diff_dst.block);
    }
  });
}

}  // namespace

extern const PoolingKernels TORCH_BLOCKED_TIER_NAME(pooling_kernels) = {max,     max_with_indices, average,
                                                                        nearest, bilinear,         add_shares};

}  // namespace torch_blocked
