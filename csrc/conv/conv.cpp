#include "conv.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>

#include "../caches.h"
#include "../reorder.h"

namespace torch_blocked {

static const Algorithm* const algorithms[] = {&conv_first, &conv_depthwise, &conv_amx, &conv_direct, &conv_reference};
// What a convolution of some kernels can be done by instead.
static const struct {
  const Algorithm* algorithm;
  Winograd mode;
} winograd_algorithms[] = {{&conv_winograd_f4, Winograd::F4},          {&conv_winograd_f4_amx, Winograd::F4},
                           {&conv_winograd_f4_unpacked, Winograd::F4}, {&conv_winograd_f2, Winograd::F2},
                           {&conv_grouped_winograd_f4, Winograd::F4},  {&conv_grouped_winograd_f2, Winograd::F2},
                           {&conv_first_winograd, Winograd::F4}};

static std::atomic<Winograd> winograd_mode{Winograd::Auto};

void set_winograd(Winograd mode) { winograd_mode = mode; }
Winograd get_winograd() { return winograd_mode; }

const ConvKernels* Conv::kernels() const { return TORCH_BLOCKED_KERNELS_OF_BLOCK(conv_kernels, block); }

bool streams_dst(const Conv& c) {
  const int64_t src_size = c.n * c.ic * c.id * c.ih * c.iw, dst_size = c.n * c.dst_image();
  const int64_t room = c.groups > 1 && c.group_ic() == 1 ? little_work_cache_room : cache_room;
  return !c.phase && outgrows_caches((src_size + dst_size) * int64_t(sizeof(float)), room) && is_streamable(c.dst);
}

bool stores_in_turn(const Conv& c, bool streams) { return c.block == 16 && (streams || !is_behind_mesh()); }

// What needs no packing: the first of the list that can.
static const Algorithm& without_packing(const Conv& conv) {
  for (const Algorithm* algorithm : algorithms)
    if (algorithm->can(conv)) return *algorithm;
  return conv_reference;
}

static double seconds_a_call(const Algorithm& algorithm, const Conv& conv, double uses) {
  return algorithm.seconds(conv) + (algorithm.pack ? algorithm.pack_seconds(conv) / uses : 0);
}

const Algorithm& choose(const Conv& conv, double uses, bool packing) {
  const Winograd mode = winograd_mode;
  const Algorithm* best = &without_packing(conv);
  if (best->seconds == nullptr) return *best;
  double least = mode == Winograd::Auto ? best->seconds(conv) : std::numeric_limits<double>::infinity();
  for (const auto& [algorithm, its_mode] : winograd_algorithms) {
    if (!allows(mode, its_mode) || !algorithm->can(conv) || (algorithm->pack && !packing)) continue;
    const double seconds = seconds_a_call(*algorithm, conv, uses);
    if (seconds >= least) continue;
    least = seconds;
    best = algorithm;
  }
  return *best;
}

static std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g ms", seconds * 1e3);
  return text;
}

// Why `choose` chose; apart from it, which every call passes.
static std::string reason(const Conv& conv, double uses) {
  const Winograd mode = winograd_mode;
  if (without_packing(conv).seconds == nullptr) return "the first of the list that takes these formats";
  const auto can = [&](const auto& entry) { return entry.algorithm->can(conv); };
  if (std::none_of(std::begin(winograd_algorithms), std::end(winograd_algorithms), can))
    return "Winograd takes 3x3 kernels of stride 1 and, if not dilated, 2, groups of whole blocks or parts of one; "
           "of a plain src wide kernels";
  if (mode == Winograd::Never) return "Winograd is off";
  const Algorithm& otherwise = without_packing(conv);
  std::string estimates = std::string("estimates: ") + otherwise.name + " " + milliseconds(otherwise.seconds(conv));
  for (const auto& [algorithm, its_mode] : winograd_algorithms)
    if (allows(mode, its_mode) && algorithm->can(conv))
      estimates += std::string(", ") + algorithm->name + " " + milliseconds(seconds_a_call(*algorithm, conv, uses));
  return estimates;
}

