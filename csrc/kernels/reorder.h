// The inner loops of a reorder, once per ISA tier.
#pragma once
#include <cstdint>

#include "isa.h"

namespace torch_blocked {

// The offsets of some rows, and the distance from each to the next where it is the same for all of them, else 0.
struct RowOffsets {
  const int64_t* each = nullptr;
  int64_t stride = 0;

  RowOffsets from(int64_t row) const { return {each + row, stride}; }
};

// Element c of the src row r becomes element r of the dst row c. A dst row has zeros from `rows` up to padded_rows.
struct Matrix {
  const char* src;
  RowOffsets src_rows;
  char* dst;
  RowOffsets dst_rows;
  int64_t rows, padded_rows, cols;
  // There are so many of them, and so far is each from the one before.
  int64_t count = 1, next_in_src = 0, next_in_dst = 0;
};

// How src and dst pass the caches.
struct Traffic {
  bool stream = false;             // dst is too large for them: whole cache lines go past them
  const char* next_src = nullptr;  // what is read some calls later, as many bytes in one piece as by this call: they
                                   // are fetched in their order, at the pace of its own reads. Null: not known
  const char* src_end = nullptr;   // there may be nothing readable from here on. Null: after what is moved
};

// A vector of a dst row: each of its bytes is one of two vectors of the src row.
struct Pick {
  alignas(64) uint8_t places[64];  // in the first of them; from 64 on, in the second
  int64_t first, second, to;       // where they begin, and this one in dst
};
// Of a row: then the rows of a tile, src and dst are within a first cache.
constexpr int64_t most_picks = 10;

// A block of some vectors whose bytes change places: the last may overlap the one before it. Each vector of dst begins
// as the first one of src, and takes bytes of each other one in turn; in a block of one vector, of that one.
struct Merge {
  alignas(64) uint8_t places[64];  // of what there is of the vector of dst; from 64 on, of the one of src
};
constexpr int64_t merges_per_vector(int64_t vectors) { return vectors > 1 ? vectors - 1 : 1; }
constexpr int64_t most_permuted = 4 * 64;  // bytes: of more vectors a transpose takes less time

// All offsets are in bytes.
struct ReorderKernels {
  // For each row r: size bytes from src + src_rows[r] to dst + dst_rows[r], then zeros up to padded_size bytes.
  using CopyRows = void(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows,
                        int64_t size, int64_t padded_size, Traffic traffic);

  using Transpose = void(const Matrix& matrix, Traffic traffic);

  // Lines of 64 bytes, each of a group of src rows by turns. The rows follow each other: the first ones of `run`
  // groups, then the second ones of the same groups and so on, then the next groups. `lines` is a multiple of `run`.
  using Interleave = void(const char* src, char* dst, const int64_t* dst_lines, int64_t lines, int64_t run,
                          bool stream);
  // The same backwards.
  using Deinterleave = void(const char* src, const int64_t* src_lines, char* dst, int64_t lines, int64_t run);

  // The same by picks of each of `rows` src rows, up to 16; the others are zeros. Back, of the rows that the lines are
  // transposed to: 4 bytes are of one line, and so `first` and `second` multiples of 4.
  using InterleavePicked = void(const char* src, const int64_t* src_rows, int64_t rows, char* dst,
                                const int64_t* dst_lines, const Pick* picks, int64_t npicks, bool stream);
  using DeinterleavePicked = void(const char* src, const int64_t* src_lines, char* dst, const int64_t* dst_rows,
                                  int64_t rows, const Pick* picks, int64_t npicks);

  // `count` blocks of `bytes` bytes, from 64 to most_permuted; the merges of each vector of dst, one vector's after
  // another's.
  using Permute = void(const char* src, int64_t next_in_src, char* dst, int64_t next_in_dst, int64_t count,
                       int64_t bytes, const Merge* merges);

  CopyRows* copy_rows;
  Transpose* transpose_1;  // by element size
  Transpose* transpose_2;
  Transpose* transpose_4;
  Transpose* transpose_8;
  Transpose* transpose_16;
  Transpose* transpose_32;
  Transpose* transpose_64;
  Interleave* interleave_1;  // by element size: groups of four, of two
  Interleave* interleave_2;
  Deinterleave* deinterleave_1;
  Deinterleave* deinterleave_2;
  bool (*has_pick)();  // whether this CPU has what the next three need
  InterleavePicked* interleave_picked;
  DeinterleavePicked* deinterleave_picked;
  Permute* permute;
};

TORCH_BLOCKED_DECLARE_KERNELS(ReorderKernels, reorder_kernels);

}  // namespace torch_blocked
