// The gradients of the recurrence of forward.h, backward through time.
//
// The loop goes from the last step to the first and only propagates the gradients of the data. It
// stores the operands of every product (recomputed from the saved sigmoids) and the gradients of
// every pre-activation, so that after the loop each weight's gradient is one product over all
// T * B rows: see backward_products.h.
//
// The split of the work and what limits it are those of forward.h: each part owns columns, and
// there is a barrier before each product that needs the columns of all parts; or it owns rows.
// After the loop each part computes the gradients of its columns.
#pragma once
#include "cpu/gemm/gemm.h"
#include "cpu/recurrence/backward_products.h"
#include "cpu/recurrence/cells.h"
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "cpu/simd/streaming.h"
#include "math/mogrifier.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Element: Real or bf16_pair
template <class Real, class Element, class Cell>
class RecurrentBackward {
 public:
  RecurrentBackward(const cpu::RecurrenceBackward<Real>& g, int parts)
      : g(g),
        r(g.forward),
        s(r),
        w(g, s, parts, Cell::TERMS),
        parts(parts),
        by_rows(shares_rows<Element>(s, r, parts)),
        exchanges(parts > 1 && !by_rows),
        products(g, s, w, parts, by_rows),
        barrier(parts) {}

  // Parts [begin, end) of the team.
  void run(int64_t begin, int64_t end) {
    Part p{{s, begin, end, parts, by_rows, PANEL_COLUMNS<Element>, Cell::WHOLE_ROWS},
           w.zoneout + 2 * s.ldh * begin,
           w.scratch + w.scratch_size * begin,
           w.left_copies + w.left_size * begin,
           w.sums + 2 * w.sums_size * begin};
    prepare_strips(p);
    pack_weights(p.packed);
    if (by_rows) barrier.wait(p.parts());
    prepare_state(p);
    if (Cell::WHOLE_ROWS) wait(p);
    for (int64_t n = s.steps - 1; n >= 0; --n)
      step(p, nth_step(r, n));
    store_state_gradients(p);
    if (!s.rounds) products.recompute_operands_of_rows(p);
    barrier.wait(p.parts());
    products.run(p);
  }

 private:
  using Part = BackwardPart<Real, Element>;
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;

  const cpu::RecurrenceBackward<Real>& g;
  const cpu::Recurrence<Real>& r;
  const Sizes<Real> s;
  BackwardWorkspace<Real, Element> w;
  const int parts;
  const bool by_rows;
  const bool exchanges;  // whether the parts own columns, and read those of the others
  const BackwardProducts<Real, Element, Cell> products;
  Barrier barrier;

  // The packed gates of a block of W_hh, from a column on.
  Element* packed_block(const Block& block, int64_t column) const {
    return w.W_hh + packed_size<Element>(block.gate * s.H, s.P) +
           depth<Element>(block.gates * s.H) * column;
  }

  // Waits until all parts have come here, unless no part needs what another one computes.
  void wait(const Part& p) {
    if (by_rows) return;
    stream_fence();
    barrier.wait(p.parts());
  }

  // Packs columns of the weights, this time as right operands of dz W.
  void pack_weights(const Columns& p) {
    const int64_t K = GATES * s.H;
    if (s.rounds || g.dx)
      pack_weight(r, r.W_ih, p.x.begin, s.X, 1, K, p.x.size(),
                  w.W_ih + depth<Element>(K) * p.x.begin);
    for (const Block& block : Cell::BLOCKS)
      pack_weight(r, r.W_hh, block.gate * s.H * s.P + p.p.begin, s.P, 1, block.gates * s.H,
                  p.p.size(), packed_block(block, p.p.begin));
    if (r.W_hr)
      pack_weight(r, r.W_hr, p.h.begin, s.H, 1, s.P, p.h.size(),
                  w.W_hr + depth<Element>(s.P) * p.h.begin);
    for (int64_t k = 0; k < s.rounds; ++k) {
      const Range in = s.on_x(k) ? p.h : p.x, columns = s.rank ? p.r : in;
      const int64_t ld = s.rank ? s.rank : s.in(k);
      if (first_use(r.A, k) == k)
        pack_weight(r, r.A[k], columns.begin, ld, 1, s.out(k), columns.size(),
                    w.A[k] + depth<Element>(s.out(k)) * columns.begin);
      if (s.rank && first_use(r.F, k) == k)
        pack_weight(r, r.F[k], in.begin, s.in(k), 1, s.rank, in.size(),
                    w.F[k] + depth<Element>(s.rank) * in.begin);
    }
  }

