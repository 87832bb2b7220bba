// Where the forward pass of a recurrence keeps results that the backward pass reads and that one
// thread of the forward pass computes for another: the factors of low ranks, and the gates and
// statistics of cells that need whole rows.
//
// If nobody will ask for gradients, the caller passes null pointers, and only the steps that are
// still needed are kept: of the gates those of a block of steps, of all else one step.
#pragma once
#include "cpu/recurrence/sizes.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T>
class Kept {
 public:
  // block: the steps whose gates are kept at the same time, or 0 where the gates have strips
  Kept(const cpu::Recurrence<T>& r, const Sizes<T>& s, int64_t block)
      : r(r),
        s(s),
        saves(r.gates),
        width_of_statistics(statistics_of(r.cell)),
        own_gates(saves ? 0 : block * rows_of_gates()),
        own_statistics(saves ? 0 : s.B * width_of_statistics),
        own_factors(saves ? 0 : s.rounds * s.B * s.rp) {}

  // Of step t. first: the first step whose gates are kept where nothing is saved
  HD T* gates(int64_t t, int64_t first) const {  // (B, SLOTS, Hp)
    return saves ? r.gates + t * rows_of_gates() : own_gates + (t - first) * rows_of_gates();
  }
  HD T* statistics(int64_t t) const {  // (B, STATISTICS)
    return saves ? r.statistics + t * s.B * width_of_statistics : own_statistics;
  }
  HD T* factors(int64_t k, int64_t t) const {  // (B, rp)  of round k
    return saves ? r.factors + (k * s.steps + t) * s.B * s.rp : own_factors + k * s.B * s.rp;
  }

 private:
  const cpu::Recurrence<T>& r;
  const Sizes<T>& s;
  const bool saves;
  const int64_t width_of_statistics;
  Buffer<T> own_gates;       // (block, B, SLOTS, Hp)
  Buffer<T> own_statistics;  // (B, STATISTICS)
  Buffer<T> own_factors;     // (rounds, B, rp)

  HD int64_t rows_of_gates() const { return s.B * s.slots * s.Hp; }  // elements of one step
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
