// Convolution of one to three spatial dims: choose an algorithm, bring the weights to its format, run it.
//
// Each algorithm is one file and one entry of the list in conv.cpp; `reference` ends the list and takes everything.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../half.h"
#include "../kernels/conv.h"
#include "../kernels/depthwise.h"
#include "../memory_desc.h"
#include "../streaming.h"
#include "packed_weights.h"
#include "post_ops.h"

namespace torch_blocked {

// Where the dst of one phase of a transposed convolution lies (transposed.cpp): its pixels are every step-th plane, row
// and column of a dst of od x oh x ow.
struct Phase {
  int64_t step_d, step_h, step_w, od, oh, ow;
};

// Logical sizes. src is plain or blocked (n, ic, ih, iw); wei is plain or blocked (oc, ic / groups, kh, kw); dst is
// nChw{block}c, dense, and every byte of it is written, its padding with zeros.
//
// One dim is a height of 1. Three: the depth is the last axis of src_md and wei_md, so that height and width are the
// same axes with it and without; dst is nCdhw{block}c.
struct Conv {
  int64_t n, groups, ic, ih, iw, oc, oh, ow, kh, kw;
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t id = 1, od = 1, kd = 1, stride_d = 1, pad_d = 0, dilation_d = 1;
  int64_t block;           // channels in a block of dst
  int64_t dst_blocks = 0;  // of an image where dst is a part of more channels; without a residual then
  std::optional<Phase> phase;

  MemoryDesc src_md, wei_md;
  const float* src;
  const float* wei;
  float* dst;
  bool dst_cached = false;  // it lies in a core's cache
  PostOps post_ops;
  int64_t nthreads;
  // Where src, dense, and dst are of half precision they lie here, and `src` and `dst` are not looked at. (Of the
  // gradient with respect to the weights half_dst is not looked at.)
  Values half_src = {nullptr, Precision::Single};
  Results half_dst = {nullptr, Precision::Single};
  bool is_half() const { return half_src.precision != Precision::Single; }