  // Finds the strips of a thread. Where the cells need whole rows, one thread computes a row of the
  // state's gradients and another one changes columns of it: then all threads share one strip.
  void prepare_strips(Part& p) const {
    p.dh = w.dh.of(p.own.p, p.begin);
    p.dx = w.dx.of(p.own.x, p.begin);
    p.dh_carried = w.dh_carried.of(Cell::WHOLE_ROWS ? p.cell_units : p.own.p, p.begin);
    p.dc_carried = w.dc_carried.of(p.cell_units, p.begin);
    p.dh_of_cell = w.dh_of_cell.of(p.own.h, p.begin);
    p.dz_row = w.dz_row.of(p.own.h, p.begin);
  }

  // Generates the mask of the state's dropout and loads dh and dc.
  void prepare_state(const Part& p) {
    memset(p.zoneout, 0, 2 * s.ldh * sizeof(Real));  // so that no load reads uninitialized padding
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      if (r.state.threshold)
        mask_values(r.state, b, s.H, p.own.h.begin, p.own.h.end, Real(r.state.scale), Real(0),
                    w.state_mask + b * s.ldh + p.own.h.begin);
      for (int64_t j = p.own.p.begin; j < p.own.p.end; j += LANES<Real>)
        Vec<Real>::load(g.dh + b * s.P + j, s.P - j).store(p.dh_carried.at(b, j));
      for (int64_t j = p.own.h.begin; Cell::HAS_C && j < p.own.h.end; j += LANES<Real>)
        Vec<Real>::load(g.dc + b * s.H + j, s.H - j).store(p.dc_carried.at(b, j));
    }
  }

  void step(const Part& p, int64_t t) {
    // Through the cell: dz of the part's hidden units.
    const int64_t first = t * s.B;  // the step's first row of T * B
    for (int64_t b = p.rows.begin; s.rounds && b < p.rows.end; ++b)
      products.recompute_operands(p.own, t, b);
    if (r.W_hr) through_projection(p, t);
    for (int64_t b = p.cell_rows.begin; b < p.cell_rows.end; ++b)
      cell(p, t, b);
    wait(p);

    // Through the gates' products into both operands, then through the rounds. Without rounds dx
    // is one product after the loop.
    for (const Block& block : Cell::BLOCKS) {
      const Matrix<const Real> dz{w.dz + (first + p.rows.begin) * w.ldz + block.slot * s.H, w.ldz};
      const bool is_first = &block == Cell::BLOCKS;
      const auto chunk = [&](int64_t m, int64_t rows, LeftOperand<Element> left) {
        const int64_t K = depth<Element>(block.gates * s.H);
        const Element* const W_hh = packed_block(block, p.own.p.begin);
        const Element* const W_ih = w.W_ih + K * p.own.x.begin;
        gemm_chunk<Element>(rows, K, p.own.p.size(), left, W_hh,
                            {p.dh.at(p.rows.begin + m, p.own.p.begin), p.dh.ld, true, !is_first},
                            nullptr,
                            s.rounds ? W_ih
                            : r.W_hr ? projection(p)
                                     : W_hh);
        if (s.rounds)
          gemm_chunk<Element>(rows, K, p.own.x.size(), left, W_ih,
                              {p.dx.at(p.rows.begin + m, p.own.x.begin), p.dx.ld, true, false},
                              nullptr, first_of_round(p, s.rounds - 1));
      };
      each_chunk(p.rows.size(), block.gates * s.H, dz, p.left_copy, chunk);
    }
    for (int64_t k = s.rounds - 1; k >= 0; --k)
      round(p, t, k);

    // Through the state's dropout into the state of the previous step, unless the state was set to
    // zero before this one; dx is complete.
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      const bool reset = resets(r, t, b);
      for (int64_t j = p.own.p.begin; j < p.own.p.end; j += LANES<Real>) {
        Vec<Real> d = Vec<Real>::load(p.dh.at(b, j));
        if (r.state.threshold) d = part_of(Vec<Real>::load(w.state_mask + b * s.ldh + j), d);
        d = Vec<Real>::load(p.dh_carried.at(b, j)) + d;
        (reset ? Vec<Real>(Real(0)) : d).store(p.dh_carried.at(b, j));
      }
      for (int64_t j = p.own.h.begin; Cell::HAS_C && reset && j < p.own.h.end; j += LANES<Real>)
        Vec<Real>(Real(0)).store(p.dc_carried.at(b, j));
      if (s.rounds && g.dx)
        for (int64_t j = p.own.x.begin; j < p.own.x.end; j += LANES<Real>)
          Vec<Real>::load(p.dx.at(b, j)).store(g.dx + (first + b) * s.X + j, s.X - j);
    }
    if (Cell::WHOLE_ROWS) wait(p);
  }

  // The part's columns of the packed projection.
  const Element* projection(const Part& p) const {
    return w.W_hr + depth<Element>(s.P) * p.own.h.begin;
  }

  // Through the projection of step t, into what the cells computed. Beyond the end of a sequence
  // the gradient of the state stays as it is.
  void through_projection(const Part& p, int64_t t) {
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      const int64_t row = t * s.B + b;
      const bool alive = !has_ended(r.lengths, t, b);
      const Vec<Real> zero(Real(0));
      for (int64_t j = p.own.p.begin; j < p.own.p.end; j += LANES<Real>) {
        Real* carried = p.dh_carried.at(b, j);
        Vec<Real> d = zero;
        if (alive) d = Vec<Real>::load(carried) + Vec<Real>::load(g.dy + row * s.P + j, s.P - j);
        store(w.dprojected + row * s.ldp + j, d, exchanges);
        if (alive) zero.store(carried);
      }
    }
    wait(p);
    const int64_t first = p.rows.begin;
    gemm<Element, Real>(p.rows.size(), s.P, p.own.h.size(),
                        {w.dprojected + (t * s.B + first) * s.ldp, s.ldp}, projection(p),
                        {p.dh_of_cell.at(first, p.own.h.begin), p.dh_of_cell.ld, true, false},
                        p.left_copy, nullptr, packed_block(Cell::BLOCKS[0], p.own.p.begin));
  }

  // The gradients of the cell of row b at step t: dz, the terms, and the state's gradients, which
  // are updated in place.
  void cell(const Part& p, int64_t t, int64_t b) {
    Real* dz = w.dz + (t * s.B + b) * w.ldz;             // (SLOTS, H)
    Real* terms = w.terms + (t * s.B + b) * w.ld_terms;  // (TERMS, H)
    if (has_ended(r.lengths, t, b)) {
      // Beyond the end of the sequence the state is copied, and so is its gradient.
      for (int64_t j = p.cell_units.begin; j < p.cell_units.end; j += LANES<Real>) {
        for (int slot = 0; slot < SLOTS; ++slot)
          Vec<Real>(Real(0)).store(dz + slot * s.H + j, s.H - j);
        for (int term = 0; term < Cell::TERMS; ++term)
          Vec<Real>(Real(0)).store(terms + term * s.H + j, s.H - j);
        if (w.h_of_cell) Vec<Real>(Real(0)).store(w.h_of_cell + (t * s.B + b) * s.ldh + j);
      }
    } else if constexpr (Cell::WHOLE_ROWS) {
      whole_row(p, t, b, dz, terms);
    } else {
      units(p, t, b, dz, terms);
    }
  }

  // The same of a cell that needs the whole row.
  void whole_row(const Part& p, int64_t t, int64_t b, Real* dz, Real* terms) {
    const int64_t row = t * s.B + b;
    const Real* before = !Cell::HAS_C          ? products.h_before(t, b)
                         : resets(r, t, b)     ? nullptr
                         : t == nth_step(r, 0) ? r.c0 + b * s.H
                                               : r.cells + (step_before(r, t) * s.B + b) * s.Hp;
    const WholeRow<Real, Cell> of_row{{s.H, s.Hp, Real(r.eps), r.b, r.vectors, before,
                                       r.gates + row * SLOTS * s.Hp, nullptr,
                                       r.statistics + row * Cell::STATISTICS}};
    of_row.backward(g.dy + row * s.H, p.dh_carried.at(b, 0), p.dc_carried.at(b, 0),
                    update_of(r, p.cell_units, t, b, p.zoneout, s.ldh), dz, terms);
  }

  // The same of the part's hidden units.
  void units(const Part& p, int64_t t, int64_t b, Real* out, Real* terms) {
    const int64_t row = t * s.B + b;
    const Vec<Real> zero(Real(0));
    const bool reset = resets(r, t, b), is_first = t == nth_step(r, 0);
    const int64_t before = step_before(r, t);
    const Real* saved = r.gates + row * SLOTS * s.Hp;            // (SLOTS, Hp)
    const Real* c_before = r.cells + (before * s.B + b) * s.Hp;  // (Hp,)  not of the first step
    const Real* h_old = Cell::HAS_C ? nullptr : products.h_before(t, b);  // (H,) or null
    const Update<Real> update = update_of(r, p.own.h, t, b, p.zoneout, s.ldh);
    Real* const to = exchanges ? p.dz_row.at(0, 0) : out;
    const int64_t ld_slot = exchanges ? p.dz_row.ld_slot : s.H;
    for (int64_t j = p.own.h.begin; j < p.own.h.end; j += LANES<Real>) {
      const int64_t n = s.H - j;
      Vec<Real> a[SLOTS], dz[SLOTS], of_vectors[Cell::TERMS + 1];
      for (int slot = 0; slot < SLOTS; ++slot)
        a[slot] = Vec<Real>::load(saved + slot * s.Hp + j);
      const Vec<Real> h = h_old ? Vec<Real>::load(h_old + j, n) : zero;
      Vec<Real> c = zero, d_c = zero;
      if (Cell::HAS_C && !reset)
        c = is_first ? Vec<Real>::load(r.c0 + b * s.H + j, n) : Vec<Real>::load(c_before + j);
      Real* carried_h = (r.W_hr ? p.dh_of_cell : p.dh_carried).at(b, j);
      Real* carried_c = p.dc_carried.at(b, j);
      Vec<Real> d_h = Vec<Real>::load(carried_h);
      if (!r.W_hr) d_h = d_h + Vec<Real>::load(g.dy + row * s.H + j, n);
      if (Cell::HAS_C) d_c = Vec<Real>::load(carried_c);

      if constexpr (Cell::PROJECTS)
        if (w.h_of_cell) Cell::output(a, c).store(w.h_of_cell + row * s.ldh + j);

      const Vec<Real> past_h = bypass(update.h, j - p.own.h.begin, d_h);
      const Vec<Real> past_c = bypass(update.c, j - p.own.h.begin, d_c);

      // Through the cell. The state's gradient so far is replaced; step() later adds the part that
      // comes through the gates' products.
      Cell::backward(a, h, c, VectorsAt<Real>{r.vectors, s.H, j}, d_h, d_c, dz, of_vectors);
      (d_h + past_h).store(carried_h);
      if (Cell::HAS_C) (d_c + past_c).store(carried_c);
      for (int slot = 0; slot < SLOTS; ++slot)
        dz[slot].store(to + slot * ld_slot + j, n);
      for (int term = 0; term < Cell::TERMS; ++term)
        of_vectors[term].store(terms + term * s.H + j, n);
    }
    for (int slot = 0; exchanges && slot < SLOTS; ++slot)
      stream_row(to + slot * ld_slot + p.own.h.begin, out + slot * s.H + p.own.h.begin,
                 p.own.h.size());
  }

  // The part's columns of the weights through which the gradient of round k goes first and last: A
  // and F with a low rank, else A twice.
  const Element* first_of_round(const Part& p, int64_t k) const {
    const Range own = s.rank ? p.own.r : s.on_x(k) ? p.own.h : p.own.x;
    return w.A[first_use(r.A, k)] + depth<Element>(s.out(k)) * own.begin;
  }
  const Element* last_of_round(const Part& p, int64_t k) const {
    const Range in = s.on_x(k) ? p.own.h : p.own.x;
    return s.rank ? w.F[first_use(r.F, k)] + depth<Element>(s.rank) * in.begin
                  : first_of_round(p, k);
  }

  // The gradients of round k for the rows of step t.
  void round(const Part& p, int64_t t, int64_t k) {
    const bool on_x = s.on_x(k);
    const int64_t first = t * s.B;  // the step's first row of T * B
    const Range out = on_x ? p.own.x : p.own.h, in = on_x ? p.own.h : p.own.x;
    const int64_t ld = s.ld_out(k);
    const Strip<Real> d_operand = on_x ? p.dx : p.dh, d_input = on_x ? p.dh : p.dx;
    Real* d_out = w.dgate[k] + first * ld;  // (B, ld)

    // Through the scaling: the pre-activation's gradient and that of the scaled operand.
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b)
      for (int64_t j = out.begin; j < out.end; j += LANES<Real>) {
        const int64_t row = first + b;
        const Vec<Real> operand = !on_x   ? Vec<Real>::load(w.h_operand[k / 2] + row * ld + j)
                                  : k > 0 ? Vec<Real>::load(w.x_operand[k / 2] + row * ld + j)
                                          : load_input(r, t, b, j);
        Vec<Real> d = Vec<Real>::load(d_operand.at(b, j));
        const Vec<Real> dg =
            mogrify_backward(Vec<Real>::load(products.gate(k, row) + j), operand, d);
        d.store(d_operand.at(b, j));
        store(d_out + b * ld + j, dg, exchanges);
      }
    wait(p);

    // Through the product of the part's rows (two with a low rank), which adds to the gradient of
    // the operand that it read.
    const int64_t own = p.rows.begin, rows = p.rows.size();
    const Matrix<const Real> left{d_out + own * ld, ld};
    const Output<Real> target{d_input.at(own, in.begin), d_input.ld, true, true};
    const Element* next =
        k ? first_of_round(p, k - 1) : packed_block(Cell::BLOCKS[0], p.own.p.begin);
    if (s.rank) {
      Real* u = w.dfactors[k] + (first + own) * s.ldr;  // (rows, ldr)
      gemm<Element, Real>(rows, s.out(k), p.own.r.size(), left, first_of_round(p, k),
                          {u + p.own.r.begin, s.ldr, true, false}, p.left_copy, nullptr,
                          last_of_round(p, k));
      wait(p);
      gemm<Element, Real>(rows, s.rank, in.size(), {u, s.ldr}, last_of_round(p, k), target,
                          p.left_copy, nullptr, next);
    } else {
      gemm<Element, Real>(rows, s.out(k), in.size(), left, first_of_round(p, k), target,
                          p.left_copy, nullptr, next);
    }
  }

  void store_state_gradients(const Part& p) {
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      for (int64_t j = p.own.p.begin; j < p.own.p.end; j += LANES<Real>)
        Vec<Real>::load(p.dh_carried.at(b, j)).store(g.dh0 + b * s.P + j, s.P - j);
      for (int64_t j = p.own.h.begin; Cell::HAS_C && j < p.own.h.end; j += LANES<Real>)
        Vec<Real>::load(p.dc_carried.at(b, j)).store(g.dc0 + b * s.H + j, s.H - j);
    }
  }
};

template <class Element, class Real>
void recurrence_backward(const cpu::RecurrenceBackward<Real>* g, int count, cpu::Parallel run,
                         int threads) {
  with_cell(g->forward.cell, g->forward.cap_input_gate, [&](auto cell) {
    run_side_by_side<RecurrentBackward<Real, Element, decltype(cell)>>(g, count, run, threads);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
