#include "reorder.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
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

// A logical axis, or several that lie in memory as one.
struct Axis {
  int64_t dim = 1, padded = 1;  // padded as in dst
  Offsets src, dst;
  Role role = Role::Loop;
  int64_t step = 1;                  // indices of one tile
  int64_t src_run = 1, dst_run = 1;  // indices of a tile that are known to lie side by side, in groups of this size

  int64_t steps() const { return (padded + step - 1) / step; }
};

struct Plan {
  int64_t element_size;
  std::vector<Axis> axes;  // outermost loop first

  const Axis& axis(Role role) const {
    return *std::find_if(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.role == role; });
  }
  Axis& axis(Role role) { return const_cast<Axis&>(std::as_const(*this).axis(role)); }
};

// Some successive indices of an axis.
struct Span {
  int64_t size, padded_size;  // within the logical dim and within dst's padded one
  const int64_t *src, *dst;   // the offset of each src_run or dst_run of them from the first
  int64_t src_run, dst_run;
};

struct Tile {
  const char* src;
  char* dst;
  Span rows, cols;
};

struct Implementation {
  const char* name;
  bool (*plan)(Plan& plan);  // gives the axes their roles and steps; false where this implementation cannot be used
  void (*run)(const Tile& tile, int64_t element_size, const ReorderKernels& kernels);
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

bool dense(const Offsets& outer, const Offsets& inner, int64_t inner_dim) {
  return outer.affine() && inner.affine() && outer.stride == inner_dim * inner.stride;
}

// Replaces one pair of axes that are one axis on both sides, if there is any.
bool merge_dense_pair(std::vector<Axis>& axes) {
  for (Axis& outer : axes)
    for (auto inner = axes.begin(); inner != axes.end(); ++inner) {
      const int64_t dim = inner->dim;
      if (&outer == &*inner || dim != inner->padded) continue;
      if (!dense(outer.src, inner->src, dim) || !dense(outer.dst, inner->dst, dim)) continue;
      outer.dim *= dim;
      outer.padded *= dim;
      outer.src = inner->src;
      outer.dst = inner->dst;
      axes.erase(inner);
      return true;
    }
  return false;
}

Plan describe(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  Plan plan{element_size, {}};
  for (int d = 0; d < src_md.ndims; d++) {
    Axis axis{src_md.dims[d], dst_md.padded(d), axis_offsets(src_md, d, element_size),
              axis_offsets(dst_md, d, element_size)};
    if (axis.padded > 1) plan.axes.push_back(axis);
  }
  while (merge_dense_pair(plan.axes)) {
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
  const int64_t src = axis.src.at(axis.step), dst = axis.dst.at(axis.step);
  return src == 0 ? dst : std::min(src, dst);
}

// The axis with no role yet whose neighbours are nearest.
Axis* nearest_axis(Plan& plan) {
  Axis* nearest = nullptr;
  for (Axis& axis : plan.axes)
    if (axis.role == Role::Loop && (nearest == nullptr || distance(axis) < distance(*nearest))) nearest = &axis;
  return nearest;
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
    cols.role = Role::Cols;
    if (run > 0)
      cols.step = (512 + run - 1) / run * run;
    else
      set_even_steps(cols, tile_numel);
    cols.src_run = cols.dst_run = run > 0 ? run : cols.step;
    Axis& rows = *nearest_axis(plan);
    rows.role = Role::Rows;
    set_even_steps(rows, std::clamp<int64_t>(tile_numel / cols.step, 1, 64));
    order_loops(plan);
    return true;
  }
  return false;
}

// Lengthens a short axis by those that continue it on `side`, at the price of a table on the other side: the columns of
// oihw -> OIhw16i16o are i * h * w and not h * w.
void extend(Plan& plan, Role role, Offsets Axis::* side, Offsets Axis::* other) {
  constexpr int64_t enough = 256, longest_table = 4096;
  const auto continues = [&](const Axis& outer, const Axis& axis) {
    return outer.role == Role::Loop && dense(outer.*side, axis.*side, axis.dim) && axis.dim == axis.padded &&
           axis.dim < enough && axis.dim * (outer.*other).period() <= longest_table;
  };
  while (true) {
    Axis& axis = plan.axis(role);
    const auto outer =
        std::find_if(plan.axes.begin(), plan.axes.end(), [&](const Axis& outer) { return continues(outer, axis); });
    if (outer == plan.axes.end()) return;
    const Offsets &outside = (*outer).*other, &inside = axis.*other;
    Offsets joined{outside.stride, {}};
    joined.inner.reserve(outside.period() * axis.dim);
    for (int64_t i = 0; i < outside.period(); i++)
      for (int64_t j = 0; j < axis.dim; j++) joined.inner.push_back(outside.at(i) + inside.at(j));
    axis.*other = joined;
    axis.padded = outer->padded * axis.dim;
    axis.dim = outer->dim * axis.dim;
    plan.axes.erase(outer);
  }
}

// Sets the step of an axis in the direction of its run; `across` is the run of the tile's other axis.
void set_run_step(Axis& axis, int64_t run, int64_t across) {
  if (run > 0)
    axis.step = run;
  else
    set_even_steps(axis, across > 0 ? std::max<int64_t>(tile_numel / across, 16) : 64);
}

bool plan_transpose(Plan& plan) {
  Axis* rows = unit_axis(plan, &Axis::dst);
  Axis* cols = unit_axis(plan, &Axis::src);
  if (rows == nullptr || cols == nullptr || rows == cols) return false;
  rows->role = Role::Rows;
  cols->role = Role::Cols;
  const int64_t row_run = run_length(rows->dst, plan.element_size);
  const int64_t col_run = run_length(cols->src, plan.element_size);
  extend(plan, Role::Rows, &Axis::dst, &Axis::src);
  extend(plan, Role::Cols, &Axis::src, &Axis::dst);
  set_run_step(plan.axis(Role::Rows), row_run, col_run);
  set_run_step(plan.axis(Role::Cols), col_run, row_run);
  plan.axis(Role::Rows).dst_run = plan.axis(Role::Rows).step;
  plan.axis(Role::Cols).src_run = plan.axis(Role::Cols).step;
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
  set_even_steps(plan.axis(Role::Rows), 64);
  set_even_steps(plan.axis(Role::Cols), 64);
  order_loops(plan);
  return true;
}

// ---- the tiles

// Few rows at a time, so that their cache lines do not push each other out before the next columns. Rows of padding are
// a second call with nothing to read.
void run_copy(const Tile& tile, int64_t element_size, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols] = tile;
  const int64_t run = cols.dst_run;
  for (int64_t r = 0; r < rows.padded_size; r += 16) {
    const int64_t count = std::min<int64_t>(16, rows.padded_size - r);
    const int64_t inside = std::clamp<int64_t>(rows.size - r, 0, count);
    for (int64_t i = 0; i * run < cols.padded_size; i++) {
      const int64_t size = std::clamp<int64_t>(cols.size - i * run, 0, run) * element_size;
      const int64_t padded_size = std::min(cols.padded_size - i * run, run) * element_size;
      char* to = dst + cols.dst[i];
      if (inside > 0) kernels.copy_rows(src + cols.src[i], rows.src + r, to, rows.dst + r, inside, size, padded_size);
      if (inside < count)
        kernels.copy_rows(nullptr, nullptr, to, rows.dst + r + inside, count - inside, 0, padded_size);
    }
  }
}

