#include "cost.h"

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "winograd_amx.h"

namespace torch_blocked {
namespace {

// What one core of a CPU of each tier does, in round figures: the choice depends on their ratios only.
struct Core {
  double flops;               // floating point operations a second in the inner loops
  double transformed_vector;  // seconds to transform one vector of a tile, there or back
};
constexpr Core cores[] = {{12e9, 8e-9}, {110e9, 2e-9}, {150e9, 2e-9}, {150e9, 2e-9}};  // default, AVX2, AVX-512, AMX

// Bytes a second from memory, all cores together and one alone: between two calls of a layer the rest of the network
// has been through the caches, so its weights come from there.
constexpr double memory_bandwidth = 30e9, core_bandwidth = 20e9;

const Core& core() { return cores[int(isa())]; }

double padded(int64_t channels, int64_t block) { return double((channels + block - 1) / block * block); }

// The weights of one tap. Groups of less than a block multiply no padding, nor do the channels of a plain src; those of
// a blocked one at most half a block.
double matrix(const Conv& c) {
  const int64_t block = c.groups == 1 ? c.block : 1;
  const int64_t multiplied = c.src_md.is_plain() ? 1 : std::max<int64_t>(1, block / 2);
  return double(c.groups) * padded(c.group_ic(), multiplied) * padded(c.group_oc(), block);
}

double multiply_seconds(const Conv& c, double rows_of_src, double matrices) {
  return 2 * rows_of_src * matrices * matrix(c) / (core().flops * double(c.nthreads));
}

// Where several groups share a block, lanes are moved for each product of vectors; but half vectors of two groups are
// multiplied as they are, where there are kernels for them.
double with_moves(const Conv& c) {
  const bool halves = c.block == 16 && c.group_ic() == 8;
  return c.shares_blocks() && !halves ? 2 : 1;
}

double wei_seconds(const Conv& c, double matrices) {
  const double bandwidth = std::min(memory_bandwidth, core_bandwidth * double(c.nthreads));
  return matrices * matrix(c) * sizeof(float) / bandwidth;
}

// Weights and multiplications overlap: the slower decides.
double product_seconds(const Conv& c, double rows_of_src, double matrices, double slower = 1) {
  return std::max(slower * multiply_seconds(c, rows_of_src, matrices), wei_seconds(c, matrices));
}

// Pixels of a row in one call of a kernel.
double call_cols(const Conv& c) { return double(c.ow) / std::ceil(double(c.ow) / double(c.kernels()->cols)); }

double transform_seconds(const Conv& c, double vectors) {
  return vectors * core().transformed_vector / double(c.nthreads);
}

double pixels(const Conv& c) { return double(c.n * c.od * c.oh * c.ow); }
double taps(const Conv& c) { return double(c.kd * c.kh * c.kw); }

// The part of an axis's taps, over all pixels of dst, that read src and not padding.
double inside(int64_t src, int64_t dst, int64_t taps, int64_t stride, int64_t dilation, int64_t pad) {
  int64_t count = 0;
  for (int64_t tap = 0; tap < taps; tap++) {
    const int64_t first = tap * dilation - pad;  // the src pixel that dst pixel 0 reads
    const int64_t begin = first < 0 ? (-first + stride - 1) / stride : 0;
    const int64_t end = first < src ? std::min(dst, (src - first + stride - 1) / stride) : 0;
    count += std::max<int64_t>(0, end - begin);
  }
  return double(count) / double(dst * taps);
}

// Of F(m x m, 3 x 3): elements of a transformed tile and of the weights for it, tiles, and vectors of transformed src
// and dst.
struct TileCounts {
  double planes, matrices, tiles, vectors;
  TileCounts(const Conv& c, int64_t m)
      : planes(std::pow(double((m - 1) * c.stride_h + 3), 2)),
        matrices(double((m + 2) * (m + 2) * c.kd)),
        tiles(double(c.n * c.od * TileAxis(c.oh, m, c.dilation_h).count * TileAxis(c.ow, m, c.dilation_w).count)),
        vectors(tiles * planes * (padded(c.ic, c.block) * double(c.kd) + padded(c.oc, c.block)) / double(c.block)) {}
};

// Elements of a transformed tile of a row, in all phases, and tiles of dst.
struct RowTileCounts {
  static constexpr int64_t m = 4;
  double elements, tiles, vectors;
  RowTileCounts(const Conv& c)
      : elements(double(m + (c.kw + c.stride_w - 1) / c.stride_w - 1)),
        tiles(double(c.n * c.od * c.oh * ((c.ow + m - 1) / m))),
        vectors(elements *
                (tiles * padded(c.oc, c.block) +
                 double(c.n * c.id * c.ih * c.ic * c.stride_w) * padded((c.ow + m - 1) / m, c.block)) /
                double(c.block)) {}
};

}  // namespace

// A vector of weights is loaded for each call's pixels: of a narrow image few. Taps that read padding are left out,
// which with a stride of 1, and borders on both sides, saves only what their narrow calls lose, unless the filter is so
// dilated that whole calls see only padding.
double direct_seconds(const Conv& c) {
  constexpr int64_t wide = 6;
  double part = 1;
  if (c.stride_h > 1 || c.dilation_h >= wide) part *= inside(c.ih, c.oh, c.kh, c.stride_h, c.dilation_h, c.pad_h);
  if (c.stride_w > 1 || c.dilation_w >= wide) part *= inside(c.iw, c.ow, c.kw, c.stride_w, c.dilation_w, c.pad_w);
  return product_seconds(c, pixels(c), taps(c), part * (1 + 1 / call_cols(c)));
}

// Products by tiles, in the measure of those by vectors, and the parts of src and of the weights, as often as they are
// made: fitted to layers of ResNet-50 (Granite Rapids).
double amx_seconds(const Conv& c) {
  constexpr double flops = 280e9, src_vector = 5.5e-9, wei_vector = 4.4e-9;
  const AmxWork w(c);
  const double threads = double(std::min(c.nthreads, w.parts)), planes = double(c.n * c.od),
               blocks = double(2 * w.ic_pairs);
  const double row_tiles = std::ceil(double(c.oh) / double(w.tile_rows));
  const double windows = std::ceil(double(w.pixels) / planes / row_tiles / amx_rows) * amx_rows * planes * row_tiles;
  const double rows = w.windows ? windows : std::ceil(double(w.pixels) / amx_rows) * amx_rows;
  const double products = double(w.steps() * amx_row) * padded(c.oc, c.block);
  const double window_pixels = planes * row_tiles * double(c.kd * w.window_pixels(w.tile_rows));
  const double src = blocks * (w.windows ? window_pixels : rows * taps(c)) * (w.split_oc ? threads : 1);
  const double tiles = w.windows ? planes * row_tiles : rows / AmxWork::most_pixels;
  const double wei = products / double(c.block) * std::max(w.split_oc ? 1 : threads, w.keeps_weights ? 0 : tiles);
  return std::max(2 * rows * products / (flops * threads), wei_seconds(c, taps(c))) +
         (src * src_vector + wei * wei_vector) / threads;
}

// For a row of taps each kernel call also begins, and moves its pixels' lanes where it reads others than its own.
double depthwise_seconds(const Conv& c) {
  const double cols = call_cols(c), products = cols * double(c.kw), begin = 6;
  const double moves = lanes_of(c) == Lane::Mapped ? cols + double(c.kw) - 1 : 0;
  return product_seconds(c, pixels(c), taps(c), (products + moves + begin) / products);
}

template <int m>
double winograd_seconds(const Conv& c) {
  const TileCounts w(c, m);
  const double call_tiles = w.tiles / std::ceil(w.tiles / double(c.kernels()->cols));
  const double products = (1 + 1 / call_tiles) * with_moves(c) * multiply_seconds(c, w.tiles, w.planes * double(c.kd));
  return std::max(products, wei_seconds(c, w.matrices)) + transform_seconds(c, w.vectors);
}

// Fitted, as a ratio to winograd_seconds, to 35 layers on one and two threads (an Intel CPU of 2 MB L2): what two tile
// registers take of a pair of blocks of each side, with the splitting beside them; a pair of vectors of weights; and a
// transformed vector, whose parts are made, too.
double winograd_amx_seconds(const Conv& c) {
  constexpr double product = 200e-9, odd_unit = 0.6, wei_pair = 7.2e-9, vector = 4.8e-9;
  if (amx_always()) return 0;
  const WinogradAmxWork w(c);
  const double threads = double(std::clamp<int64_t>(w.split_oc ? w.oc_pairs : w.units, 1, c.nthreads));
  const double matrices = double(w.planes * w.ic_pairs * w.oc_pairs) / (w.split_oc ? threads : 1);
  const double registers = double(w.run_units / amx_most_tiles) + odd_unit * double(w.run_units % amx_most_tiles);
  const double products = matrices * double(w.nruns) * registers * product;
  const double wei = matrices * double(amx_row * (w.keeps_weights ? 1 : w.nruns)) * wei_pair;
  const double vectors =
      double(w.tiles * w.planes) * (double(w.ic_blocks) * (w.split_oc ? threads : 1) + double(w.oc_blocks));
  return std::max(products + wei, wei_seconds(c, double(w.planes * c.kd))) + vectors / threads * vector;
}

// The few weights of groups that share blocks stay in the caches.
template <int m>
double winograd_pack_seconds(const Conv& c) {
  const double slower = c.shares_blocks() ? 2 : 8;
  return transform_seconds(c, slower * TileCounts(c, m).matrices * matrix(c) / double(c.block));
}

template double winograd_seconds<2>(const Conv&);
template double winograd_seconds<4>(const Conv&);
template double winograd_pack_seconds<2>(const Conv&);
template double winograd_pack_seconds<4>(const Conv&);

// In registers a vector of weights is transformed in a third of the time; the products wait for it.
double unpacked_winograd_seconds(const Conv& c) {
  const TileCounts w(c, 4);
  const double filters = transform_seconds(c, w.planes * double(c.kd) * matrix(c) / double(c.block)) / 3;
  const double products = multiply_seconds(c, w.tiles, w.planes * double(c.kd)) + filters;
  return std::max(products, wei_seconds(c, taps(c))) + transform_seconds(c, w.vectors);
}

// Its short sums take more than the products alone: of twelve first layers direct ones took 0.74 to 0.97 of what these
// two estimates' ratio said.
double row_winograd_seconds(const Conv& c) {
  constexpr double slower = 1.25;
  const RowTileCounts w(c);
  const double matrices = w.elements * double(c.kd * c.kh * c.stride_w);
  return slower * (product_seconds(c, w.tiles, matrices) + transform_seconds(c, w.vectors));
}

double row_winograd_pack_seconds(const Conv& c) {
  const double vectors = RowTileCounts(c).elements * taps(c) * matrix(c) / double(c.block);
  return 4 * vectors * core().transformed_vector;  // in double, by one thread
}

// The sums stay in a cache, the weights are not read.
double direct_weight_gradient_seconds(const Conv& c) { return multiply_seconds(c, pixels(c), taps(c)); }

double winograd_weight_gradient_seconds(const Conv& c, int64_t m) {
  const TileCounts w(c, m);
  const double sums = w.matrices * matrix(c) / double(c.block);
  return multiply_seconds(c, w.tiles, w.matrices) + transform_seconds(c, w.vectors + sums);
}

}  // namespace torch_blocked
