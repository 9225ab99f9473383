// Which instruction sets this CPU has, and which of the kernels' builds to call.
//
// Every file of csrc/kernels is compiled once per tier with that tier's flags; each build defines one table of function
// pointers named after it (reorder_kernels_avx512, ...). The choice among them is made here, at run time.
#pragma once
#include <cstdint>

namespace torch_blocked {

enum class Isa { Default, AVX2, AVX512, AMX };  // AMX: AVX-512's kernels and those on tiles (kernels/amx.h)

// The best tier that the CPU has, and for AMX the operating system lets the process use, lowered by the environment
// variable ATEN_CPU_CAPABILITY (default | avx2 | avx512) as PyTorch's own, or by set_isa.
Isa isa();
Isa best_isa();          // as isa(), without set_isa
void set_isa(Isa tier);  // for tests; never above best_isa()
const char* isa_name(Isa tier);

// Channels in one block of the fastest format: the width of a vector of floats.
inline int64_t isa_block(Isa tier) { return tier >= Isa::AVX512 ? 16 : 8; }

}  // namespace torch_blocked

#if defined(__x86_64__) || defined(_M_X64)
#define TORCH_BLOCKED_X86 1
#define TORCH_BLOCKED_DECLARE_KERNELS(Type, name) extern const Type name##_default, name##_avx2, name##_avx512
#define TORCH_BLOCKED_KERNELS(name, tier)                 \
  ((tier) >= ::torch_blocked::Isa::AVX512 ? name##_avx512 \
   : (tier) == ::torch_blocked::Isa::AVX2 ? name##_avx2   \
                                          : name##_default)
#else
#define TORCH_BLOCKED_X86 0
#define TORCH_BLOCKED_DECLARE_KERNELS(Type, name) extern const Type name##_default
#define TORCH_BLOCKED_KERNELS(name, tier) (name##_default)
#endif

// The table whose vectors are one block wide, of the best tier that has one: nChw8c runs on the AVX2 build of a CPU
// with vectors of 16 too. Null where none has.
#define TORCH_BLOCKED_KERNELS_OF_BLOCK(name, block)                                                                \
  (::torch_blocked::kernels_of_block([](::torch_blocked::Isa tier) { return &TORCH_BLOCKED_KERNELS(name, tier); }, \
                                     block))

namespace torch_blocked {

template <class TableOf>
auto kernels_of_block(const TableOf& table_of, int64_t block) -> decltype(table_of(Isa())) {
  for (int tier = int(isa()); tier >= 0; tier--)
    if (const auto table = table_of(Isa(tier)); table->block == block) return table;
  return nullptr;
}

}  // namespace torch_blocked
