#include "reorder.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "caches.h"
#include "isa.h"
#include "kernels/reorder.h"
#include "parallel.h"
#include "reorder_plan.h"
#include "streaming.h"

namespace torch_blocked {
namespace {

using namespace reorder_plan;

// Some successive indices of an axis.
struct Span {
  int64_t size, padded_size;  // within the logical dim and within dst's padded one
  RowOffsets src, dst;        // from the first, unless they are adjacent
};

struct Tile {
  const char* src;
  char* dst;
  Span rows, cols;
  int64_t count;         // of the same, each at the next index of the axis of repeats
  const char* next_src;  // what is read a chunk of src later, or null
  const char* src_end;   // where all of src ends
};

struct Implementation {
  bool (*plan)(Plan& plan);  // gives the axes their roles and steps; false where this implementation cannot be used
  void (*run)(const Tile& tile, const Plan& plan, const ReorderKernels& kernels);
};

// ---- the tiles

// Rows or columns of padding are a second call with nothing to read.
void run_copy(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  const int64_t size = cols.size * plan.element_size, padded_size = cols.padded_size * plan.element_size;
  // Cache lines go past the caches where they are written at once.
  const bool stream = plan.stream && (padded_size % 64 == 0 || plan.axis(Role::Cols).steps() == 1);
  if (rows.size > 0)
    kernels.copy_rows(src, rows.src, dst, rows.dst, rows.size, size, padded_size, {stream, next_src, src_end});
  if (rows.size < rows.padded_size)
    kernels.copy_rows(nullptr, {}, dst, rows.dst.from(rows.size), rows.padded_size - rows.size, 0, padded_size,
                      {stream});
}

ReorderKernels::Transpose* transpose_of(const ReorderKernels& kernels, int64_t element_size) {
  return element_size == 1    ? kernels.transpose_1
         : element_size == 2  ? kernels.transpose_2
         : element_size == 4  ? kernels.transpose_4
         : element_size == 8  ? kernels.transpose_8
         : element_size == 16 ? kernels.transpose_16
         : element_size == 32 ? kernels.transpose_32
                              : kernels.transpose_64;
}

// Past the caches, or with `stream` false through them.
void transpose_tile(const Tile& tile, const Plan& plan, bool stream, const ReorderKernels& kernels) {
  const auto transpose = transpose_of(kernels, plan.element_size);
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  Matrix matrix{src,
                rows.src,
                dst,
                cols.dst,
                rows.size,
                rows.padded_size,
                cols.size,
                count,
                plan.repeated.src,
                plan.repeated.dst};
  if (cols.size > 0) transpose(matrix, {stream, next_src, src_end});
  if (cols.size == cols.padded_size) return;
  matrix.rows = 0;
  matrix.dst_rows = cols.dst.from(cols.size);
  matrix.cols = cols.padded_size - cols.size;
  transpose(matrix, {stream});
}

// What is put together in the first cache goes past the others by pieces. Src is fetched while dst is written. Where
// each column is a piece, steps at the end of rows and columns may be shorter.
void run_pieces(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  alignas(64) char between[most_pieces];
  const Pieces& pieces = plan.pieces;
  const bool by_col = pieces.to.size() == pieces.cols.size();
  Tile put = tile;
  put.dst = between;
  put.cols.dst = {pieces.cols.data()};
  put.next_src = nullptr;
  transpose_tile(put, plan, false, kernels);
  const int64_t all = tile.rows.padded_size * tile.cols.padded_size * plan.element_size;
  const int64_t n = by_col ? tile.cols.padded_size : pieces.to.size(), bytes = all / n;
  kernels.copy_rows(between, {pieces.from.data()}, tile.dst, {pieces.to.data()}, n, bytes, bytes,
                    {plan.stream, tile.next_src ? tile.next_src : between});
}

void run_transpose(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  // A block is whole, or all padding.
  if (!plan.merges.empty() && tile.cols.size > 0 && kernels.has_pick())
    return kernels.permute(tile.src, plan.repeated.src, tile.dst, plan.repeated.dst, tile.count,
                           tile.rows.size * tile.cols.size * plan.element_size, plan.merges.data());
  if (!plan.pieces.to.empty()) return run_pieces(tile, plan, kernels);
  transpose_tile(tile, plan, plan.stream, kernels);
}

// The rows of 16 elements between a transpose and an interleave: `group` of them for each line of 64 bytes.
struct Between {
  alignas(64) char rows[max_groups * 64];

