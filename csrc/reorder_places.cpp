// Which byte of src each byte of dst is, for the kernels that permute bytes.
#include <algorithm>
#include <numeric>

#include "reorder_plan.h"

namespace torch_blocked::reorder_plan {
namespace {

constexpr int64_t vector_bytes = 64;

// What some bytes of a row are picked from: bytes `first` to `last` of the other row.
struct Range {
  int64_t first, last;

  // Whether vectors from these places on have all of them.
  bool is_in(int64_t a, int64_t b) const { return a <= first && b <= a + vector_bytes && last < b + vector_bytes; }
};

// Of a row of `bytes` bytes each vector is picked from two of the other row, where `place_of` finds its bytes. Empty
// where they are farther apart. The second of one is the first of the next where that does for both.
template <class PlaceOf>
Picks find_picks(int64_t bytes, const PlaceOf& place_of) {
  constexpr int64_t word = 4;
  if (bytes < 2 * vector_bytes || bytes > vector_bytes * most_picks) return {};
  const int64_t n = (bytes + vector_bytes - 1) / vector_bytes, last_vector = bytes - vector_bytes;
  const auto to = [&](int64_t p) { return std::min(p * vector_bytes, last_vector); };
  std::vector<Range> ranges(n, {last_vector, 0});
  for (int64_t p = 0; p < n; p++)
    for (int64_t i = 0; i < vector_bytes; i++) {
      const int64_t place = place_of(to(p) + i);
      ranges[p] = {std::min(ranges[p].first, place / word * word), std::max(ranges[p].last, place)};
    }
  const auto after = [&](int64_t first) { return std::min(first + vector_bytes, last_vector); };
  Picks picks(n);
  for (int64_t p = 0, before = 0; p < n; before = picks[p++].second) {
    const Range& range = ranges[p];
    Pick& pick = picks[p];
    pick.to = to(p);
    pick.first = range.is_in(before, after(before)) ? before : range.first;
    pick.second = p + 1 < n && range.is_in(pick.first, ranges[p + 1].first) ? ranges[p + 1].first : after(pick.first);
    if (!range.is_in(pick.first, pick.second)) return {};
    for (int64_t i = 0; i < vector_bytes; i++) {
      const int64_t place = place_of(pick.to + i), in_first = place - pick.first;
      pick.places[i] = in_first < vector_bytes ? in_first : vector_bytes + place - pick.second;
    }
  }
  return picks;
}

}  // namespace

// In a row elements lie as [groups of runs][group][run], or side by side in groups as [groups of runs][run][group].
void find_picks(Plan& plan, const Axis& runs, bool to_groups) {
  const int64_t size = plan.element_size, group = plan.group, run = plan.run;
  const auto place_of = [&](int64_t place) {
    const int64_t element = place / size, cols = to_groups ? group : run, rows = to_groups ? run : group;
    const int64_t set = element / (run * group), i = element % (run * group);
    return (set * run * group + i % cols * rows + i / cols) * size + place % size;
  };
  const int64_t unit = size * group;
  plan.picks = find_picks(runs.step * unit, place_of);
  plan.last_picks = find_picks(runs.padded % runs.step * unit, place_of);
  if (runs.padded % runs.step != 0 && plan.last_picks.empty()) plan.picks.clear();
}

// Where the repeated tiles are small and dense on both sides. Of wider elements a transpose takes less time.
void find_merges(Plan& plan) {
  const Axis &rows = plan.axis(Role::Rows), &cols = plan.axis(Role::Cols);
  const int64_t size = plan.element_size, src_row = cols.dim * size, dst_row = rows.dim * size;
  const int64_t bytes = rows.dim * src_row;
  const auto is_whole = [](const Axis& axis) { return axis.dim == axis.padded && axis.steps() == 1; };
  if (size > 2 || !is_whole(rows) || !is_whole(cols) || bytes < vector_bytes || bytes > most_permuted) return;
  if (!rows.src.affine() || rows.src.stride != src_row || !cols.dst.affine() || cols.dst.stride != dst_row) return;
  const int64_t vectors = (bytes + vector_bytes - 1) / vector_bytes;
  Merge unchanged;
  std::iota(unchanged.places, unchanged.places + vector_bytes, 0);
  plan.merges.assign(vectors * merges_per_vector(vectors), unchanged);
  const auto begin = [&](int64_t v) { return std::min(v * vector_bytes, bytes - vector_bytes); };
  for (int64_t d = 0; d < vectors; d++)
    for (int64_t i = 0; i < vector_bytes; i++) {
      const int64_t to = begin(d) + i, row = to % dst_row / size, col = to / dst_row;
      const int64_t from = row * src_row + col * size + to % size, s = from / vector_bytes;
      Merge* const merge = plan.merges.data() + d * merges_per_vector(vectors);
      if (s == 0)
        merge[0].places[i] = from;
      else
        merge[s - 1].places[i] = vector_bytes + from - begin(s);
    }
}

}  // namespace torch_blocked::reorder_plan
