// Which tiles are put together in the first cache, to be written past the others by pieces of memory.
#include <numeric>

#include "isa.h"
#include "reorder_plan.h"
#include "streaming.h"

namespace torch_blocked::reorder_plan {
namespace {

constexpr int64_t line = 64;  // bytes

int64_t row_bytes(const Plan& plan) {
  const Axis& rows = plan.axis(Role::Rows);
  return std::min(rows.step, rows.padded) * plan.element_size;
}

// So many columns fill whole periods of dst and whole lines.
int64_t unit_of(const Plan& plan) {
  return std::lcm(plan.axis(Role::Cols).dst.period(), line / std::gcd(row_bytes(plan), line));
}

// The largest multiple of `unit` up to `limit` that divides `all`, or 0.
int64_t even_step(int64_t all, int64_t limit, int64_t unit) {
  int64_t step = std::min(all, limit) / unit * unit;
  while (step > 0 && all % step != 0) step -= unit;
  return step;
}

// The pieces of memory that the columns of a step make in dst.
Pieces pieces_of(const Plan& plan) {
  const Axis& cols = plan.axis(Role::Cols);
  const int64_t bytes = row_bytes(plan);
  std::vector<std::pair<int64_t, int64_t>> places(cols.step);
  for (int64_t c = 0; c < cols.step; c++) places[c] = {cols.dst.at(c), c};
  std::sort(places.begin(), places.end());
  Pieces pieces;
  pieces.cols.resize(cols.step);
  for (int64_t i = 0; i < cols.step; i++) {
    pieces.cols[places[i].second] = i * bytes;
    if (i > 0 && places[i].first == places[i - 1].first + bytes) continue;
    pieces.from.push_back(i * bytes);
    pieces.to.push_back(places[i].first);
  }
  return pieces;
}

// Whether all are `bytes` bytes.
bool are_even(const Pieces& pieces, int64_t bytes) {
  for (size_t i = 0; i < pieces.from.size(); i++)
    if (pieces.from[i] != int64_t(i) * bytes) return false;
  return true;
}

// In the last step of an axis, where it is shorter than the others, else 0.
int64_t rest(const Axis& axis) { return axis.padded % std::min(axis.step, axis.padded); }

// Well past the caches, where a tile writes parts of cache lines that make whole ones together: each step is one piece.
// Of 19 MB two threads would take 1.7 times as long.
bool join_parts(Plan& plan) {
  int64_t dst_bytes = plan.element_size;
  for (const Axis& axis : plan.axes) dst_bytes *= axis.padded;
  Axis& cols = plan.axis(Role::Cols);
  const int64_t unit = unit_of(plan), most = most_pieces / row_bytes(plan) / unit * unit;
  if (!outgrows_caches(2 * dst_bytes, little_work_cache_room) || cols.dst.affine()) return false;
  if (most == 0 || cols.padded % unit != 0 || rest(plan.axis(Role::Rows)) > 0) return false;
  const int64_t limit = cols.dst.at(unit) == unit * row_bytes(plan) ? most : unit;
  if (cols.src.affine())
    set_steps_of_units(cols, limit, unit);  // the last may have less of the piece
  else
    cols.step = even_step(cols.step, limit, unit);  // within what is adjacent in src
  plan.pieces = pieces_of(plan);
  return plan.pieces.to.size() == 1;
}

// By vectors of half a line, which are put together anyway, where tiles would write lone lines to many places, as in
// weights: a Zen 3 streams 10 GB/s by a line to each of 16 rows in turn, and 40 by pieces of 576 bytes. The rows of
// planes are long enough in any case.
bool join_lines(Plan& plan) {
  constexpr int64_t most = 12 * 1024, least = 256, some_cols = 16;  // beside src in a first cache of 32 KB
  Axis &rows = plan.axis(Role::Rows), &cols = plan.axis(Role::Cols);
  if (isa() >= Isa::AVX512 || rows.dim != rows.padded || cols.dim != cols.padded) return false;
  if (cols.dst.affine() && (rows.src.affine() || cols.dst.stride % line != 0)) return false;
  const bool adjacent = cols.src.affine();  // else within a step only
  const int64_t least_cols = std::lcm(unit_of(plan), adjacent ? some_cols : cols.step);
  if (least_cols * row_bytes(plan) > most && rows.dst.affine())
    set_even_steps(rows, std::max<int64_t>(most / least_cols / plan.element_size, 1), plan.element_size);
  cols.step = even_step(adjacent ? cols.padded : cols.step, most / row_bytes(plan), unit_of(plan));
  plan.pieces = pieces_of(plan);
  const int64_t n = plan.pieces.to.size(), all = cols.step * row_bytes(plan);
  if (n == 0 || all % n != 0 || all / n % line != 0 || all / n < least || !are_even(plan.pieces, all / n)) return false;
  // Shorter steps have the same pieces where each is a column.
  const int64_t last_row_bytes = rest(rows) * plan.element_size;
  return n == cols.step ? last_row_bytes == 0 || last_row_bytes >= line : rest(rows) == 0 && rest(cols) == 0;
}

}  // namespace

void find_pieces(Plan& plan) {
  Plan joined = plan;
  if (!(row_bytes(plan) < line ? join_parts(joined) : join_lines(joined))) return;
  order_loops(joined);
  plan = std::move(joined);
}

}  // namespace torch_blocked::reorder_plan
