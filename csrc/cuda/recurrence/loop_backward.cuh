// The kernels that loop.cu launches between the matrix products of a backward step: the gradients
// of the final state, the cell, a round, the gradients of the initial state.
#pragma once
#include "cuda/recurrence/loop_step.cuh"
#include "math/cells.h"
#include "math/mogrifier.h"
#include "math/zoneout.h"

namespace fusedseq::cuda {

// The gradient of the state h that a step has read, as its parts.
template <class C>
struct StateGradient {
  const C* past;   // (B, Hp)  what bypassed the step's products (zoneout, ended sequences, the GRU)
  const C* gates;  // (B, ld)  what came through the gates: the part of h; null if there is none yet
  int64_t ld;
  // (B, Hp), or null  What came through another product: of the round on x that read h, or of the
  // cell's second block of gates.
  const C* other;
  int64_t t;  // the step that has read h
};

template <class C>
__device__ void state_gradient(const LoopArguments& a, const StateGradient<C>& g, int64_t b,
                               int64_t j, Elements<C>& d) {
  Elements<C> past;
  load(g.past + b * a.Hp + j, a.H - j, past);
  if (!g.gates) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      d[i] = past[i];
    return;
  }
  // Where the step read zeros in place of the state, the state has no gradient.
  if (resets(a, g.t, b)) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      d[i] = C(0);
    return;
  }
  // Gates and rounds read h after state dropout; what bypassed the cell did not.
  load(g.gates + b * g.ld + j, a.H - j, d);
  if (g.other) add(g.other + b * a.Hp + j, a.H - j, d);
  drop(a.state, a.seed, b, j, a.H, d);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    d[i] += past[i];
}

template <class S>
struct OutputGradients {
  using C = typename Computing<S>::type;
  const S *dh_in, *dc_in, *c0;  // (B, H); dc_in and c0 are null for a cell without c
  C *dh, *dc, *c;               // (B, Hp)  out
};

// Converts the gradients of the final state, and c0, to the computing type.
template <class S>
__global__ void __launch_bounds__(THREADS)
    begin_backward_kernel(const LoopArguments a, const OutputGradients<S> u) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  if (j >= a.Hp) return;
  Elements<C> v;
  load(u.dh_in + b * a.H + j, a.H - j, v);
  store(u.dh + b * a.Hp + j, PER_THREAD, v);
  if (!u.c0) return;
  load(u.dc_in + b * a.H + j, a.H - j, v);
  store(u.dc + b * a.Hp + j, PER_THREAD, v);
  load(u.c0 + b * a.H + j, a.H - j, v);
  store(u.c + b * a.Hp + j, PER_THREAD, v);
}

template <class S>
struct CellGradient {
  using C = typename Computing<S>::type;
  int64_t t;
  const S *gates, *dy;     // (B, SLOTS, Hp), (B, H)
  const S *h0, *y;         // (B, H), (T, B, H)
  const S* vectors;        // (V H,)  the cell's own parameters
  const C* c_before;       // (B, Hp)
  StateGradient<C> after;  // of h after this step
  C* dh;                   // (B, Hp)  out: the gradient of h that bypasses the products
  C* dc;                   // (B, Hp)  in: of c after this step, out: of c before it
  S* dz;                   // (B, SLOTS H)  out: of the pre-activations
  S* terms;                // (B, TERMS H)  out
};

template <class S, class Cell>
__global__ void __launch_bounds__(THREADS)
    cell_backward_kernel(const LoopArguments a, const CellGradient<S> g) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = a.H - j;
  if (j >= a.Hp) return;
  Elements<C> z[Cell::SLOTS] = {}, terms[Cell::TERMS + 1] = {};
  Elements<C> dh, dy, update_h, update_c;
  Elements<C> h = {}, c = {}, dc = {};
  UnitVectors<C, Cell::VECTORS + 1> p;
  state_gradient(a, g.after, b, j, dh);
  S* dz = g.dz + b * Cell::SLOTS * a.H + j;
  S* of_vectors = g.terms + b * Cell::TERMS * a.H + j;

  // Past a sequence's end the state did not change, so its gradient passes unchanged.
  if (has_ended(a.lengths, g.t, b)) {
    store(g.dh + b * a.Hp + j, PER_THREAD, dh);
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      store(dz + slot * a.H, n, z[0]);
    for (int term = 0; term < Cell::TERMS; ++term)
      store(of_vectors + term * a.H, n, z[0]);
    return;
  }

  const bool reset = resets(a, g.t, b);
