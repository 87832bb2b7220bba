// The operands of the products of a recurrence's backward pass, and the gradients that are products
// or sums over all T * B rows: those of the weights and, without rounds, that of x. They are
// computed after the loop of backward.h, each part those of its own rows or columns.
#pragma once
#include "cpu/gemm/gemm.h"
#include "cpu/recurrence/backward_workspace.h"
#include "cpu/recurrence/cells.h"
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "math/mogrifier.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Element: Real or bf16_pair
template <class Real, class Element, class Cell>
class BackwardProducts {
 public:
  using Part = BackwardPart<Real, Element>;

  BackwardProducts(const cpu::RecurrenceBackward<Real>& g, const Sizes<Real>& s,
                   BackwardWorkspace<Real, Element>& w, int parts, bool by_rows)
      : g(g), r(g.forward), s(s), w(w), parts(parts), by_rows(by_rows) {}

  // The saved sigmoids of round k in a row of T * B.
  const Real* gate(int64_t k, int64_t row) const {
    return r.round_gates + row * s.round_width + s.round_offset[k];
  }

  // The state h before step t of row b, (P,), or null where it is zero.
  const Real* h_before(int64_t t, int64_t b) const {
    return fusedseq::h_before<Real>(r, s.P, r.h0, r.y, t, b);
  }

  // Recomputes the operands of row b at step t, before and after each round, from the saved
  // sigmoids.
  void recompute_operands(const Columns& own, int64_t t, int64_t b) const {
    const int64_t row = t * s.B + b;
    const Real* before = h_before(t, b);
    for (int64_t j = own.p.begin; j < own.p.end; j += LANES<Real>) {
      Vec<Real> h = before ? Vec<Real>::load(before + j, s.P - j) : Vec<Real>(Real(0));
      if (r.state.threshold) h = part_of(Vec<Real>::load(w.state_mask + b * s.ldh + j), h);
      h.store(w.h_operand[0] + row * s.ldp + j);
      for (int64_t k = 1; k < s.rounds; k += 2) {
        h = mogrify(Vec<Real>::load(gate(k, row) + j), h);
        h.store(w.h_operand[k / 2 + 1] + row * s.ldh + j);
      }
    }
    if (s.rounds || w.x_operand[0])
      for (int64_t j = own.x.begin; j < own.x.end; j += LANES<Real>) {
        Vec<Real> x = load_input(r, t, b, j);
        if (w.x_operand[0]) x.store(w.x_operand[0] + row * s.ldx + j);
        for (int64_t k = 0; k < s.rounds; k += 2) {
          x = mogrify(Vec<Real>::load(gate(k, row) + j), x);
          x.store(w.x_operand[k / 2 + 1] + row * s.ldx + j);
        }
      }
  }

  // Without rounds only the products after the loop read the operands. Each part computes rows of
  // T * B, or where the parts own rows of the batch those of its own.
  void recompute_operands_of_rows(const Part& p) const {
    const int64_t first = by_rows ? 0 : w.rows * p.begin / parts;
    const int64_t last = by_rows ? w.rows : w.rows * p.end / parts;
    for (int64_t row = first; row < last; ++row)
      if (p.rows.contains(row % s.B)) recompute_operands(all_columns(s), row / s.B, row % s.B);
  }

  // All gradients that are not those of the state, after the loop.
  void run(const Part& p) const {
    gradient_of_x(p);
    gate_weight_gradients(p);
    vector_gradients(p);
    round_weight_gradients(p);
  }

 private:
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;

  const cpu::RecurrenceBackward<Real>& g;
  const cpu::Recurrence<Real>& r;
  const Sizes<Real>& s;
  BackwardWorkspace<Real, Element>& w;
  const int parts;
  const bool by_rows;

  int64_t rounds_on_x() const { return (s.rounds + 1) / 2; }
  int64_t rounds_on_h() const { return s.rounds / 2; }

  // dW (out, columns) (+)= d^T operand over all T * B rows, unless dW is null. Each part computes
  // rows of dW.
  void weight_gradient(const Part& p, Real* dW, int64_t out, int64_t columns, Matrix<const Real> d,
                       Matrix<const Real> operand, bool accumulate) const {
    const Range own{out * p.begin / parts, out * p.end / parts};
    if (dW)
      gemm_transposed<Element>(w.rows, columns, own, d, operand, Matrix<Real>{dW, columns},
                               accumulate, p.scratch);
  }

