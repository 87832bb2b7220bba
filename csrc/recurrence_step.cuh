// The kernels of a step of the LSTM and the Mogrifier LSTM between the vendor's products, forward and backward, which
// recurrence_loop.cu starts: the state's begin and end, a round, the cell.
#pragma once
#include "cells/lstm.h"
#include "recurrence.cuh"

namespace fusedseq::cuda {

// What the kernels of a cell and of a state need in either direction.
struct Cell {
  int64_t B, H, Hp;
  bool cap, training;
  const int64_t *seed, *lengths;
  Mask state, zoneout_h, zoneout_c;
  explicit Cell(const Recurrence& r)
      : B(r.B), H(r.H), Hp(r.Hp), cap(r.cap_input_gate), training(r.training), seed(r.seed), lengths(r.lengths), state(r.state),
        zoneout_h(r.zoneout_h), zoneout_c(r.zoneout_c) {}
};

// How much of the new state a unit takes: 1 or 0 in training, else the expectation.
template <class C> __device__ void zoneout(const Cell& a, const Mask& m, int64_t t, int64_t b, int64_t j, Four<C>& update) {
  const unsigned bits = m.threshold && a.training ? kept(m, a.seed, t * a.B + b, j, a.H) : ~0u;
#pragma unroll
  for (int i = 0; i < N; ++i) update[i] = m.threshold && !a.training ? C(1 - m.p) : C(bits >> i & 1);
}

// Also where what is not taken is no number.
template <class C> __device__ C mix(C update, C after, C before) {
  return update == C(1) ? after : update == C(0) ? before : update * after + (C(1) - update) * before;
}

template <class S> struct Begin {
  using C = typename Computing<S>::type;
  const S *h0, *c0;  // (B, H)
  C *h, *c;          // (B, Hp)
  S* operand;        // (B, ld), its part of h
  int64_t ld;
};

template <class S> __global__ void __launch_bounds__(THREADS) begin_kernel(const Cell a, const Begin<S> g) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column();
  if (j >= a.Hp) return;
  C h[N], c[N];
  load(g.h0 + b * a.H + j, a.H - j, h);
  load(g.c0 + b * a.H + j, a.H - j, c);
  store(g.h + b * a.Hp + j, N, h);
  store(g.c + b * a.Hp + j, N, c);
  drop(a.state, a.seed, b, j, a.H, h);
  store(g.operand + b * g.ld + j, N, h);
}

template <class S> struct RoundForward {
  using C = typename Computing<S>::type;
  int64_t width, padded;        // of the operand
  const C* z;                   // (B, padded)
  const S* bias;                // (width,) or null
  const S* x;                   // (B, width), the operand before, or null: then
  const C* before;              // (B, padded)
  Mask state;                   // on it
  const int64_t* seed;
  C* after;                     // (B, padded)
  S* operand;                   // (B, ld), its part
  int64_t ld;
  S* gate;                      // (B, padded), round_width apart
  int64_t round_width;
};

template <class S> __global__ void __launch_bounds__(THREADS) round_kernel(const RoundForward<S> r) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column(), n = r.width - j;
  if (j >= r.padded) return;
  C s[N], bias[N] = {}, v[N];
  load(r.z + b * r.padded + j, n, s);
  if (r.x) load(r.x + b * r.width + j, n, v);
  else load(r.before + b * r.padded + j, n, v);
  drop(r.state, r.seed, b, j, r.width, v);
  if (r.bias) load(r.bias + j, n, bias);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] = i < n ? sigmoid(s[i] + bias[i]) : C(0);
    v[i] = mogrify(s[i], v[i]);
  }
  store(r.gate + b * r.round_width + j, N, s);
  store(r.after + b * r.padded + j, N, v);
  store(r.operand + b * r.ld + j, N, v);
}

template <class S> struct CellForward {
  using C = typename Computing<S>::type;
  int64_t t;
  const C *z, *z_x;                   // (B, 4H), whose sum are the pre-activations; z_x may be null
  const S* b;                         // (4H,) or null
  const C* c_before;                  // (B, Hp)
  C *c_after, *h;                     // (B, Hp); h is carried on
  S *gates, *y, *operand;             // (B, 4, Hp), (B, H), (B, ld): its part of h
  int64_t ld;
  S *h_last, *c_last;                 // (B, H), or null but for the last step
};

