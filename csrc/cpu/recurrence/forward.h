// The recurrences over a whole sequence, forward: the LSTM, plain, with peepholes and with layer
// normalization, the Mogrifier LSTM, the GRU, plain and with layer normalization, and the simple
// RNN, whose cells are in cells.h.
//
// One team of threads runs all time steps. Each part of the work owns a range of hidden units (and
// of inputs, and of a low rank's columns). It packs its own columns of every weight once, or panel
// by panel (see forward_weights.h), and after each product does the pointwise work of the columns
// that it has just computed. A step has a barrier after each round (two if the rank is low) and one
// after the gates. Where the batch has many rows and the weights are small, each part owns rows of
// the batch instead, of which it computes all columns, and no step has a barrier: see shares_rows.
// The loop allocates no memory, except for the digits of weights in 8 bits. A cell with layer
// normalization needs all columns of a row: after the products and a barrier each part computes
// the cells of its rows of the batch. A projection is one more product at the end of a step, with a
// barrier before and after it.
//
// Layout: rows are those of the batch; within a row, the slots of all hidden units (the gates of an
// LSTM) follow each other. Rows of saved tensors are padded to PAD elements, rows of workspaces
// also to avoid cache conflicts (see buffer.h), so that all loops run over whole vectors. What a
// part alone reads and changes is in a strip of its own, and of what all parts read, each has a
// copy of its own: see strips.h. Streaming stores write what other parts or only the backward pass
// read: see streaming.h.
//
// What limits it: with 20 rows and more the multiply-add units; with one row reading the weights
// from the L3 cache, which happens once a step. Without rounds the product x W_ih^T is computed for
// blocks of steps; with rounds it cannot be, because x is then modified in each step.
#pragma once
#include "cpu/gemm/gemm.h"
#include "cpu/recurrence/cells.h"
#include "cpu/recurrence/forward_workspace.h"
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "cpu/simd/streaming.h"
#include "math/mogrifier.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Element: Real or bf16_pair
template <class Real, class Element, class Cell>
class RecurrentForward {
 public:
  RecurrentForward(const cpu::Recurrence<Real>& r, int parts)
      : r(r),
        s(r),
        parts(parts),
        plan(r, s, parts),
        w(r, s, plan, parts),
        weights(r, s, parts),
        barrier(parts) {}

  // Parts [begin, end) of the team.
  void run(int64_t begin, int64_t end) {
    Part p =
        w.part({s, begin, end, parts, plan.by_rows, PANEL_COLUMNS<Element>, Cell::WHOLE_ROWS}, s);
    weights.pack(p.packed);
    prepare_state(p);
    barrier.wait(p.parts());

    p.h = w.h_in[nth_step(r, 0) % 2].gather(p.state, p.copy_of_h);
    for (int64_t n = 0; n < s.steps; ++n) {
      const int64_t t = nth_step(r, n);
      if (!plan.input_block) {
        p.first_step_of_z = t;
      } else if (n % plan.input_block == 0) {
        const int64_t steps = std::min(s.steps - n, plan.input_block);
        p.first_step_of_z = r.reverse ? s.steps - n - steps : n;
        add_inputs(p, p.first_step_of_z, steps);
      }
      for (int64_t k = 0; k < s.rounds; ++k)
        round(p, t, k);
      gates(p, t);
      wait(p);
      if (r.W_hr) {
        p.h = w.h_of_cell.gather(p.own.h, p.copy_of_h);
        project(p, t);
        wait(p);
      }
      p.h = w.h_in[(t + 1) % 2].gather(p.state, p.copy_of_h);
    }
    store_last_state(p);
    stream_fence();
  }

 private:
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;
  using Part = ForwardPart<Real, Element, Cell>;
  using Weight = typename ForwardWeights<Real, Element, Cell>::Weight;

