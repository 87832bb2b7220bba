// The recurrences over a whole sequence, forward: the LSTM, plain, with peepholes and with layer
// normalization, the Mogrifier LSTM, the GRU, plain and with layer normalization, and the simple
// RNN, whose cells are in cells.h.
//
// One team of threads runs all time steps. Each part of the work owns a range of hidden units (and
// of inputs, and of a low rank's columns). It packs its own columns of every weight once, or panel
// by panel if there is one step only (see in_panels), and after each product does the pointwise
// work of the columns that it has just computed. A step has a barrier after each round (two if the
// rank is low) and one after the gates. Where the batch has many rows and the weights are small,
// each part owns rows of the batch instead, of which it computes all columns, and no step has a
// barrier: see shares_rows. No memory is allocated in the loop. A cell with layer normalization
// needs all columns of a row: after a barrier behind the products each part computes the cells of
// its rows of the batch.
//
// Layout: rows are those of the batch; within a row, the slots of all hidden units (the gates of an
// LSTM) follow each other. Rows of saved tensors are padded to PAD elements, rows of workspaces
// also to avoid cache conflicts (see buffer.h), so that all loops run over whole vectors.
//
// What limits it: with 20 rows and more the multiply-add units; with one row reading the weights
// from the L3 cache, which happens once a step. Without rounds the product x W_ih^T is computed for
// blocks of steps; with rounds it cannot be, because x is then modified in each step.
#pragma once
#include <algorithm>

#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/recurrence/cells.h"
#include "cpu/recurrence/kept.h"
#include "cpu/recurrence/sizes.h"
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "math/mogrifier.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// E: the elements of the products, T or bf16_pair
template <class T, class E, class Cell>
class RecurrentForward {
 public:
  RecurrentForward(const cpu::Recurrence<T>& r, int parts)
      : r(r),
        s(r),
        parts(parts),
        in_panels(s.steps == 1 && s.B <= CHUNK),
        by_rows(!in_panels && shares_rows<E>(s, r, parts)),
        input_block(s.rounds || by_rows ? 0
                    : s.B <= CHUNK / 2  ? CHUNK / s.B
                    : s.B < 2 * CHUNK   ? 2 * CHUNK / s.B
                                        : 1),
        barrier(parts),
        kept(r, s, input_block),
        W_ih(in_panels ? 0 : GATES * packed_size<E>(s.X, s.H)),
        W_hh(in_panels ? 0 : GATES * packed_size<E>(s.H, s.H)),
        panel(packed_size<E>(std::max({s.X, s.H, s.rank}), PANEL<E>)),
        panels(in_panels ? panel * parts : 0),
        h_carried(s.B * s.ldh),
        h_in{Buffer<T>(s.B * s.ldh), Buffer<T>(s.B * s.ldh)},
        h_mogrified(s.B * s.ldh),
        x_mogrified(s.B * s.ldx),
        c_first(Cell::HAS_C ? s.B * s.Hp : 0),
        state_mask(r.state.threshold ? s.B * s.ldh : 0),
        zoneout(2 * s.ldh * parts),
        left(left_size<E, T>(s.widest())),
        lefts(left * parts) {
    for (int64_t k = 0; k < s.rounds && !in_panels; ++k) {
      if (first_use(r.A, k) == k)
        A[k] = Buffer<E>(packed_size<E>(s.rank ? s.rank : s.in(k), s.out(k)));
      if (s.rank && first_use(r.F, k) == k) F[k] = Buffer<E>(packed_size<E>(s.in(k), s.rank));
    }
  }

