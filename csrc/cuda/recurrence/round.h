// The sizes of a round of the Mogrifier.
#pragma once
#include "cuda/recurrence/arguments.h"

namespace fusedseq::cuda {

// Round k multiplies one of x and h, `out` elements wide, by a sigmoid of the other, `in` wide.
struct Round {
  bool on_x;  // whether it scales x
  int64_t out, in, out_padded, in_padded;
  int64_t offset;  // of its sigmoids in a row of all rounds' sigmoids
  Round(const Recurrence& r, int64_t k)
      : on_x(k % 2 == 0),
        out(on_x ? r.X : r.H),
        in(on_x ? r.H : r.X),
        out_padded(on_x ? r.Xp : r.Hp),
        in_padded(on_x ? r.Hp : r.Xp),
        offset(k / 2 * (r.Xp + r.Hp) + (on_x ? 0 : r.Xp)) {}
};

// The first round on the same operand with the same pointer as round k: it shares its weight with
// k. A weight of the other operand may begin at the same address, with other sizes.
inline int64_t first_use(const void* const* p, int64_t k) {
  int64_t j = k % 2;
  while (p[j] != p[k])
    j += 2;
  return j;
}

}  // namespace fusedseq::cuda
