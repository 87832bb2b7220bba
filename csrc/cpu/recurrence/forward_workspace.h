// How a recurrence's forward pass goes through the steps, its intermediate results, and what one
// thread has of them.
#pragma once
#include "cpu/gemm/gemm.h"
#include "cpu/recurrence/forward_weights.h"
#include "cpu/recurrence/shared_results.h"
#include "cpu/recurrence/sizes.h"
#include "cpu/recurrence/strips.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Decided once per call.
template <class Real, class Element, class Cell>
struct ForwardPlan {
  const bool by_rows;    // whether the parts own rows, see shares_rows
  const bool exchanges;  // whether the parts own columns, and read those of the others
  // Without rounds the inputs' product does not depend on the state. It is computed for a block of
  // so many steps at once: enough rows that W_ih is seldom read, and few enough that the block's
  // gates are still in the L2 cache when their step comes. 0: each step computes its own.
  const int64_t input_block;
  const int64_t steps_of_z;  // the steps whose pre-activations are in memory at the same time
  // Whether y, and the results of the cells and of the rounds that backward reads, are written with
  // streaming stores.
  const bool streams_y, streams_saved;

  ForwardPlan(const cpu::Recurrence<Real>& r, const Sizes<Real>& s, int parts)
      : by_rows(!ForwardWeights<Real, Element, Cell>::are_in_panels(r) &&
                shares_rows<Element>(s, r, parts)),
        exchanges(parts > 1 && !by_rows),
        input_block(s.rounds || by_rows           ? 0
                    : s.B <= CHUNK_ROWS<Real> / 2 ? CHUNK_ROWS<Real> / s.B
                    : s.B < 2 * CHUNK_ROWS<Real>  ? 2 * CHUNK_ROWS<Real> / s.B
                                                  : 1),
        steps_of_z(std::clamp(input_block, int64_t(1), s.steps)),
        streams_y(exchanges && !Cell::WHOLE_ROWS && is_streamed(s, s.P)),
        streams_saved(r.gates && is_streamed(s, Cell::SLOTS * s.Hp)) {}

 private:
  // Whether a tensor (T, B, width) is written with streaming stores: if it would fill a core's L2
  // cache.
  static bool is_streamed(const Sizes<Real>& s, int64_t width) {
    return s.steps * s.B * width * int64_t(sizeof(Real)) >= int64_t(1) << 20;
  }
};

// What one thread computes, and its workspaces.
template <class Real, class Element, class Cell>
struct ForwardPart : ForwardWeights<Real, Element, Cell>::Own {
  Real* zoneout;                // (2, ldh)  for h and for c
  int64_t first_step_of_z = 0;  // the first step whose pre-activations are in z
  Range state = {};             // the columns of the state that it computes
  Real* copy_of_h = nullptr;    // (B, leading_dimension of what the products read)
  Real* copy_of_x = nullptr;    // (B, ldx)
  Strip<Real> z = {}, c = {}, h_carried = {}, gate_of_x = {}, gate_of_h = {};
  Strip<Real> h_in[2] = {}, h_of_cell = {}, h_mogrified = {}, x_mogrified = {};
  Matrix<const Real> h = {}, x = {};  // all columns of the next products' operands
};

// Allocated once per call and shared by all parts of the work.
template <class Real, class Element, class Cell>
struct ForwardWorkspace {
  using Part = ForwardPart<Real, Element, Cell>;
  // A cell that needs its whole row reads c before the step again after it has stored the new c.
  static constexpr int C_SLOTS = Cell::WHOLE_ROWS ? 2 : 1;

  const int64_t ld_copy_of_h;  // the elements of a row of a thread's copy of h
  const int64_t copies_size;   // the elements of its copies of h and x, 0 where it needs none
  const int64_t left_size;     // the elements of a left operand that is copied, see gemm.h
  const int64_t zoneout_size;  // the elements of a thread's factors of zoneout

