// Convolutions of which each reads the one before, a band of rows of the last dst after the other, so that what lies
// between two of them stays in a core's cache: layer fusion (Alwani et al., Fused-Layer CNN Accelerators, MICRO 2016).
//
// A thread takes the images' rows in order, and of what lies between it holds the rows that the next band still
// reads: only where its rows meet another's is anything computed twice. Bits are those of one after the other, by
// vectors where tiles (amx.cpp) would multiply one.
#include "chain.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "../parallel.h"
#include "../scratch.h"

namespace torch_blocked {
namespace {

constexpr int64_t band_budget = 512 << 10;  // bytes between the convolutions: about half of a core's L2
constexpr int64_t cache_bytes = 1 << 20;    // a core's L2, about
constexpr int64_t least_rows = 8;           // that a thread takes at once: fewer make a call's own costs felt
constexpr double most_lost = .1;            // of the work, for what lies between to stay in each core's cache

struct Rows {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};

// The src rows that some dst rows see.
Rows seen(const Conv& c, const Rows& dst) {
  if (dst.count() == 0) return {};
  const int64_t first = dst.begin * c.stride_h - c.pad_h, last = (dst.end - 1) * c.stride_h - c.pad_h;
  return {std::max<int64_t>(first, 0), std::min(last + (c.kh - 1) * c.dilation_h + 1, c.ih)};
}

int64_t row_size(const Conv& c) { return c.ow * c.block; }

// One convolution of a chain, with its weights as its algorithm wants them.
struct Link {
  const Algorithm* algorithm;
  ReorderedWeights weights;
  int64_t rows;  // of dst in memory: all of the last one's, those of a band of the others'

  Link(const Conv& conv, const Algorithm* its, const WeightKey* key)
      : algorithm(its), weights(conv, *its, key), rows(conv.oh) {}
  const Conv& conv() const { return weights.conv; }
  int64_t dst_size() const { return conv().oc_blocks() * rows * row_size(conv()); }
};

// Sets how many rows of each dst in between `rows` rows of the last one read; the floats of all of them.
int64_t set_rows(std::vector<Link>& links, int64_t rows) {
  int64_t size = 0;
  for (size_t i = links.size() - 1; i > 0; i--) {
    const Conv& c = links[i].conv();
    rows = links[i - 1].rows = std::min(c.ih, (rows - 1) * c.stride_h + (c.kh - 1) * c.dilation_h + 1);
    size += links[i - 1].dst_size();
  }
  return size;
}

// One thread's part of the work.
class Worker {
 public:
  Worker(const std::vector<Link>& links, float* memory) : links_(links) {
    for (size_t i = 0; i + 1 < links_.size(); memory += links_[i++].dst_size()) held_.push_back({memory, {}});
  }

  // Rows of the last dst.
  void compute(int64_t n, const Rows& rows) {
    if (n != n_ || rows.begin < end_)
      for (Held& held : held_) held.rows = {};
    n_ = n;
    end_ = rows.end;
    std::vector<Rows> missing(links_.size());
    missing.back() = rows;
    for (size_t i = links_.size() - 1; i > 0; i--) missing[i - 1] = keep(i - 1, seen(links_[i].conv(), missing[i]));
    for (size_t i = 0; i < links_.size(); i++)
      if (missing[i].count() > 0) run(i, missing[i]);
  }

 private:
  struct Held {
    float* data;
    Rows rows;
  };

  // Moves what is held of `wanted`, rows of a dst in between, to its beginning; the rows that are missing.
  Rows keep(size_t i, const Rows& wanted) {
    if (wanted.count() == 0) return {};
    auto& [data, rows] = held_[i];
    const Conv& c = links_[i].conv();
    const int64_t kept = std::max<int64_t>(0, rows.end - wanted.begin), size = row_size(c);
    for (int64_t block = 0; kept > 0 && block < c.oc_blocks(); block++) {
      float* const plane = data + block * links_[i].rows * size;
      std::memmove(plane, plane + (rows.count() - kept) * size, kept * size * sizeof(float));
    }
    rows = {wanted.begin, wanted.begin + kept};
    return {rows.end, wanted.end};
  }

  void run(size_t i, const Rows& rows) {
    const Rows src = seen(links_[i].conv(), rows);
    const bool last = i + 1 == links_.size();
    Conv c = links_[i].conv();
    const int64_t dst_row = row_size(c);
    c.n = c.src_md.dims[0] = c.nthreads = 1;
    c.ih = c.src_md.dims[2] = src.count();
    c.oh = rows.count();
    c.pad_h = src.begin - (rows.begin * c.stride_h - c.pad_h);  // what of it lies above these rows
    if (i == 0) {
      c.src += n_ * c.src_md.strides[0] + src.begin * c.src_md.strides[2];
    } else {
      const Held& held = held_[i - 1];
      c.src_md.strides[2] = c.iw * c.block;
      c.src_md.strides[1] = links_[i - 1].rows * c.src_md.strides[2];
      c.src = held.data + (src.begin - held.rows.begin) * c.src_md.strides[2];
    }
    c.phase = Phase{1, 1, 1, 1, links_[i].rows, c.ow};  // a part of the rows of dst
    if (last) {
      c.advance_dst(n_ * c.dst_image() + rows.begin * dst_row);
    } else {
      c.dst = held_[i].data + (rows.begin - held_[i].rows.begin) * dst_row;
      c.dst_cached = true;
      held_[i].rows.end = rows.end;
    }
    links_[i].algorithm->run(c);
  }

