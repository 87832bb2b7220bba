// The packed weights and the intermediate gradients of a recurrence's backward pass, and what one
// thread has of them.
#pragma once
#include "cpu/gemm/column_sums.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/transposed.h"
#include "cpu/recurrence/sizes.h"
#include "cpu/recurrence/strips.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Allocated once per call and shared by all parts of the work. rows = T * B; out, in and ld_out are
// those of a round, see Sizes.
template <class Real, class Element>
struct BackwardWorkspace {
  const int64_t rows;
  const int64_t ldz;           // the row length of dz
  const int64_t terms_width;   // the terms of a row of T * B, see cells.h
  const int64_t ld_terms;      // the row length of `terms`
  const int64_t scratch_size;  // of gemm_transposed
  const int64_t left_size;     // the elements of a left operand that is copied, see gemm.h
  const int64_t sums_size;     // the most columns of a bias's gradient

  // Weights, packed as right operands of dz W. Rounds that share a weight share the packed copy.
  Buffer<Element> W_ih;           // (gates * H, X)
  Buffer<Element> W_hh;           // (gates * H, P), each block of gates packed by itself
  Buffer<Element> W_hr;           // (P, H)
  Buffer<Element> A[MAX_ROUNDS];  // (out, in), or (out, rank) with a low rank
  Buffer<Element> F[MAX_ROUNDS];  // (rank, in)

  // Gradients of the data.
  Buffer<Real> dz;                    // (T, B, ldz)  of the gates' pre-activations
  Strips<Real> dz_row;                // (SLOTS, H)  one row of dz, until it is streamed there
  Buffer<Real> terms;                 // (T, B, ld_terms)  see cells.h
  Strips<Real> dh;                    // (B, P)  of the operand h, within a step
  Strips<Real> dx;                    // (B, X)  of the operand x, within a step
  Strips<Real> dh_carried;            // (B, P)  of the state, from step to step
  Strips<Real> dc_carried;            // (B, H)
  Buffer<Real> dprojected;            // (T, B, ldp)  of the projections
  Strips<Real> dh_of_cell;            // (B, H)  of what they read, within a step
  Buffer<Real> dgate[MAX_ROUNDS];     // (T, B, ld_out)  of the rounds' pre-activations
  Buffer<Real> dfactors[MAX_ROUNDS];  // (T, B, ldr)  of the products with F

  // The operands of the products, recomputed. x_operand[0] is x with zeros past the ends of the
  // sequences; only where the product for dW_ih reads it, see reads_masked_x.
  Buffer<Real> x_operand[MAX_ROUNDS / 2 + 2];  // (T, B, ldx)  x after i rounds on it
  Buffer<Real> h_operand[MAX_ROUNDS / 2 + 2];  // (T, B, ldp)  h after i rounds on it
  Buffer<Real> h_of_cell;                      // (T, B, ldh)  what the projections read, for dW_hr
  Buffer<Real> state_mask;                     // (B, ldh)  the factors of the state's dropout
  Buffer<Real> zoneout;                        // (parts, 2, ldh)
  Buffer<Real> sums;                           // (parts, 2, sums_size)  of column_sums
  Buffer<Element> scratch;                     // (parts, scratch_size)
  Buffer<Element> left_copies;                 // (parts, left_size)

  // Whether the gradient of W_ih needs a copy of x: with lengths, x may be NaN where dz is 0. With
  // rounds, the recomputed operands have zeros there already.
  static bool reads_masked_x(const cpu::RecurrenceBackward<Real>& g) {
    return g.forward.lengths && g.forward.rounds == 0 && g.dW_ih;
  }

  // terms: of the cell, for each hidden unit
  BackwardWorkspace(const cpu::RecurrenceBackward<Real>& g, const Sizes<Real>& s, int parts,
                    int terms)
      : BackwardWorkspace(g.forward, s, parts, reads_masked_x(g), terms) {
    if (g.dW_hr) h_of_cell = Buffer<Real>(rows * s.ldh);
  }

 private:
  BackwardWorkspace(const cpu::Recurrence<Real>& r, const Sizes<Real>& s, int parts, bool masked_x,
                    int terms_of_cell)
      : rows(s.steps * s.B),
        ldz(leading_dimension<Real>(s.slots * s.H)),
        terms_width(terms_of_cell * s.H),
        ld_terms(terms_of_cell ? leading_dimension<Real>(terms_width) : 0),
        scratch_size(round_up<Element>(TRANSPOSED_SCRATCH<Element>)),
        left_size(left_copy_size<Element, Real>(s.widest())),
        sums_size(round_up<Real>(s.widest())),
        W_ih(packed_size<Element>(s.gates * s.H, s.X)),
        W_hh(s.gates * packed_size<Element>(s.H, s.P)),
        W_hr(r.W_hr ? packed_size<Element>(s.P, s.H) : 0),
        dz(rows * ldz),
        dz_row(1, s.H, s.slots, parts),
        terms(rows * ld_terms),
        dh(s.B, s.P, 1, parts),
        dx(s.rounds ? s.B : 0, s.X, 1, parts),
        dh_carried(s.B, s.P, 1, parts),
        dc_carried(has_c(r.cell) ? s.B : 0, s.H, 1, parts),
        dprojected(r.W_hr ? rows * s.ldp : 0),
        dh_of_cell(r.W_hr ? s.B : 0, s.H, 1, parts),
        state_mask(r.state.threshold ? s.B * s.ldh : 0),
        zoneout(2 * s.ldh * parts),
        sums(2 * sums_size * parts),
        scratch(scratch_size * parts),
        left_copies(left_size * parts) {
    if (masked_x) x_operand[0] = Buffer<Real>(rows * s.ldx);
    h_operand[0] = Buffer<Real>(rows * s.ldp);
    for (int64_t k = 0; k < s.rounds; ++k) {
      if (first_use(r.A, k) == k)
        A[k] = Buffer<Element>(packed_size<Element>(s.out(k), s.rank ? s.rank : s.in(k)));
      if (s.rank && first_use(r.F, k) == k)
        F[k] = Buffer<Element>(packed_size<Element>(s.rank, s.in(k)));
      if (s.rank) dfactors[k] = Buffer<Real>(rows * s.ldr);
      dgate[k] = Buffer<Real>(rows * s.ld_out(k));
      (s.on_x(k) ? x_operand[k / 2 + 1] : h_operand[k / 2 + 1]) = Buffer<Real>(rows * s.ld_out(k));
    }
  }
};

// What one thread computes of the backward pass, and its workspaces.
template <class Real, class Element>
struct BackwardPart : Share {
  Real* zoneout;       // (2, ldh)  for h and for c
  Element* scratch;    // of gemm_transposed
  Element* left_copy;  // a left operand, copied as elements of the products
  Real* sums;          // (2, sums_size)  of column_sums
  Strip<Real> dh = {}, dx = {}, dh_carried = {}, dc_carried = {}, dh_of_cell = {}, dz_row = {};
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
