// How a Winograd convolution on tiles (winograd_amx.cpp) is cut up, for its plan and for its estimate. A tile of
// Winograd's is one row of a tile register: units of them are as many as a register has rows.
#pragma once
#include <algorithm>

#include "../caches.h"
#include "../kernels/amx.h"
#include "winograd.h"

namespace torch_blocked {

struct WinogradAmxWork {
  static constexpr int64_t m = 4, planes = (m + 2) * (m + 2);
  static constexpr int64_t most_units = 24;            // of a long run
  static constexpr int64_t long_run_bytes = 24 << 20;  // of transformed src and products, of a thread

  int64_t ic_blocks, oc_blocks, ic_pairs, oc_pairs;  // those of ic times the filter's depth
  int64_t tiles, units;
  bool keeps_weights;        // whose parts are made once a thread, not for each run: all of them stay in L2
  bool split_oc;             // threads share the output channels, not the tiles: each reads its own weights only
  int64_t run_units, nruns;  // of a thread: the most units of a run, and runs

  explicit WinogradAmxWork(const Conv& c)
      : ic_blocks((c.ic + c.block - 1) / c.block * c.kd),
        oc_blocks(c.oc_blocks()),
        ic_pairs((ic_blocks + 1) / 2),
        oc_pairs((oc_blocks + 1) / 2),
        tiles(c.n * c.od * TileAxis(c.oh, m, c.dilation_h).count * TileAxis(c.ow, m, c.dilation_w).count),
        units((tiles + amx_rows - 1) / amx_rows) {
    constexpr int64_t few_units = 6;  // a thread
    const int64_t kept_bytes = planes * oc_pairs * ic_pairs * amx_wei_step * int64_t(sizeof(Part));
    const int64_t unit_bytes = planes * (ic_blocks + oc_blocks) * c.block * amx_rows * int64_t(sizeof(float));
    keeps_weights = kept_bytes <= caches().l2 / 2;
    split_oc = !keeps_weights && units < few_units * c.nthreads && oc_pairs >= c.nthreads;
    const int64_t fitting = (keeps_weights ? caches().l2 / 10 * 9 - kept_bytes : long_run_bytes) / unit_bytes;
    constexpr int64_t at_once = amx_most_tiles;  // units in one call of a kernel
    const int64_t most = std::clamp<int64_t>(fitting / at_once * at_once, at_once, most_units);
    const int64_t of_thread = split_oc ? units : (units + c.nthreads - 1) / c.nthreads;
    nruns = std::max<int64_t>(1, (of_thread + most - 1) / most);
    run_units = (of_thread + nruns - 1) / nruns;
  }
};

}  // namespace torch_blocked
