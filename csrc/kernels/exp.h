// e^x of a vector, to 1e-7 of it.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace torch_blocked {
namespace {

// 2^n of the integers n in -127 ... 128 that `shifted` holds in its lowest bits, increased by 127: the exponent of a
// float. 0 and infinity at the ends.
inline Vec power_of_two(const Vec& shifted) {
  using Bits = int32_t __attribute__((vector_size(block * sizeof(int32_t))));
  Bits bits;
  Vec power;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits <<= 23;
  std::memcpy(static_cast<void*>(&power), &bits, sizeof(bits));
  return power;
}

// e^-x + plus; e^-x is infinity below -88.4 and zero above 88, by 2^n e^r with r = -x - n log(2): at::vec calls a
// function for e^x, which leaves no vector in its register. log(2) in two parts, as Cephes' expf has it: the first has
// so few bits that its multiples are exact. The polynomial in -r is the one of degree 5 with e^0 = 1 whose largest
// relative error, 9e-8, is least. Adding 1.5 * 2^23 rounds to an integer.
inline Vec exp_of_minus(const Vec& any, float plus) {
  const Vec x = at::vec::clamp(any, Vec(-89.f), Vec(88.f)), shift(12582912.f + 127.f);
  const Vec shifted = multiply_add(x, Vec(-1.44269504f), shift), minus_n = shift - shifted;
  const Vec minus_r = multiply_add(minus_n, Vec(2.12194440e-4f), multiply_add(minus_n, Vec(-.693359375f), x));
  Vec sum(-8.290315e-3f);
  for (const float c : {4.189793e-2f, -1.6667636e-1f, 4.9999151e-1f, -9.999997e-1f, 1.f})
    sum = multiply_add(sum, minus_r, Vec(c));
  return multiply_add(sum, power_of_two(shifted), Vec(plus));
}

}  // namespace
}  // namespace torch_blocked