  // out (width,) (+)= the sums of the columns of d over all T * B rows, unless out is null. Each
  // part computes columns.
  void bias_gradient(const Part& p, Real* out, int64_t width, Matrix<const Real> d,
                     bool accumulate) const {
    if (!out) return;
    const Range own = own_columns<Real>(width, p.begin, p.end, parts);
    column_sums(w.rows, d.p + own.begin, d.ld, own.size(), p.sums, p.sums + w.sums_size);
    if (accumulate)
      add_row((const Real*)p.sums, out + own.begin, own.size(), Real(1));
    else
      memcpy(out + own.begin, p.sums, own.size() * sizeof(Real));
  }

  // Without rounds: the gradient of x. Where the parts own rows of the batch, each computes rows of
  // dx.
  void gradient_of_x(const Part& p) const {
    if (s.rounds || !g.dx) return;
    const int64_t first = by_rows ? w.rows * p.begin / parts : 0;
    const int64_t last = by_rows ? w.rows * p.end / parts : w.rows;
    gemm<Element, Real>(last - first, GATES * s.H, p.own.x.size(), {w.dz + first * w.ldz, w.ldz},
                        w.W_ih + depth<Element>(GATES * s.H) * p.own.x.begin,
                        {g.dx + first * s.X + p.own.x.begin, s.X, false, false}, p.left_copy);
  }

  // The gradients of W_ih, W_hh, W_hr and b.
  void gate_weight_gradients(const Part& p) const {
    const Real* operand = w.x_operand[rounds_on_x()];  // null without rounds and lengths
    const Matrix<const Real> x =
        operand ? Matrix<const Real>{operand, s.ldx} : Matrix<const Real>{r.x, s.X};
    weight_gradient(p, g.dW_ih, GATES * s.H, s.X, {w.dz, w.ldz}, x, false);
    for (const Block& block : Cell::BLOCKS)
      weight_gradient(p, g.dW_hh ? g.dW_hh + block.gate * s.H * s.P : nullptr, block.gates * s.H,
                      s.P, {w.dz + block.slot * s.H, w.ldz}, {w.h_operand[rounds_on_h()], s.ldp},
                      false);
    weight_gradient(p, g.dW_hr, s.P, s.H, {w.dprojected, s.ldp}, {w.h_of_cell, s.ldh}, false);
    if (!Cell::WHOLE_ROWS) bias_gradient(p, g.db, SLOTS * s.H, {w.dz, w.ldz}, false);
  }

  // The gradients of the cell's own parameters, and of b with layer normalization. Products with
  // saved values are summed in the order of column_sums.
  void vector_gradients(const Part& p) const {
    const Matrix<const Real> terms{w.terms, w.ld_terms};
    if constexpr (Cell::WHOLE_ROWS) {
      constexpr int PRE_ACTIVATIONS = WholeRow<Real, Cell>::PRE_ACTIVATIONS;
      bias_gradient(p, g.db, PRE_ACTIVATIONS * s.H, terms, false);
      if (!g.dvectors) return;
      const Range own = own_columns<Real>(s.H, p.begin, p.end, parts);
      for (int slot = 0; slot < SLOTS; ++slot)
        product_sums(w.rows, own.size(), terms.p + Cell::term(slot) * s.H + own.begin, terms.ld,
                     r.gates + slot * s.Hp + own.begin, SLOTS * s.Hp,
                     g.dvectors + slot * s.H + own.begin, p.sums);
      if constexpr (Cell::TERMS > PRE_ACTIVATIONS)
        bias_gradient(p, g.dvectors + SLOTS * s.H, (Cell::TERMS - PRE_ACTIVATIONS) * s.H,
                      {terms.p + PRE_ACTIVATIONS * s.H, terms.ld}, false);
    } else if (Cell::TERMS) {
      bias_gradient(p, g.dvectors, w.terms_width, terms, false);
    }
  }

  // The gradients of the rounds' weights. Those of a shared weight are summed.
  void round_weight_gradients(const Part& p) const {
    for (int64_t k = 0; k < s.rounds; ++k) {
      const bool on_x = s.on_x(k);
      const Matrix<const Real> dgate{w.dgate[k], s.ld_out(k)};
      const Matrix<const Real> operand{on_x ? w.h_operand[k / 2] : w.x_operand[k / 2 + 1],
                                       on_x ? s.ldh : s.ldx};
      const auto repeated = [&](Real* const* d) {
        return d[k] && first_use(d, k) < k;
      };
      if (s.rank) {
        weight_gradient(p, g.dA[k], s.out(k), s.rank, dgate, {r.factors + k * w.rows * s.rp, s.rp},
                        repeated(g.dA));
        weight_gradient(p, g.dF[k], s.rank, s.in(k), {w.dfactors[k], s.ldr}, operand,
                        repeated(g.dF));
      } else {
        weight_gradient(p, g.dA[k], s.out(k), s.in(k), dgate, operand, repeated(g.dA));
      }
      bias_gradient(p, g.dbias[k], s.out(k), dgate, repeated(g.dbias));
    }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
