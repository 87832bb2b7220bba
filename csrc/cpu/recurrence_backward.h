// The recurrence of recurrence.h, backward through time. The loop goes from the last step to the first and only
// passes gradients of the data; the operands of every product and the gradients of every pre-activation are kept, so
// that each weight's gradient is one product over all T * B rows after the loop.
#pragma once
#include "recurrence.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T, bool cap> class Backward {
 public:
  Backward(const cpu::RecurrenceBackward<T>& g, int parts)
      : g(g), r(g.forward), s(r), parts(parts), barrier(parts), rows(s.steps * s.B), ldz(stride<T>(4 * s.H)),
        scratch_size(round_up<T>(TRANSPOSED_SCRATCH<T>)), W_ih(packed_size<T>(4 * s.H, s.X)),
        W_hh(packed_size<T>(4 * s.H, s.H)), dz(rows * ldz), dh(s.B * s.ldh), dx(s.B * s.ldx), dh_carried(s.B * s.ldh),
        dc(s.B * s.ldh), state_mask(r.state.threshold ? s.B * s.ldh : 0), zoneout(2 * s.ldh * parts),
        scratch(scratch_size * parts), db(4 * s.ldh), db_step(4 * s.ldh) {
    h_operand[0] = Buffer<T>(rows * s.ldh);
    for (int64_t k = 0; k < s.rounds; ++k) {
      if (first_use(r.A, k) == k) A[k] = Buffer<T>(packed_size<T>(s.out(k), s.rank ? s.rank : s.in(k)));
      if (s.rank && first_use(r.F, k) == k) F[k] = Buffer<T>(packed_size<T>(s.rank, s.in(k)));
      if (s.rank) dfactors[k] = Buffer<T>(rows * s.ldr);
      dgate[k] = Buffer<T>(rows * s.ld_out(k));
      dbias[k] = Buffer<T>(s.ld_out(k)), dbias_step[k] = Buffer<T>(s.ld_out(k));
      (s.on_x(k) ? x_operand[k / 2 + 1] : h_operand[k / 2 + 1]) = Buffer<T>(rows * s.ld_out(k));
    }
  }

  void run(int64_t begin, int64_t end) {
    Part p{int(end - begin), begin, end, own_columns<T>(s.H, begin, end, parts), own_columns<T>(s.X, begin, end, parts),
           own_columns<T>(s.rank, begin, end, parts), zoneout + 2 * s.ldh * begin, scratch + scratch_size * begin};
    prepare(p);
    for (int64_t t = s.steps - 1; t >= 0; --t) step(p, t);
    barrier.wait(p.weight);
    finish(p);
  }

 private:
  struct Part {
    int weight;
    int64_t begin, end;
    Range h, x, r;
    T *zoneout, *scratch;
  };

  const cpu::RecurrenceBackward<T>& g;
  const cpu::Recurrence<T>& r;
  const Shape<T> s;
  const int parts;
  Barrier barrier;
  const int64_t rows, ldz, scratch_size;
  Buffer<T> W_ih, W_hh;                          // packed, (4H, .)
  Buffer<T> A[MAX_ROUNDS], F[MAX_ROUNDS];        // packed, (out, in) or (out, rank), (rank, in)
  Buffer<T> dz;                                  // (T, B, ldz)    of the gates' pre-activations
  Buffer<T> dh, dx;                              // (B, ldh), (B, ldx)    of the operands, in the course of a step
  Buffer<T> dh_carried, dc;                      // (B, ldh)    of the state, from step to step
  Buffer<T> state_mask, zoneout, scratch;
  Buffer<T> db, db_step;                         // (4, ldh)    summed within a step, then over the steps
  Buffer<T> x_operand[MAX_ROUNDS / 2 + 2];       // (T, B, ldx)    x after that many rounds on it; [0] is x itself
  Buffer<T> h_operand[MAX_ROUNDS / 2 + 2];       // (T, B, ldh)    h likewise; [0] is the state a step reads
  Buffer<T> dgate[MAX_ROUNDS];                   // (T, B, ld_out)    of the rounds' pre-activations
  Buffer<T> dfactors[MAX_ROUNDS];                // (T, B, ldr)
  Buffer<T> dbias[MAX_ROUNDS], dbias_step[MAX_ROUNDS];

  int64_t rounds_on_x() const { return (s.rounds + 1) / 2; }
  int64_t rounds_on_h() const { return s.rounds / 2; }

  void prepare(const Part& p) {
    memset(p.zoneout, 0, 2 * s.ldh * sizeof(T));  // its padding too: nothing unwritten is ever read
    if (s.rounds || g.dx) pack(r.W_ih + p.x.begin, s.X, 1, 4 * s.H, p.x.size(), W_ih + 4 * s.H * p.x.begin);
    pack(r.W_hh + p.h.begin, s.H, 1, 4 * s.H, p.h.size(), W_hh + 4 * s.H * p.h.begin);
    for (int64_t k = 0; k < s.rounds; ++k) {
      const Range in = s.on_x(k) ? p.h : p.x, out = s.on_x(k) ? p.x : p.h, columns = s.rank ? p.r : in;
      const int64_t ld = s.rank ? s.rank : s.in(k);
      if (first_use(r.A, k) == k) pack(r.A[k] + columns.begin, ld, 1, s.out(k), columns.size(), A[k] + s.out(k) * columns.begin);
      if (s.rank && first_use(r.F, k) == k)
        pack(r.F[k] + in.begin, s.in(k), 1, s.rank, in.size(), F[k] + s.rank * in.begin);
      zero(dbias[k], out);
    }
    for (int gate = 0; gate < 4; ++gate) zero(db + gate * s.ldh, p.h);
    for (int64_t b = 0; b < s.B; ++b) {
      if (r.state.threshold)
        mask_values(r.state, b, s.H, p.h.begin, p.h.end, T(r.state.scale), T(0), state_mask + b * s.ldh + p.h.begin);
      for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
        Vec<T>::load(g.dh + b * s.H + j, s.H - j).store(dh_carried + b * s.ldh + j);
        Vec<T>::load(g.dc + b * s.H + j, s.H - j).store(dc + b * s.ldh + j);
      }
    }
  }

  static void zero(T* p, Range columns) {
    for (int64_t j = columns.begin; j < columns.end; j += LANES<T>) Vec<T>(T(0)).store(p + j);
  }
  static void add(const T* step, T* total, Range columns) {
    for (int64_t j = columns.begin; j < columns.end; j += LANES<T>) (Vec<T>::load(total + j) + Vec<T>::load(step + j)).store(total + j);
  }

  void step(const Part& p, int64_t t) {
    const int64_t first = t * s.B;
    for (int gate = 0; gate < 4; ++gate) zero(db_step + gate * s.ldh, p.h);
    for (int64_t b = 0; b < s.B; ++b) {
      operands(p, t, b);
      cell(p, t, b);
    }
    for (int gate = 0; gate < 4; ++gate) add(db_step + gate * s.ldh, db + gate * s.ldh, p.h);
    barrier.wait(p.weight);
    gemm(s.B, 4 * s.H, dz + first * ldz, ldz, W_hh + 4 * s.H * p.h.begin, p.h.size(), dh + p.h.begin, s.ldh, true, false);
    if (s.rounds)
      gemm(s.B, 4 * s.H, dz + first * ldz, ldz, W_ih + 4 * s.H * p.x.begin, p.x.size(), dx + p.x.begin, s.ldx, true, false);
    for (int64_t k = s.rounds - 1; k >= 0; --k) round(p, first, k);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
        Vec<T> d = Vec<T>::load(dh + b * s.ldh + j);
        if (r.state.threshold) d = d * Vec<T>::load(state_mask + b * s.ldh + j);
        (Vec<T>::load(dh_carried + b * s.ldh + j) + d).store(dh_carried + b * s.ldh + j);
      }
      if (s.rounds && g.dx)
        for (int64_t j = p.x.begin; j < p.x.end; j += LANES<T>)
          Vec<T>::load(dx + b * s.ldx + j).store(g.dx + (first + b) * s.X + j, s.X - j);
    }
  }

  // The operands of row b at step t, recomputed from the saved sigmoids.
  void operands(const Part& p, int64_t t, int64_t b) {
    const int64_t row = t * s.B + b;
    const T* h_before = t ? r.y + (row - s.B) * s.H : r.h0 + b * s.H;
    for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
      Vec<T> h = Vec<T>::load(h_before + j, s.H - j);
      if (r.state.threshold) h = h * Vec<T>::load(state_mask + b * s.ldh + j);
      h.store(h_operand[0] + row * s.ldh + j);
      for (int64_t k = 1; k < s.rounds; k += 2) {
        h = mogrify(Vec<T>::load(gate(k, row) + j), h);
        h.store(h_operand[k / 2 + 1] + row * s.ldh + j);
      }
    }
    if (s.rounds)
      for (int64_t j = p.x.begin; j < p.x.end; j += LANES<T>) {
        Vec<T> x = Vec<T>::load(r.x + row * s.X + j, s.X - j);
        for (int64_t k = 0; k < s.rounds; k += 2) {
          x = mogrify(Vec<T>::load(gate(k, row) + j), x);
          x.store(x_operand[k / 2 + 1] + row * s.ldx + j);
        }
      }
  }

  const T* gate(int64_t k, int64_t row) const { return r.round_gates + row * s.round_width + s.round_offset[k]; }

  void cell(const Part& p, int64_t t, int64_t b) {
    const int64_t row = t * s.B + b;
    T* out = dz + row * ldz;
    if (r.lengths && t >= r.lengths[b]) {  // past the end: the state's gradient passes by
      for (int gate = 0; gate < 4; ++gate)
        for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) Vec<T>(T(0)).store(out + gate * s.H + j, s.H - j);
      return;
    }
    const T *a = r.gates + row * 4 * s.Hp, *c_before = r.cells + (row - s.B) * s.Hp;
    if (r.zoneout_h.threshold) zoneout_row(r, r.zoneout_h, r.zoneout_h_p, p.h, row, p.zoneout);
    if (r.zoneout_c.threshold) zoneout_row(r, r.zoneout_c, r.zoneout_c_p, p.h, row, p.zoneout + s.ldh);
    for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
      const int64_t n = s.H - j;
      const LstmGates<Vec<T>> gates{Vec<T>::load(a + j), Vec<T>::load(a + s.Hp + j), Vec<T>::load(a + 2 * s.Hp + j),
                                    Vec<T>::load(a + 3 * s.Hp + j)};
      const Vec<T> c = t ? Vec<T>::load(c_before + j) : Vec<T>::load(r.c0 + b * s.H + j, n);
      T *carried_h = dh_carried + b * s.ldh + j, *carried_c = dc + b * s.ldh + j;
      Vec<T> d_h = Vec<T>::load(carried_h) + Vec<T>::load(g.dy + row * s.H + j, n), d_c = Vec<T>::load(carried_c);
      Vec<T> past_h(T(0)), past_c(T(0));
      if (r.zoneout_h.threshold) {
        const Vec<T> u = Vec<T>::load(p.zoneout + j - p.h.begin);
        past_h = (1.f - u) * d_h, d_h = u * d_h;
      }
      if (r.zoneout_c.threshold) {
        const Vec<T> u = Vec<T>::load(p.zoneout + s.ldh + j - p.h.begin);
        past_c = (1.f - u) * d_c, d_c = u * d_c;
      }
      const LstmGates<Vec<T>> d = lstm_cell_backward<cap>(gates, c, d_h, d_c);
      past_h.store(carried_h);
      (d_c + past_c).store(carried_c);
      const Vec<T> all[4] = {d.i, d.f, d.g, d.o};
      for (int gate = 0; gate < 4; ++gate) {
        all[gate].store(out + gate * s.H + j, n);
        T* sum = db_step + gate * s.ldh + j;
        (Vec<T>::load(sum) + all[gate]).store(sum);
      }
    }
  }

  void round(const Part& p, int64_t first, int64_t k) {
    const bool on_x = s.on_x(k);
    const Range out = on_x ? p.x : p.h, in = on_x ? p.h : p.x;
    const int64_t ld = s.ld_out(k), ld_in = on_x ? s.ldh : s.ldx;
    T *d_operand = on_x ? dx : dh, *d_out = dgate[k] + first * ld;
    zero(dbias_step[k], out);
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t j = out.begin; j < out.end; j += LANES<T>) {
        const int64_t row = first + b;
        const Vec<T> operand = !on_x  ? Vec<T>::load(h_operand[k / 2] + row * ld + j)
                               : k > 0 ? Vec<T>::load(x_operand[k / 2] + row * ld + j)
                                       : Vec<T>::load(r.x + row * s.X + j, s.X - j);
        Vec<T> d = Vec<T>::load(d_operand + b * ld + j);
        const Vec<T> dg = mogrify_backward(Vec<T>::load(gate(k, row) + j), operand, d);
        d.store(d_operand + b * ld + j);
        dg.store(d_out + b * ld + j);
        (Vec<T>::load(dbias_step[k] + j) + dg).store(dbias_step[k] + j);
      }
    add(dbias_step[k], dbias[k], out);
    barrier.wait(p.weight);
    T* target = (on_x ? dh : dx) + in.begin;
    const T* weight = A[first_use(r.A, k)];
    if (s.rank) {
      T* u = dfactors[k] + first * s.ldr;
      gemm(s.B, s.out(k), (const T*)d_out, ld, weight + s.out(k) * p.r.begin, p.r.size(), u + p.r.begin, s.ldr, true, false);
      barrier.wait(p.weight);
      gemm(s.B, s.rank, (const T*)u, s.ldr, F[first_use(r.F, k)] + s.rank * in.begin, in.size(), target, ld_in, true, true);
    } else {
      gemm(s.B, s.out(k), (const T*)d_out, ld, weight + s.out(k) * in.begin, in.size(), target, ld_in, true, true);
    }
  }

  // The gradient of one weight (out, columns): its rows are shared out among the parts.
  void weight_gradient(const Part& p, T* dW, int64_t out, const T* d, int64_t ld, const T* operand, int64_t ld_operand,
                       int64_t columns, bool accumulate) {
    if (dW)
      gemm_transposed(rows, d, ld, out * p.begin / parts, out * p.end / parts, operand, ld_operand, columns, dW, columns,
                      accumulate, p.scratch);
  }

  static void store_sums(T* out, const T* sums, Range columns, int64_t width, bool accumulate) {
    if (!out) return;
    for (int64_t j = columns.begin; j < columns.end; j += LANES<T>) {
      Vec<T> v = Vec<T>::load(sums + j);
      if (accumulate) v = v + Vec<T>::load(out + j, width - j);
      v.store(out + j, width - j);
    }
  }

  void finish(const Part& p) {
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
        Vec<T>::load(dh_carried + b * s.ldh + j).store(g.dh0 + b * s.H + j, s.H - j);
        Vec<T>::load(dc + b * s.ldh + j).store(g.dc0 + b * s.H + j, s.H - j);
      }
    if (s.rounds == 0 && g.dx)
      gemm(rows, 4 * s.H, (const T*)dz, ldz, W_ih + 4 * s.H * p.x.begin, p.x.size(), g.dx + p.x.begin, s.X, false, false);
    const T* x = s.rounds ? x_operand[rounds_on_x()] : r.x;
    weight_gradient(p, g.dW_ih, 4 * s.H, dz, ldz, x, s.rounds ? s.ldx : s.X, s.X, false);
    weight_gradient(p, g.dW_hh, 4 * s.H, dz, ldz, h_operand[rounds_on_h()], s.ldh, s.H, false);
    for (int gate = 0; gate < 4; ++gate)
      if (g.db) store_sums(g.db + gate * s.H, db + gate * s.ldh, p.h, s.H, false);
    for (int64_t k = 0; k < s.rounds; ++k) {
      const bool on_x = s.on_x(k);
      const T* operand = on_x ? h_operand[k / 2] : x_operand[k / 2 + 1];
      const int64_t ld_in = on_x ? s.ldh : s.ldx;
      const auto repeated = [&](T* const* d) { return d[k] && first_use<T>(d, k) < k; };
      if (s.rank) {
        weight_gradient(p, g.dA[k], s.out(k), dgate[k], s.ld_out(k), r.factors + k * rows * s.rp, s.rp, s.rank, repeated(g.dA));
        weight_gradient(p, g.dF[k], s.rank, dfactors[k], s.ldr, operand, ld_in, s.in(k), repeated(g.dF));
      } else {
        weight_gradient(p, g.dA[k], s.out(k), dgate[k], s.ld_out(k), operand, ld_in, s.in(k), repeated(g.dA));
      }
      store_sums(g.dbias[k], dbias[k], on_x ? p.x : p.h, s.out(k), repeated(g.dbias));
    }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
