// The kernels that loop.cu launches between the matrix products of a backward step: the gradients
// of the final state, the cell, a round, the gradients of the initial state.
#pragma once
#include "cuda/recurrence/loop_step.cuh"
#include "math/lstm.h"
#include "math/mogrifier.h"

namespace fusedseq::cuda {

// The gradient of the state h that a step has read, as its parts.
template <class C>
struct StateGradient {
  const C* past;   // (B, Hp)  what bypassed the step's cell (zoneout, ended sequences)
  const C* gates;  // (B, ld)  what came through the gates: the part of h; null if there is none yet
  int64_t ld;
  const C* round;  // (B, Hp)  what came through the round on x that read h; or null
};

template <class C>
__device__ void state_gradient(const Cell& a, const StateGradient<C>& g, int64_t b, int64_t j,
                               Elements<C>& d) {
  Elements<C> past;
  load(g.past + b * a.Hp + j, a.H - j, past);
  if (!g.gates) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      d[i] = past[i];
    return;
  }
  // Gates and rounds read h after state dropout; what bypassed the cell did not.
  load(g.gates + b * g.ld + j, a.H - j, d);
  if (g.round) add(g.round + b * a.Hp + j, a.H - j, d);
  drop(a.state, a.seed, b, j, a.H, d);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    d[i] += past[i];
}

template <class S>
struct OutputGradients {
  using C = typename Computing<S>::type;
  const S *dh_in, *dc_in, *c0;  // (B, H)
  C *dh, *dc, *c;               // (B, Hp)  out
};

// Converts the gradients of the final state, and c0, to the computing type.
template <class S>
__global__ void __launch_bounds__(THREADS)
    begin_backward_kernel(const Cell a, const OutputGradients<S> u) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  if (j >= a.Hp) return;
  Elements<C> v;
  load(u.dh_in + b * a.H + j, a.H - j, v);
  store(u.dh + b * a.Hp + j, PER_THREAD, v);
  load(u.dc_in + b * a.H + j, a.H - j, v);
  store(u.dc + b * a.Hp + j, PER_THREAD, v);
  load(u.c0 + b * a.H + j, a.H - j, v);
  store(u.c + b * a.Hp + j, PER_THREAD, v);
}

template <class S>
struct CellGradient {
  using C = typename Computing<S>::type;
  int64_t t;
  const S *gates, *dy;     // (B, 4, Hp), (B, H)
  const C* c_before;       // (B, Hp)
  StateGradient<C> after;  // of h after this step
  C* dh;                   // (B, Hp)  out: the gradient of h that bypasses the cell
  C* dc;                   // (B, Hp)  in: of c after this step, out: of c before it
  S* dz;                   // (B, 4H)  out: of the gates' pre-activations
};

template <class S>
__global__ void __launch_bounds__(THREADS)
    cell_backward_kernel(const Cell a, const CellGradient<S> g) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = a.H - j;
  if (j >= a.Hp) return;
  Elements<C> z[4] = {};
  Elements<C> dh, dc, c, dy, update_h, update_c;
  state_gradient(a, g.after, b, j, dh);
  S* dz = g.dz + b * 4 * a.H + j;

  // Past a sequence's end the state did not change, so its gradient passes unchanged.
  if (has_ended(a.lengths, g.t, b)) {
    store(g.dh + b * a.Hp + j, PER_THREAD, dh);
    for (int gate = 0; gate < 4; ++gate)
      store(dz + gate * a.H, n, z[0]);
    return;
  }