  // Whether there is no depth, neither of src, dst and the filter nor of padding.
  bool one_plane() const { return kd == 1 && id == 1 && od == 1 && pad_d == 0; }
  int64_t group_ic() const { return ic / groups; }
  int64_t group_oc() const { return oc / groups; }
  // Blocks of a group's input channels, each as often as the filter is deep, and the last of them, those that have at
  // most half of their channels.
  int64_t group_ic_blocks() const { return (group_ic() + block - 1) / block * kd; }
  int64_t half_blocks() const { return (group_ic() + block - 1) % block < block / 2 ? kd : 0; }
  int64_t oc_blocks() const { return (oc + block - 1) / block; }
  // Whether several groups share a block of src, and the same ones that block of dst.
  bool shares_blocks() const {
    return group_ic() == group_oc() && group_ic() > 1 && group_ic() < block && block % group_ic() == 0;
  }
  int64_t padded_oc() const { return oc_blocks() * block; }
  // Floats from one pixel, row, plane, block of channels and image of dst to the next.
  int64_t dst_pixel() const { return dst_step() * block; }
  int64_t dst_row() const { return phase ? phase->step_h * phase->ow * block : ow * block; }
  int64_t dst_plane() const { return phase ? phase->step_d * phase->oh * phase->ow * block : oh * dst_row(); }
  int64_t dst_block() const { return phase ? phase->od * phase->oh * phase->ow * block : od * dst_plane(); }
  int64_t dst_image() const { return (dst_blocks ? dst_blocks : oc_blocks()) * dst_block(); }
  int64_t dst_step() const { return phase ? phase->step_w : 1; }  // of ConvArgs
  // From here on dst, and what is laid out as it, begin `offset` floats further.
  void advance_dst(int64_t offset) {
    dst += offset;
    if (post_ops.residual) post_ops.residual += offset;
  }
  // The same of `count` images alone, from the first-th on.
  Conv images(int64_t first, int64_t count) const {
    Conv some = *this;
    some.n = some.src_md.dims[0] = count;
    some.src += first * src_md.strides[0];
    some.advance_dst(first * dst_image());
    return some;
  }
  // The kernels whose vectors are one block wide, null where no build of them is.
  const ConvKernels* kernels() const;
};

struct Algorithm {
  const char* name;
  bool (*can)(const Conv&);            // whether it takes this src, whatever the weights' format
  MemoryDesc (*weights)(const Conv&);  // the weights' format it wants
  void (*run)(const Conv&);
  // Where the weights it wants are more than a reorder of the tensor's: computes them from any format.
  void (*pack)(const Conv&, const MemoryDesc& wanted, float* packed) = nullptr;
  // Estimates, for algorithms between which there is a choice.
  double (*seconds)(const Conv&) = nullptr;
  double (*pack_seconds)(const Conv&) = nullptr;
  const Algorithm* packs_as = nullptr;  // another one, whose packed weights are these, too
};

// How Winograd's algorithms are chosen: by the estimates, never, or wherever they can (f2, f4: one of the two).
enum class Winograd { Auto, Never, Always, F2, F4 };
void set_winograd(Winograd mode);
Winograd get_winograd();
// Whether Winograd's algorithm of this mode is one of those to choose from.
inline bool allows(Winograd mode, Winograd its_mode) {
  return mode == Winograd::Auto || mode == Winograd::Always || mode == its_mode;
}

// For tests: whether tiles take all that they can, not only what they are estimated to be faster for.
void set_amx_always(bool always);
bool amx_always();

// The algorithm for a problem; deterministic in its arguments, the ISA tier and set_winograd. `uses` is how many calls
// share one packing of the weights; without `packing` it is one that keeps none.
const Algorithm& choose(const Conv& conv, double uses, bool packing = true);

// Runs it, with weights kept between calls where there is a `key` to keep them under.
void convolve(const Conv& conv, const WeightKey* key);
// That of src times `src_scale`, a number of each image and channel, padded to whole blocks. Both are in float32, the
// weights dense and OIhw{b}i{b}o, without groups.
void convolve_scaled(const Conv& conv, const float* src_scale);
// The transposed convolution whose src and dst are conv's and whose wei is (ic, oc / groups, kh, kw): the gradient,
// with respect to its src, of the convolution of these strides, paddings, dilations and groups from dst to src, whose
// wei it is. src is blocked as dst.
void convolve_transposed(const Conv& conv, const WeightKey* key);
// The gradient with respect to the weights of conv, whose wei_md describes diff_wei and whose dst and wei are not
// looked at; diff_dst is laid out as dst and of the precision of src. src is plain, without groups, or blocked as dst.
// Every byte of diff_wei is written.
void convolve_weight_gradient(const Conv& conv, const Values& diff_dst, float* diff_wei);
struct Choice {
  const Algorithm* algorithm;
  std::string reason;
};
// What convolve would choose, and why, without an effect on what is kept.
Choice explain(const Conv& conv, const WeightKey* key);

// The weights' descriptor with these dims: outer dims in the order `order`, those that there are, then the inner
// blocks, all dense. A depth that the order does not name lies outside the height, wherever that is.
MemoryDesc dense_desc(const MemoryDesc& dims_of, std::initializer_list<int> order,
                      std::initializer_list<std::pair<int, int64_t>> blocks);
// The weights by blocks of both channels, OIhw{b}i{b}o.
inline MemoryDesc by_blocks(const Conv& c) { return dense_desc(c.wei_md, {0, 1, 2, 3}, {{1, c.block}, {0, c.block}}); }
// The same dims, strides (but where a dim is 1 they do not matter) and blocks.
bool same_layout(const MemoryDesc& a, const MemoryDesc& b);
// Elements of a dense tensor, padding included.
int64_t elements(const MemoryDesc& md);
// How many images of half precision are in float32 at a time where each is of `image` floats.
int64_t images_at_a_time(const Conv& conv, int64_t image);

// Calls of a kernel that takes at most so many of n columns, tiles or blocks: as even as possible, those with one more
// first.
struct Calls {
  int64_t number, fewest, wider;
  Calls(int64_t n, int64_t most) : number((n + most - 1) / most), fewest(n / number), wider(n % number) {}
  int64_t size(int64_t call) const { return fewest + (call < wider); }
  int64_t alike(int64_t call) const { return (call < wider ? wider : number) - call; }  // from this one on
};

// Which lanes of src the output channels of a grouped convolution read, where the weights of each channel of a group
// begin, and for a block of output channels a map for every channel of a group and src block that some lanes find it
// in.
Lane lanes_of(const Conv& c);
std::vector<int64_t> channel_weights(const Conv& c);
void lane_maps(const Conv& c, int64_t oc_block, const std::vector<int64_t>& weights, std::vector<LaneMap>& maps);

// Whether dst is to be written past the caches.
bool streams_dst(const Conv& conv);

// Whether the kernels of a plain src store some columns while they multiply others. Behind a mesh cores have room for
// all stores of a run, but of those past the caches (`streams`); and of blocks of 8 these columns are too few sums for
// two FMAs a cycle.
bool stores_in_turn(const Conv& conv, bool streams);

// How many input channel blocks are summed in one go where each has `taps` products a lane: the error of a sum of n
// products grows as sqrt(n), so long ones are cut into parts of about sum_products.
constexpr int64_t sum_products = 288;
inline int64_t sum_blocks(const Conv& conv, int64_t taps) {
  return std::max<int64_t>(1, sum_products / (taps * conv.block));
}

// The same problem with its weights in the format `wanted`: reordered, unless they are in it.
class ReorderedWeights {
 public:
  ReorderedWeights(const Conv& given, const MemoryDesc& wanted);
  // As the algorithm wants them; where there is a `key` and several calls are expected to share them, kept under it.
  ReorderedWeights(const Conv& given, const Algorithm& algorithm, const WeightKey* key, const Taps& taps = {});
  Conv conv;

