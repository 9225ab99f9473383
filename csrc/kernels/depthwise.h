// The inner loops of depthwise and grouped convolutions of a blocked src: one table per ISA tier.
//
// One call computes some rows of a plane of dst, one block of channels, so that a plane of a few pixels costs one call.
#pragma once
#include <cstdint>
#include <iterator>

#include "../isa.h"
#include "conv.h"

namespace torch_blocked {

// Rows, or columns, [begin, end) of the filter.
struct TapRange {
  int64_t begin, end;
};

// Which src lane a dst lane reads: its own, each that of a map, or all of them the same one. Fours and Eights: groups
// of as many channels, several of which share a block, the same ones that of src and of dst.
enum class Lane { Own, Mapped, Same, Fours, Eights };
constexpr int nlanes = int(Lane::Eights) + 1;

// For one channel of each group: dst lane i reads src lane from[i] where use[i] is -1 (all bits) and nothing where it
// is 0. Where all lanes read the same one it is in src, for as many neighbouring channels as `lanes` says, whose
// weights are wei_lane apart. src and wei are added to every tap's.
constexpr int max_lanes = 16;
struct LaneMap {
  int64_t src, wei;
  int64_t lanes, wei_lane;
  int32_t from[max_lanes];
  int32_t use[max_lanes];
};

// Where src that is fetched ahead goes; Both: into L2 long before into L1.
enum class FetchInto { L2, L1, Both };

// The sum over maps and taps for `ntiles` tiles, of as many neighbouring columns as the kernel has, in each of `nrows`
// rows.
struct DepthwiseArgs {
  const float* src;
  int64_t src_offset;  // of the first pixel's filter: it may lie in the padding, before src, where its taps do not
  int64_t src_row, src_tile;  // from one dst row's, one tile's filter to the next
  int64_t iw_begin, iw;       // the src column of that first pixel; columns of src: what lies outside is padding
  int64_t tile_columns;       // src columns from one tile to the next
  const float* zeros;         // a vector of them: what lanes that exchange their sums read in the padding
  int64_t ahead;              // the first of the src rows to fetch into the cache meanwhile: its offset, like taps'
  int64_t ahead_rows;         // how many, one after another in memory
  FetchInto ahead_into;
  int64_t far_ahead;  // with FetchInto::Both: floats on from what is fetched into L1
  const LaneMap* maps;
  int64_t nmaps;
  const Tap* taps;
  const TapRange* rows;  // for each dst row, those of its taps that lie inside src
  const float* wei;
  int64_t wei_kw;  // to the weights of the next tap of a row
  float* dst;
  int64_t dst_row, nrows, ntiles;
  int64_t dst_step = 1;      // as in ConvArgs
  bool first, last, stream;  // as in ConvArgs
  Epilogue epilogue;         // at the first pixel
};
using DepthwiseKernel = void (*)(const DepthwiseArgs&);

// A row of taps of these widths shares its pixels: each is loaded once. Other filters go tap by tap.
constexpr int depthwise_kw[] = {1, 2, 3, 5, 7};
constexpr int depthwise_max_stride = 2;

// For Fours and Eights: what `to` takes of the weights of a tap, as many vectors as a group has channels; `channels`
// says where each of these begins.
using ExchangeWeights = void (*)(const float* wei, const int64_t* channels, float* to);

struct DepthwiseKernels {
  int cols[nlanes][std::size(depthwise_kw)];  // most of a call
  // [Lane][index into depthwise_kw][column stride - 1][cols - 1]
  DepthwiseKernel kernels[nlanes][std::size(depthwise_kw)][depthwise_max_stride][conv_max_cols];
  // Of 3x3, stride 1, padding of at most 1, Lane::Own, pixels of dst side by side, one plane. [cols - 1]
  int rolling_cols;  // most of a call; 0 where there are none
  DepthwiseKernel rolling[conv_max_cols];
  ExchangeWeights exchange_weights[nlanes];  // null where there are no kernels, and for other lanes
};
TORCH_BLOCKED_DECLARE_KERNELS(DepthwiseKernels, depthwise_kernels);

}  // namespace torch_blocked
