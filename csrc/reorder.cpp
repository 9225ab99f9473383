#include "reorder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "kernels/reorder.h"
#include "parallel.h"

// Note [Reorder by tiles]
// An element's offset is a sum over the logical axes of a function of that axis's index alone, blocked or not
// (MemoryDesc::off_v). So a reorder is a loop over tiles of two axes, the rows and the columns, and the elements of a
// tile are found with four small tables: the offsets of its rows and of its columns, in src and in dst. The
// implementations differ in the two axes they choose:
//   copy        the columns lie side by side in both src and dst (nhwc <-> nChw16c): rows of bytes are copied
//   transpose   the columns lie side by side in src, the rows in dst (nchw -> nChw16c -> nchw, oihw -> OIhw16i16o)
//   reference   any two axes: element by element
// The loops run over dst's padded dims; what lies past the logical dims is cleared on the way.
//
// The offsets of an unblocked axis, and of every part of a blocked one, are multiples of a stride. So an axis with no
// padding is taken apart where its blocks begin, and what is then dense on both sides becomes one axis.

namespace torch_blocked {
namespace {

// The byte offset of each index of one axis, on one side: periodic, as an inner block repeats itself.
struct Offsets {
  int64_t stride = 0;          // of a whole period
  std::vector<int64_t> inner;  // within one period; empty where that is one index

  bool affine() const { return inner.empty(); }
  int64_t period() const { return affine() ? 1 : int64_t(inner.size()); }
  int64_t at(int64_t i) const { return affine() ? i * stride : i / period() * stride + inner[i % period()]; }
};

enum class Role { Loop, Rows, Cols };

// A logical axis, a part of one, or several as one.
struct Axis {
  int64_t dim = 1, padded = 1;  // padded as in dst
  Offsets src, dst;
  Role role = Role::Loop;
  int64_t step = 1;                                 // indices of one tile
  bool src_adjacent = false, dst_adjacent = false;  // a tile's are known to lie side by side: they need no table

  int64_t steps() const { return (padded + step - 1) / step; }
};

struct Plan {
  int64_t element_size;
  bool stream = false;          // dst is written past the caches
  std::vector<Axis> axes = {};  // outermost loop first

