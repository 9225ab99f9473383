#include "winograd.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "lanes.h"
#include "tier.h"
#include "vec.h"
#include "winograd_matrices.h"

namespace torch_blocked {
namespace {

// Where element (y, x) of a transformed tile lies: in the order of the weights that multiply it.
template <class F>
constexpr int plane(int y, int x) {
  constexpr int last = F::wei_size - 1, sharing = F::size - last;
  const int wei_y = std::min(y, last), wei_x = std::min(x, last);
  return wei_y * F::size + wei_x * (wei_y == last ? sharing : 1) + (y - wei_y) * (wei_x == last ? sharing : 1) + x -
         wei_x;
}

// The pixels of a tile whose rows and columns are of these phases: pixel(y, x) loads one of the tile.
template <class F, int phase_y, int phase_x, class Pixel>
[[gnu::always_inline]] inline void transform_phase(const Pixel& pixel, float* dst, int64_t dst_plane) {
  using Y = typename F::template Phase<phase_y>;
  using X = typename F::template Phase<phase_x>;
  Vec columns[Y::size][X::size];  // [row][column], the columns transformed
  UNROLL for (int x = 0; x < X::size; x++) {
    Vec d[Y::size], out[Y::size];
    UNROLL for (int y = 0; y < Y::size; y++) d[y] = pixel(y * F::stride + phase_y, x * F::stride + phase_x);
    Y::src(d, out);
    UNROLL for (int y = 0; y < Y::size; y++) columns[y][x] = out[y];
  }
  UNROLL for (int y = 0; y < Y::size; y++) {
    Vec out[X::size];
    X::src(columns[y], out);
    UNROLL for (int x = 0; x < X::size; x++) out[x].store(dst + plane<F>(Y::first + y, X::first + x) * dst_plane);
  }
}

template <class F, class Pixel>
[[gnu::always_inline]] inline void transform_pixels(const Pixel& pixel, float* dst, int64_t dst_plane) {
  transform_phase<F, 0, 0>(pixel, dst, dst_plane);
  if constexpr (F::stride > 1) {
    transform_phase<F, 0, 1>(pixel, dst, dst_plane);
    transform_phase<F, 1, 0>(pixel, dst, dst_plane);
    transform_phase<F, 1, 1>(pixel, dst, dst_plane);
  }
}

// Calls of(pixel), a constant where pixels lie side by side, as they do but of a dilated filter.
template <class Of>
[[gnu::always_inline]] inline void with_pixel(int64_t pixel, const Of& of) {
  if (pixel == block)
    of(std::integral_constant<int64_t, block>());
  else
    of(pixel);
}

template <class F>
void transform_src(const float* src, int64_t src_row, int64_t src_pixel, float* dst, int64_t dst_plane) {
  // What of the tile after next no tile above or before it reads.
  constexpr int size = F::size, step = F::m * F::stride, shared = size - step;
  with_pixel(src_pixel, [&](auto pixel) __attribute__((always_inline)) {
    UNROLL for (int y = shared; y < size; y++) UNROLL for (int x = shared; x < size; x++)
        __builtin_prefetch(src + y * src_row + (2 * step + x) * pixel, 0, 3);
    transform_pixels<F>([&](int y, int x) { return Vec::loadu(src + y * src_row + x * pixel); }, dst, dst_plane);
  });
}

constexpr float zeros[block] = {};

template <class F>
void transform_src_part(const float* src, int64_t src_row, int64_t src_pixel, const TilePart& part, float* dst,
                        int64_t dst_plane) {
  const TilePart in = part;
  with_pixel(src_pixel, [&](auto pixel) __attribute__((always_inline)) {
    const auto load = [&](int y, int x) {
      const bool inside = y >= in.row_begin && y < in.row_end && x >= in.col_begin && x < in.col_end;
      return Vec::loadu(inside ? src + y * src_row + x * pixel : zeros);
    };
    transform_pixels<F>(load, dst, dst_plane);
  });
}

// Adds to a tile what the elements of these phases are.
template <class F, int phase_y, int phase_x>
[[gnu::always_inline]] inline void transform_phase_back(const float* src, int64_t src_plane,
                                                        Register (&tile)[F::m][F::m]) {
  constexpr int M = F::m;
  using Y = typename F::template Phase<phase_y>;
  using X = typename F::template Phase<phase_x>;
  Vec columns[M][X::size];
  UNROLL for (int x = 0; x < X::size; x++) {
    Vec m[Y::size], out[M];
    UNROLL for (int y = 0; y < Y::size; y++) m[y] = Vec::loadu(src + plane<F>(Y::first + y, X::first + x) * src_plane);
    Y::dst(m, out);
    UNROLL for (int y = 0; y < M; y++) columns[y][x] = out[y];
  }
  UNROLL for (int y = 0; y < M; y++) {
    Vec out[M];
    X::dst(columns[y], out);
    UNROLL for (int x = 0; x < M; x++) tile[y][x] = Vec(tile[y][x]) + out[x];
  }
}

// The first `rows` x `cols` pixels of a tile, each by itself.
template <int M>
[[gnu::always_inline]] inline void store_part(Register (&tile)[M][M], float* dst, int64_t dst_row, int64_t dst_pixel,
                                              int64_t rows, int64_t cols, bool stream, const Epilogue& e) {
  alignas(64) float pixels[M * M * block];  // not `tile`: what is looked up by a variable is in no register anywhere
  UNROLL for (int y = 0; y < M; y++) UNROLL for (int x = 0; x < M; x++) Vec(tile[y][x])
      .store(pixels + (y * M + x) * block);
  Epilogue pixel_epilogue = e;
  for (int64_t y = 0; y < rows; y++)
    for (int64_t x = 0; x < cols; x++) {
      const int64_t offset = y * dst_row + x * dst_pixel;
      Register pixel[1][1] = {{Vec::loadu(pixels + (y * M + x) * block)}};
      if (e.residual) pixel_epilogue.residual = e.residual + offset;
      finish(pixel_epilogue, 0, 0, 0, 0, pixel);
      store_vector(Vec(pixel[0][0]), dst + offset, stream);
    }
}

template <class F>
void transform_dst(const float* src, int64_t src_plane, float* dst, int64_t dst_row, int64_t dst_pixel, int64_t rows,
                   int64_t cols, bool stream, const Epilogue& e) {
  constexpr int M = F::m;
  const Vec bias = e.bias ? Vec::loadu(e.bias) : Vec(0.f);
  Register tile[M][M];
  UNROLL for (int y = 0; y < M; y++) UNROLL for (int x = 0; x < M; x++) tile[y][x] = bias;
  transform_phase_back<F, 0, 0>(src, src_plane, tile);
  if constexpr (F::stride > 1) {
    transform_phase_back<F, 0, 1>(src, src_plane, tile);
    transform_phase_back<F, 1, 0>(src, src_plane, tile);
    transform_phase_back<F, 1, 1>(src, src_plane, tile);
  }
  if (rows < M || cols < M) return store_part<M>(tile, dst, dst_row, dst_pixel, rows, cols, stream, e);
  with_pixel(dst_pixel, [&](auto pixel) __attribute__((always_inline)) {
    finish(e, 0, 0, dst_row, pixel, tile);
    UNROLL for (int y = 0; y < M; y++) UNROLL for (int x = 0; x < M; x++)
        store_vector(Vec(tile[y][x]), dst + y * dst_row + x * pixel, stream);
  });
}

// In double: the fractions of G are no floats, and this is done once for many calls.
template <class F>
void transform_wei(const float* wei, int64_t wei_tap, float* dst, int64_t dst_plane) {
  constexpr int size = F::wei_size;
  const auto& g = F::wei;
  double rows[size][3][block];
  for (int y = 0; y < size; y++)
    for (int kw = 0; kw < 3; kw++)
      for (int o = 0; o < block; o++)
        rows[y][kw][o] = g[y][0] * double(wei[kw * wei_tap + o]) + g[y][1] * double(wei[(3 + kw) * wei_tap + o]) +
                         g[y][2] * double(wei[(6 + kw) * wei_tap + o]);
  for (int y = 0; y < size; y++)
    for (int x = 0; x < size; x++)
      for (int o = 0; o < block; o++)
        dst[(y * size + x) * dst_plane + o] =
            float(rows[y][0][o] * g[x][0] + rows[y][1][o] * g[x][1] + rows[y][2][o] * g[x][2]);
}

template <int M>
void transform_diff_dst(const float* diff, int64_t diff_row, int64_t diff_pixel, float* dst, int64_t dst_plane) {
  constexpr int size = M + 2;
  Vec columns[size][M];
  UNROLL for (int x = 0; x < M; x++) {
    Vec d[M], out[size];
    UNROLL for (int y = 0; y < M; y++) d[y] = Vec::loadu(diff + y * diff_row + x * diff_pixel);
    Matrices<M>::diff_dst(d, out);
    UNROLL for (int y = 0; y < size; y++) columns[y][x] = out[y];
  }
  UNROLL for (int y = 0; y < size; y++) {
    Vec out[size];
    Matrices<M>::diff_dst(columns[y], out);
    UNROLL for (int x = 0; x < size; x++) out[x].store(dst + (y * size + x) * dst_plane);
  }
}

template <int M>
void transform_diff_wei(const float* src, int64_t src_plane, float* diff_wei, int64_t wei_tap) {
  constexpr int size = M + 2;
  Vec columns[3][size];
  UNROLL for (int x = 0; x < size; x++) {
    Vec m[size], out[3];
    UNROLL for (int y = 0; y < size; y++) m[y] = Vec::loadu(src + (y * size + x) * src_plane);
    Matrices<M>::diff_wei(m, out);
    UNROLL for (int y = 0; y < 3; y++) columns[y][x] = out[y];
  }
  UNROLL for (int y = 0; y < 3; y++) {
    Vec out[3];
    Matrices<M>::diff_wei(columns[y], out);
    UNROLL for (int x = 0; x < 3; x++) {
      float* const tap = diff_wei + (y * 3 + x) * wei_tap;
      (Vec::loadu(tap) + out[x]).store(tap);
    }
  }
}

// By log2(Phases) perfect shuffles of as many vectors.
template <int Phases>
void sort_by_vectors(const float* src, int64_t cols, float* dst, int64_t dst_phase) {
  constexpr int size = FloatVec::size();
  for (int64_t j = 0; j < cols; j += size) {
    FloatVec v[Phases], sorted[Phases];
    UNROLL for (int p = 0; p < Phases; p++) v[p] = FloatVec::loadu(src + j * Phases + p * size);
    UNROLL for (int step = 1; step < Phases; step *= 2) {
      UNROLL for (int p = 0; p < Phases / 2; p++) std::tie(sorted[p], sorted[p + Phases / 2]) =
          at::vec::deinterleave2(v[2 * p], v[2 * p + 1]);
      UNROLL for (int p = 0; p < Phases; p++) v[p] = sorted[p];
    }
    UNROLL for (int p = 0; p < Phases; p++) v[p].store(dst + p * dst_phase + j);
  }
}

void sort_columns(const float* src, int64_t phases, int64_t cols, float* dst, int64_t dst_phase) {
  if (phases == 4) return sort_by_vectors<4>(src, cols, dst, dst_phase);
  if (phases == 8) return sort_by_vectors<8>(src, cols, dst, dst_phase);
  if (phases == 16) return sort_by_vectors<16>(src, cols, dst, dst_phase);
  for (int64_t p = 0; p < phases; p++)
    for (int64_t j = 0; j < cols; j++) dst[p * dst_phase + j] = src[j * phases + p];
}

template <int M, int R>
void transform_src_row(const float* src, const int64_t* columns, int64_t tiles, float* dst, int64_t dst_plane) {
  constexpr int size = M + R - 1;
  for (int64_t t = 0; t < tiles; t += block) {
    Vec d[size], out[size];
    UNROLL for (int j = 0; j < size; j++) d[j] = Vec::loadu(src + columns[j] + t);
    Matrices<M, R>::src(d, out);
    UNROLL for (int j = 0; j < size; j++) out[j].store(dst + j * dst_plane + t);
  }
}

// The first `cols` of M pixels, after the epilogue.
template <int M>
__attribute__((noinline)) void store_first(const Vec (&tile)[M], int64_t cols, float* dst, bool stream, Epilogue e) {
  for (int64_t x = 0; x < cols; x++) {
    Register pixel[1][1] = {{tile[x]}};
    finish(e, 0, 0, 0, 0, pixel);
    store_vector(Vec(pixel[0][0]), dst + x * block, stream);
    if (e.residual) e.residual += block;
  }
}

template <int M, int R>
void transform_dst_row(const float* src, int64_t src_plane, float* dst, int64_t cols, bool stream,
                       const Epilogue& epilogue) {
  constexpr int size = M + R - 1;
  const Vec bias = epilogue.bias ? Vec::loadu(epilogue.bias) : Vec(0.f);
  Epilogue e = epilogue;
  for (int64_t begin = 0; begin < cols; begin += M) {
    Vec m[size], out[M];
    Register tile[1][M];
    UNROLL for (int j = 0; j < size; j++) m[j] = Vec::loadu(src + j * src_plane + begin / M * block);
    Matrices<M, R>::dst(m, out);
    UNROLL for (int x = 0; x < M; x++) tile[0][x] = out[x] + bias;
    float* const pixels = dst + begin * block;
    if (!stream) UNROLL for (int x = 0; x < M; x++) __builtin_prefetch(pixels + (cols + x) * block, 1, 3);
    if (epilogue.residual) e.residual = epilogue.residual + begin * block;
    if (begin + M <= cols) {
      finish(e, 0, 0, 0, block, tile);
      UNROLL for (int x = 0; x < M; x++) store_vector(Vec(tile[0][x]), pixels + x * block, stream);
    } else {
      Vec some[M];  // a copy: what has an address is in no register before either
      UNROLL for (int x = 0; x < M; x++) some[x] = tile[0][x];
      store_first<M>(some, cols - begin, pixels, stream, e);
    }
  }
}

template <int M, int Stride>
constexpr WinogradTransforms transforms() {
  using F = Filter3<M, Stride>;
  WinogradTransforms steps = {};
  steps.m = M, steps.size = F::size, steps.wei_size = F::wei_size;
  steps.src = transform_src<F>;
  steps.src_part = transform_src_part<F>;
  steps.dst = transform_dst<F>;
  steps.wei = transform_wei<F>;
  if constexpr (Stride == 1) {
    steps.diff_dst = transform_diff_dst<M>;
    steps.diff_wei = transform_diff_wei<M>;
  }
  return steps;
}

// In double, as transform_wei.
template <int M, int R>
void transform_wei_row(const float* wei, int64_t wei_tap, int64_t count, float* dst, int64_t dst_plane) {
  for (int j = 0; j < M + R - 1; j++) {
    double sum[block] = {};
    for (int64_t tap = 0; tap < count; tap++)
      for (int o = 0; o < block; o++) sum[o] += Matrices<M, R>::wei[j][tap] * double(wei[tap * wei_tap + o]);
    for (int o = 0; o < block; o++) dst[j * dst_plane + o] = float(sum[o]);
  }
}

template <int M, int R>
constexpr WinogradRowTransforms row_transforms = {
    M, R, M + R - 1, sort_columns, transform_src_row<M, R>, transform_dst_row<M, R>, transform_wei_row<M, R>};

template <int Tiles, int Blocks>
void multiply(const WinogradProducts& a) {
  const float* src = a.src;
  float* dst = a.dst;
  for (int64_t plane = 0; plane < a.planes; plane++, src += a.src_plane, dst += a.dst_plane)
    for (int64_t begin = 0; begin < a.ic_blocks; begin += a.sum_blocks) {
      Vec acc[Blocks][Tiles];
      UNROLL for (int b = 0; b < Blocks; b++) UNROLL for (int t = 0; t < Tiles; t++) acc[b][t] = Vec(0.f);
      for (int64_t k = begin; k < std::min(begin + a.sum_blocks, a.ic_blocks); k++) {
        const float* const tiles = src + k * a.src_block;
        const float* const matrix = a.wei + a.wei_planes[plane] + k * block * block;
#pragma GCC unroll 4
        for (int i = 0; i < block; i++) {
          __builtin_prefetch(tiles + a.src_plane + i * Tiles, 0, 3);  // the next plane's, from L2
          Vec w[Blocks];
          UNROLL for (int b = 0; b < Blocks; b++) w[b] = Vec::loadu(matrix + b * a.wei_block + i * block);
          UNROLL for (int t = 0; t < Tiles; t++) {
            const Vec x(tiles[t * block + i]);
            UNROLL for (int b = 0; b < Blocks; b++) acc[b][t] = multiply_add(w[b], x, acc[b][t]);
          }
        }
      }
      UNROLL for (int b = 0; b < Blocks; b++) UNROLL for (int t = 0; t < Tiles; t++) {
        float* const sum = dst + b * a.dst_block + t * block;
        if (begin > 0) acc[b][t] = acc[b][t] + Vec::loadu(sum);
        acc[b][t].store(sum);
      }
    }
}

// Of a block that several groups share: each map brings a channel of every group into the lanes of its outputs.
template <int Tiles>
void multiply_lanes(const WinogradProducts& a) {
  const float* src = a.src;
  float* dst = a.dst;
  for (int64_t plane = 0; plane < a.planes; plane++, src += a.src_plane, dst += a.dst_plane) {
    const float* const wei = a.wei + a.wei_planes[plane];
    Vec acc[Tiles];
    UNROLL for (int t = 0; t < Tiles; t++) acc[t] = Vec(0.f);
    for (int64_t k = 0; k < a.ic_blocks; k++)
      for (int64_t m = 0; m < a.nmaps; m++) {
        const Lanes lanes(a.maps[m]);
        const Vec w = Vec::loadu(wei + (k * a.nmaps + m) * block);
        UNROLL for (int t = 0; t < Tiles; t++) acc[t] =
            multiply_add(w, lanes.move(src + k * a.src_block + t * block), acc[t]);
      }
    UNROLL for (int t = 0; t < Tiles; t++) acc[t].store(dst + t * block);
  }
}

// The same of two groups a block, one after the other by half vectors: their weights multiply a broadcast src channel,
// and no lanes are moved. Where a vector has 8 lanes its halves are too short to be worth it.
template <int Tiles>
void multiply_halves(const WinogradProducts& a) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int half = block / 2;
  const float* src = a.src;
  float* dst = a.dst;
  for (int64_t plane = 0; plane < a.planes; plane++, src += a.src_plane, dst += a.dst_plane)
    for (int first = 0; first < block; first += half) {
      __m256 acc[Tiles];
      UNROLL for (int t = 0; t < Tiles; t++) acc[t] = _mm256_setzero_ps();
      for (int64_t k = 0; k < a.ic_blocks; k++) UNROLL for (int i = 0; i < half; i++) {
          const __m256 w = _mm256_loadu_ps(a.wei + a.wei_planes[plane] + (k * half + i) * block + first);
          const float* const tiles = src + k * a.src_block + first + i;
          UNROLL for (int t = 0; t < Tiles; t++) acc[t] = _mm256_fmadd_ps(w, _mm256_set1_ps(tiles[t * block]), acc[t]);
        }
      UNROLL for (int t = 0; t < Tiles; t++) _mm256_storeu_ps(dst + t * block + first, acc[t]);
    }
#else
  multiply_lanes<Tiles>(a);
#endif
}

// Row y of the elements of transformed tiles, of one block of input channels: adds to dst, but where it is the first,
// and scales the sums at the last. Of the weights' block `ahead` floats on, a sixth is fetched: a few lines before
// every few lanes, as memory gives them, and by loops inside the sums', which keep GCC from holding those in memory.
template <int y, int Tiles>
__attribute__((noinline)) void multiply_row(const WinogradUnpackedProducts& a, const float* src, const float* wei,
                                            int64_t ahead, bool first, bool last) {
  constexpr int size = 6, lines = 9 * block * block / 16 / size, some = 4;
  float* const dst = a.dst + y * size * a.dst_plane;
  const int64_t src_plane = a.src_plane;
  Vec acc[size][Tiles];
  UNROLL for (int x = 0; x < size; x++) UNROLL for (int t = 0; t < Tiles; t++) acc[x][t] =
      first ? Vec(0.f) : Vec::loadu(dst + x * a.dst_plane + t * block);
  src += y * size * src_plane;
#pragma GCC unroll 1
  for (int begin = 0; begin < block; begin += some) {
    for (int line = lines * begin / block; line < lines * (begin + some) / block; line++)
      __builtin_prefetch(wei + ahead + (y * lines + line) * 16, 0, 2);
#pragma GCC unroll 1
    for (int i = begin; i < begin + some; i++) {
      Vec g[3], w[size];
      UNROLL for (int x = 0; x < 3; x++) {
        const float* const tap = wei + x * block * block + i * block;
        const auto row = [&](int kh) { return Vec::loadu(tap + kh * 3 * block * block); };
        if constexpr (y == 0 || y == size - 1) {
          g[x] = row(y == 0 ? 0 : 2);
        } else {
          const Vec column[3] = {row(0), row(1), row(2)};
          Vec out[size];
          Matrices<4>::filter(column, out);
          g[x] = out[y];
        }
      }
      Matrices<4>::filter(g, w);
      UNROLL for (int x = 0; x < size; x++) UNROLL for (int t = 0; t < Tiles; t++) acc[x][t] =
          multiply_add(w[x], Vec(src[x * src_plane + t * block + i]), acc[x][t]);
    }
  }
  constexpr auto& scale = Matrices<4>::filter_scale;
  if (last)
    UNROLL for (int x = 0; x < size; x++) UNROLL for (int t = 0; t < Tiles; t++) acc[x][t] =
        acc[x][t] * Vec(float(scale[y] * scale[x]));
  UNROLL for (int x = 0; x < size; x++) UNROLL for (int t = 0; t < Tiles; t++) acc[x][t].store(dst + x * a.dst_plane +
                                                                                               t * block);
}

template <int Tiles, int... y>
void multiply_unpacked(const WinogradUnpackedProducts& a, std::integer_sequence<int, y...>) {
  constexpr int64_t wei_block = 9 * block * block, blocks_ahead = 2;
  for (int64_t k = 0; k < a.ic_blocks; k++)
    (multiply_row<y, Tiles>(a, a.src + k * a.src_block, a.wei + k * wei_block, blocks_ahead * wei_block, k == 0,
                            k + 1 == a.ic_blocks),
     ...);
}

template <int Tiles>
void multiply_unpacked(const WinogradUnpackedProducts& a) {
  multiply_unpacked<Tiles>(a, std::make_integer_sequence<int, 6>());
}

template <size_t... I>
constexpr void fill(WinogradUnpackedMultiply* row, std::index_sequence<I...>) {
  ((row[I] = multiply_unpacked<int(I) + 1>), ...);
}

template <size_t... I>
constexpr void fill_shared(WinogradKernels& table, std::index_sequence<I...>) {
  ((table.multiply_lanes[I] = multiply_lanes<int(I) + 1>, table.multiply_halves[I] = multiply_halves<int(I) + 1>), ...);
}

template <int Blocks, size_t... I>
constexpr void fill(WinogradMultiply* row, std::index_sequence<I...>) {
  ((row[I] = multiply<int(I) + 1, Blocks>), ...);
}

// One block of output channels leaves room for more tiles, two read each src element once for both.
constexpr WinogradKernels make_table() {
  constexpr int most_of_one = std::min(winograd_max_tiles, 2 * max_cols);
  constexpr int most_unpacked = 2 * max_cols / 6;  // of six sums each
  static_assert(most_unpacked <= winograd_max_unpacked_tiles);
  WinogradKernels table = {};
  table.block = block;
  table.f2[0] = transforms<2, 1>(), table.f2[1] = transforms<2, 2>();
  table.f4[0] = transforms<4, 1>(), table.f4[1] = transforms<4, 2>();
  table.most_tiles[0] = most_of_one, table.most_tiles[1] = max_cols;
  table.most_unpacked_tiles = most_unpacked;
  fill<1>(table.multiply[0], std::make_index_sequence<most_of_one>());
  fill<2>(table.multiply[1], std::make_index_sequence<max_cols>());
  fill_shared(table, std::make_index_sequence<most_of_one>());
  fill(table.multiply_unpacked, std::make_index_sequence<most_unpacked>());
  table.rows[0] = row_transforms<4, 3>;
  table.rows[1] = row_transforms<4, 4>;
  return table;
}

}  // namespace

extern const WinogradKernels TORCH_BLOCKED_TIER_NAME(winograd_kernels) = make_table();

}  // namespace torch_blocked
