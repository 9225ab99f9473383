// The operators as library.cpp registers them; torch_blocked/library.py says what they do.
//
// All take and return physical tensors (a blocked tensor's outer dims, then its inner blocks). A blocking is a flat
// list of (axis, size), outermost inner block first; empty for a plain tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "tensors.h"

namespace torch_blocked {

// A `Tensor?[]` without the dispatcher's boxes (boxed.h).
using OptionalTensors = at::ArrayRef<std::optional<Tensor>>;

Tensor reorder_cpu(const Tensor& src, SymIntArrayRef size, IntArrayRef src_blocking, IntArrayRef dst_order,
                   IntArrayRef dst_blocking, std::optional<at::ScalarType> dtype);
double reorder_tile_rate_cpu(const Tensor& src, IntArrayRef size, IntArrayRef src_blocking, IntArrayRef dst_order,
                             IntArrayRef dst_blocking);

Tensor convolution_cpu(const Tensor& src, at::OptionalIntArrayRef src_blocking, const Tensor& weight,
                       IntArrayRef weight_size, at::OptionalIntArrayRef weight_blocking,
                       const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                       int64_t groups, int64_t block, const std::optional<Tensor>& scale,
                       const std::optional<Tensor>& shift, const std::optional<Tensor>& residual,
                       c10::string_view activation, double alpha, bool residual_last,
                       const std::optional<Tensor>& src_scale);
void convolution_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src,
                         at::OptionalIntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
                         at::OptionalIntArrayRef weight_blocking, const std::optional<Tensor>& bias, IntArrayRef stride,
                         IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t block,
                         const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                         c10::string_view activation, double alpha);
Tensor convolution_chain_cpu(const Tensor& src, at::OptionalIntArrayRef src_blocking, at::TensorList weights,
                             IntArrayRef channels, OptionalTensors biases, IntArrayRef strides, IntArrayRef paddings,
                             IntArrayRef dilations, IntArrayRef groups, int64_t block, OptionalTensors scales,
                             OptionalTensors shifts, c10::string_view activations, at::ArrayRef<double> alphas,
                             const std::optional<Tensor>& residual, bool residual_last);
Tensor convolution_transpose_cpu(const Tensor& src, IntArrayRef src_blocking, const Tensor& weight,
                                 IntArrayRef weight_size, IntArrayRef weight_blocking,
                                 const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                                 IntArrayRef output_padding, IntArrayRef dilation, int64_t groups, int64_t block,
                                 const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                                 const std::optional<Tensor>& residual, c10::string_view activation, double alpha,
                                 bool residual_last);
void convolution_transpose_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src, IntArrayRef src_blocking,
                                   const Tensor& weight, IntArrayRef weight_size, IntArrayRef weight_blocking,
                                   const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef output_padding, IntArrayRef dilation, int64_t groups, int64_t block,
                                   const std::optional<Tensor>& scale, const std::optional<Tensor>& shift,
                                   c10::string_view activation, double alpha);
Tensor convolution_weight_gradient_cpu(const Tensor& src, IntArrayRef src_blocking, const Tensor& diff_dst,
                                       IntArrayRef weight_size, IntArrayRef weight_order, IntArrayRef weight_blocking,
                                       IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups);
std::tuple<std::string, std::string> convolution_algorithm(const Tensor& src, IntArrayRef src_blocking,
                                                           const Tensor& weight, IntArrayRef weight_size,
                                                           IntArrayRef weight_blocking, IntArrayRef stride,
                                                           IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                                           int64_t block);
void set_winograd_by_name(c10::string_view mode, int64_t max_bytes);
int64_t packed_weights_bytes();

Tensor batch_norm_cpu(const Tensor& src, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      const Tensor& mean, const Tensor& var, double eps);
std::tuple<Tensor, Tensor> batch_norm_scale_shift_cpu(const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias, const Tensor& mean,
                                                      const Tensor& var, double eps);
std::tuple<Tensor, Tensor> batch_norm_statistics_cpu(const Tensor& src, int64_t channels);
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_cpu(const Tensor& diff_dst, const Tensor& src,
                                                           const std::optional<Tensor>& weight, const Tensor& mean,
                                                           const Tensor& invstd, bool training);

Tensor reduce_channels_cpu(const Tensor& src, int64_t channels, c10::string_view how);
std::tuple<Tensor, Tensor> find_channel_cpu(const Tensor& src, int64_t channels, bool least);
Tensor softmax_channels_cpu(const Tensor& src, int64_t channels, bool log);
std::tuple<Tensor, Tensor, Tensor> layer_norm_channels_cpu(const Tensor& src, int64_t channels,
                                                           const std::optional<Tensor>& weight,
                                                           const std::optional<Tensor>& bias, double eps);
Tensor softmax_channels_backward_cpu(const Tensor& diff_dst, const Tensor& dst, int64_t channels, bool log);

std::tuple<Tensor, Tensor> pool_cpu(const Tensor& src, c10::SymInt channels, SymIntArrayRef output_size,
                                    c10::string_view mode, at::OptionalIntArrayRef kernel,
                                    at::OptionalIntArrayRef stride, at::OptionalIntArrayRef padding,
                                    at::OptionalIntArrayRef dilation, bool count_include_pad,
                                    std::optional<int64_t> divisor_override, bool indices);
Tensor upsample_cpu(const Tensor& src, SymIntArrayRef output_size, c10::string_view mode, bool align_corners,
                    std::optional<double> scale_h, std::optional<double> scale_w);
Tensor max_pool_backward_cpu(const Tensor& diff_dst, const Tensor& indices, SymIntArrayRef src_size);
Tensor avg_pool_backward_cpu(const Tensor& diff_dst, SymIntArrayRef src_size, IntArrayRef kernel, IntArrayRef stride,
                             IntArrayRef padding, bool count_include_pad, std::optional<int64_t> divisor_override);
Tensor upsample_backward_cpu(const Tensor& diff_dst, SymIntArrayRef src_size, c10::string_view mode, bool align_corners,
                             std::optional<double> scale_h, std::optional<double> scale_w);

// As at::linear, of dense float32 matrices by kernels for few images.
Tensor linear_cpu(const Tensor& src, const Tensor& weight, const std::optional<Tensor>& bias);

// ---- memory (tensors.cpp)

// As at::empty_like of a dense tensor, in memory of the pool.
Tensor empty_like_cpu(const Tensor& like);
// Dense, of this size and the dtype of `like`, in memory of the pool.
Tensor new_empty_cpu(const Tensor& like, SymIntArrayRef size);
// Copies src to the channel blocks of dst from the first_block-th on.
void copy_out_cpu(const Tensor& dst, int64_t first_block, const Tensor& src);
void empty_cache();
int64_t cached_bytes();
int64_t set_cache_limit(int64_t bytes);
// Turns guards on or off and returns how many outputs freed since the last call had theirs overwritten.
int64_t guard_outputs(bool on);

}  // namespace torch_blocked