template <class C> __device__ void add(const C* p, int64_t n, Four<C>& v) {
  C w[N];
  load(p, n, w);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] += w[i];
}

template <class S> __global__ void __launch_bounds__(THREADS) cell_kernel(const Cell a, const CellForward<S> f) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column(), n = a.H - j;
  if (j >= a.Hp) return;
  C z[4][N], h[N], c[N], update_h[N], update_c[N], y[N];
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) {
    const int64_t at = gate * a.H + j;
    load(f.z + b * 4 * a.H + at, n, z[gate]);
    if (f.z_x) add(f.z_x + b * 4 * a.H + at, n, z[gate]);
    C bias[N] = {};
    if (f.b) load(f.b + at, n, bias);
#pragma unroll
    for (int i = 0; i < N; ++i) z[gate][i] += bias[i];
  }
  load(f.h + b * a.Hp + j, N, h);
  load(f.c_before + b * a.Hp + j, N, c);
  zoneout(a, a.zoneout_h, f.t, b, j, update_h);
  zoneout(a, a.zoneout_c, f.t, b, j, update_c);
  const bool alive = !a.lengths || f.t < a.lengths[b];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const LstmGates<C> gates = lstm_gates(LstmGates<C>{z[0][i], z[1][i], z[2][i], z[3][i]});
    const LstmState<C> next = a.cap ? lstm_cell<true>(gates, c[i]) : lstm_cell<false>(gates, c[i]);
    if (alive) h[i] = mix(update_h[i], next.h, h[i]), c[i] = mix(update_c[i], next.c, c[i]);
    y[i] = alive ? h[i] : C(0);
    z[0][i] = i < n ? gates.i : C(0), z[1][i] = i < n ? gates.f : C(0);
    z[2][i] = i < n ? gates.g : C(0), z[3][i] = i < n ? gates.o : C(0);
  }
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) store(f.gates + (b * 4 + gate) * a.Hp + j, N, z[gate]);
  store(f.y + b * a.H + j, n, y);
  store(f.h + b * a.Hp + j, N, h);
  store(f.c_after + b * a.Hp + j, N, c);
  if (f.h_last) store(f.h_last + b * a.H + j, n, h), store(f.c_last + b * a.H + j, n, c);
  drop(a.state, a.seed, b, j, a.H, h);
  store(f.operand + b * f.ld + j, N, h);
}

// The gradient of the state that a step has read: what passed its cell by, and what came through its gates and rounds.
template <class C> struct StateGradient {
  const C* past;     // (B, Hp)
  const C* gates;    // (B, ld), the part of h; null where there is none yet
  int64_t ld;
  const C* round;    // (B, Hp) or null
};

template <class C> __device__ void state_gradient(const Cell& a, const StateGradient<C>& g, int64_t b, int64_t j, Four<C>& d) {
  C past[N];
  load(g.past + b * a.Hp + j, a.H - j, past);
  if (!g.gates) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = past[i];
    return;
  }
  load(g.gates + b * g.ld + j, a.H - j, d);
  if (g.round) add(g.round + b * a.Hp + j, a.H - j, d);
  drop(a.state, a.seed, b, j, a.H, d);
#pragma unroll
  for (int i = 0; i < N; ++i) d[i] += past[i];
}

template <class S> struct CellGradient {
  using C = typename Computing<S>::type;
  int64_t t;
  const S *gates, *dy;     // (B, 4, Hp), (B, H)
  const C* c_before;       // (B, Hp)
  StateGradient<C> after;  // of the state after this step
  C *dh, *dc;              // (B, Hp): what passes the cell by; of c, after and then before this step
  S* dz;                   // (B, 4H)
};

