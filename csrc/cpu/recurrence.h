// The LSTM and the Mogrifier LSTM over a whole sequence, forward. One team of threads runs all steps; each part owns a
// range of hidden units (and of inputs, and of a low rank's columns), packs its own columns of every weight once, and
// after each product does the pointwise work of the columns it has just computed. A step has a barrier after each
// round (two where the rank is low) and one after the gates. No memory is taken in the loop.
//
// What limits it: at 20 rows and more the multiply-adds; at one row the weights' way from the third cache, which they
// take once a step. The input's product cannot leave the loop where there are rounds; without, it does.
#pragma once
#include "../cells/lstm.h"
#include "../cells/mogrifier.h"
#include "team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t MAX_ROUNDS = 64;

// Sizes and strides of one recurrence, the same in forward and backward.
template <class T> struct Shape {
  int64_t steps, B, X, H, rounds, rank, Xp, Hp, rp, ldx, ldh, ldr, round_width, round_offset[MAX_ROUNDS];

  explicit Shape(const cpu::Recurrence<T>& r)
      : steps(r.steps), B(r.B), X(r.X), H(r.H), rounds(r.rounds), rank(r.rank), Xp(cpu::padded(X)), Hp(cpu::padded(H)),
        rp(cpu::padded(rank)), ldx(stride<T>(X)), ldh(stride<T>(H)), ldr(stride<T>(rank)), round_width(0) {
    for (int64_t k = 0; k < rounds; ++k) {
      round_offset[k] = round_width;
      round_width += on_x(k) ? Xp : Hp;
    }
  }
  HD bool on_x(int64_t k) const { return k % 2 == 0; }               // which operand round k scales
  HD int64_t out(int64_t k) const { return on_x(k) ? X : H; }        // and its width
  HD int64_t in(int64_t k) const { return on_x(k) ? H : X; }
  HD int64_t ld_out(int64_t k) const { return on_x(k) ? ldx : ldh; }
};

// Rounds that share a weight share its packed copy: the first round with the same pointer.
template <class T> HD int64_t first_use(const T* const* weights, int64_t k) {
  int64_t j = 0;
  while (weights[j] != weights[k]) ++j;
  return j;
}

// How much of the new state the units of a row take: 1 or 0 in training, else the expectation.
template <class T>
void zoneout_row(const cpu::Recurrence<T>& r, const cpu::Mask& mask, double p, Range units, int64_t row, T* update) {
  if (r.training) return mask_values(mask, row, r.H, units.begin, units.end, T(1), T(0), update);
  for (int64_t j = 0; j < units.size(); ++j) update[j] = T(1 - p);
}

