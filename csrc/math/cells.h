// The cells of the recurrences, for csrc/cpu/recurrence and csrc/cuda/recurrence. A cell has, for
// each hidden unit,
//
//   GATES     rows of W_ih and of W_hh: gate g of W_ih is added to slot g
//   SLOTS     pre-activations, of which the values that the backward reads are saved in their place
//   HAS_C     a cell state c beside h
//   BLOCKS    ranges of consecutive gates of W_hh that are added to consecutive slots
//   VECTORS   elements of the cell's own parameter vector
//   TERMS     numbers of a row and step whose sums over all of them are gradients of parameters
//             that no product multiplies
//
//   PROJECTS  whether a projection may follow: then it has a function `output` of what was saved
//             and of c before the step, which returns h after it
//
// and two functions of a hidden unit, or of a vector of hidden units:
//
//   forward   z: the pre-activations, then what is saved of them    h, c: the state, updated
//             p: the cell's own parameters
//   backward  a: what was saved    h, c: the state before the step    p: as above
//             dz: the gradients of the pre-activations, on return    terms: on return
//             dh, dc: the gradients of the state after the step, then of that before it, where dh
//             does not include what comes through the product with W_hh
//
// A cell with WHOLE_ROWS has sums over the hidden units of a row. In place of these functions it
// has those of cpu/recurrence/layer_norm_{lstm,gru}_row.h and of
// cuda/recurrence/loop_layer_norm_{lstm,gru}.cuh, and beside these constants STATISTICS, as
// statistics_of, and the term that is the gradient of a slot's pre-activation.
#pragma once
#include "math/cell_kind.h"
#include "math/gru.h"
#include "math/lstm.h"
#include "math/peephole_lstm.h"
#include "math/rnn.h"

namespace fusedseq {

struct Block {
  int slot, gate, gates;  // the first slot and gate, and the number of gates
};

// What most cells have in common.
struct PlainCell {
  static constexpr int VECTORS = 0, TERMS = 0;
  static constexpr bool WHOLE_ROWS = false, PROJECTS = false;
};

// cap: whether min(i, 1 - f) replaces i, see math/lstm.h
template <bool cap>
struct LstmCell : PlainCell {
  static constexpr int GATES = 4, SLOTS = 4;
  static constexpr bool HAS_C = true, PROJECTS = true;
  static constexpr Block BLOCKS[] = {{0, 0, 4}};

  // What a projection reads.
  template <class V>
  HD static V output(const V (&a)[SLOTS], V c) {
    return lstm_cell<cap>(LstmGates<V>{a[0], a[1], a[2], a[3]}, c).h;
  }
  template <class V, class P>
  HD static void forward(V (&z)[SLOTS], V& h, V& c, const P&) {
    const LstmGates<V> a = lstm_gates(LstmGates<V>{z[0], z[1], z[2], z[3]});
    const LstmState<V> state = lstm_cell<cap>(a, c);
    z[0] = a.i;
    z[1] = a.f;
    z[2] = a.g;
    z[3] = a.o;
    h = state.h;
    c = state.c;
  }
  template <class V, class P>
  HD static void backward(const V (&a)[SLOTS], V, V c, const P&, V& dh, V& dc, V (&dz)[SLOTS], V*) {
    const LstmGates<V> d = lstm_cell_backward<cap>(LstmGates<V>{a[0], a[1], a[2], a[3]}, c, dh, dc);
    dz[0] = d.i;
    dz[1] = d.f;
    dz[2] = d.g;
    dz[3] = d.o;
    dh = V(0.f);
  }
};

// The parameters are the peepholes of i, f and o, and the terms are their gradients.
struct PeepholeLstmCell {
  static constexpr int GATES = 4, SLOTS = 4, VECTORS = 3, TERMS = 3;
  static constexpr bool HAS_C = true, WHOLE_ROWS = false, PROJECTS = false;
  static constexpr Block BLOCKS[] = {{0, 0, 4}};

