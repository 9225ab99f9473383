// How far the cores are from each other.
#pragma once

namespace torch_blocked {

// Seconds that a cache line takes from one core to another and back, of the slowest of up to 15 others that this
// process may run on: less than 100e-9 where the two share a cache, 300e-9 and more where they share none. 0 where
// there is one core, or where it cannot be measured.
double core_round_trip();

}  // namespace torch_blocked
