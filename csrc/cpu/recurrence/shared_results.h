// The results of a recurrence's forward pass that one thread computes and another one reads: the
// factors of low ranks, and the gates and statistics of cells that need whole rows. The backward
// pass reads them too.
//
// They are in the tensors that the caller saves for backward. If nobody will ask for gradients,
// those pointers are null, and only the steps that are still needed are in memory of this class: of
// the gates those of a block of steps, of all else one step.
#pragma once
#include "cpu/recurrence/sizes.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real>
class SharedResults {
 public:
  // block: the steps whose gates are in memory at the same time, or 0 where the gates have strips
  SharedResults(const cpu::Recurrence<Real>& r, const Sizes<Real>& s, int64_t block)
      : r(r),
        s(s),
        saves(r.gates),
        width_of_statistics(statistics_of(r.cell)),
        own_gates(saves ? 0 : block * size_of_gates()),
        own_statistics(saves ? 0 : s.B * width_of_statistics),
        own_factors(saves ? 0 : s.rounds * s.B * s.rp) {}

  // Of step t. first: the first step whose gates are in memory where nothing is saved
  HD Real* gates(int64_t t, int64_t first) const {  // (B, SLOTS, Hp)
    return saves ? r.gates + t * size_of_gates() : own_gates + (t - first) * size_of_gates();
  }
  HD Real* statistics(int64_t t) const {  // (B, STATISTICS)
    return saves ? r.statistics + t * s.B * width_of_statistics : own_statistics;
  }
  HD Real* factors(int64_t k, int64_t t) const {  // (B, rp)  of round k
    return saves ? r.factors + (k * s.steps + t) * s.B * s.rp : own_factors + k * s.B * s.rp;
  }

 private:
  const cpu::Recurrence<Real>& r;
  const Sizes<Real>& s;
  const bool saves;
  const int64_t width_of_statistics;
  Buffer<Real> own_gates;       // (block, B, SLOTS, Hp)
  Buffer<Real> own_statistics;  // (B, STATISTICS)
  Buffer<Real> own_factors;     // (rounds, B, rp)

  // The elements of the gates of one step.
  HD int64_t size_of_gates() const { return s.B * s.slots * s.Hp; }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
