#include "../reorder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "operators.h"

namespace torch_blocked {

// Floating point to integer rounds to nearest even and saturates (NaN becomes 0); every other pair is torch's own.
static Tensor convert(const Tensor& src, at::ScalarType dtype) {
  const bool rounds = at::isFloatingType(src.scalar_type()) && at::isIntegralType(dtype, /*includeBool=*/false);
  if (!rounds) return src.to(dtype);
  const Tensor exact = src.to(at::kDouble).nan_to_num(0.0).round();
  const int64_t bits = 8 * c10::elementSize(dtype);
  const bool is_signed = c10::isSignedType(dtype);
  const double upper = std::ldexp(1.0, is_signed ? bits - 1 : bits), lower = is_signed ? -upper : 0.0;
  if (bits < 64) return exact.clamp(lower, upper - 1).to(dtype);
  // 2^63 - 1 and 2^64 - 1 are no doubles: what reaches 2^63 or 2^64 is set apart.
  const int64_t largest = is_signed ? std::numeric_limits<int64_t>::max() : -1;  // -1 has the bits of 2^64 - 1
  const Tensor in_range = at::where(exact >= upper, at::full_like(exact, 0.0), exact.clamp_min(lower)).to(dtype);
  return at::where(exact >= upper, at::full_like(in_range.view(at::kLong), largest), in_range.view(at::kLong))
      .view(dtype);
}

Tensor reorder_cpu(const Tensor& src, SymIntArrayRef symbolic_size, IntArrayRef src_blocking, IntArrayRef dst_order,
                   IntArrayRef dst_blocking, std::optional<at::ScalarType> dtype) {
  const IntArrayRef size = known(symbolic_size);
  const at::ScalarType dst_dtype = dtype.value_or(src.scalar_type());
  MemoryDesc src_md = describe("reorder: src", src, size, src_blocking);  // checked before anything is done
  const MemoryDesc dst_md = describe_dense("reorder: dst", size, dst_order, dst_blocking);
  Tensor dst = empty_physical(dst_md, dst_dtype);
  if (dst.numel() == 0) return dst;
  Tensor converted;  // where the bytes of src are not those to be moved
  if (dst_dtype != src.scalar_type())
    converted = convert(src, dst_dtype);
  else if (src.is_conj() || src.is_neg())
    converted = src.resolve_conj().resolve_neg();
  if (converted.defined()) src_md = describe("reorder: src", converted, size, src_blocking);
  const void* const from = (converted.defined() ? converted : src).const_data_ptr();
  or_out_of_memory("reorder",
                   [&] { reorder(src_md, from, dst_md, dst.mutable_data_ptr(), dst.element_size(), num_threads()); });
  return dst;
}

double reorder_tile_rate_cpu(const Tensor& src, IntArrayRef size, IntArrayRef src_blocking, IntArrayRef dst_order,
                             IntArrayRef dst_blocking) {
  const MemoryDesc src_md = describe("reorder_tile_rate: src", src, size, src_blocking);
  const MemoryDesc dst_md = describe_dense("reorder_tile_rate: dst", size, dst_order, dst_blocking);
  const Tensor dst = empty_physical(dst_md, src.scalar_type());
  double rate = 0;
  or_out_of_memory("reorder_tile_rate", [&] {
    rate = reorder_tile_rate(src_md, src.const_data_ptr(), dst_md, dst.mutable_data_ptr(), dst.element_size());
  });
  return rate;
}

}  // namespace torch_blocked
