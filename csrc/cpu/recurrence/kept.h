// Where the forward pass of a recurrence keeps what the backward pass reads: the activated gates of
// every step, its cell state and so on.
//
// If nobody will ask for gradients, the caller passes null pointers, and only the steps that are
// still needed are kept: the block of steps whose inputs were multiplied together, of the cell
// states the last two, and of all else one step. Most of the memory that a call writes otherwise is
// what it saves.
#pragma once
#include <algorithm>

#include "cpu/recurrence/sizes.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T>
class Kept {
 public:
  // block: the steps whose inputs are multiplied together, or 0
  Kept(const cpu::Recurrence<T>& r, const Sizes<T>& s, int64_t block)
      : r(r),
        s(s),
        saves(r.gates),
        width_of_statistics(statistics_of(r.cell)),
        own_gates(saves ? 0 : std::clamp(block, int64_t(1), s.steps) * rows_of_gates()),
        own_cells(saves || !has_c(r.cell) ? 0 : 2 * s.B * s.Hp),
        own_statistics(saves ? 0 : s.B * width_of_statistics),
        own_round_gates(saves ? 0 : s.B * s.round_width),
        own_factors(saves ? 0 : s.rounds * s.B * s.rp) {}

  // Of step t. first: the first step whose gates are kept where nothing is saved
  HD T* gates(int64_t t, int64_t first) const {  // (B, SLOTS, Hp)
    return saves ? r.gates + t * rows_of_gates() : own_gates + (t - first) * rows_of_gates();
  }
  HD T* cells(int64_t t) const {  // (B, Hp)
    return saves ? r.cells + t * s.B * s.Hp : own_cells + t % 2 * s.B * s.Hp;
  }
  HD T* statistics(int64_t t) const {  // (B, STATISTICS)
    return saves ? r.statistics + t * s.B * width_of_statistics : own_statistics;
  }
  HD T* round_gates(int64_t t) const {  // (B, round_width)
    return saves ? r.round_gates + t * s.B * s.round_width : own_round_gates;
  }
  HD T* factors(int64_t k, int64_t t) const {  // (B, rp)  of round k
    return saves ? r.factors + (k * s.steps + t) * s.B * s.rp : own_factors + k * s.B * s.rp;
  }

 private:
  const cpu::Recurrence<T>& r;
  const Sizes<T>& s;
  const bool saves;
  const int64_t width_of_statistics;
  Buffer<T> own_gates;        // (steps of a block, B, SLOTS, Hp)
  Buffer<T> own_cells;        // (2, B, Hp)  of steps t with t % 2 = 0 and 1
  Buffer<T> own_statistics;   // (B, STATISTICS)
  Buffer<T> own_round_gates;  // (B, round_width)
  Buffer<T> own_factors;      // (rounds, B, rp)

  HD int64_t rows_of_gates() const { return s.B * s.slots * s.Hp; }  // elements of one step
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