  // Parts [begin, end) of the team.
  void run(int64_t begin, int64_t end) {
    Part p{{s, begin, end, parts, by_rows, PANEL<E>, Cell::WHOLE_ROWS},
           zoneout + 2 * s.ldh * begin,
           lefts + left * begin};
    if (!in_panels) pack_weights(p.packed);
    prepare_state(p);
    barrier.wait(p.parts());

    for (int64_t n = 0; n < s.steps; ++n) {
      const int64_t t = nth_step(r, n);
      if (!input_block) {
        p.first_kept = t;
      } else if (n % input_block == 0) {
        const int64_t steps = s.steps - n < input_block ? s.steps - n : input_block;
        p.first_kept = r.reverse ? s.steps - n - steps : n;
        add_inputs(p, p.first_kept, steps);
      }
      for (int64_t k = 0; k < s.rounds; ++k)
        round(p, t, k);
      gates(p, t);
      wait(p);
    }
    store_last_state(p);
  }

 private:
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;

  // What one thread computes, and its workspaces.
  struct Part : Share {
    T* zoneout;              // (2, ldh)  for h and for c
    E* left;                 // a left operand as elements of the products
    int64_t first_kept = 0;  // the first step whose gates are kept, see Kept
  };

  const cpu::Recurrence<T>& r;
  const Sizes<T> s;
  const int parts;
  // Whether each panel of a weight is multiplied as soon as it is packed, while it is in the L2
  // cache, or by dot products without being packed if the rows are few: of a single step, which
  // uses no weight twice. Then no weight is packed as a whole.
  const bool in_panels;
  const bool by_rows;
  // Without rounds the inputs' product does not depend on the state. It is computed for a block of
  // so many steps at once: enough rows that W_ih is seldom read, and few enough that the block's
  // gates are still in the L2 cache when their step comes. 0: each step computes its own.
  const int64_t input_block;
  Barrier barrier;
  const Kept<T> kept;
  Buffer<E> W_ih;           // packed, (GATES)(X, H)
  Buffer<E> W_hh;           // packed, (GATES)(H, H)
  Buffer<E> A[MAX_ROUNDS];  // packed, (in, out), or (rank, out) with a low rank
  Buffer<E> F[MAX_ROUNDS];  // packed, (in, rank)
  const int64_t panel;      // the elements of the widest panel
  Buffer<E> panels;         // (parts, panel)
  Buffer<T> h_carried;      // (B, ldh)  the state that goes from step to step
  Buffer<T> h_in[2];  // (B, ldh)  the state with its dropout, which step t reads from h_in[t % 2]
  Buffer<T> h_mogrified;  // (B, ldh)
  Buffer<T> x_mogrified;  // (B, ldx)
  Buffer<T> c_first;      // (B, Hp)  c0
  Buffer<T> state_mask;   // (B, ldh)  the factors of the state's dropout
  Buffer<T> zoneout;      // (parts, 2, ldh)
  const int64_t left;     // the elements of a converted left operand, see gemm.h
  Buffer<E> lefts;        // (parts, left)

  // Waits until all parts have come here, unless no part needs what another one computes.
  void wait(const Part& p) {
    if (!by_rows) barrier.wait(p.parts());
  }

  // A part's columns of a product: rows of a weight (out, K), from its number `first` on, and their
  // packed copy, null where there is none.
  struct Weight {
    const void* W;
    int64_t first;
    const E* packed;
  };
  // row: the first one    column: its place among those that were packed together
  Weight weight(const void* W, int64_t K, int64_t row, const E* packed, int64_t column) const {
    return {W, row * K, in_panels ? nullptr : packed + depth<E>(K) * column};
  }

