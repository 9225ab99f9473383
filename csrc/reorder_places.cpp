// Which byte of src each byte of dst is, for the kernels that permute bytes.
#include <algorithm>

#include "reorder_plan.h"

namespace torch_blocked::reorder_plan {
namespace {

// What a row of `bytes` bytes is picked from, by the place in it of each of the other row's; empty where 64 bytes are
// farther apart than a pick reaches.
template <class PlaceOf>
Picks find_picks(int64_t bytes, const PlaceOf& place_of) {
  constexpr int64_t vector = 64, reach = 128;
  Picks picks;
  if (bytes < reach || bytes > vector * most_picks) return {};
  for (int64_t first = 0; first < bytes; first += vector) {
    Pick pick{{}, bytes, std::min(first, bytes - vector)};
    for (int64_t i = 0; i < vector; i++) pick.from = std::min(pick.from, place_of(pick.to + i));
    pick.from = std::min(pick.from, bytes - reach);
    for (int64_t i = 0; i < vector; i++) {
      const int64_t place = place_of(pick.to + i) - pick.from;
      if (place >= reach) return {};
      pick.places[i] = place;
    }
    picks.push_back(pick);
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
void find_shares(Plan& plan) {
  const Axis &rows = plan.axis(Role::Rows), &cols = plan.axis(Role::Cols);
  const int64_t size = plan.element_size, src_row = cols.dim * size, dst_row = rows.dim * size;
  const int64_t bytes = rows.dim * src_row;
  constexpr int64_t vector = 64;
  const auto is_whole = [](const Axis& axis) { return axis.dim == axis.padded && axis.steps() == 1; };
  if (size > 2 || !is_whole(rows) || !is_whole(cols) || bytes < vector || bytes > most_permuted) return;
  if (!rows.src.affine() || rows.src.stride != src_row || !cols.dst.affine() || cols.dst.stride != dst_row) return;
  const int64_t vectors = (bytes + vector - 1) / vector;
  plan.shares.resize(vectors * vectors);
  const auto begin = [&](int64_t v) { return std::min(v * vector, bytes - vector); };
  for (int64_t d = 0; d < vectors; d++)
    for (int64_t i = 0; i < vector; i++) {
      const int64_t to = begin(d) + i, row = to % dst_row / size, col = to / dst_row;
      const int64_t from = row * src_row + col * size + to % size, s = from / vector;
      Share& share = plan.shares[d * vectors + s];
      share.places[i] = from - begin(s);
      share.mask[i] = 0xff;
    }
}

}  // namespace torch_blocked::reorder_plan
