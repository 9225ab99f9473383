#include "../conv/chain.h"

#include <ATen/ops/empty.h>

#include <string_view>
#include <vector>

#include "operators.h"
#include "problem.h"

namespace torch_blocked {
namespace {

// The blocking of a weight as `model.to(blocked)` makes it: of output channels, or of input and then output channels.
std::vector<int64_t> weight_blocking(const Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 5 || weight.dim() == 6,
                    "convolution_chain: a weight has four dims and one block, of oc, or two, of ic and oc; got shape ",
                    weight.sizes());
  if (weight.dim() == 5) return {0, weight.size(4)};
  return {1, weight.size(4), 0, weight.size(5)};
}

// The i-th pair of numbers of a list.
IntArrayRef pair(IntArrayRef list, size_t i) { return list.slice(2 * i, 2); }

// The words that commas part.
std::vector<c10::string_view> split_words(std::string_view words) {
  std::vector<c10::string_view> found;
  for (size_t end; (end = words.find(',')) != words.npos; words.remove_prefix(end + 1))
    found.push_back(words.substr(0, end));
  found.push_back(words);
  return found;
}

}  // namespace

Tensor convolution_chain_cpu(const Tensor& src, at::OptionalIntArrayRef src_blocking, const at::TensorList weights,
                             IntArrayRef channels, const c10::List<std::optional<Tensor>>& biases, IntArrayRef strides,
                             IntArrayRef paddings, IntArrayRef dilations, IntArrayRef groups, int64_t block,
                             const c10::List<std::optional<Tensor>>& scales,
                             const c10::List<std::optional<Tensor>>& shifts, c10::string_view activations,
                             at::ArrayRef<double> alphas, const std::optional<Tensor>& residual, bool residual_last) {
  const size_t n = weights.size();
  const std::vector<c10::string_view> activation_names = split_words(activations);
  TORCH_CHECK_VALUE(
      n > 0 && channels.size() == n + 1 && biases.size() == n && scales.size() == n && shifts.size() == n &&
          alphas.size() == n && activation_names.size() == n && groups.size() == n && strides.size() == 2 * n &&
          paddings.size() == 2 * n && dilations.size() == 2 * n,
      "convolution_chain: for ", n, " weights there are ", n,
      " of everything else, two numbers each of strides, paddings and dilations, and ", n + 1, " numbers of channels");
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "convolution_chain: float32 only, got ", src.scalar_type());
  std::vector<Conv> convs;
  std::vector<std::optional<WeightKey>> keys;
  std::vector<const WeightKey*> its_keys;
  std::vector<PostOpArguments> post_ops;
  Tensor link = src, dst;
  for (size_t i = 0; i < n; i++) {
    const Tensor& weight = weights[i];
    const std::vector<int64_t> blocking = weight_blocking(weight), blocks = {1, block};
    TORCH_CHECK_VALUE(groups[i] >= 1 && channels[i] % groups[i] == 0, "convolution_chain: ", channels[i],
                      " channels do not split into ", groups[i], " groups");
    const int64_t size[] = {channels[i + 1], channels[i] / groups[i], weight.size(2), weight.size(3)};
    Conv c = problem(link, i == 0 ? known(src_blocking) : IntArrayRef(blocks), weight, size, blocking, pair(strides, i),
                     pair(paddings, i), pair(dilations, i), groups[i], block);
    const std::vector<int64_t> shape = dst_shape(c, 4);
    link = at::empty(shape, src.options().device(at::kMeta));
    if (i + 1 == n) link = dst = empty_pooled(shape, at::kFloat);
    post_ops.emplace_back(c, link, biases.get(i), scales.get(i), shifts.get(i), i + 1 == n ? residual : std::nullopt,
                          activation_names[i], alphas[i], residual_last);
    c.wei = weight.const_data_ptr<float>();
    keys.push_back(weight_key(weight, blocking, false));
    convs.push_back(c);
  }
  for (const auto& key : keys) its_keys.push_back(key ? &*key : nullptr);
  if (dst.numel() == 0) return dst;
  convs.front().src = src.const_data_ptr<float>();
  convs.back().dst = dst.mutable_data_ptr<float>();
  or_out_of_memory("convolution_chain", [&] { convolve_chain(convs, its_keys); });
  return dst;
}

}  // namespace torch_blocked