template <class T, bool cap> class Forward {
 public:
  Forward(const cpu::Recurrence<T>& r, int parts)
      : r(r), s(r), parts(parts), barrier(parts), W_ih(4 * packed_size<T>(s.X, s.H)), W_hh(4 * packed_size<T>(s.H, s.H)),
        h_raw(s.B * s.ldh), h_in{Buffer<T>(s.B * s.ldh), Buffer<T>(s.B * s.ldh)}, h_mogrified(s.B * s.ldh),
        x_mogrified(s.B * s.ldx), c_first(s.B * s.Hp), state_mask(r.state.threshold ? s.B * s.ldh : 0),
        zoneout(2 * s.ldh * parts) {
    for (int64_t k = 0; k < s.rounds; ++k) {
      if (first_use(r.A, k) == k) A[k] = Buffer<T>(packed_size<T>(s.rank ? s.rank : s.in(k), s.out(k)));
      if (s.rank && first_use(r.F, k) == k) F[k] = Buffer<T>(packed_size<T>(s.in(k), s.rank));
    }
  }

  void run(int64_t begin, int64_t end) {
    Part p{int(end - begin), own_columns<T>(s.H, begin, end, parts), own_columns<T>(s.X, begin, end, parts),
           own_columns<T>(s.rank, begin, end, parts), zoneout + 2 * s.ldh * begin};
    prepare(p);
    if (s.rounds == 0)
      for (int g = 0; g < 4; ++g)
        gemm(s.steps * s.B, s.X, r.x, s.X, packed(W_ih, s.X, g, p), p.h.size(), r.gates + g * s.Hp + p.h.begin, 4 * s.Hp,
             true, false);
    barrier.wait(p.weight);
    for (int64_t t = 0; t < s.steps; ++t) {
      for (int64_t k = 0; k < s.rounds; ++k) round(p, t, k);
      gates(p, t);
      barrier.wait(p.weight);
    }
    finish(p);
  }

 private:
  struct Part {
    int weight;
    Range h, x, r;  // the hidden units, inputs and low-rank columns it owns
    T* zoneout;     // (2, ldh)
  };

  const cpu::Recurrence<T>& r;
  const Shape<T> s;
  const int parts;
  Barrier barrier;
  Buffer<T> W_ih, W_hh;              // packed, gate by gate
  Buffer<T> A[MAX_ROUNDS], F[MAX_ROUNDS];
  Buffer<T> h_raw;                   // (B, ldh)     the state carried on
  Buffer<T> h_in[2];                 // (B, ldh)     the state a step reads, dropped out; in turn
  Buffer<T> h_mogrified;             // (B, ldh)
  Buffer<T> x_mogrified;             // (B, ldx)
  Buffer<T> c_first;                 // (B, Hp)
  Buffer<T> state_mask;              // (B, ldh)     factors
  Buffer<T> zoneout;                 // (parts, 2, ldh)

  const T* packed(const T* weight, int64_t K, int gate, const Part& p) const {
    return weight + gate * packed_size<T>(K, s.H) + K * p.h.begin;
  }

  void prepare(const Part& p) {
    memset(p.zoneout, 0, 2 * s.ldh * sizeof(T));  // its padding too: nothing unwritten is ever read
    for (int64_t g = 0; g < 4; ++g) {
      const int64_t row = g * s.H + p.h.begin;
      pack(r.W_ih + row * s.X, 1, s.X, s.X, p.h.size(), W_ih + g * packed_size<T>(s.X, s.H) + s.X * p.h.begin);
      pack(r.W_hh + row * s.H, 1, s.H, s.H, p.h.size(), W_hh + g * packed_size<T>(s.H, s.H) + s.H * p.h.begin);
    }
    for (int64_t k = 0; k < s.rounds; ++k) {
      const Range out = s.on_x(k) ? p.x : p.h;
      const int64_t K = s.rank ? s.rank : s.in(k);
      if (first_use(r.A, k) == k) pack(r.A[k] + out.begin * K, 1, K, K, out.size(), A[k] + K * out.begin);
      if (s.rank && first_use(r.F, k) == k)
        pack(r.F[k] + p.r.begin * s.in(k), 1, s.in(k), s.in(k), p.r.size(), F[k] + s.in(k) * p.r.begin);
    }
    for (int64_t b = 0; b < s.B; ++b) {
      if (r.state.threshold)
        mask_values(r.state, b, s.H, p.h.begin, p.h.end, T(r.state.scale), T(0), state_mask + b * s.ldh + p.h.begin);
      for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
        Vec<T>::load(r.c0 + b * s.H + j, s.H - j).store(c_first + b * s.Hp + j);
        const Vec<T> h = Vec<T>::load(r.h0 + b * s.H + j, s.H - j);
        h.store(h_raw + b * s.ldh + j);
        input_state(h, b, j).store(h_in[0] + b * s.ldh + j);
      }
    }
  }

  HD Vec<T> input_state(Vec<T> h, int64_t b, int64_t j) const {
    return r.state.threshold ? h * Vec<T>::load(state_mask + b * s.ldh + j, s.H - j) : h;
  }

  void round(const Part& p, int64_t t, int64_t k) {
    const bool on_x = s.on_x(k);
    const Range out = on_x ? p.x : p.h;
    const T* operand = on_x ? (k < 2 ? h_in[t % 2] : h_mogrified) : x_mogrified;
    const int64_t ld = on_x ? s.ldh : s.ldx, K = s.rank ? s.rank : s.in(k);
    T* gate = r.round_gates + t * s.B * s.round_width + s.round_offset[k];
    const T* weight = A[first_use(r.A, k)] + K * out.begin;
    if (s.rank) {
      T* u = r.factors + (k * s.steps + t) * s.B * s.rp;
      gemm(s.B, s.in(k), operand, ld, F[first_use(r.F, k)] + s.in(k) * p.r.begin, p.r.size(), u + p.r.begin, s.rp, true, false);
      barrier.wait(p.weight);
      gemm(s.B, K, u, s.rp, weight, out.size(), gate + out.begin, s.round_width, true, false);
    } else {
      gemm(s.B, K, operand, ld, weight, out.size(), gate + out.begin, s.round_width, true, false);
    }
    const T* bias = r.bias[k];
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t j = out.begin; j < out.end; j += LANES<T>) {
        T* z = gate + b * s.round_width + j;
        Vec<T> g = Vec<T>::load(z);
        if (bias) g = g + Vec<T>::load(bias + j, s.out(k) - j);
        g = sigmoid(g);
        g.store(z);
        if (on_x) {
          T* x = x_mogrified + b * s.ldx + j;
          mogrify(g, k == 0 ? Vec<T>::load(r.x + (t * s.B + b) * s.X + j, s.X - j) : Vec<T>::load(x)).store(x);
        } else {
          T* h = h_mogrified + b * s.ldh + j;
          mogrify(g, Vec<T>::load(k == 1 ? h_in[t % 2] + b * s.ldh + j : h)).store(h);
        }
      }
    barrier.wait(p.weight);
  }

  void gates(const Part& p, int64_t t) {
    T* out = r.gates + t * s.B * 4 * s.Hp;
    const T* h = s.rounds < 2 ? h_in[t % 2] : h_mogrified;
    for (int g = 0; g < 4; ++g) {
      T* C = out + g * s.Hp + p.h.begin;
      if (s.rounds > 0) gemm(s.B, s.X, (const T*)x_mogrified, s.ldx, packed(W_ih, s.X, g, p), p.h.size(), C, 4 * s.Hp, true, false);
      gemm(s.B, s.H, h, s.ldh, packed(W_hh, s.H, g, p), p.h.size(), C, 4 * s.Hp, true, true);
    }
    for (int64_t b = 0; b < s.B; ++b) cell(p, t, b, out + b * 4 * s.Hp);
  }

  void cell(const Part& p, int64_t t, int64_t b, T* z) {
    const bool alive = !r.lengths || t < r.lengths[b];
    const T* c_before = t ? r.cells + ((t - 1) * s.B + b) * s.Hp : c_first + b * s.Hp;
    T *c_after = r.cells + (t * s.B + b) * s.Hp, *y = r.y + (t * s.B + b) * s.H;
    T *carried = h_raw + b * s.ldh, *next = h_in[(t + 1) % 2] + b * s.ldh;
    if (r.zoneout_h.threshold) zoneout_row(r, r.zoneout_h, r.zoneout_h_p, p.h, t * s.B + b, p.zoneout);
    if (r.zoneout_c.threshold) zoneout_row(r, r.zoneout_c, r.zoneout_c_p, p.h, t * s.B + b, p.zoneout + s.ldh);
    for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
      const int64_t n = s.H - j;
      const Vec<T> c_old = Vec<T>::load(c_before + j), h_old = Vec<T>::load(carried + j);
      LstmGates<Vec<T>> a{Vec<T>::load(z + j), Vec<T>::load(z + s.Hp + j), Vec<T>::load(z + 2 * s.Hp + j),
                          Vec<T>::load(z + 3 * s.Hp + j)};
      if (r.b)
        a = {a.i + Vec<T>::load(r.b + j, n), a.f + Vec<T>::load(r.b + s.H + j, n), a.g + Vec<T>::load(r.b + 2 * s.H + j, n),
             a.o + Vec<T>::load(r.b + 3 * s.H + j, n)};
      a = lstm_gates(a);
      a.i.store(z + j), a.f.store(z + s.Hp + j), a.g.store(z + 2 * s.Hp + j), a.o.store(z + 3 * s.Hp + j);
      LstmState<Vec<T>> state = lstm_cell<cap>(a, c_old);
      if (r.zoneout_h.threshold) state.h = mix(p.zoneout + j - p.h.begin, state.h, h_old);
      if (r.zoneout_c.threshold) state.c = mix(p.zoneout + s.ldh + j - p.h.begin, state.c, c_old);
      if (!alive) state = {h_old, c_old};
      (alive ? state.h : Vec<T>(T(0))).store(y + j, n);
      state.c.store(c_after + j);
      state.h.store(carried + j);
      input_state(state.h, b, j).store(next + j);
    }
  }

  HD Vec<T> mix(const T* update, Vec<T> after, Vec<T> before) const {
    const Vec<T> u = Vec<T>::load(update);
    return u * after + (1.f - u) * before;
  }

  void finish(const Part& p) {
    const T* c = r.cells + (s.steps - 1) * s.B * s.Hp;
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t j = p.h.begin; j < p.h.end; j += LANES<T>) {
        Vec<T>::load(h_raw + b * s.ldh + j).store(r.h + b * s.H + j, s.H - j);
        Vec<T>::load(c + b * s.Hp + j).store(r.c + b * s.H + j, s.H - j);
      }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