  // What one thread alone uses. Where the cells need whole rows, the states are those of its rows.
  Strips<Real> z;               // (steps_of_z, B, SLOTS, H)  the gates' pre-activations
  Strips<Real> c;               // (B, C_SLOTS, H)  the cell state
  Strips<Real> h_carried;       // (B, P)  the state that goes from step to step
  Strips<Real> gate_of_x;       // (B, X)  of a round on x
  Strips<Real> gate_of_h;       // (B, H)  of a round on h
  Buffer<Real> copies;          // (parts, copies_size)
  Buffer<Real> zoneout;         // (parts, zoneout_size)
  Buffer<Element> left_copies;  // (parts, left_size)

  // What all threads read.
  Exchange<Real> h_in[2];      // (B, P)  the state with its dropout, of step t in h_in[t % 2]
  Exchange<Real> h_of_cell;    // (B, H)  what a projection reads
  Exchange<Real> h_mogrified;  // (B, H)
  Exchange<Real> x_mogrified;  // (B, X)
  Buffer<Real> state_mask;     // (B, ldh)  the factors of the state's dropout
  const SharedResults<Real> shared_results;

  ForwardWorkspace(const cpu::Recurrence<Real>& r, const Sizes<Real>& s,
                   const ForwardPlan<Real, Element, Cell>& plan, int parts)
      : ld_copy_of_h(std::max(s.ldh, s.ldp)),
        copies_size(plan.exchanges ? s.B * (ld_copy_of_h + (s.rounds ? s.ldx : 0)) : 0),
        left_size(left_copy_size<Element, Real>(s.widest())),
        zoneout_size(2 * s.ldh),
        z(Cell::WHOLE_ROWS ? 0 : plan.steps_of_z * s.B, s.H, Cell::SLOTS, parts),
        c(Cell::HAS_C ? s.B : 0, s.H, C_SLOTS, parts),
        h_carried(s.B, s.P, 1, parts),
        gate_of_x(s.rounds ? s.B : 0, s.X, 1, parts),
        gate_of_h(s.rounds > 1 ? s.B : 0, s.H, 1, parts),
        copies(copies_size * parts),
        zoneout(zoneout_size * parts),
        left_copies(left_size * parts),
        h_in{{s.B, s.P, parts}, {s.B, s.P, parts}},
        h_of_cell(r.W_hr ? s.B : 0, s.H, parts),
        h_mogrified(s.rounds > 1 ? s.B : 0, s.H, parts),
        x_mogrified(s.rounds ? s.B : 0, s.X, parts),
        state_mask(r.state.threshold ? s.B * s.ldh : 0),
        shared_results(r, s, Cell::WHOLE_ROWS ? plan.steps_of_z : 0) {}

  // Returns what a thread has that computes this share. A barrier has to follow before any thread
  // reads what another one computes.
  Part part(const Share& share, const Sizes<Real>& s) {
    Part p{{share, left_copies + left_size * share.begin}, zoneout + zoneout_size * share.begin};
    p.state = Cell::WHOLE_ROWS ? p.cell_units : p.own.p;
    p.copy_of_h = copies + copies_size * p.begin;
    p.copy_of_x = p.copy_of_h + s.B * ld_copy_of_h;
    p.z = z.of(p.own.h, p.begin);
    p.c = c.of(p.cell_units, p.begin);
    p.h_carried = h_carried.of(p.state, p.begin);
    p.gate_of_x = gate_of_x.of(p.own.x, p.begin);
    p.gate_of_h = gate_of_h.of(p.own.h, p.begin);
    for (int i = 0; i < 2; ++i)
      p.h_in[i] = h_in[i].join(p.state, p.begin);
    p.h_of_cell = h_of_cell.join(p.own.h, p.begin);
    p.h_mogrified = h_mogrified.join(p.own.h, p.begin);
    p.x_mogrified = x_mogrified.join(p.own.x, p.begin);
    return p;
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
