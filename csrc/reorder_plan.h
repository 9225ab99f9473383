// How a reorder is taken apart: its axes, and the two of them that make a tile.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/reorder.h"
#include "memory_desc.h"

// Note [Reorder by tiles]
// An element's offset is a sum over the logical axes of a function of that axis's index alone, blocked or not
// (MemoryDesc::off_v). So a reorder is a loop over tiles of two axes, the rows and the columns, and the elements of a
// tile are found with four small tables: the offsets of its rows and of its columns, in src and in dst. The
// implementations differ in the two axes they choose:
//   copy        the columns lie side by side in both src and dst (nhwc <-> nChw16c, past the caches or where the last
//               block is not full): rows of bytes are copied
//   transpose   the columns lie side by side in src, the rows in dst (nchw -> nChw16c -> nchw, oihw -> OIhw16i16o);
//               up to a cache line that lies side by side in both is one element (nhwc <-> nChw16c in the caches);
//               where a tile is one small block on both sides, its bytes are permuted as they are (oihw -> Oihw16o);
//               past the caches a tile may be put together in the first one and written by pieces of memory
//   interleave  the same, and a few of the columns alternate in dst (oihw -> OIhw8i16o2i); and back: deinterleave
//   periods     the same, and columns far apart in dst share a few places of the first cache (oihw -> Ohwi16o)
//   reference   any two axes: element by element
// The loops run over dst's padded dims; what lies past the logical dims is cleared on the way.
//
// The offsets of an unblocked axis, and of every part of a blocked one, are multiples of a stride. So an axis with no
// padding is taken apart where its blocks begin, and what is then dense on both sides becomes one axis.

namespace torch_blocked::reorder_plan {

// The byte offset of each index of one axis, on one side: periodic, as an inner block repeats itself.
struct Offsets {
  int64_t stride = 0;          // of a whole period
  std::vector<int64_t> inner;  // within one period; empty where that is one index
  std::vector<int64_t> table;  // of every index of a step, wherever in a period it begins; empty where none is needed

  bool affine() const { return inner.empty(); }
  int64_t period() const { return affine() ? 1 : int64_t(inner.size()); }
  int64_t at(int64_t i) const { return affine() ? i * stride : i / period() * stride + inner[i % period()]; }

  // A step's offsets and where they count from.
  RowOffsets rows(int64_t begin) const {
    return table.empty() ? RowOffsets() : RowOffsets{table.data() + begin % period(), affine() ? stride : 0};
  }
  int64_t origin(int64_t begin) const { return table.empty() ? at(begin) : begin / period() * stride; }
};

enum class Role { Loop, Repeats, Rows, Cols };

// A logical axis, a part of one, or several as one.
struct Axis {
  int64_t dim = 1, padded = 1;  // padded as in dst
  Offsets src, dst;
  Role role = Role::Loop;
  int64_t step = 1;                                 // indices of one tile
  bool src_adjacent = false, dst_adjacent = false;  // a tile's are known to lie side by side: they need no table

  int64_t steps() const { return padded <= step ? 1 : (padded + step - 1) / step; }
};

// Of a logical axis one for each part between two borders of its inner blocks, of which src and dst have max_ndims
// each.
constexpr size_t max_axes = 3 * max_ndims;

using Picks = std::vector<Pick>;

// A tile as pieces of memory in dst, all of as many bytes, put together one after the other.
struct Pieces {
  std::vector<int64_t> cols;      // where each column is put
  std::vector<int64_t> from, to;  // where each piece is then, and where in dst, from the tile's place
};

struct Plan {
  int64_t element_size;
  bool stream = false;                // dst is written past the caches
  int64_t src_bytes = 0;              // from the first element of src to the end of the last
  int64_t group = 1, run = 0;         // of an interleave: elements in a group, and groups in a run of them
  Picks picks = {}, last_picks = {};  // of a tile's rows, and of the last, shorter tile's; empty where there are none
  std::vector<Merge> merges = {};     // of a tile that is one small block on both sides; empty where it is not
  std::vector<Axis> axes = {};        // outermost loop first
  Pieces pieces = {};                 // of a tile that is put together before dst is written; empty where none is
  // Where src is read in chunks, pieces of memory that follow each other: the bytes and the tiles of one, which the
  // loops from `chunk_loop` on make. 0 bytes where it is not.
  int64_t chunk = 0, chunk_tiles = 1;
  size_t chunk_loop = 0;
  // The distances of the tiles that one call takes, along the axis of repeats if there is any.
  struct {
    int64_t src = 0, dst = 0;
  } repeated = {};
  // Where a tile is first transposed to dst rows that follow each other: those, the first one of each period, and the
  // places of a period's rows in dst.
  struct {
    Offsets dense, from, to;
  } periods = {};

  const Axis& axis(Role role) const {
    return *std::find_if(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.role == role; });
  }
  Axis& axis(Role role) { return const_cast<Axis&>(std::as_const(*this).axis(role)); }
};

// The axes of a reorder, none with a role yet: what is dense on both sides is one axis.
Plan describe(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size);

// Most groups in a tile of plan_interleave and plan_deinterleave.
constexpr int64_t max_groups = 16 * most_picks;

// Most bytes in a tile of plan_periods.
constexpr int64_t max_dense = 20 * 1024;

// Most bytes of a tile with pieces.
constexpr int64_t most_pieces = 16 * 1024;

// Cuts an axis into about equal steps of whole units; none is longer than `limit` where that is a number of them.
void set_steps_of_units(Axis& axis, int64_t limit, int64_t unit);

// Steps that begin with whole periods, so that one table of offsets serves for all of them, and with whole cache lines;
// or where `limit` is too small for both, with one of these.
void set_even_steps(Axis& axis, int64_t limit, int64_t element_size);

// The loop whose steps are farther apart goes outside. By the shorter of the two distances: then src and dst are both
// walked in pieces of many cache lines, and neither in order at the cost of the other. Of two as far, that in src.
void order_loops(Plan& plan);

// Of a plan whose axes have their roles and steps, that goes past the caches: the pieces, with shorter steps.
void find_pieces(Plan& plan);

// Of a plan whose axes have their roles and steps: the smallest chunks, and the tables.
void find_chunks(Plan& plan);
void write_tables(Plan& plan);

// Of a plan by groups: the picks, where those of rows of `runs` reach. Of one whose tiles repeat: the merges, where
// they are small blocks.
void find_picks(Plan& plan, const Axis& runs, bool to_groups);
void find_merges(Plan& plan);

// Each gives the axes their roles and steps; false where its implementation cannot be used.
bool plan_copy(Plan& plan);
bool plan_interleave(Plan& plan);
bool plan_deinterleave(Plan& plan);
bool plan_periods(Plan& plan);
bool plan_transpose(Plan& plan);
bool plan_reference(Plan& plan);

}  // namespace torch_blocked::reorder_plan