  const cpu::Recurrence<Real>& r;
  const Sizes<Real> s;
  const int parts;
  const ForwardPlan<Real, Element, Cell> plan;
  ForwardWorkspace<Real, Element, Cell> w;
  ForwardWeights<Real, Element, Cell> weights;
  Barrier barrier;

  // Waits until all parts have come here, unless no part needs what another one computes.
  void wait(const Part& p) {
    if (plan.by_rows) return;
    stream_fence();
    barrier.wait(p.parts());
  }

  // Generates the mask of the state's dropout and loads h0 and c0.
  void prepare_state(const Part& p) {
    memset(p.zoneout, 0,
           w.zoneout_size * sizeof(Real));  // so that no load reads uninitialized padding
    for (int64_t b = p.cell_rows.begin; b < p.cell_rows.end; ++b) {
      if (r.state.threshold)
        mask_values(r.state, b, s.H, p.cell_units.begin, p.cell_units.end, Real(r.state.scale),
                    Real(0), w.state_mask + b * s.ldh + p.cell_units.begin);
      const int64_t first = nth_step(r, 0);
      const bool reset = resets(r, first, b);
      for (int64_t j = p.cell_units.begin; Cell::HAS_C && j < p.cell_units.end; j += LANES<Real>)
        Vec<Real>::load(r.c0 + b * s.H + j, s.H - j).store(c_of(p, first, b, j));
      for (int64_t j = p.state.begin; j < p.state.end; j += LANES<Real>) {
        const Vec<Real> h =
            reset ? Vec<Real>(Real(0)) : Vec<Real>::load(r.h0 + b * s.P + j, s.P - j);
        h.store(p.h_carried.at(b, j));
        drop_state(h, b, j).store(p.h_in[first % 2].at(b, j));
      }
    }
  }

  // The cell state of row b before step t, from unit j on. For t + 1: after step t, also in
  // reverse.
  Real* c_of(const Part& p, int64_t t, int64_t b, int64_t j) const {
    return p.c.at(b, j, t % w.C_SLOTS);
  }

  // Returns the state with its dropout, for the units from j on in row b.
  HD Vec<Real> drop_state(Vec<Real> h, int64_t b, int64_t j) const {
    if (!r.state.threshold) return h;
    return part_of(Vec<Real>::load(w.state_mask + b * s.ldh + j, s.H - j), h);
  }