  // How many this thread has made, those found among the kept ones not counted.
  static int64_t count() { return count_; }

 private:
  void make(const MemoryDesc& wanted);
  static inline thread_local int64_t count_ = 0;
  std::vector<float> reordered_;
  PackedWeights::Packed kept_;
};

// Values of output channels for kernels that read whole vectors: as they are, or a copy with zeros up to whole blocks.
class PaddedValues {
 public:
  PaddedValues(const float* values, int64_t count, int64_t padded_count);
  const float* at(int64_t channel) const {
    return values_ ? (copy_.empty() ? values_ : copy_.data()) + channel : nullptr;
  }

 private:
  const float* values_;  // of the caller, null where absent
  std::vector<float> copy_;
};

// The post-ops' vectors, padded, and the mask of real channels.
class PaddedPostOps {
 public:
  explicit PaddedPostOps(const Conv& conv);
  // The epilogue for `blocks` blocks from block `oc_block`, dst written at `offset` from its start. Inlined, so that
  // its fields are written where they belong: a copy of them in wider pieces would wait for all stores before it, a
  // kernel's whole answer.
  Epilogue at(int64_t oc_block, int64_t blocks, int64_t offset) const {
    Epilogue e;
    const int64_t channel = oc_block * conv_.block;
    e.bias = bias_.at(channel);
    e.scale = scale_.at(channel);
    e.shift = shift_.at(channel);
    e.keep = oc_block + blocks == conv_.oc_blocks() && !keep_.empty() ? keep_.data() + channel : nullptr;
    e.residual = conv_.post_ops.residual ? conv_.post_ops.residual + offset : nullptr;
    e.residual_last = conv_.post_ops.residual_last;
    e.clamp = activation_.clamp;
    e.lower = activation_.lower;
    e.upper = activation_.upper;
    e.activate = activate_;
    e.alpha = conv_.post_ops.alpha;
    return e;
  }

 private:
  const Conv& conv_;
  const Activation activation_;
  const Activate activate_;
  const PaddedValues bias_, scale_, shift_;
  std::vector<float> keep_;
};

extern const Algorithm conv_first, conv_amx, conv_direct, conv_depthwise, conv_reference;
extern const Algorithm conv_winograd_f4, conv_winograd_f4_amx, conv_winograd_f4_unpacked, conv_winograd_f2,
    conv_grouped_winograd_f4, conv_grouped_winograd_f2, conv_first_winograd;

}  // namespace torch_blocked
