// The operators as PyTorch sees them: schemas and registration. This file and those of library/ and python/ are the
// only ones that include torch.
#include <torch/library.h>

#include "caches.h"
#include "conv/conv.h"
#include "isa.h"
#include "library/boxed.h"
#include "library/calls.h"
#include "library/operators.h"
#include "round_trip.h"

namespace torch_blocked {
namespace {

std::string isa_now() { return isa_name(isa()); }
int64_t isa_block_now() { return isa_block(isa()); }
void set_isa_by_name(c10::string_view name) {
  for (const Isa tier : {Isa::Default, Isa::AVX2, Isa::AVX512, Isa::AMX})
    if (name == isa_name(tier)) return set_isa(tier);
  TORCH_CHECK_VALUE(false, "set_isa: one of default, avx2, avx512, amx, got '", name, "'");
}

void set_caches_checked(int64_t l1, int64_t l2) {
  TORCH_CHECK_VALUE(l1 >= 0 && l2 >= 0, "set_caches: bytes of L1 and L2, or zeros, got ", l1, " and ", l2);
  set_caches(l1, l2);
}

}  // namespace
}  // namespace torch_blocked

// Lists that may be empty are optional: the executor of AOTInductor's packages passes nothing for them.
TORCH_LIBRARY(torch_blocked, m) {
  m.def(
      "reorder(Tensor src, SymInt[] size, int[] src_blocking, int[] dst_order, int[] dst_blocking, "
      "ScalarType? dtype=None) -> Tensor");
  m.def("reorder_tile_rate(Tensor src, int[] size, int[] src_blocking, int[] dst_order, int[] dst_blocking) -> float");
  m.def(
      "convolution(Tensor src, int[]? src_blocking, Tensor weight, int[] weight_size, int[]? weight_blocking, Tensor? "
      "bias, "
      "int[] stride, int[] padding, int[] dilation, int groups, int block, Tensor? scale=None, Tensor? shift=None, "
      "Tensor? residual=None, str activation='none', float alpha=0, bool residual_last=False, Tensor? src_scale=None) "
      "-> Tensor");
  m.def(
      "convolution_transpose(Tensor src, int[] src_blocking, Tensor weight, int[] weight_size, int[] weight_blocking, "
      "Tensor? bias, int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, int block, "
      "Tensor? scale=None, Tensor? shift=None, Tensor? residual=None, str activation='none', float alpha=0, "
      "bool residual_last=False) -> Tensor");
  m.def(
      "convolution_out(Tensor(a!) dst, int first_block, Tensor src, int[]? src_blocking, Tensor weight, int[] "
      "weight_size, int[]? weight_blocking, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, int "
      "block, Tensor? scale=None, Tensor? shift=None, str activation='none', float alpha=0) -> ()");
  m.def(
      "convolution_chain(Tensor src, int[]? src_blocking, Tensor[] weights, int[] channels, Tensor?[] biases, int[] "
      "strides, int[] paddings, int[] dilations, int[] groups, int block, Tensor?[] scales, Tensor?[] shifts, str "
      "activations, float[] alphas, Tensor? residual=None, bool residual_last=False) -> Tensor");
  m.def(
      "convolution_transpose_out(Tensor(a!) dst, int first_block, Tensor src, int[] src_blocking, Tensor weight, int[] "
      "weight_size, int[] weight_blocking, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int[] "
      "dilation, int groups, int block, Tensor? scale=None, Tensor? shift=None, str activation='none', float alpha=0) "
      "-> ()");
  m.def(
      "convolution_weight_gradient(Tensor src, int[] src_blocking, Tensor diff_dst, int[] weight_size, int[] "
      "weight_order, "
      "int[] weight_blocking, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor");
  m.def(
      "convolution_algorithm(Tensor src, int[] src_blocking, Tensor weight, int[] weight_size, int[] weight_blocking, "
      "int[] stride, int[] padding, int[] dilation, int groups, int block) -> (str, str)");
  m.def("set_winograd(str mode, int max_bytes) -> ()", torch_blocked::set_winograd_by_name);
  m.def("set_amx_always(bool always) -> ()", torch_blocked::set_amx_always);
  m.def("packed_weights_bytes() -> int", torch_blocked::packed_weights_bytes);
  m.def("weight_reorders() -> int", torch_blocked::ReorderedWeights::count);
  m.def("batch_norm(Tensor src, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, float eps) -> Tensor");
  m.def("batch_norm_scale_shift(Tensor? weight, Tensor? bias, Tensor mean, Tensor var, float eps) -> (Tensor, Tensor)");
  m.def("batch_norm_statistics(Tensor src, SymInt channels) -> (Tensor, Tensor)");
  m.def(
      "batch_norm_backward(Tensor diff_dst, Tensor src, Tensor? weight, Tensor mean, Tensor invstd, bool "
      "training) -> (Tensor, Tensor, Tensor)");
  m.def("reduce_channels(Tensor src, SymInt channels, str how) -> Tensor");
  m.def("find_channel(Tensor src, SymInt channels, bool least) -> (Tensor, Tensor)");
  m.def("softmax_channels(Tensor src, SymInt channels, bool log) -> Tensor");
  m.def(
      "layer_norm_channels(Tensor src, SymInt channels, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, "
      "Tensor)");
  m.def("softmax_channels_backward(Tensor diff_dst, Tensor dst, SymInt channels, bool log) -> Tensor");
  m.def(
      "pool(Tensor src, SymInt channels, SymInt[] output_size, str mode, int[]? kernel_size=None, int[]? stride=None, "
      "int[]? padding=None, int[]? dilation=None, bool count_include_pad=True, int? divisor_override=None, "
      "bool indices=False) -> (Tensor, Tensor)");
  m.def(
      "upsample(Tensor src, SymInt[] output_size, str mode, bool align_corners=False, float? scale_h=None, "
      "float? scale_w=None) -> Tensor");
  m.def("max_pool_backward(Tensor diff_dst, Tensor indices, SymInt[] src_size) -> Tensor");
  m.def(
      "avg_pool_backward(Tensor diff_dst, SymInt[] src_size, int[] kernel_size=[], int[] stride=[], int[] padding=[], "
      "bool count_include_pad=True, int? divisor_override=None) -> Tensor");
  m.def(
      "upsample_backward(Tensor diff_dst, SymInt[] src_size, str mode, bool align_corners=False, float? scale_h=None, "
      "float? scale_w=None) -> Tensor");
  m.def("linear(Tensor src, Tensor weight, Tensor? bias) -> Tensor");
  m.def("empty_like(Tensor like) -> Tensor");
  m.def("new_empty(Tensor like, SymInt[] size) -> Tensor", {at::Tag::nondeterministic_seeded});  // as ATen's empty_like
  m.def("copy_out(Tensor(a!) dst, int first_block, Tensor src) -> ()");
  m.def("empty_cache() -> ()", torch_blocked::empty_cache);
  m.def("set_cache_limit(int bytes) -> int", torch_blocked::set_cache_limit);
  m.def("cached_bytes() -> int", torch_blocked::cached_bytes);
  m.def("guard_outputs(bool on) -> int", torch_blocked::guard_outputs);
  m.def("entry_point(int schema_hash) -> int", torch_blocked::entry_point);
  m.def("isa() -> str", torch_blocked::isa_now);
  m.def("isa_block() -> int", torch_blocked::isa_block_now);
  m.def("set_isa(str name) -> ()", torch_blocked::set_isa_by_name);
  m.def("core_round_trip() -> float", torch_blocked::core_round_trip);
  m.def("set_caches(int l1, int l2) -> ()", torch_blocked::set_caches_checked);
}