  const std::vector<Link>& links_;
  std::vector<Held> held_;
  int64_t n_ = -1, end_ = 0;  // the image and the end of the rows that were computed last
};

// The algorithms, where each computes a row of dst in the same way whatever the others are, from src rows that exist;
// else none.
std::vector<const Algorithm*> algorithms_by_rows(std::span<const Conv> convs, std::span<const WeightKey* const> keys) {
  std::vector<const Algorithm*> algorithms;
  for (size_t i = 0; i < convs.size(); i++) {
    const Conv& c = convs[i];
    const Algorithm* its = &choose(c, keys[i] ? PackedWeights::instance().uses(*keys[i], false) : 1);
    if (its == &conv_amx) its = &conv_direct;  // of few rows tiles would make the parts of all weights
    if ((its != &conv_first && its != &conv_direct && its != &conv_depthwise) || c.pad_h > (c.kh - 1) * c.dilation_h)
      return {};
    algorithms.push_back(its);
  }
  return algorithms;
}

// What the threads lose to bands, as a part of the work: one of them has the most rows, and where its rows meet
// another's within an image both compute what they see. Not a number of no rows, which is below no bound.
double lost(std::span<const Conv> convs) {
  const Conv& last = convs.back();
  const double rows = double(last.n * last.oh), threads = double(last.nthreads);
  const double waited = std::ceil(rows / threads) * threads / rows - 1;
  if (last.n % last.nthreads == 0) return waited;
  double work = 0, repeated = 0;
  Rows above{0, last.oh / 2}, below{above.end, last.oh};  // where two threads share an image
  for (size_t i = convs.size(); i-- > 0;) {
    const Conv& c = convs[i];
    const double row = double(c.ow * c.oc * c.group_ic() * c.kh * c.kw);
    work += double(c.n * c.oh) * row;
    repeated += (threads - 1) * double(above.count() + below.count() - c.oh) * row;
    above = seen(c, above), below = seen(c, below);
  }
  return waited + repeated / work;
}

// Whether each core keeps what lies between at little cost. What another core wrote is read half as fast as one's own,
// a quarter as fast where the two share no cache (AMD Zen 4). One thread gains where its cache does not hold it all.
bool pays(std::span<const Conv> convs) {
  int64_t between = 0;
  for (size_t i = 0; i + 1 < convs.size(); i++) between += convs[i].n * convs[i].dst_image() * sizeof(float);
  return lost(convs) <= most_lost && (convs.back().nthreads > 1 || between > cache_bytes);
}

void run_bands(std::span<const Conv> convs, const std::vector<const Algorithm*>& algorithms,
               std::span<const WeightKey* const> keys) {
  std::vector<Link> links;
  for (size_t i = 0; i < convs.size(); i++) {
    if (keys[i]) PackedWeights::instance().uses(*keys[i], true);
    links.emplace_back(convs[i], algorithms[i], keys[i]);
  }
  const Conv& last = convs.back();
  int64_t rows = 1;
  while (rows < last.oh && set_rows(links, rows + 1) * int64_t(sizeof(float)) <= band_budget) rows++;
  const int64_t size = set_rows(links, rows);
  Ranges ranges(last.n * last.oh, last.nthreads, least_rows);
  parallel(last.nthreads, [&](int64_t thread, int64_t) {
    Worker worker(links, Scratch::get<ScratchOf::Chain>(size));
    for (int64_t begin, end; ranges.take(thread, begin, end);)
      for (int64_t count; begin < end; begin += count) {
        const int64_t row = begin % last.oh, left = std::min(end - begin, last.oh - row);
        count = std::min(rows, left);
        worker.compute(begin / last.oh, {row, row + count});
      }
  });
}

// One after the other; what lies between in memory, whole.
void run_whole(std::span<Conv> convs, std::span<const WeightKey* const> keys) {
  std::optional<PooledBuffer> buffers[2];  // src and dst in turn
  for (size_t i = 0; i < convs.size(); i++) {
    Conv& c = convs[i];
    if (i > 0) c.src = buffers[(i + 1) % 2]->data();
    if (i + 1 < convs.size()) c.dst = buffers[i % 2].emplace(c.n * c.dst_image()).data();
    convolve(c, keys[i]);
  }
}

}  // namespace

void convolve_chain(std::span<Conv> convs, std::span<const WeightKey* const> keys) {
  const auto algorithms = pays(convs) ? algorithms_by_rows(convs, keys) : std::vector<const Algorithm*>();
  if (algorithms.empty())
    run_whole(convs, keys);
  else
    run_bands(convs, algorithms, keys);
}

}  // namespace torch_blocked