static Conv with_weights(const Conv& conv, const MemoryDesc& wei_md, const float* wei) {
  Conv with = conv;
  with.wei_md = wei_md;
  with.wei = wei;
  return with;
}

int64_t elements(const MemoryDesc& md) {
  int64_t count = md.inner_numel();
  for (int d = 0; d < md.ndims; d++) count *= md.outer(d);
  return count;
}

static Packing packing(const Algorithm& algorithm, const Conv& conv, const WeightKey& key, const Taps& taps = {}) {
  return {.algorithm = algorithm.packs_as ? algorithm.packs_as : &algorithm,
          .weight = conv.wei_md,
          .block = conv.block,
          .groups = conv.groups,
          .stride_w = conv.stride_w,
          .transposed = key.transposed,
          .taps = taps};
}

static void reorder_weights(const Conv& conv, const MemoryDesc& wanted, float* to) {
  reorder(conv.wei_md, conv.wei, wanted, to, sizeof(float), conv.nthreads);
}

void ReorderedWeights::make(const MemoryDesc& wanted) {
  count_++;
  reordered_.resize(elements(wanted));
  reorder_weights(conv, wanted, reordered_.data());
  conv = with_weights(conv, wanted, reordered_.data());
}

ReorderedWeights::ReorderedWeights(const Conv& given, const MemoryDesc& wanted) : conv(given) {
  if (!same_layout(wanted, given.wei_md)) make(wanted);
}

ReorderedWeights::ReorderedWeights(const Conv& given, const Algorithm& algorithm, const WeightKey* key,
                                   const Taps& taps)
    : conv(given) {
  constexpr double seconds = 1e-9;  // to reorder one, about
  const MemoryDesc wanted = algorithm.weights(given);
  if (same_layout(wanted, given.wei_md)) return;
  PackedWeights& kept = PackedWeights::instance();
  if (key && kept.uses(*key, false) > 1) {
    const int64_t size = elements(wanted);
    const auto gain = [&] { return double(size) * seconds; };
    kept_ = kept.get(*key, packing(algorithm, given, *key, taps), size, gain, [&](float* to) {
      count_++;
      reorder_weights(given, wanted, to);
    });
  }
  if (kept_)
    conv = with_weights(given, wanted, kept_->data());
  else
    make(wanted);
}

int64_t images_at_a_time(const Conv& conv, int64_t image) {
  constexpr int64_t cached = int64_t(1) << 20;  // floats, in the last level cache beside the weights
  return std::clamp<int64_t>(cached / image, 1, conv.n);
}

// What is of half precision goes through the cache in float32, some images at a time.
static void run(const Algorithm& algorithm, const Conv& conv) {
  if (!conv.is_half()) return algorithm.run(conv);
  const int64_t src_image = elements(conv.src_md) / conv.n, dst_image = conv.dst_image();
  const int64_t images = images_at_a_time(conv, src_image + dst_image);
  const PooledBuffer src(images * src_image), dst(images * dst_image);
  Conv part = conv;
  part.half_src.precision = part.half_dst.precision = Precision::Single;
  part.src = src.data(), part.dst = dst.data();
  for (int64_t n = 0; n < conv.n; n += images) {
    part.n = part.src_md.dims[0] = std::min(images, conv.n - n);
    conv.half_src.widen(n * src_image, part.n * src_image, src.data(), conv.nthreads);
    algorithm.run(part);
    conv.half_dst.narrow(n * dst_image, part.n * dst_image, dst.data(), conv.nthreads);
    if (part.post_ops.residual) part.post_ops.residual += part.n * dst_image;
  }
}

static double gain(const Conv& conv, const Algorithm& packing) {
  return without_packing(conv).seconds(conv) - packing.seconds(conv);
}

