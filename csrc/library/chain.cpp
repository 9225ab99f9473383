#include "../conv/chain.h"

#include <algorithm>
#include <string_view>

#include "operators.h"
#include "problem.h"

namespace torch_blocked {
namespace {

// The blocking of a weight as `model.to(blocked)` makes it: of output channels, or of input and then output channels.
Shape weight_blocking(const Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 5 || weight.dim() == 6,
                    "convolution_chain: a weight has four dims and one block, of oc, or two, of ic and oc; got shape ",
                    weight.sizes());
  if (weight.dim() == 5) return {0, weight.size(4)};
  return {1, weight.size(4), 0, weight.size(5)};
}

// The i-th pair of numbers of a list.
IntArrayRef pair(IntArrayRef list, size_t i) { return list.slice(2 * i, 2); }

Shape dense_strides(IntArrayRef shape) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d > 0; d--) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

// The words that commas part.
c10::SmallVector<c10::string_view, 4> split_words(std::string_view words) {
  c10::SmallVector<c10::string_view, 4> found;
  for (size_t end; (end = words.find(',')) != words.npos; words.remove_prefix(end + 1))
    found.push_back(words.substr(0, end));
  found.push_back(words);
  return found;
}

// One convolution of `ic` to `oc` channels.
Conv link_problem(const Physical& src, IntArrayRef src_blocking, const Tensor& weight, int64_t ic, int64_t oc,
                  IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t block) {
  const Shape blocking = weight_blocking(weight);
  TORCH_CHECK_VALUE(groups >= 1 && ic % groups == 0, "convolution_chain: ", ic, " channels do not split into ", groups,
                    " groups");
  const int64_t size[] = {oc, ic / groups, weight.size(2), weight.size(3)};
  Conv c = problem(src, src_blocking, weight, size, blocking, stride, padding, dilation, groups, block);
  c.wei = weight.const_data_ptr<float>();
  return c;
}

// The convolutions, and what they need for as long as they run.
struct Chain {
  c10::SmallVector<Conv, 4> convs;
  c10::SmallVector<std::optional<WeightKey>, 4> keys;
  c10::SmallVector<PostOpArguments, 4> post_ops;

  void run(const Tensor& src, const Tensor& dst) {
    c10::SmallVector<const WeightKey*, 4> its_keys;
    for (const auto& key : keys) its_keys.push_back(key ? &*key : nullptr);
    convs.front().src = src.const_data_ptr<float>();
    convs.back().dst = dst.mutable_data_ptr<float>();
    or_out_of_memory("convolution_chain", [&] { convolve_chain(convs, its_keys); });
  }
};

}  // namespace

Tensor convolution_chain_cpu(const Tensor& src, at::OptionalIntArrayRef src_blocking, const at::TensorList weights,
                             IntArrayRef channels, OptionalTensors biases, IntArrayRef strides, IntArrayRef paddings,
                             IntArrayRef dilations, IntArrayRef groups, int64_t block, OptionalTensors scales,
                             OptionalTensors shifts, c10::string_view activations, at::ArrayRef<double> alphas,
                             const std::optional<Tensor>& residual, bool residual_last) {
  const size_t n = weights.size();
  const c10::SmallVector<c10::string_view, 4> activation_names = split_words(activations);
  TORCH_CHECK_VALUE(
      n > 0 && channels.size() == n + 1 && biases.size() == n && scales.size() == n && shifts.size() == n &&
          alphas.size() == n && activation_names.size() == n && groups.size() == n && strides.size() == 2 * n &&
          paddings.size() == 2 * n && dilations.size() == 2 * n,
      "convolution_chain: for ", n, " weights there are ", n,
      " of everything else, two numbers each of strides, paddings and dilations, and ", n + 1, " numbers of channels");
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "convolution_chain: float32 only, got ", src.scalar_type());
  Chain chain;
  Shape shape(src.sizes()), strides_of_link(src.strides());
  const int64_t blocks[] = {1, block};
  for (size_t i = 0; i < n; i++) {
    const Physical link(shape, strides_of_link, at::kFloat);
    Conv c = link_problem(link, i == 0 ? known(src_blocking) : IntArrayRef(blocks), weights[i], channels[i],
                          channels[i + 1], pair(strides, i), pair(paddings, i), pair(dilations, i), groups[i], block);
    shape = dst_shape(c, 4);
    strides_of_link = dense_strides(shape);
    chain.post_ops.emplace_back(c, Physical(shape, strides_of_link, at::kFloat), biases[i], scales[i], shifts[i],
                                i + 1 == n ? residual : std::nullopt, activation_names[i], alphas[i], residual_last);
    chain.keys.push_back(weight_key(weights[i], weight_blocking(weights[i]), false));
    chain.convs.push_back(c);
  }
  const Tensor dst = empty_pooled(shape, at::kFloat);
  if (dst.numel() > 0) chain.run(src, dst);
  return dst;
}

}  // namespace torch_blocked