  // Round k of step t: the operand that it scales is multiplied by twice the sigmoid of a product
  // with the other operand.
  void round(Part& p, int64_t t, int64_t k) {
    const bool on_x = s.on_x(k);
    const Range out = on_x ? p.own.x : p.own.h;
    const Matrix<const Real> operand = on_x ? p.h : p.x;
    const int64_t K = s.rank ? s.rank : s.in(k);
    const Strip<Real> gate = on_x ? p.gate_of_x : p.gate_of_h;
    Real* const saved = r.round_gates ? r.round_gates + t * s.B * s.round_width + s.round_offset[k]
                                      : nullptr;  // (B, round_width)
    const Weight last = weights.last_of_round(p, k);
    const Weight next = k + 1 < s.rounds ? weights.first_of_round(p, k + 1) : weights.of_x(0, p);
    const int64_t first = p.rows.begin, rows = p.rows.size();
    const Matrix<const Real> left{operand.p + first * operand.ld, operand.ld};
    const Output<Real> product{gate.at(first, out.begin), gate.ld, true, false};

    // The product of the part's rows. With a low rank there are two, and the second needs all
    // columns of the first.
    if (s.rank) {
      Real* u = w.shared_results.factors(k, t) + first * s.rp;  // (rows, rp)
      weights.multiply(p, rows, s.in(k), p.own.r.size(), left, weights.first_of_round(p, k),
                       {u + p.own.r.begin, s.rp, true, false}, last);
      wait(p);
      weights.multiply(p, rows, K, out.size(), Matrix<const Real>{u, s.rp}, last, product, next);
    } else {
      weights.multiply(p, rows, K, out.size(), left, last, product, next);
    }

    // Bias, sigmoid (saved for backward) and the operand's new value. The first round on x and the
    // first one on h start from the step's inputs, later rounds from the previous one's result.
    const Real* bias = r.bias[k];  // (out,) or null
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b)
      for (int64_t j = out.begin; j < out.end; j += LANES<Real>) {
        Vec<Real> g = Vec<Real>::load(gate.at(b, j));
        if (bias) g = g + Vec<Real>::load(bias + j, s.out(k) - j);
        g = sigmoid(g);
        if (saved) store(saved + b * s.round_width + j, g, plan.streams_saved);
        if (on_x) {
          Real* x = p.x_mogrified.at(b, j);
          const Vec<Real> before = k == 0 ? load_input(r, t, b, j) : Vec<Real>::load(x);
          store(x, mogrify(g, before), plan.exchanges);
        } else {
          Real* h = p.h_mogrified.at(b, j);
          const Vec<Real> before = Vec<Real>::load(k == 1 ? p.h_in[t % 2].at(b, j) : h);
          store(h, mogrify(g, before), plan.exchanges);
        }
      }
    wait(p);
    if (on_x)
      p.x = w.x_mogrified.gather(p.own.x, p.copy_of_x);
    else
      p.h = w.h_mogrified.gather(p.own.h, p.copy_of_h);
  }

  // The part's columns of rows of z, from row `first` on, (+)= operand (rows, K) times a weight.
  // weight_of: (gate) -> its part of the weight    block: the gates of the weight and the first
  // slot of z next: the weight that is multiplied after it
  template <class WeightOf>
  void add_gates(const Part& p, int64_t first, int64_t rows, int64_t K, Matrix<const Real> operand,
                 WeightOf weight_of, const Strip<Real>& z, Block block, bool accumulate,
                 Weight next) {
    each_chunk(rows, K, operand, p.left_copy,
               [&](int64_t m, int64_t height, LeftOperand<Element> left) {
                 for (int i = 0; i < block.gates; ++i) {
                   const int g = block.gate + i;
                   weights.multiply(
                       p, height, K, p.own.h.size(), left, weight_of(g),
                       {z.at(first + m, p.own.h.begin, block.slot + i), z.ld, true, accumulate},
                       i + 1 < block.gates ? weight_of(g + 1) : next);
                 }
               });
  }

  // The gates' products with the inputs, which are added to the first slots.
  static constexpr Block INPUTS = {0, 0, GATES};

  void add_products_of_x(const Part& p, int64_t first, int64_t rows, Matrix<const Real> x,
                         const Strip<Real>& z) {
    const auto weight_of = [&](int gate) {
      return weights.of_x(gate, p);
    };
    add_gates(p, first, rows, s.X, x, weight_of, z, INPUTS, false, weights.of_h(0, p));
  }

  // The inputs' part of the gates of a block of steps, from step t on. The rows past the end of a
  // sequence are computed too, and not used.
  void add_inputs(const Part& p, int64_t t, int64_t steps) {
    add_products_of_x(p, 0, steps * s.B, {r.x + t * s.B * s.X, s.X}, z_of(p, t));
  }

  // The pre-activations of step t, which is in the present block, and of the steps after it. Where
  // the cells need whole rows, the pre-activations are in the shared results.
  Strip<Real> z_of(const Part& p, int64_t t) const {
    if (Cell::WHOLE_ROWS)
      return {w.shared_results.gates(t, p.first_step_of_z), SLOTS * s.Hp, s.Hp, 0};
    return {p.z.p + (t - p.first_step_of_z) * s.B * p.z.ld, p.z.ld, p.z.ld_slot, p.z.first};
  }

  // The gates of step t and, from them, the new state.
  void gates(const Part& p, int64_t t) {
    const int64_t first = p.rows.begin, rows = p.rows.size();
    const Strip<Real> z = z_of(p, t);
    const Matrix<const Real> h{p.h.p + first * p.h.ld, p.h.ld};
    if (!plan.input_block) {
      const Matrix<const Real> x = s.rounds
                                       ? Matrix<const Real>{p.x.p + first * p.x.ld, p.x.ld}
                                       : Matrix<const Real>{r.x + (t * s.B + first) * s.X, s.X};
      add_products_of_x(p, first, rows, x, z);
    }
    constexpr int last = sizeof Cell::BLOCKS / sizeof(Block) - 1;
    for (int i = 0; i <= last; ++i) {
      const Block block = Cell::BLOCKS[i];
      const Weight next = i < last ? weights.of_h(Cell::BLOCKS[i + 1].gate, p)
                          : r.W_hr ? weights.of_projection(p)
                                   : weights.first_of_step(p);
      const auto weight_of = [&](int gate) {
        return weights.of_h(gate, p);
      };
      add_gates(p, first, rows, s.P, h, weight_of, z, block, block.slot < GATES, next);
    }
    if (Cell::WHOLE_ROWS) wait(p);
    for (int64_t b = p.cell_rows.begin; b < p.cell_rows.end; ++b)
      cell(p, t, b, z);
  }

  // The cell of row b at step t, from its pre-activations. Saves the activated gates and c.
  void cell(const Part& p, int64_t t, int64_t b, const Strip<Real>& z) {
    const bool alive = !has_ended(r.lengths, t, b), reset = resets(r, t, b);
    Real* const saved = r.gates ? r.gates + (t * s.B + b) * SLOTS * s.Hp : nullptr;  // (SLOTS, Hp)
    Real* const saved_c =
        r.gates && Cell::HAS_C ? r.cells + (t * s.B + b) * s.Hp : nullptr;  // (Hp,)
    const StateRow next = state_row(p, t, b);
    const Update<Real> update =
        alive ? update_of(r, p.cell_units, t, b, p.zoneout, s.ldh) : Update<Real>{};
    if constexpr (Cell::WHOLE_ROWS) {
      const Real* before = !Cell::HAS_C ? next.carried : reset ? nullptr : c_of(p, t, b, 0);
      Real* statistics = w.shared_results.statistics(t) + b * Cell::STATISTICS;
      const WholeRow<Real, Cell> row{{s.H, s.Hp, Real(r.eps), r.b, r.vectors, before, z.at(b, 0),
                                      c_of(p, t + 1, b, 0), statistics}};
      alive ? row.forward(next.y) : row.clear();
    }

    const Vec<Real> zero(Real(0));
    for (int64_t j = p.cell_units.begin; j < p.cell_units.end; j += LANES<Real>) {
      // Activate the gates and save them.
      const int64_t n = s.H - j;
      const Vec<Real> h_old = r.W_hr ? zero : Vec<Real>::load(next.carried + j);
      const Vec<Real> c_old = Cell::HAS_C && !reset ? Vec<Real>::load(c_of(p, t, b, j)) : zero;
      Vec<Real> h_new = h_old, c_new = c_old;
      if constexpr (Cell::WHOLE_ROWS) {
        if (alive) h_new = Vec<Real>::load(next.y + j, n);
        if (alive && Cell::HAS_C) c_new = Vec<Real>::load(c_of(p, t + 1, b, j));
      } else {
        Vec<Real> a[SLOTS];
        for (int slot = 0; slot < SLOTS; ++slot) {
          a[slot] = Vec<Real>::load(z.at(b, j, slot));
          if (r.b) a[slot] = a[slot] + Vec<Real>::load(r.b + slot * s.H + j, n);
        }
        Cell::forward(a, h_new, c_new, VectorsAt<Real>{r.vectors, s.H, j});
        for (int slot = 0; saved && slot < SLOTS; ++slot)
          store(saved + slot * s.Hp + j, a[slot], plan.streams_saved);
      }

      // The new state. A row whose sequence has ended retains its state.
      const int64_t unit = j - p.cell_units.begin;
      if (Cell::HAS_C) {
        const Vec<Real> c = alive ? mix(update.c, unit, c_new, c_old) : c_old;
        c.store(c_of(p, t + 1, b, j));
        if (saved_c) store(saved_c + j, c, plan.streams_saved);
      }
      if (r.W_hr)
        store(p.h_of_cell.at(b, j), alive ? h_new : zero, plan.exchanges);
      else
        store_state(next, j, alive ? mix(update.h, unit, h_new, h_old) : h_old);
    }
    if (!r.W_hr) stream_y(p, next);
  }

  // Where row b's state h after step t is stored.
  struct StateRow {
    int64_t b;
    Real *y, *carried, *next_in;  // indexed by the unit, which has to be one of the thread's own
    bool alive, next_resets;      // whether the next step starts from zero
    bool streams_y;               // whether stream_y stores y
  };
  StateRow state_row(const Part& p, int64_t t, int64_t b) const {
    const bool is_last = t == nth_step(r, s.steps - 1), alive = !has_ended(r.lengths, t, b);
    const bool next_resets = !is_last && resets(r, step_after(r, t), b);
    return {b,
            r.y + (t * s.B + b) * s.P,
            p.h_carried.at(b, 0),
            p.h_in[(t + 1) % 2].at(b, 0),
            alive,
            next_resets,
            plan.streams_y && alive && !next_resets};
  }
  // Stores the units from j on of the state, and of the output: zero where the sequence has ended.
  HD void store_state(const StateRow& to, int64_t j, Vec<Real> h) const {
    const Vec<Real> zero(Real(0));
    if (!to.streams_y) (to.alive ? h : zero).store(to.y + j, s.P - j);
    if (to.next_resets) h = zero;
    h.store(to.carried + j);
    store(to.next_in + j, drop_state(h, to.b, j), plan.exchanges);
  }
  // Stores the part's columns of a row of y, which are those of the state, unless store_state has.
  HD void stream_y(const Part& p, const StateRow& to) const {
    if (to.streams_y) stream_row(to.carried + p.state.begin, to.y + p.state.begin, p.state.size());
  }

  // The state after step t from what the cells have computed, with a projection.
  void project(const Part& p, int64_t t) {
    const Strip<Real> products = p.h_in[(t + 1) % 2];  // where store_state replaces them
    const int64_t first = p.rows.begin;
    weights.multiply(p, p.rows.size(), s.H, p.own.p.size(),
                     Matrix<const Real>{p.h.p + first * p.h.ld, p.h.ld}, weights.of_projection(p),
                     {products.at(first, p.own.p.begin), products.ld, true, false},
                     weights.first_of_step(p));
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      const StateRow to = state_row(p, t, b);
      const Real* h = to.alive ? to.next_in : to.carried;
      for (int64_t j = p.own.p.begin; j < p.own.p.end; j += LANES<Real>)
        store_state(to, j, Vec<Real>::load(h + j));
      stream_y(p, to);
    }
  }

  void store_last_state(const Part& p) {
    const int64_t end = nth_step(r, s.steps - 1) + 1;
    for (int64_t b = p.cell_rows.begin; b < p.cell_rows.end; ++b) {
      for (int64_t j = p.state.begin; j < p.state.end; j += LANES<Real>)
        Vec<Real>::load(p.h_carried.at(b, j)).store(r.h + b * s.P + j, s.P - j);
      for (int64_t j = p.cell_units.begin; Cell::HAS_C && j < p.cell_units.end; j += LANES<Real>)
        Vec<Real>::load(c_of(p, end, b, j)).store(r.c + b * s.H + j, s.H - j);
    }
  }
};

template <class Element, class Real>
void recurrence(const cpu::Recurrence<Real>* r, int count, cpu::Parallel run, int threads) {
  with_cell(r->cell, r->cap_input_gate, [&](auto cell) {
    run_side_by_side<RecurrentForward<Real, Element, decltype(cell)>>(r, count, run, threads);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