void convolve(const Conv& conv, const WeightKey* key) {
  PackedWeights& kept = PackedWeights::instance();
  const Algorithm* const algorithm = &choose(conv, key ? kept.uses(*key, true) : 1);
  if (algorithm->pack == nullptr) return run(*algorithm, ReorderedWeights(conv, *algorithm, key).conv);
  const MemoryDesc wanted = algorithm->weights(conv);
  const auto pack = [&](float* packed) { algorithm->pack(conv, wanted, packed); };
  if (key == nullptr) {
    const PooledBuffer packed(elements(wanted));
    pack(packed.data());
    return run(*algorithm, with_weights(conv, wanted, packed.data()));
  }
  const auto its_gain = [&] { return gain(conv, *algorithm); };
  if (const auto packed = kept.get(*key, packing(*algorithm, conv, *key), elements(wanted), its_gain, pack))
    return run(*algorithm, with_weights(conv, wanted, packed->data()));
  const Algorithm& otherwise = choose(conv, 1, false);
  run(otherwise, ReorderedWeights(conv, otherwise, key).conv);
}

Choice explain(const Conv& conv, const WeightKey* key) {
  PackedWeights& kept = PackedWeights::instance();
  const double uses = key ? kept.uses(*key, false) : 1;
  const Choice choice = {&choose(conv, uses), reason(conv, uses)};
  if (choice.algorithm->pack == nullptr || key == nullptr) return choice;
  const int64_t count = elements(choice.algorithm->weights(conv));
  if (kept.has(*key, packing(*choice.algorithm, conv, *key), count, gain(conv, *choice.algorithm))) return choice;
  return {&choose(conv, 1, false), std::string("no room for the ") + std::to_string(count * sizeof(float)) +
                                       " bytes of " + choice.algorithm->name +
                                       "'s weights within max_bytes = " + std::to_string(kept.bound())};
}

MemoryDesc dense_desc(const MemoryDesc& dims_of, std::initializer_list<int> order,
                      std::initializer_list<std::pair<int, int64_t>> blocks) {
  MemoryDesc md;
  md.ndims = dims_of.ndims;
  std::copy_n(dims_of.dims, md.ndims, md.dims);
  for (const auto& [axis, size] : blocks) {
    md.inner_idxs[md.inner_nblks] = axis;
    md.inner_blks[md.inner_nblks++] = size;
  }
  int64_t stride = md.inner_numel();
  const auto place = [&](int axis) {
    if (axis >= md.ndims) return;
    md.strides[axis] = stride;
    stride *= md.outer(axis);
  };
  const bool depth_unnamed = order.size() == 4;
  for (const int* axis = order.end(); axis != order.begin();) {
    place(*--axis);
    if (depth_unnamed && *axis == 2) place(4);
  }
  return md;
}

bool same_layout(const MemoryDesc& a, const MemoryDesc& b) {
  if (a.ndims != b.ndims || a.inner_nblks != b.inner_nblks) return false;
  for (int i = 0; i < a.inner_nblks; i++)
    if (a.inner_blks[i] != b.inner_blks[i] || a.inner_idxs[i] != b.inner_idxs[i]) return false;
  for (int d = 0; d < a.ndims; d++)
    if (a.dims[d] != b.dims[d] || (a.outer(d) > 1 && a.strides[d] != b.strides[d])) return false;
  return true;
}

PaddedValues::PaddedValues(const float* values, int64_t count, int64_t padded_count) : values_(values) {
  if (values == nullptr || count == padded_count) return;
  copy_.assign(padded_count, 0.f);
  std::copy_n(values, count, copy_.begin());
}

static Activate kernel_of(const Conv& conv) {
  const auto kernel = conv.post_ops.activation ? conv.post_ops.activation->kernel : nullptr;
  return kernel ? conv.kernels()->activations->*kernel : nullptr;
}

PaddedPostOps::PaddedPostOps(const Conv& conv)
    : conv_(conv),
      activation_(conv.post_ops.activation ? *conv.post_ops.activation : Activation{}),
      activate_(kernel_of(conv)),
      bias_(conv.post_ops.bias, conv.oc, conv.padded_oc()),
      scale_(conv.post_ops.scale, conv.oc, conv.padded_oc()),
      shift_(conv.post_ops.shift, conv.oc, conv.padded_oc()) {
  if (conv.oc == conv.padded_oc()) return;
  keep_.assign(conv.padded_oc(), 0.f);
  std::memset(keep_.data(), 0xff, conv.oc * sizeof(float));
}

}  // namespace torch_blocked
