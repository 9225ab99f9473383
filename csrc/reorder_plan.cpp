#include "reorder_plan.h"

#include <bit>
#include <cstdlib>
#include <numeric>

#include "streaming.h"

namespace torch_blocked::reorder_plan {
namespace {

Offsets axis_offsets(const MemoryDesc& md, int axis, int64_t element_size) {
  const int64_t block = md.block(axis);
  const bool repeats = md.outer(axis) > 1;
  Offsets offsets{repeats ? md.strides[axis] * element_size : 0, {}};
  if (block == 1) return offsets;

  offsets.inner.assign(block, 0);
  int64_t inner_stride = element_size, done = 1;
  for (int i = md.inner_nblks - 1; i >= 0; i--) {
    const int64_t size = md.inner_blks[i];
    if (md.inner_idxs[i] == axis) {
      for (int64_t j = 0; j < block; j++) offsets.inner[j] += j / done % size * inner_stride;
      done *= size;
    }
    inner_stride *= size;
  }
  // A block that its own repetition continues, or that never repeats, is an ordinary strided axis.
  const int64_t step = offsets.inner[1];
  bool affine = !repeats || offsets.stride == block * step;
  for (int64_t j = 0; j < block; j++) affine = affine && offsets.inner[j] == j * step;
  if (affine) offsets = {step, {}};
  return offsets;
}

// Adds the axis of one logical dim, or where it has no padding its parts between the borders of its inner blocks.
void add_axes(std::vector<Axis>& axes, const MemoryDesc& src_md, const MemoryDesc& dst_md, int d,
              int64_t element_size) {
  const Axis axis{src_md.dims[d], dst_md.padded(d), axis_offsets(src_md, d, element_size),
                  axis_offsets(dst_md, d, element_size)};
  std::vector<int64_t> borders = {1, axis.dim};
  const auto add_borders = [&](const MemoryDesc& md, const Offsets& offsets) {
    int64_t border = 1;
    for (int i = md.inner_nblks - 1; i >= 0 && !offsets.affine(); i--)
      if (md.inner_idxs[i] == d) borders.push_back(border *= md.inner_blks[i]);
  };
  add_borders(src_md, axis.src);
  add_borders(dst_md, axis.dst);
  std::sort(borders.begin(), borders.end());
  bool even = axis.dim == axis.padded && borders.back() == axis.dim;
  for (size_t i = 1; i < borders.size(); i++) even = even && borders[i] % borders[i - 1] == 0;
  if (!even) return axes.push_back(axis);
  for (size_t i = 1; i < borders.size(); i++) {
    const int64_t begin = borders[i - 1], dim = borders[i] / begin;
    if (dim > 1) axes.push_back({dim, dim, {axis.src.at(begin), {}}, {axis.dst.at(begin), {}}});
  }
}

bool dense(const Offsets& outer, const Offsets& inner, int64_t inner_dim) {
  return outer.affine() && inner.affine() && outer.stride == inner_dim * inner.stride;
}

Offsets join(const Offsets& outer, const Offsets& inner, int64_t inner_dim) {
  if (dense(outer, inner, inner_dim)) return inner;
  Offsets joined{outer.stride, {}};
  joined.inner.reserve(outer.period() * inner_dim);
  for (int64_t i = 0; i < outer.period(); i++)
    for (int64_t j = 0; j < inner_dim; j++) joined.inner.push_back(outer.at(i) + inner.at(j));
  return joined;
}

// Makes `inner` the faster part of one axis of two.
void join(std::vector<Axis>& axes, Axis& outer, Axis& inner) {
  inner.src = join(outer.src, inner.src, inner.dim);
  inner.dst = join(outer.dst, inner.dst, inner.dim);
  inner.padded = outer.padded * inner.dim;
  inner.dim = outer.dim * inner.dim;
  axes.erase(axes.begin() + (&outer - axes.data()));
}

// Joins one pair of axes that are one on both sides, if there is any.
bool join_dense_pair(std::vector<Axis>& axes) {
  for (Axis& outer : axes)
    for (Axis& inner : axes) {
      if (&outer == &inner || inner.dim != inner.padded) continue;
      if (!dense(outer.src, inner.src, inner.dim) || !dense(outer.dst, inner.dst, inner.dim)) continue;
      join(axes, outer, inner);
      return true;
    }
  return false;
}

int64_t nbytes(const MemoryDesc& md, int64_t element_size) {
  int64_t bytes = element_size;
  for (int d = 0; d < md.ndims; d++) bytes *= md.padded(d);
  return bytes;
}

// How many indices lie side by side, counted from any multiple of that number; 0 stands for all.
int64_t run_length(const Offsets& offsets, int64_t element_size) {
  if (offsets.affine()) return offsets.stride == element_size ? 0 : 1;
  int64_t n = 1;
  while (n < offsets.period() && offsets.inner[n] == n * element_size) n++;
  return n;
}

// The axis whose elements lie side by side, or null.
Axis* unit_axis(Plan& plan, Offsets Axis::* side) {
  for (Axis& axis : plan.axes)
    if (run_length(axis.*side, plan.element_size) != 1) return &axis;
  return nullptr;
}

// Whether the elements lie side by side along one axis in src and along another in dst.
bool is_transpose(Plan& plan) {
  const Axis *src = unit_axis(plan, &Axis::src), *dst = unit_axis(plan, &Axis::dst);
  return src != nullptr && dst != nullptr && src != dst;
}

// Makes one element of a few that lie side by side in both src and dst, as pairs of input channels do in 1x1 weights,
// where that makes a transpose of what would be copied in short rows: nhwc -> nChw16c.
void widen_elements(Plan& plan) {
  constexpr int64_t part = 16, line = 64;            // of a vector, in bytes
  const int64_t widest = plan.stream ? part : line;  // past the caches longer rows are copied as fast
  for (size_t a = 0; a < plan.axes.size(); a++) {
    const Axis& axis = plan.axes[a];
    const int64_t size = axis.dim * plan.element_size;
    const bool adjacent = axis.src.affine() && axis.src.stride == plan.element_size && axis.dst.affine() &&
                          axis.dst.stride == plan.element_size;
    if (!adjacent || axis.dim != axis.padded || size > widest || (size & (size - 1)) != 0) continue;
    Plan wider = plan;
    wider.element_size = size;
    wider.axes.erase(wider.axes.begin() + a);
    if (size < part || is_transpose(wider)) plan = std::move(wider);
    return;
  }
}

// ---- the plans

// The distance in memory of one step of the loop over an axis, on the side where it is shorter.
int64_t distance(const Axis& axis) {
  const int64_t src = std::abs(axis.src.at(axis.step)), dst = axis.dst.at(axis.step);
  return src == 0 ? dst : std::min(src, dst);
}

int64_t distance_in_dst(const Axis& axis) { return axis.dst.at(axis.step); }

// The axis with no role yet whose neighbours are nearest, or null.
Axis* nearest_axis(Plan& plan, int64_t (*far)(const Axis&) = distance) {
  Axis* nearest = nullptr;
  for (Axis& axis : plan.axes)
    if (axis.role == Role::Loop && (nearest == nullptr || far(axis) < far(*nearest))) nearest = &axis;
  return nearest;
}

// Lengthens a short axis of the tile by loops while `choose` finds one, at the price of tables of offsets.
template <class Choose>
void lengthen(Plan& plan, Role role, const Choose& choose) {
  constexpr int64_t enough = 256, longest_table = 4096;
  while (true) {
    Axis& axis = plan.axis(role);
    if (axis.dim >= enough || axis.dim != axis.padded) return;
    Axis* outer = choose(axis);
    if (outer == nullptr) return;
    if (axis.dim * std::max(outer->src.period(), outer->dst.period()) > longest_table) return;
    join(plan.axes, *outer, axis);
  }
}

}  // namespace

void set_steps_of_units(Axis& axis, int64_t limit, int64_t unit) {
  const int64_t steps = (axis.padded + limit - 1) / limit;
  axis.step = ((axis.padded + steps - 1) / steps + unit - 1) / unit * unit;
}

void set_even_steps(Axis& axis, int64_t limit, int64_t element_size) {
  const int64_t period = std::max(axis.src.period(), axis.dst.period()), line = 64 / element_size;
  const int64_t both = std::lcm(period, line);
  set_steps_of_units(axis, limit,
                     both <= limit                   ? both
                     : period > 1 && period <= limit ? period
                                                     : std::min(line, limit));
}

void order_loops(Plan& plan) {
  const auto far = [](const Axis& axis) { return std::pair(distance(axis), std::abs(axis.src.at(axis.step))); };
  std::stable_sort(plan.axes.begin(), plan.axes.end(), [&](const Axis& a, const Axis& b) { return far(a) > far(b); });
}

namespace {

constexpr int64_t tile_numel = 16 * 1024, tile_bytes = 32 * 1024;

// Lengthens an axis by the loops that continue it on `side`: the columns of oihw -> OIhw16i16o are i * h * w, not h *
// w.
void extend(Plan& plan, Role role, Offsets Axis::* side) {
  lengthen(plan, role, [&](const Axis& axis) {
    const auto outer = std::find_if(plan.axes.begin(), plan.axes.end(), [&](const Axis& outer) {
      return outer.role == Role::Loop && dense(outer.*side, axis.*side, axis.dim);
    });
    return outer == plan.axes.end() ? nullptr : &*outer;
  });
}

// A tile's axis that is adjacent on one side takes one run of it at a time, or so much that `across` indices of the
// other axis make a tile, and at least some cache lines: within the caches rows that are a power of two apart take half
// as long by eight lines as by four.
void set_run_step(const Plan& plan, Axis& axis, int64_t run, int64_t across) {
  const int64_t element_size = plan.element_size;
  const int64_t some = std::clamp<int64_t>((plan.stream ? 256 : 512) / element_size, 64, 256);
  if (run > 0)
    axis.step = run;
  else
    set_even_steps(axis, across < some ? std::max(some, tile_bytes / element_size / across) : some, element_size);
}

}  // namespace

Plan describe(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  Plan plan{element_size};
  plan.src_bytes = element_size;
  plan.stream = outgrows_caches(nbytes(src_md, element_size) + nbytes(dst_md, element_size), reorder_cache_room());
  for (int d = 0; d < src_md.ndims; d++)
    if (dst_md.padded(d) > 1) add_axes(plan.axes, src_md, dst_md, d, element_size);
  for (const Axis& axis : plan.axes) plan.src_bytes += axis.src.at(axis.dim - 1);
  while (join_dense_pair(plan.axes)) {
  }
  widen_elements(plan);
  while (plan.axes.size() < 2) plan.axes.push_back(Axis());  // a tile has two axes
  return plan;
}

constexpr int64_t most_places = 4;  // in dst that are written in turn

bool plan_copy(Plan& plan) {
  for (Axis& cols : plan.axes) {
    const int64_t run = std::gcd(run_length(cols.src, plan.element_size), run_length(cols.dst, plan.element_size));
    if (run == 1) continue;
    if (run > 0)
      cols.step = run;
    else
      set_even_steps(cols, tile_numel, plan.element_size);
    cols.src_adjacent = cols.dst_adjacent = true;
    const int64_t rows = std::clamp<int64_t>(tile_numel / cols.step, 1, 256);
    cols.role = Role::Cols;
    // Past the caches rows shorter than a cache line follow each other in dst where they would else be written to many
    // places in turn: no CPU joins the parts of a line where those of many others come in between.
    const bool parts = plan.stream && std::min(cols.step, cols.padded) * plan.element_size < 64;
    Axis* const nearest = nearest_axis(plan);
    const bool many = nearest->padded > most_places;
    (parts && many ? nearest_axis(plan, distance_in_dst) : nearest)->role = Role::Rows;
    lengthen(plan, Role::Rows, [&](const Axis&) { return nearest_axis(plan); });
    set_even_steps(plan.axis(Role::Rows), rows, plan.element_size);
    order_loops(plan);
    return true;
  }
  return false;
}

namespace {

// Past the caches a CPU's own prefetch follows src in about so many pages at a time.
constexpr int64_t most_pages = 32, page_bytes = 4096;

bool in_many_pages(const Plan& plan, const Axis& rows) {
  const bool fills_lines = most_pages * plan.element_size >= 64;  // of dst
  return plan.stream && fills_lines && rows.step > most_pages && rows.src.affine() && rows.src.stride >= page_bytes;
}

bool plan_tiles(Plan& plan) {
  if (!is_transpose(plan)) return false;
  Axis *unit_in_src = unit_axis(plan, &Axis::src), *unit_in_dst = unit_axis(plan, &Axis::dst);
  unit_in_dst->role = Role::Rows;
  unit_in_src->role = Role::Cols;
  // The rows first where they are no whole vectors: extended, an axis takes loops that the other might have.
  const bool whole_rows = unit_in_dst->dim % 8 == 0, whole_cols = unit_in_src->dim % 8 == 0;
  if (!whole_rows && (whole_cols || unit_in_dst->dim < unit_in_src->dim)) extend(plan, Role::Rows, &Axis::dst);
  extend(plan, Role::Cols, &Axis::src);
  extend(plan, Role::Rows, &Axis::dst);

  Axis &rows = plan.axis(Role::Rows), &cols = plan.axis(Role::Cols);
  const int64_t row_run = run_length(rows.dst, plan.element_size), col_run = run_length(cols.src, plan.element_size);
  set_run_step(plan, rows, row_run, col_run > 0 ? col_run : cols.padded);
  if (row_run == 0 && in_many_pages(plan, rows)) set_even_steps(rows, most_pages, plan.element_size);
  set_run_step(plan, cols, col_run, std::min(rows.step, rows.padded));
  rows.dst_adjacent = cols.src_adjacent = true;
  order_loops(plan);
  return true;
}

// Makes a loop of an axis with many offsets and leaves as many as make whole cache lines: their table is read with
// every tile, and one of 6 KB and more would push src and dst out of the first cache. So long a step has periods on one
// side only: on the other it is adjacent.
void split_periods(Plan& plan, Role role) {
  constexpr int64_t few = 6 * 1024 / sizeof(int64_t);
  Axis& axis = plan.axis(role);
  const int64_t period = std::max(axis.src.period(), axis.dst.period());
  const int64_t unit = std::lcm(period, 64 / plan.element_size);
  if (period == 1 || axis.step <= std::max(unit, few) || axis.dim != axis.padded || axis.dim % unit != 0) return;
  const Axis loop{axis.dim / unit, axis.dim / unit, {axis.src.at(unit), {}}, {axis.dst.at(unit), {}}};
  axis.dim = axis.padded = axis.step = unit;
  plan.axes.push_back(loop);
  order_loops(plan);
}

// Where tiles are small, some of the innermost loop becomes the kernel's own.
void find_repeats(Plan& plan) {
  const auto several = [](const Axis& axis) { return axis.steps() > 1; };
  const auto inner = std::find_if(plan.axes.rbegin(), plan.axes.rend(), several);
  if (inner == plan.axes.rend() || inner->role != Role::Loop || inner->dim != inner->padded) return;
  if (!inner->src.affine() || !inner->dst.affine()) return;
  const auto numel = [](const Axis& axis) { return std::min(axis.step, axis.padded); };
  const int64_t some = std::max(tile_numel, 2 * tile_bytes / plan.element_size);
  const int64_t count = some / (numel(plan.axis(Role::Rows)) * numel(plan.axis(Role::Cols)));
  if (count < 2) return;
  inner->role = Role::Repeats;
  // A power of two of calls: threads share them evenly.
  const auto calls = int64_t(std::bit_ceil(uint64_t(inner->dim + count - 1) / count));
  inner->step = (inner->dim + calls - 1) / calls;
  plan.repeated = {inner->src.stride, inner->dst.stride};
  find_merges(plan);
}

bool adjacent(const Axis& axis, const Offsets& offsets, int64_t element_size) {
  return axis.dim == axis.padded && offsets.affine() && offsets.stride == element_size;
}

// A transpose of groups of elements that lie side by side on one side, and on the `apart` one in runs that follow each
// other: the pairs or quadruples of input channels in OIhw8i16o2i and OIhw4i16o4i, and runs of kh * kw. They are
// planned as wider elements of one axis, `across`; the other axis of the tile is of blocks of 16.
bool plan_groups(Plan& plan, Role across, Role along, Offsets Axis::* apart, Offsets Axis::* together) {
  constexpr int64_t bytes = 4, block = 16;
  const Axis *group = nullptr, *run = nullptr;
  for (const Axis& axis : plan.axes)
    if (axis.dim * plan.element_size == bytes && adjacent(axis, axis.*together, plan.element_size)) group = &axis;
  for (const Axis& axis : plan.axes)
    if (group && adjacent(axis, axis.*apart, plan.element_size) && dense(group->*apart, axis.*apart, axis.dim))
      run = &axis;
  if (run == nullptr || run->dim > max_groups) return false;

  plan.group = group->dim;
  plan.run = run->dim;
  std::vector<Axis> axes = {*run};  // the first, so that it is taken where src overlaps and others would do
  (axes.front().*apart).stride = bytes;
  for (const Axis& axis : plan.axes)
    if (&axis != group && &axis != run) axes.push_back(axis);
  plan.axes = std::move(axes);
  const int64_t element_size = std::exchange(plan.element_size, bytes);
  if (!plan_tiles(plan)) return false;
  plan.element_size = element_size;

  Axis& runs = plan.axis(across);
  const int64_t period = std::max(runs.src.period(), runs.dst.period());
  const int64_t unit = period % plan.run == 0 && period <= max_groups ? period : plan.run;
  runs.step = std::min(max_groups / unit * unit, runs.padded);
  const Axis& blocks = plan.axis(along);
  find_picks(plan, runs, across == Role::Cols);
  const auto may_be_padded = [&](const Axis& axis) { return across == Role::Cols && axis.role == Role::Rows; };
  return blocks.step == block && (blocks.padded % block == 0 || run_length(blocks.*together, bytes) == block) &&
         std::all_of(plan.axes.begin(), plan.axes.end(),
                     [&](const Axis& axis) { return axis.dim == axis.padded || may_be_padded(axis); });
}

}  // namespace

void write_tables(Plan& plan) {
  const auto write = [](Offsets& offsets, int64_t step) {
    offsets.table.resize(offsets.period() - 1 + step);
    for (size_t i = 0; i < offsets.table.size(); i++) offsets.table[i] = offsets.at(i);
  };
  auto& [dense, from, to] = plan.periods;
  const bool put_together = dense.stride != 0 || !plan.pieces.to.empty();  // columns have a table of their own
  for (Axis& axis : plan.axes) {
    if (axis.role != Role::Rows && axis.role != Role::Cols) continue;
    const int64_t step = std::min(axis.step, axis.padded);
    if (!axis.src_adjacent) write(axis.src, step);
    if (!axis.dst_adjacent && !(put_together && axis.role == Role::Cols)) write(axis.dst, step);
  }
  if (dense.stride == 0) return;
  const Axis& cols = plan.axis(Role::Cols);
  write(dense, cols.step);
  write(from, cols.step / cols.dst.period());
  write(to, cols.dst.period());
}

bool plan_transpose(Plan& plan) {
  if (!plan_tiles(plan)) return false;
  if (plan.stream) {  // each tile fetches what a later one reads
    find_pieces(plan);
    return true;
  }
  split_periods(plan, Role::Cols);
  split_periods(plan, Role::Rows);
  find_repeats(plan);
  return true;
}

// Of columns whose places in dst, evenly apart, are more than the first cache keeps of those that are a multiple of
// 4096 bytes apart, each of a cache line or less; in the next period each is the neighbour of the one before. Of lines
// written in parts the cache keeps fewer until they are whole.
bool plan_periods(Plan& plan) {
  constexpr int64_t way_bytes = 4096, line = 64;
  if (plan.stream || !plan_tiles(plan)) return false;
  Axis& cols = plan.axis(Role::Cols);
  const Axis& rows = plan.axis(Role::Rows);
  const int64_t row_step = std::min(rows.step, rows.padded), row_bytes = row_step * plan.element_size;
  if (row_bytes > line || !std::has_single_bit(uint64_t(row_bytes)) || cols.dst.stride != row_bytes) return false;
  const int64_t period = cols.dst.period(), distance = cols.dst.at(1) - cols.dst.at(0);
  const int64_t most_kept = row_bytes < line ? 8 : 12;
  if (period * std::gcd(distance, way_bytes) <= most_kept * way_bytes) return false;
  for (int64_t i = 1; i < period; i++)
    if (cols.dst.at(i) - cols.dst.at(i - 1) != distance) return false;
  const int64_t unit = period * (line / row_bytes);  // columns that fill whole lines
  const int64_t most = max_dense / row_bytes / unit * unit;
  const bool whole = rows.padded % row_step == 0 && cols.dim == cols.padded && cols.dim % period == 0;
  if (!whole || most == 0) return false;
  set_steps_of_units(cols, most, unit);
  plan.periods.dense.stride = row_bytes;
  plan.periods.from.stride = row_bytes * period;
  plan.periods.to.stride = distance;
  return true;
}

bool plan_interleave(Plan& plan) { return plan_groups(plan, Role::Cols, Role::Rows, &Axis::src, &Axis::dst); }

bool plan_deinterleave(Plan& plan) { return plan_groups(plan, Role::Rows, Role::Cols, &Axis::dst, &Axis::src); }

bool plan_reference(Plan& plan) {
  const auto nearer = [](Offsets Axis::* side) {
    return [side](const Axis& a, const Axis& b) {
      return std::pair(a.role, (a.*side).at(1)) < std::pair(b.role, (b.*side).at(1));
    };
  };
  std::min_element(plan.axes.begin(), plan.axes.end(), nearer(&Axis::dst))->role = Role::Cols;
  std::min_element(plan.axes.begin(), plan.axes.end(), nearer(&Axis::src))->role = Role::Rows;
  lengthen(plan, Role::Rows, [&](const Axis&) { return nearest_axis(plan); });
  set_even_steps(plan.axis(Role::Rows), 64, plan.element_size);
  set_even_steps(plan.axis(Role::Cols), 64, plan.element_size);
  order_loops(plan);
  return true;
}

}  // namespace torch_blocked::reorder_plan
