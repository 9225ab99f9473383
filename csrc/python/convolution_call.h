// A convolution as it was called, to be run at another time.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "arguments.h"
#include "blocked.h"

namespace torch_blocked {

// A call of torch_blocked::convolution with its post-ops. It holds the bytes of blocked tensors, not the tensors: those
// may get others.
struct ConvolutionCall {
  struct Bytes {
    at::Tensor physical;
    const Blocking* blocking;  // null where it is plain
    c10::DimVector size;

    Bytes() = default;
    explicit Bytes(const Operand& x) : physical(x.physical), blocking(x.blocking), size(x.sizes()) {}
    at::IntArrayRef blocks() const { return blocking ? at::IntArrayRef(blocking->blocks) : at::IntArrayRef(); }
  };

  Bytes src, weight;
  OptionalTensor bias;
  Numbers stride, padding, dilation;
  int64_t groups, block;
  const Blocking* blocking = nullptr;  // of dst
  OptionalTensor scale, shift, residual;
  std::string activation = "none";
  double alpha = 0;
  bool residual_last = false;

  // Called after the weight has been reordered.
  using OnPacking = std::function<void(const ConvolutionCall&)>;

  bool has_post_ops() const { return scale || residual || activation != "none"; }
  // Of dst; 0 where the filter is larger than the padded src.
  c10::DimVector size() const;
  at::ScalarType dtype() const { return src.physical.scalar_type(); }
  ConvolutionCall without_post_ops() const;
  at::Tensor run() const;
};

}  // namespace torch_blocked