  const Axis& axis(Role role) const {
    return *std::find_if(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.role == role; });
  }
  Axis& axis(Role role) { return const_cast<Axis&>(std::as_const(*this).axis(role)); }
};

// Some successive indices of an axis.
struct Span {
  int64_t size, padded_size;  // within the logical dim and within dst's padded one
  const int64_t *src, *dst;   // the offset of each from the first, unless they are adjacent
};

struct Tile {
  const char* src;
  char* dst;
  Span rows, cols;
};

struct Implementation {
  const char* name;
  bool (*plan)(Plan& plan);  // gives the axes their roles and steps; false where this implementation cannot be used
  void (*run)(const Tile& tile, const Plan& plan, const ReorderKernels& kernels);
};

// ---- the axes

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

// What one core has of the last level on today's servers, about; what the system says is often the sum of many.
constexpr int64_t cache_bytes = 16 << 20;

int64_t nbytes(const MemoryDesc& md, int64_t element_size) {
  int64_t bytes = element_size;
  for (int d = 0; d < md.ndims; d++) bytes *= md.padded(d);
  return bytes;
}

Plan describe(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  Plan plan{element_size};
  plan.stream = nbytes(src_md, element_size) + nbytes(dst_md, element_size) > cache_bytes;
  for (int d = 0; d < src_md.ndims; d++)
    if (dst_md.padded(d) > 1) add_axes(plan.axes, src_md, dst_md, d, element_size);
  while (join_dense_pair(plan.axes)) {
  }
  while (plan.axes.size() < 2) plan.axes.push_back(Axis());  // a tile has two axes
  return plan;
}

// ---- the plans

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

// The distance in memory of one step of the loop over an axis, on the side where it is shorter.
int64_t distance(const Axis& axis) {
  const int64_t src = std::abs(axis.src.at(axis.step)), dst = axis.dst.at(axis.step);
  return src == 0 ? dst : std::min(src, dst);
}

// The axis with no role yet whose neighbours are nearest, or null.
Axis* nearest_axis(Plan& plan) {
  Axis* nearest = nullptr;
  for (Axis& axis : plan.axes)
    if (axis.role == Role::Loop && (nearest == nullptr || distance(axis) < distance(*nearest))) nearest = &axis;
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

// Cuts an axis into equal steps of at most `limit`. They begin with whole periods, so that one table of offsets serves
// for all of them, or with whole vectors.
void set_even_steps(Axis& axis, int64_t limit) {
  const int64_t period = std::max(axis.src.period(), axis.dst.period());
  const int64_t unit = period > 1 && period <= limit ? period : std::min<int64_t>(16, limit);
  const int64_t steps = (axis.padded + limit - 1) / limit;
  axis.step = ((axis.padded + steps - 1) / steps + unit - 1) / unit * unit;
}

// The loop whose steps are farther apart goes outside. By the shorter of the two distances: then src and dst are both
// walked in pieces of many cache lines, and neither in order at the cost of the other.
void order_loops(Plan& plan) {
  std::stable_sort(plan.axes.begin(), plan.axes.end(),
                   [](const Axis& a, const Axis& b) { return distance(a) > distance(b); });
}

constexpr int64_t tile_numel = 16 * 1024;

bool plan_copy(Plan& plan) {
  for (Axis& cols : plan.axes) {
    const int64_t run = std::gcd(run_length(cols.src, plan.element_size), run_length(cols.dst, plan.element_size));
    if (run == 1) continue;
    if (run > 0)
      cols.step = run;
    else
      set_even_steps(cols, tile_numel);
    cols.src_adjacent = cols.dst_adjacent = true;
    const int64_t rows = std::clamp<int64_t>(tile_numel / cols.step, 1, 256);
    cols.role = Role::Cols;
    nearest_axis(plan)->role = Role::Rows;
    lengthen(plan, Role::Rows, [&](const Axis&) { return nearest_axis(plan); });
    set_even_steps(plan.axis(Role::Rows), rows);
    order_loops(plan);
    return true;
  }
  return false;
}

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
// other axis make a tile.
void set_run_step(Axis& axis, int64_t run, int64_t across) {
  if (run > 0)
    axis.step = run;
  else
    set_even_steps(axis, across < 64 ? tile_numel / across : 64);
}

bool plan_transpose(Plan& plan) {
  Axis* unit_in_dst = unit_axis(plan, &Axis::dst);
  Axis* unit_in_src = unit_axis(plan, &Axis::src);
  if (unit_in_dst == nullptr || unit_in_src == nullptr || unit_in_dst == unit_in_src) return false;
  unit_in_dst->role = Role::Rows;
  unit_in_src->role = Role::Cols;
  // The rows first where they are no whole vectors: extended, an axis takes loops that the other might have.
  const bool whole_rows = unit_in_dst->dim % 8 == 0, whole_cols = unit_in_src->dim % 8 == 0;
  if (!whole_rows && (whole_cols || unit_in_dst->dim < unit_in_src->dim)) extend(plan, Role::Rows, &Axis::dst);
  extend(plan, Role::Cols, &Axis::src);
  extend(plan, Role::Rows, &Axis::dst);

  Axis &rows = plan.axis(Role::Rows), &cols = plan.axis(Role::Cols);
  const int64_t row_run = run_length(rows.dst, plan.element_size), col_run = run_length(cols.src, plan.element_size);
  set_run_step(rows, row_run, col_run > 0 ? col_run : cols.padded);
  set_run_step(cols, col_run, row_run > 0 ? row_run : rows.padded);
  rows.dst_adjacent = cols.src_adjacent = true;
  order_loops(plan);
  return true;
}

bool plan_reference(Plan& plan) {
  const auto nearer = [](Offsets Axis::* side) {
    return [side](const Axis& a, const Axis& b) {
      return std::pair(a.role, (a.*side).at(1)) < std::pair(b.role, (b.*side).at(1));
    };
  };
  std::min_element(plan.axes.begin(), plan.axes.end(), nearer(&Axis::dst))->role = Role::Cols;
  std::min_element(plan.axes.begin(), plan.axes.end(), nearer(&Axis::src))->role = Role::Rows;
  lengthen(plan, Role::Rows, [&](const Axis&) { return nearest_axis(plan); });
  set_even_steps(plan.axis(Role::Rows), 64);
  set_even_steps(plan.axis(Role::Cols), 64);
  order_loops(plan);
  return true;
}

// ---- the tiles

// Rows or columns of padding are a second call with nothing to read.
void run_copy(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols] = tile;
  const int64_t size = cols.size * plan.element_size, padded_size = cols.padded_size * plan.element_size;
  // Cache lines go past the caches where they are written at once.
  const bool stream = plan.stream && (padded_size % 64 == 0 || plan.axis(Role::Cols).steps() == 1);
  if (rows.size > 0) kernels.copy_rows(src, rows.src, dst, rows.dst, rows.size, size, padded_size, stream);
  if (rows.size < rows.padded_size)
    kernels.copy_rows(nullptr, nullptr, dst, rows.dst + rows.size, rows.padded_size - rows.size, 0, padded_size,
                      stream);
}

void run_transpose(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const int64_t element_size = plan.element_size;
  const auto transpose = element_size == 1   ? kernels.transpose_1
                         : element_size == 2 ? kernels.transpose_2
                         : element_size == 4 ? kernels.transpose_4
                         : element_size == 8 ? kernels.transpose_8
                                             : kernels.transpose_16;
  const auto& [src, dst, rows, cols] = tile;
  if (cols.size > 0) transpose(src, rows.src, dst, cols.dst, rows.size, rows.padded_size, cols.size, plan.stream);
  if (cols.size < cols.padded_size)
    transpose(nullptr, nullptr, dst, cols.dst + cols.size, 0, rows.padded_size, cols.padded_size - cols.size,
              plan.stream);
}

template <int element_size>
void run_elements(const Tile& tile) {
  const auto& [src, dst, rows, cols] = tile;
  for (int64_t r = 0; r < rows.padded_size; r++) {
    char* to = dst + rows.dst[r];
    const int64_t size = r < rows.size ? cols.size : 0;
    for (int64_t c = 0; c < size; c++) std::memcpy(to + cols.dst[c], src + (rows.src[r] + cols.src[c]), element_size);
    for (int64_t c = size; c < cols.padded_size; c++) std::memset(to + cols.dst[c], 0, element_size);
  }
}

void run_reference(const Tile& tile, const Plan& plan, const ReorderKernels&) {
  const int64_t element_size = plan.element_size;
  const auto run = element_size == 1   ? run_elements<1>
                   : element_size == 2 ? run_elements<2>
                   : element_size == 4 ? run_elements<4>
                   : element_size == 8 ? run_elements<8>
                                       : run_elements<16>;
  run(tile);
}

constexpr Implementation implementations[] = {
    {"copy", plan_copy, run_copy},
    {"transpose", plan_transpose, run_transpose},
    {"reference", plan_reference, run_reference},
};

// The first implementation that can be used, and its plan.
const Implementation& choose(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size, Plan& plan) {
  const Plan described = describe(src_md, dst_md, element_size);
  for (const Implementation& implementation : implementations) {
    plan = described;
    if (implementation.plan(plan)) return implementation;
  }
  throw std::logic_error("reorder: the reference takes every pair");
}

// ---- the loops

// The spans of one axis. Their offsets are written once for all that begin at the same place of a period.
class SpanTable {
 public:
  explicit SpanTable(const Axis& axis) : axis_(axis) {}