  // The part's columns of one gate's weight, of W_ih or of W_hh.
  Weight of_x(int gate, const Part& p) const {
    const int64_t j = p.own.h.begin;
    return weight(r.W_ih, s.X, gate * s.H + j, W_ih + gate * packed_size<E>(s.X, s.H), j);
  }
  Weight of_h(int gate, const Part& p) const {
    const int64_t j = p.own.h.begin;
    return weight(r.W_hh, s.H, gate * s.H + j, W_hh + gate * packed_size<E>(s.H, s.H), j);
  }
  // The part's columns of the weights that round k multiplies first and last: F and A with a low
  // rank, else A twice.
  Weight last_of_round(const Part& p, int64_t k) const {
    const int64_t j = (s.on_x(k) ? p.own.x : p.own.h).begin;
    return weight(r.A[k], s.rank ? s.rank : s.in(k), j, A[first_use(r.A, k)], j);
  }
  Weight first_of_round(const Part& p, int64_t k) const {
    if (!s.rank) return last_of_round(p, k);
    const int64_t j = p.own.r.begin;
    return weight(r.F[k], s.in(k), j, F[first_use(r.F, k)], j);
  }
  // The weight that the next step multiplies first, if there is one.
  Weight first_of_step(const Part& p) const {
    if (in_panels) return {};
    return s.rounds ? first_of_round(p, 0) : of_h(0, p);
  }

  // Whether a weight's rows of K numbers are rows of elements E where they are.
  bool are_elements(int64_t K) const {
    return std::is_same<E, T>::value ? !r.bf16_weights : r.bf16_weights && K % 2 == 0;
  }

  // Where a weight is in memory.
  const E* in_memory(Weight weight) const {
    const int64_t bytes = r.bf16_weights ? sizeof(bfloat16) : sizeof(T);
    return weight.W ? reinterpret_cast<const E*>(static_cast<const char*>(weight.W) +
                                                 weight.first * bytes)
                    : nullptr;
  }

  // C (M, columns) (+)= A (M, K) times the columns of a weight. next: see `gemm`
  void multiply(const Part& p, int64_t M, int64_t K, int64_t columns, LeftOperand<E> left,
                Weight weight, Output<T> C, Weight next) const {
    if (!in_panels)
      return gemm_chunk<E>(M, depth<E>(K), columns, left, weight.packed, C, nullptr, next.packed);
    if (M <= MAX_DOT_ROWS && fills_vectors<E>(K) && are_elements(K))
      return product_of_rows<E>(M, depth<E>(K), columns, {left.p, left.sm},
                                {in_memory(weight), depth<E>(K)}, nullptr, C);
    E* const own = panels + panel * p.begin;
    for (int64_t n = 0; n < columns; n += PANEL<E>) {
      const int64_t after = n + PANEL<E>, width = (after < columns ? after : columns) - n;
      const Weight ahead = after < columns ? Weight{weight.W, weight.first + after * K, {}} : next;
      pack_weight(r, weight.W, weight.first + n * K, 1, K, K, width, own);
      gemm_chunk<E>(M, depth<E>(K), width, left, own,
                    {C.p + n, C.ld, C.whole_vectors, C.accumulate}, nullptr, in_memory(ahead));
    }
  }
  void multiply(const Part& p, int64_t M, int64_t K, int64_t columns, Matrix<const T> operand,
                Weight weight, Output<T> C, Weight next) const {
    each_chunk(M, K, operand, p.left, [&](int64_t m, int64_t rows, LeftOperand<E> left) {
      multiply(p, rows, K, columns, left, weight,
               {C.p + m * C.ld, C.ld, C.whole_vectors, C.accumulate}, next);
    });
  }

  void pack_weights(const Columns& p) {
    for (int64_t g = 0; g < GATES; ++g) {
      const int64_t row = g * s.H + p.h.begin;
      pack_weight(r, r.W_ih, row * s.X, 1, s.X, s.X, p.h.size(),
                  W_ih + g * packed_size<E>(s.X, s.H) + depth<E>(s.X) * p.h.begin);
      pack_weight(r, r.W_hh, row * s.H, 1, s.H, s.H, p.h.size(),
                  W_hh + g * packed_size<E>(s.H, s.H) + depth<E>(s.H) * p.h.begin);
    }
    for (int64_t k = 0; k < s.rounds; ++k) {
      const Range out = s.on_x(k) ? p.x : p.h;
      const int64_t K = s.rank ? s.rank : s.in(k);
      if (first_use(r.A, k) == k)
        pack_weight(r, r.A[k], out.begin * K, 1, K, K, out.size(), A[k] + depth<E>(K) * out.begin);
      if (s.rank && first_use(r.F, k) == k)
        pack_weight(r, r.F[k], p.r.begin * s.in(k), 1, s.in(k), s.in(k), p.r.size(),
                    F[k] + depth<E>(s.in(k)) * p.r.begin);
    }
  }

