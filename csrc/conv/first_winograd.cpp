// Winograd's algorithm along the rows of a plain src: the first convolution of a network where its kernel is wide.
//
// A stride is a sum over phases: dst is the sum, over phases p, of the convolution of stride 1 of src's columns
// p, p + stride, ... with the filter's, so that 7 columns of stride 2 are 4 and 3. Each is one of F(4, 3) or F(4, 4)
// (kernels/winograd.h), all summed before they are transformed back: a run of four dst pixels takes six or seven
// multiplications a phase and row of the filter instead of twelve or sixteen. Rows are not transformed: with so few
// input channels the second transform costs more than it saves.
//
// As in first.cpp some dst rows of an image are computed at a time, and a table of taps holds the sum; here it runs
// over the transformed src of one point at a time, its pixels being tiles.
#include "../parallel.h"
#include "../scratch.h"
#include "cost.h"
#include "window.h"
#include "winograd.h"

namespace torch_blocked {
namespace {

// Bytes of transformed src: in L2 beside the weights; and of one dst row, which is not cut into parts, the most.
constexpr int64_t src_budget = 256 << 10, most_src = 4 << 20, most_rows = 16;

// Taps of the widest phase.
int64_t taps(const Conv& c) { return (c.kw + c.stride_w - 1) / c.stride_w; }

const WinogradRowTransforms* transforms_of(const Conv& c) {
  const WinogradKernels* const kernels = winograd_kernels(c);
  if (kernels == nullptr) return nullptr;
  for (const WinogradRowTransforms& transforms : kernels->rows)
    if (transforms.taps == taps(c)) return &transforms;
  return nullptr;
}

int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool can(const Conv& c) {
  if (c.dilation_w != 1 || !conv_first.can(c)) return false;
  const WinogradRowTransforms* const transforms = transforms_of(c);
  if (transforms == nullptr) return false;
  const int64_t rows = (c.kh - 1) * c.dilation_h + 1, tiles = (c.ow + transforms->m - 1) / transforms->m;
  const int64_t row = c.stride_w * transforms->size * rounded_up(tiles, c.block);
  return c.ic * c.kd * rows * row * int64_t(sizeof(float)) <= most_src;
}

// The transformed weights: for each block of output channels and each point of the transform those of the taps, the
// phases outermost. They are few, and made anew for each call of weights that are blocked along one axis, as most such
// weights are: theirs are not kept (library/problem.h).
MemoryDesc weights(const Conv& c) {
  MemoryDesc dims_of = c.wei_md;
  dims_of.dims[3] = transforms_of(c)->size * c.stride_w;
  return dense_desc(dims_of, {0, 3, 2, 1}, {{0, c.block}});
}

void pack(const Conv& given, const MemoryDesc& wanted, float* packed) {
  const ReorderedWeights reordered(given, conv_first.weights(given));
  const Conv& c = reordered.conv;
  const WinogradRowTransforms& transforms = *transforms_of(c);
  const int64_t* const strides = c.wei_md.strides;
  for (int64_t oc_block = 0; oc_block < c.oc_blocks(); oc_block++)
    for (int64_t kd = 0; kd < c.kd; kd++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t ic = 0; ic < c.ic; ic++)
          for (int64_t phase = 0; phase < c.stride_w; phase++) {
            const int64_t from[] = {oc_block * c.block, ic, kh, phase, kd};
            transforms.wei(c.wei + c.wei_md.off_v(from), c.stride_w * strides[3],
                           (c.kw - phase + c.stride_w - 1) / c.stride_w, packed + wanted.off_v(from),
                           c.stride_w * wanted.strides[3]);
          }
}

// The same with the columns that a tile reads as its kernel and as many as it steps over as its stride.
Conv by_tiles(const Conv& c, const WinogradRowTransforms& transforms) {
  Conv tiles = c;
  tiles.kw = transforms.size * c.stride_w;
  tiles.ow = (c.ow + transforms.m - 1) / transforms.m;
  tiles.stride_w = transforms.m * c.stride_w;
  return tiles;
}

struct Plan {
  const Conv& conv;
  const ConvKernels& kernels;
  const WinogradRowTransforms& transforms;
  const bool stream;
  const PaddedPostOps post_ops;
  const Conv tiles;
  const Window window;  // of one plane
  // Floats, all of whole vectors of tiles: one column of all tiles of a row of the window; and, of its transform, one
  // point, one phase, the row.
  const int64_t column, point, phase, row;
  int64_t bands;                 // of an image, each some dst rows
  int64_t plane;                 // floats from one transformed plane to the next
  int64_t cols;                  // tiles in a call of a kernel
  std::vector<Tap> taps;         // of one point
  std::vector<int64_t> columns;  // a tile's, of the window's sorted row, by phase

  explicit Plan(const Conv& c);
  int64_t planes() const { return conv.ic * conv.kd; }
  // Floats of scratch; the sorted row is read from the window in whole vectors, beyond its end.
  int64_t src_size() const { return planes() * plane; }
  int64_t products_point() const { return 2 * cols * conv.block; }
  int64_t products_size() const { return transforms.size * products_point(); }
  int64_t sorted_size() const { return tiles.stride_w * column; }
  int64_t window_size() const { return plane / row * window.row_size + sorted_size(); }

