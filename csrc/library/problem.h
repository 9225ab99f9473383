// The problem of a convolution, from the arguments of its operator: shared by the operators that have one.
#pragma once
#include <c10/util/SmallVector.h>

#include <optional>

#include "../conv/conv.h"
#include "tensors.h"

namespace torch_blocked {

// One number for each spatial dim.
void check_window(const char* name, IntArrayRef values, int64_t dims, int64_t least);

// Sizes, strides and paddings; everything that does not depend on the data, but for the size of dst. The weight is
// (ic, oc / groups, ...) where `transposed`.
Conv describe_problem(const Physical& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
                      IntArrayRef weight_blocking, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                      int64_t groups, int64_t block, bool transposed = false);

// The same of a convolution, with the size of dst.
Conv problem(const Physical& src, IntArrayRef src_blocking, const Tensor& weight, IntArrayRef weight_size,
             IntArrayRef weight_blocking, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
             int64_t block);

// dst's physical shape: of as many dims as the weight has, then the block.
using Shape = c10::SmallVector<int64_t, 6>;
Shape dst_shape(const Conv& c, int64_t ndims);

// What weights packed from this tensor may be kept under. Only where every write to it is counted: not where it is
// plain or has plain views (blocks along one axis only), which may be written through `.data`; not inference tensors,
// which count nothing; and not in memory shared with other processes, each of which counts its own.
std::optional<WeightKey> weight_key(const Tensor& weight, IntArrayRef weight_blocking, bool transposed);

// The post-ops of a convolution: the arguments of its operator, dense, for as long as it runs.
struct PostOpArguments {
  Tensor bias, scale, shift, residual;

  // Into `c`, checked.
  PostOpArguments(Conv& c, const Physical& dst, const std::optional<Tensor>& bias, const std::optional<Tensor>& scale,
                  const std::optional<Tensor>& shift, const std::optional<Tensor>& residual,
                  c10::string_view activation, double alpha, bool residual_last);
};

}  // namespace torch_blocked