TORCH_LIBRARY_IMPL(torch_blocked, CPU, m) {
  m.impl("empty_like", torch_blocked::empty_like_cpu);
  m.impl("new_empty", torch_blocked::new_empty_cpu);
  m.impl("copy_out", torch_blocked::copy_out_cpu);
  m.impl("linear", torch_blocked::linear_cpu);
  m.impl("reorder", torch_blocked::reorder_cpu);
  m.impl("reorder_tile_rate", torch_blocked::reorder_tile_rate_cpu);
  m.impl("convolution", torch_blocked::convolution_cpu);
  m.impl("convolution_out", torch_blocked::convolution_out_cpu);
  m.impl("convolution_chain", torch_blocked::Registered<torch_blocked::convolution_chain_cpu>::call);
  m.impl("convolution_transpose", torch_blocked::convolution_transpose_cpu);
  m.impl("convolution_transpose_out", torch_blocked::convolution_transpose_out_cpu);
  m.impl("convolution_weight_gradient", torch_blocked::convolution_weight_gradient_cpu);
  m.impl("convolution_algorithm", torch_blocked::convolution_algorithm);
  m.impl("batch_norm", torch_blocked::batch_norm_cpu);
  m.impl("batch_norm_scale_shift", torch_blocked::batch_norm_scale_shift_cpu);
  m.impl("batch_norm_statistics", torch_blocked::batch_norm_statistics_cpu);
  m.impl("batch_norm_backward", torch_blocked::batch_norm_backward_cpu);
  m.impl("reduce_channels", torch_blocked::reduce_channels_cpu);
  m.impl("find_channel", torch_blocked::find_channel_cpu);
  m.impl("softmax_channels", torch_blocked::softmax_channels_cpu);
  m.impl("layer_norm_channels", torch_blocked::layer_norm_channels_cpu);
  m.impl("softmax_channels_backward", torch_blocked::softmax_channels_backward_cpu);
  m.impl("pool", torch_blocked::pool_cpu);
  m.impl("upsample", torch_blocked::upsample_cpu);
  m.impl("max_pool_backward", torch_blocked::max_pool_backward_cpu);
  m.impl("avg_pool_backward", torch_blocked::avg_pool_backward_cpu);
  m.impl("upsample_backward", torch_blocked::upsample_backward_cpu);
}