  static RowOffsets offsets(int64_t group) {
    static const auto table = [] {
      std::array<std::array<int64_t, 4 * max_groups>, 2> table;
      for (int64_t r = 0; r < 4 * max_groups; r++) table[0][r] = r * 16, table[1][r] = r * 32;
      return table;
    }();
    return {table[group == 2].data(), 64 / group};
  }
};

// Those of a tile with so many lines, where this CPU has them.
const Picks* picks_of(const Plan& plan, Role role, int64_t lines, const ReorderKernels& kernels) {
  const Picks& picks = lines == plan.axis(role).step ? plan.picks : plan.last_picks;
  return plan.picks.empty() || !kernels.has_pick() ? nullptr : &picks;
}

void run_interleave(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  const int64_t lines = cols.padded_size;
  if (const Picks* const picks = picks_of(plan, Role::Cols, lines, kernels))
    return kernels.interleave_picked(src, rows.src.each, rows.size, dst, cols.dst.each, picks->data(), picks->size(),
                                     plan.stream);
  Between between;
  transpose_of(kernels, plan.element_size)(
      {src, rows.src, between.rows, between.offsets(plan.group), rows.size, 16, lines * plan.group}, {});
  const auto interleave = plan.group == 4 ? kernels.interleave_1 : kernels.interleave_2;
  interleave(between.rows, dst, cols.dst.each, lines, plan.run, plan.stream);
}

void run_deinterleave(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  const int64_t lines = rows.padded_size;
  if (const Picks* const picks = picks_of(plan, Role::Rows, lines, kernels))
    return kernels.deinterleave_picked(src, rows.src.each, dst, cols.dst.each, cols.size, picks->data(), picks->size());
  Between between;
  const auto deinterleave = plan.group == 4 ? kernels.deinterleave_1 : kernels.deinterleave_2;
  deinterleave(src, rows.src.each, between.rows, lines, plan.run);
  transpose_of(kernels, plan.element_size)(
      {between.rows, between.offsets(plan.group), dst, cols.dst, lines * plan.group, lines * plan.group, cols.size},
      {plan.stream});
}

// A transpose to dst rows that follow each other, then one whose elements these are: those of one place in their
// periods become neighbours.
void run_periods(const Tile& tile, const Plan& plan, const ReorderKernels& kernels) {
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  const auto& [dense, from, to] = plan.periods;
  const int64_t row_bytes = dense.stride, period = from.stride / row_bytes;
  alignas(64) char between[max_dense];
  transpose_of(kernels, plan.element_size)(
      {src, rows.src, between, dense.rows(0), rows.size, rows.padded_size, cols.padded_size}, {});
  const int64_t periods = cols.padded_size / period;
  transpose_of(kernels, row_bytes)({between, from.rows(0), dst, to.rows(0), periods, periods, period}, {});
}

template <int element_size>
void run_elements(const Tile& tile) {
  const auto& [src, dst, rows, cols, count, next_src, src_end] = tile;
  for (int64_t r = 0; r < rows.padded_size; r++) {
    char* to = dst + rows.dst.each[r];
    const int64_t size = r < rows.size ? cols.size : 0;
    for (int64_t c = 0; c < size; c++)
      std::memcpy(to + cols.dst.each[c], src + (rows.src.each[r] + cols.src.each[c]), element_size);
    for (int64_t c = size; c < cols.padded_size; c++) std::memset(to + cols.dst.each[c], 0, element_size);
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
    {plan_copy, run_copy},       {plan_interleave, run_interleave}, {plan_deinterleave, run_deinterleave},
    {plan_periods, run_periods}, {plan_transpose, run_transpose},   {plan_reference, run_reference},
};

// A reorder that was planned before.
struct Planned {
  MemoryDesc src_md, dst_md;
  int64_t element_size = 0;  // the plan's own may be wider
  Isa tier{};                // whose vectors it was planned for
  const Implementation* implementation = nullptr;
  Plan plan{};
};

void choose(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size, Planned& planned) {
  const Plan described = describe(src_md, dst_md, element_size);
  for (const Implementation& implementation : implementations) {
    Plan plan = described;
    if (!implementation.plan(plan)) continue;
    if (plan.stream) find_chunks(plan);
    write_tables(plan);
    planned = {src_md, dst_md, element_size, isa(), &implementation, std::move(plan)};
    return;
  }
  throw std::logic_error("reorder: the reference takes every pair");
}

// A sum of products that do not wait for each other.
uint64_t hash(const MemoryDesc& md, uint64_t hash) {
  constexpr uint64_t odd = 0x9e3779b97f4a7c15;
  uint64_t factor = odd;
  const auto add = [&](int64_t value) { hash += uint64_t(value) * (factor += 2 * odd); };
  for (int d = 0; d < md.ndims; d++) add(md.dims[d]), add(md.strides[d]);
  for (int i = 0; i < md.inner_nblks; i++) add(md.inner_blks[i] * max_ndims + md.inner_idxs[i]);
  return hash * odd;
}

// A model makes the same few reorders again and again, and of small tensors the plan takes as long as the moves. Each
// thread keeps its own; a plan is forgotten where another has the same place.
const Planned& plan_once(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  static thread_local Planned cache[64];
  Planned& planned = cache[hash(dst_md, hash(src_md, element_size)) >> 58];
  if (planned.implementation == nullptr || planned.element_size != element_size || planned.tier != isa() ||
      planned.src_md != src_md || planned.dst_md != dst_md)
    choose(src_md, dst_md, element_size, planned);
  return planned;
}

// ---- the loops

Span span_of(const Axis& axis, int64_t begin) {
  const int64_t padded_size = std::min(axis.step, axis.padded - begin);
  return {std::min(axis.dim - begin, padded_size), padded_size, axis.src.rows(begin), axis.dst.rows(begin)};
}

// The tiles of a plan in the order of its loops, from the tile numbered `first`.
class TileLoop {
 public:
  TileLoop(const Plan& plan, const char* src, char* dst, int64_t first)
      : plan_(plan), axes_(plan.axes), tile_of_chunk_(first % plan.chunk_tiles), src_(src), dst_(dst) {
    for (size_t a = axes_.size(); a-- > 0;) {
      const int64_t steps = first > 0 ? axes_[a].steps() : 1;
      move(a, first % steps * axes_[a].step);
      first /= steps;
    }
  }

  void next() {
    for (size_t a = axes_.size(); a-- > 0;) {
      const int64_t begin = places_[a].begin + axes_[a].step;
      if (begin < axes_[a].padded) {
        tile_of_chunk_ = a < plan_.chunk_loop ? 0 : tile_of_chunk_ + 1;
        return move(a, begin);
      }
      if (places_[a].begin > 0) move(a, 0);
    }
  }

  Tile tile() const {
    Tile tile{src_ + (in_padding_ ? 0 : src_offset_),
              dst_ + dst_offset_,
              row_span_,
              col_span_,
              count_,
              next_src(),
              src_ + plan_.src_bytes};
    if (in_padding_) tile.rows.size = tile.cols.size = 0;
    return tile;
  }

 private:
  struct Place {
    int64_t begin = 0, src = 0, dst = 0;
  };

  // The tile's share of the next chunk.
  const char* next_src() const {
    if (plan_.chunk == 0 || in_padding_ > 0) return nullptr;
    int64_t offset = plan_.chunk + tile_of_chunk_ * (plan_.chunk / plan_.chunk_tiles);
    for (size_t a = 0; a < plan_.chunk_loop; a++) offset += places_[a].src;
    return src_ + offset;
  }

  void move(size_t a, int64_t begin) {
    const Axis& axis = axes_[a];
    Place& place = places_[a];
    const int64_t src = axis.src.origin(begin), dst = axis.dst.origin(begin);
    src_offset_ += src - place.src;
    dst_offset_ += dst - place.dst;
    in_padding_ += int(begin >= axis.dim) - int(place.begin >= axis.dim);
    if (axis.role == Role::Rows) row_span_ = span_of(axis, begin);
    if (axis.role == Role::Cols) col_span_ = span_of(axis, begin);
    if (axis.role == Role::Repeats) count_ = std::min(axis.step, axis.dim - begin);
    place.begin = begin;
    place.src = src;
    place.dst = dst;
  }

  const Plan& plan_;
  const std::vector<Axis>& axes_;
  int64_t tile_of_chunk_;
  const char* src_;
  char* dst_;
  int64_t src_offset_ = 0, dst_offset_ = 0;
  int in_padding_ = 0;  // axes whose place is past their logical dim
  Span row_span_{}, col_span_{};
  int64_t count_ = 1;
  std::array<Place, max_axes> places_;
};

bool has_elements(const MemoryDesc& md) {
  return std::all_of(md.dims, md.dims + md.ndims, [](int64_t dim) { return dim > 0; });
}

const Planned& checked_plan(const MemoryDesc& src_md, const MemoryDesc& dst_md, int64_t element_size) {
  if (element_size < 1 || element_size > 16 || (element_size & (element_size - 1)) != 0)
    throw std::invalid_argument("reorder: elements of 1, 2, 4, 8 or 16 bytes, got " + std::to_string(element_size));
  return plan_once(src_md, dst_md, element_size);
}

int64_t tiles_of(const Plan& plan) {
  int64_t tiles = 1;
  for (const Axis& axis : plan.axes) tiles *= axis.steps();
  return tiles;
}

int64_t dst_bytes(const Plan& plan) {
  int64_t bytes = plan.element_size;
  for (const Axis& axis : plan.axes) bytes *= axis.padded;
  return bytes;
}

// The first tiles that write no more than `most` bytes, at least one, and how many bytes that is.
std::pair<int64_t, int64_t> tiles_within(const Plan& plan, int64_t most) {
  TileLoop loop(plan, nullptr, nullptr, 0);
  const int64_t all = tiles_of(plan);
  for (int64_t tiles = 0, bytes = 0;; loop.next()) {
    const Tile tile = loop.tile();
    const int64_t more = tile.rows.padded_size * tile.cols.padded_size * tile.count * plan.element_size;
    if (tiles == all || (tiles > 0 && bytes + more > most)) return {tiles, bytes};
    tiles++, bytes += more;
  }
}

void run_tiles(const Implementation& implementation, const Plan& plan, const void* src, void* dst, int64_t begin,
               int64_t end) {
  const ReorderKernels& kernels = TORCH_BLOCKED_KERNELS(reorder_kernels, isa());
  TileLoop loop(plan, static_cast<const char*>(src), static_cast<char*>(dst), begin);
  for (int64_t i = begin; i < end; i++, loop.next()) implementation.run(loop.tile(), plan, kernels);
}

}  // namespace

void reorder(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst, int64_t element_size,
             int64_t nthreads) {
  if (!has_elements(dst_md)) return;
  const Planned& planned = checked_plan(src_md, dst_md, element_size);
  if (dst_bytes(planned.plan) < 64 * 1024) nthreads = 1;  // less than it costs to start the others
  parallel_for(tiles_of(planned.plan), nthreads, [&](int64_t begin, int64_t end) {
    run_tiles(*planned.implementation, planned.plan, src, dst, begin, end);
    if (planned.plan.stream) finish_streams();
  });
}

double reorder_tile_rate(const MemoryDesc& src_md, const void* src, const MemoryDesc& dst_md, void* dst,
                         int64_t element_size) {
  if (!has_elements(dst_md)) return 0;
  const Planned& planned = checked_plan(src_md, dst_md, element_size);
  Plan plan = planned.plan;  // what keeps clear of the caches is left out
  plan.stream = false, plan.chunk = 0;
  const auto [tiles, bytes] = tiles_within(plan, caches().l1 / 4);
  const auto seconds_of = [&](int64_t rounds) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < rounds; i++) run_tiles(*planned.implementation, plan, src, dst, 0, tiles);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  int64_t rounds = 1;
  while (seconds_of(rounds) < 1e-4) rounds *= 2;
  double fastest = seconds_of(rounds);  // of some: what disturbs one is not the tile's
  for (int i = 0; i < 10; i++) fastest = std::min(fastest, seconds_of(rounds));
  return double(rounds * bytes) / fastest;
}

}  // namespace torch_blocked
