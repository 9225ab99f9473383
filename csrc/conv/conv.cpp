#include "conv.h"

#include <algorithm>
#include <cstring>

#include "../reorder.h"

namespace torch_blocked {

static const Algorithm* const algorithms[] = {&conv_first, &conv_direct, &conv_depthwise, &conv_reference};

const ConvKernels* Conv::kernels() const {
  // Vectors of 8 on a CPU with vectors of 16 too: nChw8c runs on the AVX2 build there.
  for (int tier = int(isa()); tier >= 0; tier--) {
    const ConvKernels& kernels = TORCH_BLOCKED_KERNELS(conv_kernels, Isa(tier));
    if (kernels.block == block) return &kernels;
  }
  return nullptr;
}

const Algorithm& choose(const Conv& conv) {
  for (const Algorithm* algorithm : algorithms)
    if (algorithm->can(conv)) return *algorithm;
  return conv_reference;
}

void convolve(const Conv& conv) {
  const Algorithm& algorithm = choose(conv);
  const MemoryDesc wanted = algorithm.weights(conv);
  if (same_layout(wanted, conv.wei_md)) return algorithm.run(conv);
  int64_t size = wanted.inner_numel();
  for (int d = 0; d < wanted.ndims; d++) size *= wanted.outer(d);
  std::vector<float> packed(size);
  reorder(conv.wei_md, conv.wei, wanted, packed.data(), sizeof(float), conv.nthreads);
  Conv with_packed = conv;
  with_packed.wei_md = wanted;
  with_packed.wei = packed.data();
  algorithm.run(with_packed);
}

MemoryDesc dense_desc(const MemoryDesc& dims_of, std::vector<int> order, std::vector<std::pair<int, int64_t>> blocks) {
  MemoryDesc md;
  md.ndims = dims_of.ndims;
  std::copy_n(dims_of.dims, md.ndims, md.dims);
  for (const auto& [axis, size] : blocks) {
    md.inner_idxs[md.inner_nblks] = axis;
    md.inner_blks[md.inner_nblks++] = size;
  }
  int64_t stride = md.inner_numel();
  for (int i = md.ndims - 1; i >= 0; i--) {
    md.strides[order[i]] = stride;
    stride *= md.outer(order[i]);
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

static std::vector<float> padded(const float* values, int64_t count, int64_t padded_count) {
  if (values == nullptr) return {};
  std::vector<float> copy(padded_count, 0.f);
  std::copy_n(values, count, copy.begin());
  return copy;
}

PaddedPostOps::PaddedPostOps(const Conv& conv) : conv_(conv) {
  const int64_t oc = conv.oc, count = conv.oc_blocks() * conv.block;
  bias_ = padded(conv.post_ops.bias, oc, count);
  scale_ = padded(conv.post_ops.scale, oc, count);
  shift_ = padded(conv.post_ops.shift, oc, count);
  if (count != oc) {
    keep_.assign(count, 0.f);
    std::memset(keep_.data(), 0xff, oc * sizeof(float));
  }
}

Epilogue PaddedPostOps::at(int64_t oc_block, int64_t blocks, int64_t offset) const {
  const int64_t channel = oc_block * conv_.block;
  const auto from = [&](const std::vector<float>& values) { return values.empty() ? nullptr : &values[channel]; };
  Epilogue e;
  e.bias = from(bias_);
  e.scale = from(scale_);
  e.shift = from(shift_);
  e.keep = oc_block + blocks == conv_.oc_blocks() ? from(keep_) : nullptr;
  e.residual = conv_.post_ops.residual ? conv_.post_ops.residual + offset : nullptr;
  e.clamp = conv_.post_ops.clamp;
  e.lower = conv_.post_ops.lower;
  e.upper = conv_.post_ops.upper;
  return e;
}

}  // namespace torch_blocked