  // Generates the mask of the state's dropout and copies h0 and c0 to padded rows.
  void prepare_state(const Part& p) {
    memset(p.zoneout, 0, 2 * s.ldh * sizeof(T));  // so that no load reads uninitialised padding
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b) {
      if (r.state.threshold)
        mask_values(r.state, b, s.H, p.own.h.begin, p.own.h.end, T(r.state.scale), T(0),
                    state_mask + b * s.ldh + p.own.h.begin);
      const int64_t first = nth_step(r, 0);
      const bool reset = resets(r, first, b);
      for (int64_t j = p.own.h.begin; j < p.own.h.end; j += LANES<T>) {
        if (Cell::HAS_C) Vec<T>::load(r.c0 + b * s.H + j, s.H - j).store(c_first + b * s.Hp + j);
        const Vec<T> h = reset ? Vec<T>(T(0)) : Vec<T>::load(r.h0 + b * s.H + j, s.H - j);
        h.store(h_carried + b * s.ldh + j);
        drop_state(h, b, j).store(h_in[first % 2] + b * s.ldh + j);
      }
    }
  }

  // Returns the state with its dropout, for the units from j on in row b.
  HD Vec<T> drop_state(Vec<T> h, int64_t b, int64_t j) const {
    return r.state.threshold ? h * Vec<T>::load(state_mask + b * s.ldh + j, s.H - j) : h;
  }

  // Round k of step t: the operand that it scales is multiplied by twice the sigmoid of a product
  // with the other operand.
  void round(const Part& p, int64_t t, int64_t k) {
    const bool on_x = s.on_x(k);
    const Range out = on_x ? p.own.x : p.own.h;
    const T* operand = on_x ? (k < 2 ? h_in[t % 2] : h_mogrified) : x_mogrified;
    const int64_t ld = on_x ? s.ldh : s.ldx, K = s.rank ? s.rank : s.in(k);
    T* gate = kept.round_gates(t) + s.round_offset[k];  // (B, round_width)
    const Weight last = last_of_round(p, k);
    const Weight next = k + 1 < s.rounds ? first_of_round(p, k + 1) : of_x(0, p);
    const int64_t first = p.rows.begin, rows = p.rows.size();
    const Matrix<const T> left{operand + first * ld, ld};
    const Output<T> product{gate + first * s.round_width + out.begin, s.round_width, true, false};

    // The product of the part's rows. With a low rank there are two, and the second needs all
    // columns of the first.
    if (s.rank) {
      T* u = kept.factors(k, t) + first * s.rp;  // (rows, rp)
      multiply(p, rows, s.in(k), p.own.r.size(), left, first_of_round(p, k),
               {u + p.own.r.begin, s.rp, true, false}, last);
      wait(p);
      multiply(p, rows, K, out.size(), Matrix<const T>{u, s.rp}, last, product, next);
    } else {
      multiply(p, rows, K, out.size(), left, last, product, next);
    }

    // Bias, sigmoid (saved for backward) and the operand's new value. The first round on x and the
    // first one on h start from the step's inputs, later rounds from the previous one's result.
    const T* bias = r.bias[k];  // (out,) or null
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b)
      for (int64_t j = out.begin; j < out.end; j += LANES<T>) {
        T* z = gate + b * s.round_width + j;
        Vec<T> g = Vec<T>::load(z);
        if (bias) g = g + Vec<T>::load(bias + j, s.out(k) - j);
        g = sigmoid(g);
        g.store(z);
        if (on_x) {
          T* x = x_mogrified + b * s.ldx + j;
          const Vec<T> before = k == 0 ? load_input(r, t, b, j) : Vec<T>::load(x);
          mogrify(g, before).store(x);
        } else {
          T* h = h_mogrified + b * s.ldh + j;
          mogrify(g, Vec<T>::load(k == 1 ? h_in[t % 2] + b * s.ldh + j : h)).store(h);
        }
      }
    wait(p);
  }

  // The part's columns of z (rows, SLOTS, Hp) (+)= operand (rows, K) times a weight.
  // of: (gate) -> its part of the weight    block: the gates of the weight and the first slot of z
  // next: the weight that is multiplied after it
  template <class Of>
  void add_gates(const Part& p, int64_t rows, int64_t K, Matrix<const T> operand, Of of, T* z,
                 Block block, bool accumulate, Weight next) {
    each_chunk(rows, K, operand, p.left, [&](int64_t m, int64_t height, LeftOperand<E> left) {
      for (int i = 0; i < block.gates; ++i) {
        const int g = block.gate + i;
        multiply(p, height, K, p.own.h.size(), left, of(g),
                 {z + (m * SLOTS + block.slot + i) * s.Hp + p.own.h.begin, SLOTS * s.Hp, true,
                  accumulate},
                 i + 1 < block.gates ? of(g + 1) : next);
      }
    });
  }

  // The gates' products with the inputs, which are added to the first slots.
  static constexpr Block INPUTS = {0, 0, GATES};

  void add_products_of_x(const Part& p, int64_t rows, Matrix<const T> x, T* z) {
    const auto of = [&](int gate) {
      return of_x(gate, p);
    };
    add_gates(p, rows, s.X, x, of, z, INPUTS, false, of_h(0, p));
  }

  // The inputs' part of the gates of a block of steps, from step t on. The rows behind the end of a
  // sequence are computed too, and not used.
  void add_inputs(const Part& p, int64_t t, int64_t steps) {
    add_products_of_x(p, steps * s.B, {r.x + t * s.B * s.X, s.X}, kept.gates(t, p.first_kept));
  }

  // The gates of step t and, from them, the new state.
  void gates(const Part& p, int64_t t) {
    const int64_t first = p.rows.begin, rows = p.rows.size();
    T* out = kept.gates(t, p.first_kept);  // (B, SLOTS, Hp)
    T* z = out + first * SLOTS * s.Hp;     // (rows, SLOTS, Hp)
    const T* h = s.rounds < 2 ? h_in[t % 2] : h_mogrified;
    if (!input_block) {
      const Matrix<const T> x = s.rounds ? Matrix<const T>{x_mogrified + first * s.ldx, s.ldx}
                                         : Matrix<const T>{r.x + (t * s.B + first) * s.X, s.X};
      add_products_of_x(p, rows, x, z);
    }
    constexpr int last = sizeof Cell::BLOCKS / sizeof(Block) - 1;
    for (int i = 0; i <= last; ++i) {
      const Block block = Cell::BLOCKS[i];
      const Weight next = i < last ? of_h(Cell::BLOCKS[i + 1].gate, p) : first_of_step(p);
      const auto of = [&](int gate) {
        return of_h(gate, p);
      };
      add_gates(p, rows, s.H, {h + first * s.ldh, s.ldh}, of, z, block, block.slot < GATES, next);
    }
    if (Cell::WHOLE_ROWS) wait(p);
    for (int64_t b = p.cell_rows.begin; b < p.cell_rows.end; ++b)
      cell(p, t, b, out + b * SLOTS * s.Hp);
  }

  // The cell of row b at step t. z (SLOTS, Hp): pre-activations on entry, activated gates on
  // return.
  void cell(const Part& p, int64_t t, int64_t b, T* z) {
    const bool alive = !has_ended(r.lengths, t, b), reset = resets(r, t, b);
    const bool is_first = t == nth_step(r, 0), is_last = t == nth_step(r, s.steps - 1);
    const bool next_resets = !is_last && resets(r, step_after(r, t), b);
    const T* c_before = (is_first ? c_first : kept.cells(step_before(r, t))) + b * s.Hp;  // (Hp,)
    T* c_after = kept.cells(t) + b * s.Hp;                                                // (Hp,)
    T* y = r.y + (t * s.B + b) * s.H;                                                     // (H,)
    T* h = h_carried + b * s.ldh;                                                         // (ldh,)
    T* next_in = h_in[(t + 1) % 2] + b * s.ldh;                                           // (ldh,)
    const Update<T> update =
        alive ? update_of(r, p.cell_units, t, b, p.zoneout, s.ldh) : Update<T>{};
    if constexpr (Cell::WHOLE_ROWS) {
      const T* before = !Cell::HAS_C ? h : reset ? nullptr : c_before;
      T* statistics = kept.statistics(t) + b * Cell::STATISTICS;
      const WholeRow<T, Cell> row{
          {s.H, s.Hp, T(r.eps), r.b, r.vectors, before, z, c_after, statistics}};
      alive ? row.forward(y) : row.clear();
    }

    const Vec<T> zero(T(0));
    for (int64_t j = p.cell_units.begin; j < p.cell_units.end; j += LANES<T>) {
      // Activate the gates and save them.
      const int64_t n = s.H - j;
      const Vec<T> h_old = Vec<T>::load(h + j);
      const Vec<T> c_old = Cell::HAS_C && !reset ? Vec<T>::load(c_before + j) : zero;
      Vec<T> h_new = h_old, c_new = c_old;
      if constexpr (Cell::WHOLE_ROWS) {
        if (alive) h_new = Vec<T>::load(y + j, n);
        if (alive && Cell::HAS_C) c_new = Vec<T>::load(c_after + j);
      } else {
        Vec<T> a[SLOTS];
        for (int slot = 0; slot < SLOTS; ++slot) {
          a[slot] = Vec<T>::load(z + slot * s.Hp + j);
          if (r.b) a[slot] = a[slot] + Vec<T>::load(r.b + slot * s.H + j, n);
        }
        Cell::forward(a, h_new, c_new, VectorsAt<T>{r.vectors, s.H, j});
        for (int slot = 0; slot < SLOTS; ++slot)
          a[slot].store(z + slot * s.Hp + j);
      }

      // The new state. A row whose sequence has ended retains its state, and its output is zero.
      const int64_t unit = j - p.cell_units.begin;
      h_new = mix(update.h, unit, h_new, h_old);
      if (Cell::HAS_C) c_new = mix(update.c, unit, c_new, c_old);
      if (!alive) h_new = h_old, c_new = c_old;
      (alive ? h_new : zero).store(y + j, n);
      if (Cell::HAS_C) c_new.store(c_after + j);
      if (next_resets) h_new = zero;
      h_new.store(h + j);
      drop_state(h_new, b, j).store(next_in + j);
    }
  }

  void store_last_state(const Part& p) {
    const T* c = kept.cells(nth_step(r, s.steps - 1));  // (B, Hp)
    for (int64_t b = p.rows.begin; b < p.rows.end; ++b)
      for (int64_t j = p.own.h.begin; j < p.own.h.end; j += LANES<T>) {
        Vec<T>::load(h_carried + b * s.ldh + j).store(r.h + b * s.H + j, s.H - j);
        if (Cell::HAS_C) Vec<T>::load(c + b * s.Hp + j).store(r.c + b * s.H + j, s.H - j);
      }
  }
};

template <class E, class T>
void recurrence(const cpu::Recurrence<T>* r, int count, cpu::Parallel run, int threads) {
  with_cell(r->cell, r->cap_input_gate, [&](auto cell) {
    run_side_by_side<RecurrentForward<T, E, decltype(cell)>>(r, count, run, threads);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
