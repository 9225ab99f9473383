// Operators as code that Inductor generates calls them: through a pointer, with their arguments as words.
//
// By name they take a list of boxed values: for each of their lists two blocks of memory and another of its numbers,
// for every call several microseconds. torch_blocked/compile/calls.py writes the other side.
#pragma once
#include <cstdint>

namespace torch_blocked {

// The address of a function void(const int64_t* words) for the operator whose schema has this hash; ValueError where
// there is none: the code that asks was generated for another version.
//
// The words, in the order of the schema: a number, or a float64's bits; the address of a Tensor or of a C string; of
// what is optional the address, or 0; of a list the address and the length; then for each result where to put the
// address of a new Tensor, or 0.
int64_t entry_point(int64_t schema_hash);

}  // namespace torch_blocked