 private:
  void set_bands();
};

Plan::Plan(const Conv& c)
    : conv(c),
      kernels(*c.kernels()),
      transforms(*transforms_of(c)),
      stream(streams_dst(c)),
      post_ops(c),
      tiles(by_tiles(c, transforms)),
      window(tiles, 1, true),
      column(rounded_up(tiles.ow + 1, c.block)),
      point(rounded_up(tiles.ow, c.block)),
      phase(transforms.size * point),
      row(c.stride_w * phase) {
  set_bands();
  const int64_t ncalls = (tiles.ow + kernels.cols - 1) / kernels.cols;
  cols = (tiles.ow + ncalls - 1) / ncalls;
  for (int64_t p = 0; p < c.stride_w; p++) {
    for (int64_t kd = 0; kd < c.kd; kd++)
      for (int64_t kh = 0; kh < c.kh; kh++)
        for (int64_t channel = 0; channel < c.ic; channel++)
          taps.push_back({(kd * c.ic + channel) * plane + kh * window.rows_per_tap * row + p * phase,
                          int64_t(taps.size()) * c.block});
    for (int64_t j = p; j < tiles.kw; j += c.stride_w)
      columns.push_back(j % tiles.stride_w * column + j / tiles.stride_w);
  }
}

void Plan::set_bands() {
  const auto bytes = [&](int64_t rows) { return planes() * window.rows(rows) * row * int64_t(sizeof(float)); };
  int64_t rows = 1;
  while (rows < most_rows && bytes(rows + 1) <= src_budget) rows++;
  bands = even_parts((conv.oh + rows - 1) / rows, conv.n * conv.od, conv.oh, conv.nthreads);
  plane = window.rows((conv.oh + bands - 1) / bands) * row;
}

// Some dst rows of one plane of one image.
struct Band {
  int64_t n, od, begin, end;
  int64_t rows() const { return end - begin; }
};

void transform_src(const Plan& plan, const Band& band, float* window, float* dst) {
  const Conv& c = plan.conv;
  float* const sorted = window + plan.window_size();
  for (int64_t i = 0; i < plan.planes(); i++) {
    plan.window.fill(c.src + band.n * c.src_md.strides[0] + i % c.ic * c.src_md.strides[1], band.od, i / c.ic,
                     band.begin, band.rows(), window, plan.kernels.copy_plain);
    for (int64_t r = 0; r < plan.window.rows(band.rows()); r++) {
      plan.transforms.sort_columns(window + r * plan.window.row_size, plan.tiles.stride_w, plan.tiles.ow + 1, sorted,
                                   plan.column);
      for (int64_t p = 0; p < c.stride_w; p++)
        plan.transforms.src(sorted, plan.columns.data() + p * plan.transforms.size, plan.tiles.ow,
                            dst + i * plan.plane + r * plan.row + p * plan.phase, plan.point);
    }
  }
}

// One or two blocks of output channels of the band, whose first row in block 0 is at `dst`.
void compute_blocks(const Plan& plan, const Band& band, const float* src, int64_t dst, int64_t oc_block,
                    float* products) {
  const Conv& c = plan.conv;
  const int64_t blocks = std::min<int64_t>(2, c.oc_blocks() - oc_block), m = plan.transforms.m;
  const int64_t wei_point = plan.taps.size() * c.block;
  ConvArgs a{};
  a.taps = plan.taps.data();
  a.ntaps = plan.taps.size();
  a.wei_block = c.wei_md.strides[0];
  a.dst_block = plan.cols * c.block;
  a.in_turn = stores_in_turn(c, false);
  for (int64_t row = 0; row < band.rows(); row++)
    for (int64_t begin = 0, n; begin < plan.tiles.ow; begin += n) {
      n = std::min(plan.cols, plan.tiles.ow - begin);
      for (int64_t point = 0; point < plan.transforms.size; point++) {
        a.src = src + row * plan.window.rows_per_dst * plan.row + point * plan.point + begin;
        a.wei = c.wei + oc_block * a.wei_block + point * wei_point;
        a.dst = products + point * plan.products_point();
        plan.kernels.plain_row[0][blocks - 1][n - 1](a);
      }
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t to = dst + (oc_block + b) * c.dst_block() + row * c.dst_row() + begin * m * c.block;
        plan.transforms.dst(products + b * a.dst_block, plan.products_point(), c.dst + to,
                            std::min(n * m, c.ow - begin * m), plan.stream, plan.post_ops.at(oc_block + b, 1, to));
      }
    }
}

void run(const Conv& c) {
  const Plan plan(c);
  parallel_for(c.n * c.od * plan.bands, c.nthreads, [&](int64_t begin, int64_t end) {
    float* const src = Scratch::get(plan.src_size() + plan.products_size() + plan.window_size() + plan.sorted_size());
    float* const products = src + plan.src_size();
    float* const window = products + plan.products_size();
    for (int64_t i = begin; i < end; i++) {
      Band band{i / plan.bands / c.od, i / plan.bands % c.od, 0, 0};
      split(c.oh, plan.bands, i % plan.bands, band.begin, band.end);
      transform_src(plan, band, window, src);
      const int64_t dst = band.n * c.dst_image() + band.od * c.dst_plane() + band.begin * c.dst_row();
      for (int64_t oc_block = 0; oc_block < c.oc_blocks(); oc_block += 2)
        compute_blocks(plan, band, src, dst, oc_block, products);
    }
    if (plan.stream) finish_streams();
  });
}

}  // namespace

const Algorithm conv_first_winograd = {"first_winograd",         can, weights, run, pack, row_winograd_seconds,
                                       row_winograd_pack_seconds};

}  // namespace torch_blocked
