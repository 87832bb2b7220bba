// Which implementation a recurrence runs where a user has measured it (`fusedseq tune-kernels`):
// pyext/fusedseq/kernel_table.py reads the file and fills the table when the operators are loaded.
// Without a table the plan of cuda/recurrence/plan.h decides alone.
#pragma once
#include <array>
#include <cstdint>

namespace fusedseq {

// The numbers are those of ENGINES in pyext/fusedseq/kernel_table.py. `persistent`, `words` (the
// persistent kernels with words that carry their own validity in place of flags) and `wavefront`
// cannot be forced upon sizes that do not fit.
enum class Engine : int64_t { by_plan, loop, persistent, wavefront, in_turn, words };

// Multiprocessors of the GPU, its compute capability (90 for 9.0), cuda::Type, B, X, H, rounds;
// then H and rounds of the second of two layers, else 0. The number of steps is not in it: it
// changes from batch to batch, and hardly the order of the engines.
using MeasuredSize = std::array<int64_t, 9>;

Engine measured_engine(const MeasuredSize& size);
bool has_measured_engines();

}  // namespace fusedseq