  Span get(int64_t begin) {
    const int64_t padded_size = std::min(axis_.step, axis_.padded - begin);
    if (!axis_.src_adjacent) fill(axis_.src, begin, padded_size, src_);
    if (!axis_.dst_adjacent) fill(axis_.dst, begin, padded_size, dst_);
    return {std::min(axis_.dim - begin, padded_size), padded_size, src_.offsets.data(), dst_.offsets.data()};
  }

 private:
  struct Table {
    int64_t phase = -1;
    std::vector<int64_t> offsets;
  };

  static void fill(const Offsets& offsets, int64_t begin, int64_t size, Table& table) {
    const int64_t phase = offsets.affine() ? 0 : begin % offsets.period();
    if (phase == table.phase && size <= int64_t(table.offsets.size())) return;
    table.phase = phase;
    table.offsets.resize(size);
    if (offsets.affine()) {
      for (int64_t i = 0; i < size; i++) table.offsets[i] = i * offsets.stride;
      return;
    }
    int64_t i = phase, base = -offsets.inner[phase];
    for (int64_t& offset : table.offsets) {
      offset = base + offsets.inner[i];
      if (++i == offsets.period()) i = 0, base += offsets.stride;
    }
  }

  const Axis& axis_;
  Table src_, dst_;
};

// The tiles of a plan in the order of its loops, from the tile numbered `first`.
class TileLoop {
 public:
  TileLoop(const Plan& plan, const char* src, char* dst, int64_t first)
      : axes_(plan.axes),
        src_(src),
        dst_(dst),
        rows_(plan.axis(Role::Rows)),
        cols_(plan.axis(Role::Cols)),
        places_(axes_.size()) {
    for (size_t a = axes_.size(); a-- > 0; first /= axes_[a].steps()) move(a, first % axes_[a].steps() * axes_[a].step);
  }

