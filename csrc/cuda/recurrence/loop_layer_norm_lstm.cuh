// The cell of the LSTM with layer normalization, forward and backward, for loop.cu: the arithmetic
// of math/layer_norm_lstm.h. A row has 4 sums forward and 2 backward.
#pragma once
#include "cuda/recurrence/loop_layer_norm.cuh"
#include "math/layer_norm_lstm.h"

namespace fusedseq::cuda {

constexpr int GAMMA_C = 8, BETA_C = 9;  // where these parts of `vectors` begin, in units of H

// u = tanh(gamma_c n + beta_c) from the normalized c'.
template <class S, class C>
__device__ void activated_c(const LayerNorm<S, LayerNormLstmCell>& norm, int64_t j,
                            const Elements<C>& n, Elements<C>& u) {
  Elements<C> gamma, beta;
  norm.vector(GAMMA_C, j, gamma);
  norm.vector(BETA_C, j, beta);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    u[i] = tanh_(n[i] * gamma[i] + beta[i]);
}

template <class S>
__global__ void __launch_bounds__(ROW_THREADS)
    layer_norm_lstm_kernel(const LoopArguments a, const CellForward<S> f,
                           const LayerNorm<S, LayerNormLstmCell> norm) {
  using C = typename Computing<S>::type;
  const int64_t b = blockIdx.x;
  const int64_t first = threadIdx.x * PER_THREAD;
  const int64_t width = norm.GATES * a.H;
  C* z_h = f.z + b * width;
  if (has_ended(a.lengths, f.t, b)) {
    copy_state(a, f, norm, b);
    return;
  }
  const ProductsOfRow<C> p = products_of_row(norm, f.z_x + b * width, static_cast<const C*>(z_h));

  // The gates, and c'. The output gate replaces the first gate's product, which is not read again.
  C mean_c[1] = {};
  for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
    const int64_t n = a.H - j;
    Elements<C> z[norm.Z] = {};
    Elements<C> c = {};
    pre_activations(norm, p, f.gates + b * norm.SLOTS * a.Hp, j, z);
    if (!resets(a, f.t, b)) load(f.c_before + b * a.Hp + j, PER_THREAD, c);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const LstmGates<C> gates = lstm_gates(LstmGates<C>{z[0][i], z[1][i], z[2][i], z[3][i]});
      c[i] = i < n ? lstm_cell_c<false>(gates, c[i]) : C(0);
      z[3][i] = gates.o;
      mean_c[0] += c[i];
    }
    store(f.c_after + b * a.Hp + j, PER_THREAD, c);
    store(z_h + j, n, z[3]);
  }
  sum_over_block(mean_c);
  mean_c[0] /= C(a.H);

  C rstd_c[1] = {};
  for (int64_t j = first; j < a.H; j += ROW_UNITS) {
    Elements<C> c;
    load(f.c_after + b * a.Hp + j, PER_THREAD, c);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      if (i < a.H - j) rstd_c[0] += (c[i] - mean_c[0]) * (c[i] - mean_c[0]);
  }
  sum_over_block(rstd_c);
  rstd_c[0] = norm.reciprocal_deviation(rstd_c[0], a.H);

  // h', from the normalized c', and the state after zoneout.
  for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
    const int64_t n = a.H - j;
    Elements<C> c, v, u, o, h, update_h, update_c;
    Elements<C> before = {};
    load(f.c_after + b * a.Hp + j, PER_THREAD, c);
    load(z_h + j, n, o);
    load(f.h + b * a.Hp + j, PER_THREAD, h);
    if (!resets(a, f.t, b)) load(f.c_before + b * a.Hp + j, PER_THREAD, before);
    zoneout(a, a.zoneout_h, f.t, b, j, update_h);
    zoneout(a, a.zoneout_c, f.t, b, j, update_c);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      v[i] = normalize(c[i], mean_c[0], rstd_c[0]);
    activated_c(norm, j, v, u);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      h[i] = i < n ? mix(update_h[i], o[i] * u[i], h[i]) : C(0);
      c[i] = mix(update_c[i], c[i], before[i]);
    }
    store(f.c_after + b * a.Hp + j, PER_THREAD, c);
    store(f.y + b * a.H + j, n, h);
    store_state(a, f, b, j, h, c);
  }
  if (threadIdx.x == 0) {
    C* statistics = norm.statistics + b * norm.STATISTICS;
    statistics[0] = p.rstd[0];
    statistics[1] = p.rstd[1];
    statistics[2] = mean_c[0];
    statistics[3] = rstd_c[0];
  }
}

// What the passes of the backward compute for a thread's units.
template <class S>
struct LayerNormLstmUnits {
  using C = typename Computing<S>::type;
  using Norm = LayerNorm<S, LayerNormLstmCell>;
  const LoopArguments& a;
  const CellGradient<S>& g;
  const Norm& norm;
  int64_t b;
  const C *c_after, *statistics;  // (Hp,), (4,)  of the row

  Elements<C> gates[Norm::GATES];     // activated
  Elements<C> products[Norm::SLOTS];  // normalized
  Elements<C> c_before;
  Elements<C> c, ds, dn;  // normalized c', gradients of its tanh's argument and of it
  Elements<C> dh;         // what bypasses the cell
  Elements<C> update_c;   // of zoneout
  Elements<C> dz[Norm::Z], dc;

