// What the forward and the backward pass of a recurrence share: sizes, strides and helpers.
#pragma once
#include <algorithm>

#include "cpu/arguments/recurrence.h"
#include "cpu/buffer.h"
#include "cpu/gemm/int8_rows.h"
#include "cpu/random_mask.h"
#include "cpu/simd/bf16_pair.h"
#include "cpu/team.h"
#include "math/cell_kind.h"
#include "math/step_order.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t MAX_ROUNDS = 64;

template <class Real>
struct Sizes {
  int64_t steps, B, X, H, P, rounds, rank;
  int64_t gates, slots;              // of the cell, for each hidden unit
  int64_t Xp, Hp, rp;                // X, H and rank padded as in the saved tensors
  int64_t ldx, ldh, ldp, ldr;        // the row lengths of workspaces of width X, H, P and rank
  int64_t round_width;               // the row length of round_gates
  int64_t round_offset[MAX_ROUNDS];  // where each round's gate begins in such a row

  explicit Sizes(const cpu::Recurrence<Real>& r)
      : steps(r.steps),
        B(r.B),
        X(r.X),
        H(r.H),
        P(r.P),
        rounds(r.rounds),
        rank(r.rank),
        gates(gates_of(r.cell)),
        slots(slots_of(r.cell)),
        Xp(cpu::padded(X)),
        Hp(cpu::padded(H)),
        rp(cpu::padded(rank)),
        ldx(leading_dimension<Real>(X)),
        ldh(leading_dimension<Real>(H)),
        ldp(leading_dimension<Real>(P)),
        ldr(leading_dimension<Real>(rank)),
        round_width(0) {
    for (int64_t k = 0; k < rounds; ++k) {
      round_offset[k] = round_width;
      round_width += on_x(k) ? Xp : Hp;
    }
  }

  // The longest row of a left operand of a product: of dz in the backward pass, or of the state, x,
  // what a cell computes or the columns of a low rank.
  HD int64_t widest() const { return std::max({slots * H, X, P, rank}); }
  // Rounds 0, 2, ... scale x and read h; rounds 1, 3, ... scale h and read x.
  HD bool on_x(int64_t k) const { return k % 2 == 0; }
  // The width of the operand that round k scales, and of the one that it reads.
  HD int64_t out(int64_t k) const { return on_x(k) ? X : H; }
  HD int64_t in(int64_t k) const { return on_x(k) ? H : X; }
  HD int64_t ld_out(int64_t k) const { return on_x(k) ? ldx : ldh; }
};

// Returns the first round on the same operand as round k whose weight pointer equals round k's.
// Rounds that share a weight share the packed copy of that round. A weight of the other operand may
// begin at the same address, with other sizes.
template <class Pointer>
HD int64_t first_use(const Pointer* weights, int64_t k) {
  int64_t j = k % 2;
  while (weights[j] != weights[k])
    j += 2;
  return j;
}

// Packs a part of a weight, from its number `first` on, as `pack` does. scale: of its columns, if
// the weight has 8 bits.
template <class Element, class Real>
void pack_weight(const cpu::Recurrence<Real>& r, const void* W, int64_t first, int64_t stride_k,
                 int64_t stride_n, int64_t K, int64_t columns, Element* to,
                 const float* scale = nullptr) {
  if constexpr (std::is_same<Real, float>::value)
    if (r.weights == cpu::WeightType::bf16)
      return pack(static_cast<const bfloat16*>(W) + first, stride_k, stride_n, K, columns, to);
  if constexpr (std::is_same<Element, float>::value)
    if (r.weights == cpu::WeightType::int8)
      return pack_scaled(static_cast<const int8_t*>(W) + first, scale, K, columns, to);
  pack(static_cast<const Real*>(W) + first, stride_k, stride_n, K, columns, to);
}