template <class S> __global__ void __launch_bounds__(THREADS) cell_backward_kernel(const Cell a, const CellGradient<S> g) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column(), n = a.H - j;
  if (j >= a.Hp) return;
  C z[4][N] = {}, dh[N], dc[N], c[N], dy[N], update_h[N], update_c[N];
  state_gradient(a, g.after, b, j, dh);
  S* dz = g.dz + b * 4 * a.H + j;
  if (a.lengths && g.t >= a.lengths[b]) {  // past the end: the state's gradient passes by
    store(g.dh + b * a.Hp + j, N, dh);
    for (int gate = 0; gate < 4; ++gate) store(dz + gate * a.H, n, z[0]);
    return;
  }
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) load(g.gates + (b * 4 + gate) * a.Hp + j, N, z[gate]);
  load(g.c_before + b * a.Hp + j, n, c);
  load(g.dc + b * a.Hp + j, n, dc);
  load(g.dy + b * a.H + j, n, dy);
  zoneout(a, a.zoneout_h, g.t, b, j, update_h);
  zoneout(a, a.zoneout_c, g.t, b, j, update_c);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const LstmGates<C> gates{z[0][i], z[1][i], z[2][i], z[3][i]};
    const C through_h = update_h[i] * (dh[i] + dy[i]), past_c = (C(1) - update_c[i]) * dc[i];
    dh[i] = (C(1) - update_h[i]) * (dh[i] + dy[i]);
    dc[i] *= update_c[i];
    const LstmGates<C> d = a.cap ? lstm_cell_backward<true>(gates, c[i], through_h, dc[i]) : lstm_cell_backward<false>(gates, c[i], through_h, dc[i]);
    dc[i] += past_c;
    z[0][i] = d.i, z[1][i] = d.f, z[2][i] = d.g, z[3][i] = d.o;
  }
  store(g.dh + b * a.Hp + j, N, dh);
  store(g.dc + b * a.Hp + j, N, dc);
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) store(dz + gate * a.H, n, z[gate]);
}

template <class S> struct RoundGradient {
  using C = typename Computing<S>::type;
  int64_t width, padded;        // of the operand
  const S* raw;                 // (B, width), before any round
  Mask state;                   // on it
  const int64_t* seed;
  const S* gates;               // (B, .), round_width apart: of the first round on this operand
  int64_t round_width, period;
  int count;                    // rounds on this operand before
  C* d;                         // (B, ld), of the operand: after and then before the round
  int64_t ld;
  const C* pending;             // (B, padded), to add to d; null for the last round
  S* dround;                    // (B, padded), round_width apart
  S* dx;                        // (B, width), where d is the gradient of x itself; else null
};

template <class S> __global__ void __launch_bounds__(THREADS) round_backward_kernel(const RoundGradient<S> r) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column(), n = r.width - j;
  if (j >= r.padded) return;
  const S* gates = r.gates + b * r.round_width + j;
  C v[N], s[N], d[N], dz[N];
  load(r.raw + b * r.width + j, n, v);
  drop(r.state, r.seed, b, j, r.width, v);
  mogrify_all(gates, r.period, r.count, v);
  load(gates + r.count * r.period, N, s);
  load(r.d + b * r.ld + j, n, d);
  if (r.pending) add(r.pending + b * r.padded + j, n, d);
#pragma unroll
  for (int i = 0; i < N; ++i) dz[i] = mogrify_backward(s[i], v[i], d[i]);
  store(r.d + b * r.ld + j, N, d);
  store(r.dround + b * r.round_width + j, N, dz);
  if (r.dx) store(r.dx + b * r.width + j, n, d);
}

template <class S> struct Upstream {
  using C = typename Computing<S>::type;
  const S *dh_in, *dc_in, *c0;  // (B, H)
  C *dh, *dc, *c;               // (B, Hp)
};

template <class S> __global__ void __launch_bounds__(THREADS) begin_backward_kernel(const Cell a, const Upstream<S> u) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column();
  if (j >= a.Hp) return;
  C v[N];
  load(u.dh_in + b * a.H + j, a.H - j, v), store(u.dh + b * a.Hp + j, N, v);
  load(u.dc_in + b * a.H + j, a.H - j, v), store(u.dc + b * a.Hp + j, N, v);
  load(u.c0 + b * a.H + j, a.H - j, v), store(u.c + b * a.Hp + j, N, v);
}

template <class S> struct Downstream {
  using C = typename Computing<S>::type;
  StateGradient<C> h;
  const C* dc;    // (B, Hp)
  S *dh0, *dc0;   // (B, H)
};

template <class S> __global__ void __launch_bounds__(THREADS) end_backward_kernel(const Cell a, const Downstream<S> d) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row(), j = own_column();
  if (j >= a.Hp) return;
  C v[N];
  state_gradient(a, d.h, b, j, v), store(d.dh0 + b * a.H + j, a.H - j, v);
  load(d.dc + b * a.Hp + j, a.H - j, v), store(d.dc0 + b * a.H + j, a.H - j, v);
}

}  // namespace fusedseq::cuda
