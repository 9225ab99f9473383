#include "channels.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "scratch.h"

namespace torch_blocked {
namespace {

// Some pixels of an image that a kernel takes together: `block` of them, or what is left.
struct Pixels {
  const BlockedShape& shape;
  int64_t image, first, count;

  bool whole() const { return count == shape.block; }
  int64_t index() const { return image * shape.pixels + first; }
  // Floats to the first of them, and from one block to the next: in a tensor of the shape; in a copy.
  int64_t offset() const { return (image * shape.blocks() * shape.pixels + first) * shape.block; }
  int64_t stride() const { return whole() ? shape.pixels * shape.block : copy_stride(); }
  int64_t copy_stride() const { return shape.block * shape.block; }
  int64_t copy_size() const { return whole() ? 0 : shape.blocks() * copy_stride(); }

  // Where a kernel reads them: where they lie, or copied and filled up with zeros.
  const float* read(const float* tensor, float* copy) const {
    if (whole()) return tensor + offset();
    std::fill_n(copy, copy_size(), 0.f);
    for (int64_t k = 0; k < shape.blocks(); k++)
      std::copy_n(tensor + offset() + k * shape.pixels * shape.block, count * shape.block, copy + k * copy_stride());
    return copy;
  }
  // Where a kernel writes them, and the way from there.
  float* place(float* tensor, float* copy) const { return whole() ? tensor + offset() : copy; }
  void finish(float* tensor, const float* placed) const {
    if (whole()) return;
    for (int64_t k = 0; k < shape.blocks(); k++)
      std::copy_n(placed + k * copy_stride(), count * shape.block, tensor + offset() + k * shape.pixels * shape.block);
  }
};

// Calls body(pixels) on all of them.
template <class Body>
void each_tile(const BlockedShape& s, const Body& body) {
  const int64_t tiles = (s.pixels + s.block - 1) / s.block;
  parallel_for(s.n * tiles, s.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = i % tiles * s.block;
      body(Pixels{s, i / tiles, first, std::min(s.block, s.pixels - first)});
    }
  });
}

constexpr int64_t most_lanes = 16;

}  // namespace

const ChannelKernels* channel_kernels(int64_t block) { return TORCH_BLOCKED_KERNELS_OF_BLOCK(channel_kernels, block); }

void reduce_channels(const BlockedShape& s, ChannelReduction how, const float* src, float* dst) {
  const auto reduce = channel_kernels(s.block)->reduce[how];
  const auto denormals = how == Greatest || how == Least ? Denormals::Kept : Denormals::Flushed;
  each_tile(s, [&](const Pixels& pixels) {
    const Denormals here(denormals);
    float values[most_lanes];
    reduce({pixels.read(src, Scratch::get(pixels.copy_size())), pixels.stride(), s.channels}, values);
    std::copy_n(values, pixels.count, dst + pixels.index());
  });
}

void find_channel(const BlockedShape& s, bool least, const float* src, float* dst, int64_t* indices) {
  const ChannelKernels& kernels = *channel_kernels(s.block);
  const auto find = least ? kernels.find_least : kernels.find_greatest;
  each_tile(s, [&](const Pixels& pixels) {
    const Denormals kept(Denormals::Kept);
    float values[most_lanes];
    int64_t at[most_lanes];
    find({pixels.read(src, Scratch::get(pixels.copy_size())), pixels.stride(), s.channels}, values, at);
    std::copy_n(values, pixels.count, dst + pixels.index());
    std::copy_n(at, pixels.count, indices + pixels.index());
  });
}

void softmax_channels(const BlockedShape& s, bool log, const float* src, float* dst) {
  const ChannelKernels& kernels = *channel_kernels(s.block);
  const auto softmax = log ? kernels.log_softmax : kernels.softmax;
  each_tile(s, [&](const Pixels& pixels) {
    float* const copies = Scratch::get(2 * pixels.copy_size());
    float* const placed = pixels.place(dst, copies + pixels.copy_size());
    softmax({pixels.read(src, copies), pixels.stride(), s.channels}, placed);
    pixels.finish(dst, placed);
  });
}

void layer_norm_channels(const BlockedShape& s, const float* weight, const float* bias, double eps, const float* src,
                         float* dst, float* mean, float* rstd) {
  const auto layer_norm = channel_kernels(s.block)->layer_norm;
  const std::vector<float> weights = padded(s, weight), biases = padded(s, bias);
  each_tile(s, [&](const Pixels& pixels) {
    float means[most_lanes], rstds[most_lanes];
    float* const copies = Scratch::get(2 * pixels.copy_size());
    float* const placed = pixels.place(dst, copies + pixels.copy_size());
    layer_norm({pixels.read(src, copies), pixels.stride(), s.channels}, weight ? weights.data() : nullptr,
               bias ? biases.data() : nullptr, float(eps), placed, means, rstds);
    pixels.finish(dst, placed);
    std::copy_n(means, pixels.count, mean + pixels.index());
    std::copy_n(rstds, pixels.count, rstd + pixels.index());
  });
}

void softmax_channels_backward(const BlockedShape& s, bool log, const float* diff_dst, const float* dst,
                               float* diff_src) {
  const ChannelKernels& kernels = *channel_kernels(s.block);
  const auto backward = log ? kernels.log_softmax_backward : kernels.softmax_backward;
  each_tile(s, [&](const Pixels& pixels) {
    const int64_t size = pixels.copy_size();
    float* const copies = Scratch::get(3 * size);
    float* const placed = pixels.place(diff_src, copies + 2 * size);
    const float* const answers = pixels.read(dst, copies + size);
    backward({pixels.read(diff_dst, copies), pixels.stride(), s.channels}, answers, placed);
    pixels.finish(diff_src, placed);
  });
}

}  // namespace torch_blocked
