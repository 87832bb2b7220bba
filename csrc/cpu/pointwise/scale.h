// y = x * factor, stored in another type.
#pragma once
#include "cpu/simd/elements.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

void scale(const cpu::Scale& s, cpu::Parallel run) {
  constexpr int64_t BLOCK = 16384;
  by_type(s.type, [&](auto of) {
    using S = decltype(of);
    using C = typename Compute<S>::type;
    parallel(run, (s.n + BLOCK - 1) / BLOCK, [&](int64_t begin, int64_t end) {
      const C* x = static_cast<const C*>(s.x);
      S* y = static_cast<S*>(s.y);
      const int64_t last = end * BLOCK < s.n ? end * BLOCK : s.n;
      for (int64_t i = begin * BLOCK; i < last; i += LANES<C>)
        store_up_to(y + i, Vec<C>::load(x + i, last - i) * Vec<C>(C(s.factor)), last - i);
    });
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
