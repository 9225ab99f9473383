#include "convolution_call.h"

#include "../library/operators.h"

namespace torch_blocked {

at::Tensor ConvolutionCall::run() const {
  static const auto op = operator_of<decltype(convolution_cpu)>("torch_blocked::convolution");
  return op.call(src.physical, src.blocks(), weight.physical, weight.size, weight.blocks(), bias, stride, padding,
                 dilation, groups, block, scale, shift, residual, activation, alpha, residual_last, {});
}

c10::DimVector ConvolutionCall::size() const {
  c10::DimVector size = src.size;
  size[1] = weight.size[0];
  for (size_t i = 0; i < stride.size(); i++) {
    const int64_t beyond = src.size[i + 2] + 2 * padding[i] - dilation[i] * (weight.size[i + 2] - 1) - 1;
    size[i + 2] = beyond < 0 ? 0 : beyond / stride[i] + 1;
  }
  return size;
}

ConvolutionCall ConvolutionCall::without_post_ops() const {
  ConvolutionCall call = *this;
  call.scale = call.shift = call.residual = std::nullopt;
  call.activation = "none";
  return call;
}

}  // namespace torch_blocked
