// y = x * factor, in the same type or rounded to a narrower one.
#pragma once
#include "cpu/arguments/pointwise.h"
#include "cpu/simd/elements.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

void scale(const cpu::Scale& s, cpu::Parallel run) {
  constexpr int64_t BLOCK = 16384;
  by_type(s.type, [&](auto number) {
    using Stored = decltype(number);
    using Real = RealOf<Stored>;
    parallel(run, (s.n + BLOCK - 1) / BLOCK, [&](int64_t begin, int64_t end) {
      const int64_t last = end * BLOCK < s.n ? end * BLOCK : s.n;
      const auto multiply = [&](const auto* x, Stored* y) {
        for (int64_t i = begin * BLOCK; i < last; i += LANES<Real>)
          store_up_to(y + i, load_up_to(x + i, last - i) * Vec<Real>(Real(s.factor)), last - i);
      };
      if (s.of_x == s.type)
        multiply(static_cast<const Stored*>(s.x), static_cast<Stored*>(s.y));
      else
        multiply(static_cast<const Real*>(s.x), static_cast<Stored*>(s.y));
    });
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