  // From the output to c': sets all but dz[0] to dz[2], and dc. Where zoneout has
  // replaced c', it is computed again, from gates that were rounded to S.
  __device__ void through_output(int64_t j) {
    const int64_t n = a.H - j;
    Elements<C> d, dy, u, gamma, update, after;
    state_gradient(a, g.after, b, j, d);
    load(g.dy + b * a.H + j, n, dy);
    zoneout(a, a.zoneout_h, g.t, b, j, update);
    zoneout(a, a.zoneout_c, g.t, b, j, update_c);
    load(c_after + j, PER_THREAD, after);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      c_before[i] = C(0);
    if (!resets(a, g.t, b)) load(g.c_before + b * a.Hp + j, n, c_before);
    norm.vector(GAMMA_C, j, gamma);
#pragma unroll
    for (int gate = 0; gate < norm.Z; ++gate)
      for (int i = 0; i < PER_THREAD; ++i)
        gates[gate][i] = C(0);
#pragma unroll
    for (int slot = 0; slot < norm.SLOTS; ++slot) {
      load(g.gates + (b * norm.SLOTS + slot) * a.Hp + j, PER_THREAD, products[slot]);
      norm.add(slot, j, products[slot], gates);
    }
    norm.add_biases(j, gates);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const LstmGates<C> activated =
          lstm_gates(LstmGates<C>{gates[0][i], gates[1][i], gates[2][i], gates[3][i]});
      gates[0][i] = activated.i;
      gates[1][i] = activated.f;
      gates[2][i] = activated.g;
      gates[3][i] = activated.o;
      const C c_next = update_c[i] == C(1) ? after[i] : lstm_cell_c<false>(activated, c_before[i]);
      c[i] = i < n ? normalize(c_next, statistics[2], statistics[3]) : C(0);
    }
    activated_c(norm, j, c, u);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      C d_h = d[i] + dy[i];
      dh[i] = bypass(update[i], d_h);
      dz[3][i] = layer_norm_lstm_output_backward(gates[3][i], u[i], d_h, ds[i]);
      dn[i] = ds[i] * gamma[i];
    }
  }

  // From c' to the gates and to c before the step, after through_output. mean_dn, mean_dn_n: of dn
  // and of dn c
  __device__ void through_c(int64_t j, C mean_dn, C mean_dn_n) {
    const int64_t n = a.H - j;
    Elements<C> d;
    load(g.dc + b * a.Hp + j, n, d);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const C past = bypass(update_c[i], d[i]);
      const C dc_next = d[i] + normalize_backward(c[i], dn[i], statistics[3], mean_dn, mean_dn_n);
      const LstmGates<C> activated{gates[0][i], gates[1][i], gates[2][i], gates[3][i]};
      const LstmGates<C> of_gates =
          layer_norm_lstm_cell_backward(activated, c_before[i], dc_next, dz[3][i], dc[i]);
      dc[i] += past;
      dz[0][i] = of_gates.i;
      dz[1][i] = of_gates.f;
      dz[2][i] = of_gates.g;
    }
  }
};

// The 1 lets ptxas use more than 128 registers, without which it would spill.
template <class S>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_lstm_backward_kernel(const LoopArguments a, const CellGradient<S> g,
                                    const LayerNorm<S, LayerNormLstmCell> norm,
                                    const typename Computing<S>::type* c_after) {
  using C = typename Computing<S>::type;
  constexpr int TERMS = LayerNormLstmCell::TERMS;
  const int64_t b = blockIdx.x;
  const int64_t first = threadIdx.x * PER_THREAD;
  if (has_ended(a.lengths, g.t, b)) {
    copy_state_gradient(a, g, norm, b);
    return;
  }

  // The means of dn and of dn n, first of c', then of the products with W_ih and with W_hh.
  LayerNormLstmUnits<S> row{
      a, g, norm, b, c_after + b * a.Hp, norm.statistics + b * norm.STATISTICS};
  C mean_c[2] = {};
  for (int64_t j = first; j < a.H; j += ROW_UNITS) {
    row.through_output(j);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      mean_c[0] += row.dn[i];
      mean_c[1] += row.dn[i] * row.c[i];
    }
  }
  sum_over_block(mean_c);
  mean_c[0] /= C(a.H);
  mean_c[1] /= C(a.H);

  C mean[4] = {};
  for (int64_t j = first; j < a.H; j += ROW_UNITS) {
    row.through_output(j);
    row.through_c(j, mean_c[0], mean_c[1]);
    add_gradients(norm, j, row.products, row.dz, mean);
  }
  sum_over_block(mean);
#pragma unroll
  for (int n = 0; n < 4; ++n)
    mean[n] /= C(norm.GATES * a.H);

  // The gradients, of which that of h is what bypassed the cell.
  const bool reset = resets(a, g.t, b);
  for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
    const int64_t n = a.H - j;
    row.through_output(j);
    row.through_c(j, mean_c[0], mean_c[1]);
    store_gradients(g, norm, b, j, row.products, row.dz, mean);
    Elements<C> dgamma;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      dgamma[i] = row.ds[i] * row.c[i];
      if (reset) row.dc[i] = C(0);
    }
    S* of_c = g.terms + (b * TERMS + norm.Z) * a.H + j;
    store(of_c, n, dgamma);
    store(of_c + a.H, n, row.ds);
    store(g.dh + b * a.Hp + j, PER_THREAD, row.dh);
    store(g.dc + b * a.Hp + j, PER_THREAD, row.dc);
  }
}

}  // namespace fusedseq::cuda