// Whether the parts of the team share the rows of the batch during the steps, instead of the
// columns (see forward.h). A part that owns rows needs no barrier, but reads all weights in every
// step: they have to fit in its L2 cache, nearly, or to be used for many rows. The limits were
// tried on 2 cores of a Zen 5 EPYC, with 1 MiB of L2 cache each.
//
// A part gets at least 8 rows. Then all tiles of a product have 4 rows or more, whichever way the
// work is split, and so the same order of additions.
template <class Element, class Real>
bool shares_rows(const Sizes<Real>& s, const cpu::Recurrence<Real>& r, int parts) {
  constexpr int64_t MIN_ROWS = 8, MANY_ROWS = 32, SMALL = 3 << 19, LARGE = 4 << 20;  // bytes
  int64_t numbers = s.gates * s.H * (s.P + s.X) + (r.W_hr ? s.P * s.H : 0);
  for (int64_t k = 0; k < s.rounds; ++k)
    if (first_use(r.A, k) == k)
      numbers += s.rank ? s.rank * (s.in(k) + s.out(k)) : s.in(k) * s.out(k);
  const int64_t rows = s.B / parts, bytes = numbers * int64_t(sizeof(Element)) / NUMBERS<Element>;
  return parts > 1 && rows >= MIN_ROWS && bytes <= (rows >= MANY_ROWS ? LARGE : SMALL);
}

// Columns of the matrices of a recurrence.
struct Columns {
  Range h, p, x, r;  // hidden units, units of the state h, inputs and low-rank columns
};
template <class Real>
Columns all_columns(const Sizes<Real>& s) {
  return {{0, s.H}, {0, s.P}, {0, s.X}, {0, s.rank}};
}
// Returns the columns that parts [begin, end) of the team own, in whole units.
template <class Real>
Columns columns_of(const Sizes<Real>& s, int64_t begin, int64_t end, int64_t parts, int64_t unit) {
  return {own_columns<Real>(s.H, begin, end, parts, unit),
          own_columns<Real>(s.P, begin, end, parts, unit),
          own_columns<Real>(s.X, begin, end, parts, unit),
          own_columns<Real>(s.rank, begin, end, parts, unit)};
}

// What one thread computes: the parts [begin, end) of the work. During the steps it multiplies its
// own rows of the batch by its own columns of the weights. Of each weight it packs the columns
// `packed`: its own ones, or, where the parts own rows, its share of the panels, because all parts
// multiply by all columns.
//
// cell_rows and cell_units are the rows and the hidden units whose cells it computes: its own rows
// and columns, but where a cell needs whole rows, all units of rows of the batch.
struct Share {
  int64_t begin, end;
  Range rows;
  Columns own, packed;
  Range cell_rows, cell_units;

  // panel: the columns of a panel of packed weights    whole_rows: whether a cell needs them
  template <class Real>
  Share(const Sizes<Real>& s, int64_t begin, int64_t end, int64_t parts, bool by_rows,
        int64_t panel, bool whole_rows)
      : begin(begin),
        end(end),
        rows{by_rows ? s.B * begin / parts : 0, by_rows ? s.B * end / parts : s.B},
        own(by_rows ? all_columns(s) : columns_of(s, begin, end, parts, COLUMN_UNIT<Real>)),
        packed(by_rows ? columns_of(s, begin, end, parts, panel) : own),
        cell_rows{whole_rows ? Range{s.B * begin / parts, s.B * end / parts} : rows},
        cell_units{whole_rows ? Range{0, s.H} : own.h} {}

  int64_t parts() const { return end - begin; }
};

// Returns the units from j on of x in row b at step t, or zeros past the end of the sequence.
template <class Real>
HD Vec<Real> load_input(const cpu::Recurrence<Real>& r, int64_t t, int64_t b, int64_t j) {
  if (has_ended(r.lengths, t, b)) return Vec<Real>(Real(0));
  return Vec<Real>::load(r.x + (t * r.B + b) * r.X + j, r.X - j);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