void run_transpose(const Tile& tile, int64_t element_size, const ReorderKernels& kernels) {
  const auto transpose = element_size == 1   ? kernels.transpose_1
                         : element_size == 2 ? kernels.transpose_2
                         : element_size == 4 ? kernels.transpose_4
                         : element_size == 8 ? kernels.transpose_8
                                             : kernels.transpose_16;
  const auto& [src, dst, rows, cols] = tile;
  if (cols.size > 0) transpose(src, rows.src, dst, cols.dst, rows.size, rows.padded_size, cols.size);
  if (cols.size < cols.padded_size)
    transpose(nullptr, nullptr, dst, cols.dst + cols.size, 0, rows.padded_size, cols.padded_size - cols.size);
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

void run_reference(const Tile& tile, int64_t element_size, const ReorderKernels&) {
  switch (element_size) {
    case 1:
      return run_elements<1>(tile);
    case 2:
      return run_elements<2>(tile);
    case 4:
      return run_elements<4>(tile);
    case 8:
      return run_elements<8>(tile);
    default:
      return run_elements<16>(tile);
  }
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
    fill(axis_.src, axis_.src_run, begin, padded_size, src_);
    fill(axis_.dst, axis_.dst_run, begin, padded_size, dst_);
    return {std::min(axis_.dim - begin, padded_size),
            padded_size,
            src_.offsets.data(),
            dst_.offsets.data(),
            axis_.src_run,
            axis_.dst_run};
  }

 private:
  struct Table {
    int64_t phase = -1;
    std::vector<int64_t> offsets;
  };

  static void fill(const Offsets& offsets, int64_t run, int64_t begin, int64_t size, Table& table) {
    const int64_t phase = offsets.affine() ? 0 : begin % offsets.period();
    if (phase == table.phase && size <= int64_t(table.offsets.size()) * run) return;
    table.phase = phase;
    table.offsets.resize((size + run - 1) / run);
    if (offsets.affine()) {
      for (size_t i = 0; i < table.offsets.size(); i++) table.offsets[i] = i * run * offsets.stride;
      return;
    }
    int64_t i = phase, base = -offsets.inner[phase];
    for (int64_t& offset : table.offsets) {
      offset = base + offsets.inner[i];
      i += run;  // a run is part of a period
      if (i == offsets.period()) i = 0, base += offsets.stride;
    }
  }

  const Axis& axis_;
  Table src_, dst_;
};

// The tiles of a plan in the order of its loops, from the tile numbered `first`.
class TileLoop {
 public:
  TileLoop(const Plan& plan, const char* src, char* dst, int64_t first)
      : axes_(plan.axes), src_(src), dst_(dst), rows_(plan.axis(Role::Rows)), cols_(plan.axis(Role::Cols)) {
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
  Place places_[max_ndims];
};

bool has_elements(const MemoryDesc& md) {
  return std::all_of(md.dims, md.dims + md.ndims, [](int64_t dim) { return dim > 0; });
}

}  // namespace

void reorder(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst, int64_t element_size,
             int64_t nthreads) {
  if (!has_elements(dst_md)) return;
  Plan plan;
  const Implementation& implementation = choose(src_md, dst_md, element_size, plan);
  const ReorderKernels& kernels = TORCH_BLOCKED_KERNELS(reorder_kernels, isa());

  int64_t tiles = 1, size = element_size;
  for (const Axis& axis : plan.axes) tiles *= axis.steps(), size *= axis.padded;
  if (size < 64 * 1024) nthreads = 1;  // less than it costs to start the others
  parallel_for(tiles, nthreads, [&](int64_t begin, int64_t end) {
    TileLoop loop(plan, static_cast<const char*>(src), static_cast<char*>(dst), begin);
    for (int64_t i = begin; i < end; i++, loop.next()) implementation.run(loop.tile(), element_size, kernels);
  });
}

const char* reorder_implementation(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  if (!has_elements(dst_md)) return "reference";
  Plan plan;
  return choose(src_md, dst_md, element_size, plan).name;
}

}  // namespace torch_blocked