  template <class V, class P>
  HD static void forward(V (&z)[SLOTS], V& h, V& c, const P& p) {
    const LstmGates<V> a =
        peephole_lstm_cell(LstmGates<V>{z[0], z[1], z[2], z[3]}, Peepholes<V>{p[0], p[1], p[2]}, c);
    z[0] = a.i;
    z[1] = a.f;
    z[2] = a.g;
    z[3] = a.o;
    h = a.o * tanh_(c);
  }
  template <class V, class P>
  HD static void backward(const V (&a)[SLOTS], V, V c, const P& p, V& dh, V& dc, V (&dz)[SLOTS],
                          V* terms) {
    Peepholes<V> dp;
    const LstmGates<V> d = peephole_lstm_cell_backward(LstmGates<V>{a[0], a[1], a[2], a[3]}, c,
                                                       Peepholes<V>{p[0], p[1], p[2]}, dh, dc, dp);
    dz[0] = d.i;
    dz[1] = d.f;
    dz[2] = d.g;
    dz[3] = d.o;
    terms[0] = dp.i;
    terms[1] = dp.f;
    terms[2] = dp.o;
    dh = V(0.f);
  }
};

// The slots are the four gates' products with W_ih, then those with W_hh. The terms are the
// gradients of z (4H), and those of gamma_c and of beta_c.
struct LayerNormLstmCell {
  static constexpr int GATES = 4, SLOTS = 8, VECTORS = 10, TERMS = 6, STATISTICS = 4;
  static constexpr bool HAS_C = true, WHOLE_ROWS = true;
  static constexpr Block BLOCKS[] = {{4, 0, 4}};
  HD static constexpr int term(int slot) { return slot % GATES; }
};

// The slots are the three gates' products with W_ih, then those with W_hh. The terms are the
// gradients of the pre-activations of GruCell.
struct LayerNormGruCell {
  static constexpr int GATES = 3, SLOTS = 6, VECTORS = 6, TERMS = 4, STATISTICS = 2;
  static constexpr bool HAS_C = false, WHOLE_ROWS = true;
  static constexpr Block BLOCKS[] = {{3, 0, 3}};
  HD static constexpr int term(int slot) { return slot == 5 ? 3 : slot % GATES; }
};

// The slots are r, z, the new gate's product with W_ih and that with W_hh.
struct GruCell : PlainCell {
  static constexpr int GATES = 3, SLOTS = 4;
  static constexpr bool HAS_C = false;
  static constexpr Block BLOCKS[] = {{0, 0, 2}, {3, 2, 1}};

  template <class V, class P>
  HD static void forward(V (&z)[SLOTS], V& h, V&, const P&) {
    const GruGates<V> a = gru_gates(GruGates<V>{z[0], z[1], z[2], z[3]});
    z[0] = a.r;
    z[1] = a.z;
    z[2] = a.n;
    h = gru_cell(a, h);
  }
  template <class V, class P>
  HD static void backward(const V (&a)[SLOTS], V h, V, const P&, V& dh, V&, V (&dz)[SLOTS], V*) {
    const GruGates<V> d = gru_cell_backward(GruGates<V>{a[0], a[1], a[2], a[3]}, h, dh);
    dz[0] = d.r;
    dz[1] = d.z;
    dz[2] = d.n;
    dz[3] = d.q;
  }
};

// rectified: max(z, 0) and not tanh(z)
template <bool rectified>
struct RnnCell : PlainCell {
  static constexpr int GATES = 1, SLOTS = 1;
  static constexpr bool HAS_C = false;
  static constexpr Block BLOCKS[] = {{0, 0, 1}};

  template <class V, class P>
  HD static void forward(V (&z)[SLOTS], V& h, V&, const P&) {
    h = z[0] = rnn_cell<rectified>(z[0]);
  }
  template <class V, class P>
  HD static void backward(const V (&a)[SLOTS], V, V, const P&, V& dh, V&, V (&dz)[SLOTS], V*) {
    dz[0] = rnn_cell_backward<rectified>(a[0], dh);
    dh = V(0.f);
  }
};

// Returns the gate of W_hh that is added to a slot, or -1.
template <class Cell>
HD constexpr int hidden_gate(int slot) {
  constexpr Block first = Cell::BLOCKS[0];
  constexpr Block last = Cell::BLOCKS[sizeof Cell::BLOCKS / sizeof(Block) - 1];
  if (slot >= first.slot && slot < first.slot + first.gates) return first.gate + slot - first.slot;
  if (slot >= last.slot && slot < last.slot + last.gates) return last.gate + slot - last.slot;
  return -1;
}

// Calls with(cell) with the cell of a recurrence.
template <class F>
void with_cell(CellKind kind, bool cap_input_gate, F with) {
  switch (kind) {
    case CellKind::lstm:
      return cap_input_gate ? with(LstmCell<true>{}) : with(LstmCell<false>{});
    case CellKind::peephole_lstm:
      return with(PeepholeLstmCell{});
    case CellKind::layer_norm_lstm:
      return with(LayerNormLstmCell{});
    case CellKind::layer_norm_gru:
      return with(LayerNormGruCell{});
    case CellKind::gru:
      return with(GruCell{});
    case CellKind::rnn_tanh:
      return with(RnnCell<false>{});
    case CellKind::rnn_relu:
      return with(RnnCell<true>{});
  }
}

}  // namespace fusedseq
