#include "cost.h"

#include <algorithm>

namespace torch_blocked {
namespace {

// What one core of a CPU of each tier does, in round figures: the choice depends on their ratios only.
struct Core {
  double flops;               // floating point operations a second in the inner loops
  double transformed_vector;  // seconds to transform one vector of a tile, there or back
};
constexpr Core cores[] = {{12e9, 8e-9}, {110e9, 2e-9}, {240e9, 2e-9}};  // default, AVX2, AVX-512

// Bytes a second from memory, all cores together: between two calls of a layer the rest of the network has been through
// the caches, so its weights come from there.
constexpr double memory_bandwidth = 30e9;

const Core& core() { return cores[int(isa())]; }

double padded(int64_t channels, int64_t block) { return double((channels + block - 1) / block * block); }

// Weights and multiplications overlap: the slower decides.
double product_seconds(const Conv& c, double rows_of_src, double matrices) {
  const double matrix = padded(c.ic, c.block) * padded(c.oc, c.block);
  const double compute = 2 * rows_of_src * matrices * matrix / (core().flops * double(c.nthreads));
  return std::max(compute, matrices * matrix * sizeof(float) / memory_bandwidth);
}

}  // namespace

double direct_seconds(const Conv& c) {
  return product_seconds(c, double(c.n * c.od * c.oh * c.ow), double(c.kd * c.kh * c.kw));
}

double winograd_seconds(const Conv& c, int64_t m) {
  const double tiles = double(c.n * c.od * ((c.oh + m - 1) / m) * ((c.ow + m - 1) / m)), kd = double(c.kd);
  const double planes = double((m + 2) * (m + 2));
  const double vectors = tiles * planes * (padded(c.ic, c.block) * kd + padded(c.oc, c.block)) / double(c.block);
  return product_seconds(c, tiles, planes * kd) + vectors * core().transformed_vector / double(c.nthreads);
}

double winograd_pack_seconds(const Conv& c, int64_t m) {
  const double planes = double((m + 2) * (m + 2) * c.kd);
  const double vectors = planes * padded(c.ic, c.block) * padded(c.oc, c.block) / double(c.block);
  return vectors * 8 * core().transformed_vector / double(c.nthreads);
}

double direct_weight_gradient_seconds(const Conv& c) { return direct_seconds(c); }

// As many products as forward, of as many vectors, and the sums are transformed back once.
double winograd_weight_gradient_seconds(const Conv& c, int64_t m) {
  const double planes = double((m + 2) * (m + 2) * c.kd);
  const double sums = planes * padded(c.ic, c.block) * padded(c.oc, c.block) / double(c.block);
  return winograd_seconds(c, m) + sums * core().transformed_vector / double(c.nthreads);
}

}  // namespace torch_blocked