#pragma unroll
  for (int gate = 0; gate < 4; ++gate)
    load(g.gates + (b * 4 + gate) * a.Hp + j, PER_THREAD, z[gate]);
  load(g.c_before + b * a.Hp + j, n, c);
  load(g.dc + b * a.Hp + j, n, dc);
  load(g.dy + b * a.H + j, n, dy);
  zoneout(a, a.zoneout_h, g.t, b, j, update_h);
  zoneout(a, a.zoneout_c, g.t, b, j, update_c);

  // Zoneout splits each gradient into a part through the cell and a part that bypasses it.
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const LstmGates<C> gates{z[0][i], z[1][i], z[2][i], z[3][i]};
    const C through_h = update_h[i] * (dh[i] + dy[i]);
    const C past_c = (C(1) - update_c[i]) * dc[i];
    dh[i] = (C(1) - update_h[i]) * (dh[i] + dy[i]);
    dc[i] *= update_c[i];
    const LstmGates<C> d = a.cap ? lstm_cell_backward<true>(gates, c[i], through_h, dc[i])
                                 : lstm_cell_backward<false>(gates, c[i], through_h, dc[i]);
    dc[i] += past_c;
    z[0][i] = d.i;
    z[1][i] = d.f;
    z[2][i] = d.g;
    z[3][i] = d.o;
  }
  store(g.dh + b * a.Hp + j, PER_THREAD, dh);
  store(g.dc + b * a.Hp + j, PER_THREAD, dc);
#pragma unroll
  for (int gate = 0; gate < 4; ++gate)
    store(dz + gate * a.H, n, z[gate]);
}

template <class S>
struct RoundGradient {
  using C = typename Computing<S>::type;
  int64_t width, padded;   // of the operand that the round scales
  const S* raw;            // (B, width)  the operand before dropout and rounds
  const int64_t* lengths;  // (B,) or null: the operand counts as zero behind a sequence's end
  int64_t t;
  Mask state;  // its dropout
  const int64_t* seed;
  const S* gates;  // (B, round_width)  sigmoids, from the first round on this operand on
  int64_t round_width, period;  // a row, and from a round on this operand to the next one
  int count;                    // rounds on this operand before this one
  C* d;                         // (B, ld)  in: gradient of the operand after the round, out: before
  int64_t ld;
  const C* pending;  // (B, padded)  to be added to d first; null in the last round
  S* dround;         // (B, round_width)  out: gradient of the round's pre-activations, its columns
  S* dx;             // (B, width)  out: d, in the first round, whose operand is x itself; else null
};

template <class S>
__global__ void __launch_bounds__(THREADS) round_backward_kernel(const RoundGradient<S> r) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = r.width - j;
  if (j >= r.padded) return;

  // Recompute the operand before this round from the saved sigmoids.
  const S* gates = r.gates + b * r.round_width + j;
  Elements<C> s, d, dz;
  Elements<C> v = {};
  if (!has_ended(r.lengths, r.t, b)) load(r.raw + b * r.width + j, n, v);
  drop(r.state, r.seed, b, j, r.width, v);
  mogrify_all(gates, r.period, r.count, v);
  load(gates + r.count * r.period, PER_THREAD, s);

  // mogrify_backward returns the gradient of the sigmoid's argument, and updates d.
  load(r.d + b * r.ld + j, n, d);
  if (r.pending) add(r.pending + b * r.padded + j, n, d);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    dz[i] = mogrify_backward(s[i], v[i], d[i]);
  store(r.d + b * r.ld + j, PER_THREAD, d);
  store(r.dround + b * r.round_width + j, PER_THREAD, dz);
  if (r.dx) store(r.dx + b * r.width + j, n, d);
}

template <class S>
struct InitialStateGradients {
  using C = typename Computing<S>::type;
  StateGradient<C> h;
  const C* dc;   // (B, Hp)
  S *dh0, *dc0;  // (B, H)  out
};

template <class S>
__global__ void __launch_bounds__(THREADS)
    end_backward_kernel(const Cell a, const InitialStateGradients<S> d) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  if (j >= a.Hp) return;
  Elements<C> v;
  state_gradient(a, d.h, b, j, v);
  store(d.dh0 + b * a.H + j, a.H - j, v);
  load(d.dc + b * a.Hp + j, a.H - j, v);
  store(d.dc0 + b * a.H + j, a.H - j, v);
}

}  // namespace fusedseq::cuda