  void next() {
    for (size_t a = axes_.size(); a-- > 0;) {
      const int64_t begin = places_[a].begin + axes_[a].step;
      if (begin < axes_[a].padded) return move(a, begin);
      move(a, 0);
    }
  }

  Tile tile() {
    Tile tile{src_, dst_, {}, {}};
    int64_t src_offset = 0, dst_offset = 0;
    bool padding = false;
    for (size_t a = 0; a < axes_.size(); a++) {
      const Place& place = places_[a];
      src_offset += place.src;
      dst_offset += place.dst;
      padding |= place.begin >= axes_[a].dim;
      if (axes_[a].role == Role::Rows) tile.rows = rows_.get(place.begin);
      if (axes_[a].role == Role::Cols) tile.cols = cols_.get(place.begin);
    }
    tile.dst += dst_offset;
    if (padding)
      tile.rows.size = tile.cols.size = 0;
    else
      tile.src += src_offset;
    return tile;
  }

 private:
  struct Place {
    int64_t begin, src, dst;
  };

  void move(size_t a, int64_t begin) { places_[a] = {begin, axes_[a].src.at(begin), axes_[a].dst.at(begin)}; }

  const std::vector<Axis>& axes_;
  const char* src_;
  char* dst_;
  SpanTable rows_, cols_;
  std::vector<Place> places_;
};

bool has_elements(const MemoryDesc& md) {
  return std::all_of(md.dims, md.dims + md.ndims, [](int64_t dim) { return dim > 0; });
}

}  // namespace

void reorder(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst, int64_t element_size,
             int64_t nthreads) {
  if (!has_elements(dst_md)) return;
  if (element_size < 1 || element_size > 16 || (element_size & (element_size - 1)) != 0)
    throw std::invalid_argument("reorder: elements of 1, 2, 4, 8 or 16 bytes, got " + std::to_string(element_size));
  Plan plan;
  const Implementation& implementation = choose(src_md, dst_md, element_size, plan);
  const ReorderKernels& kernels = TORCH_BLOCKED_KERNELS(reorder_kernels, isa());

  int64_t tiles = 1, size = element_size;
  for (const Axis& axis : plan.axes) tiles *= axis.steps(), size *= axis.padded;
  if (size < 64 * 1024) nthreads = 1;  // less than it costs to start the others
  parallel_for(tiles, nthreads, [&](int64_t begin, int64_t end) {
    TileLoop loop(plan, static_cast<const char*>(src), static_cast<char*>(dst), begin);
    for (int64_t i = begin; i < end; i++, loop.next()) implementation.run(loop.tile(), plan, kernels);
    if (plan.stream) std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed stores keep no order of their own
  });
}

}  // namespace torch_blocked