#pragma unroll
  for (int slot = 0; slot < Cell::SLOTS; ++slot)
    load(g.gates + (b * Cell::SLOTS + slot) * a.Hp + j, PER_THREAD, z[slot]);
#pragma unroll
  for (int v = 0; v < Cell::VECTORS; ++v)
    load(g.vectors + v * a.H + j, n, p.all[v]);
  if (Cell::HAS_C) {
    load(g.dc + b * a.Hp + j, n, dc);
    if (!reset) load(g.c_before + b * a.Hp + j, n, c);
  } else if (const S* before = h_before(a, g.h0, g.y, g.t, b)) {
    load(before + j, n, h);
  }
  load(g.dy + b * a.H + j, n, dy);
  zoneout(a, a.zoneout_h, g.t, b, j, update_h);
  zoneout(a, a.zoneout_c, g.t, b, j, update_c);

  // Zoneout splits each gradient into a part through the cell and a part that bypasses it.
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    C slots[Cell::SLOTS], d[Cell::SLOTS], of_unit[Cell::TERMS + 1];
#pragma unroll
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      slots[slot] = z[slot][i];
    C d_h = dh[i] + dy[i], d_c = dc[i];
    p.i = i;
    dh[i] = bypass(update_h[i], d_h);
    dc[i] = bypass(update_c[i], d_c);
    Cell::backward(slots, h[i], c[i], p, d_h, d_c, d, of_unit);
    dh[i] += d_h;
    dc[i] += d_c;
#pragma unroll
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      z[slot][i] = d[slot];
#pragma unroll
    for (int term = 0; term < Cell::TERMS; ++term)
      terms[term][i] = of_unit[term];
  }

  // The gradient of a state that was zeroed goes no further: of c here, of h in state_gradient.
  if (reset)
    for (int i = 0; i < PER_THREAD; ++i)
      dc[i] = C(0);
  store(g.dh + b * a.Hp + j, PER_THREAD, dh);
  if (Cell::HAS_C) store(g.dc + b * a.Hp + j, PER_THREAD, dc);
#pragma unroll
  for (int slot = 0; slot < Cell::SLOTS; ++slot)
    store(dz + slot * a.H, n, z[slot]);
#pragma unroll
  for (int term = 0; term < Cell::TERMS; ++term)
    store(of_vectors + term * a.H, n, terms[term]);
}

template <class S>
struct RoundGradient {
  using C = typename Computing<S>::type;
  int64_t width, padded;  // of the operand that the round scales
  // The operand before dropout and rounds: x, which counts as zero past a sequence's end, or null
  // for the state before the step.
  const S* x;       // (B, width)
  const S *h0, *y;  // (B, width), (T, B, width)
  int64_t t;
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
__global__ void __launch_bounds__(THREADS)
    round_backward_kernel(const LoopArguments a, const RoundGradient<S> r) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = r.width - j;
  if (j >= r.padded) return;

  // Recompute the operand before this round from the saved sigmoids.
  const S* gates = r.gates + b * r.round_width + j;
  Elements<C> s, d, dz;
  Elements<C> v = {};
  if (r.x) {
    if (!has_ended(a.lengths, r.t, b)) load(r.x + b * r.width + j, n, v);
  } else if (const S* before = h_before(a, r.h0, r.y, r.t, b)) {
    load(before + j, n, v);
    drop(a.state, a.seed, b, j, r.width, v);
  }
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
  S *dh0, *dc0;  // (B, H)  out; dc0 is null for a cell without c
};

template <class S>
__global__ void __launch_bounds__(THREADS)
    end_backward_kernel(const LoopArguments a, const InitialStateGradients<S> d) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  if (j >= a.Hp) return;
  Elements<C> v;
  state_gradient(a, d.h, b, j, v);
  store(d.dh0 + b * a.H + j, a.H - j, v);
  if (!d.dc0) return;
  load(d.dc + b * a.Hp + j, a.H - j, v);
  store(d.dc0 + b * a.H + j, a.H - j, v);
}

}  // namespace fusedseq::cuda
