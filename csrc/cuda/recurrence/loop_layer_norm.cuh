// The cell of the LSTM with layer normalization, forward and backward, which loop.cu launches in
// place of cell_kernel and cell_backward_kernel: sums over the hidden units of a row come between
// the arithmetic of math/layer_norm_lstm.h. A block computes a row; a thread has 4 neighbouring
// units of every ROW_UNITS.
//
// What limits the speed: with few rows the latency of the sums, 4 forward and 2 backward, because a
// row has one SM. Backward computes the gates again in each of 3 passes, from saved values that are
// in the L1 cache then. Not timed.
#pragma once
#include "cuda/recurrence/loop_backward.cuh"
#include "cuda/recurrence/loop_forward.cuh"
#include "math/layer_norm_lstm.h"

namespace fusedseq::cuda {

constexpr int ROW_THREADS = 256;
constexpr int ROW_UNITS = ROW_THREADS * PER_THREAD;

// Replaces each of a thread's values by its sum over the threads of the block, always added in the
// same order.
template <int N, class C>
__device__ __forceinline__ void sum_over_block(C (&v)[N]) {
  __shared__ C sums[N][ROW_THREADS];
#pragma unroll
  for (int n = 0; n < N; ++n)
    sums[n][threadIdx.x] = v[n];
  for (int half = ROW_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half)
#pragma unroll
      for (int n = 0; n < N; ++n)
        sums[n][threadIdx.x] += sums[n][threadIdx.x + half];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n)
    v[n] = sums[n][0];
  __syncthreads();  // before the next call writes there
}

// Arguments of both directions beside those of other cells.
template <class S>
struct LayerNorm {
  using C = typename Computing<S>::type;
  static constexpr int GATES = LayerNormLstmCell::GATES, SLOTS = LayerNormLstmCell::SLOTS;
  static constexpr int STATISTICS = 4;
  // Where the parts of `vectors` begin, in units of H.
  static constexpr int GAMMA_IH = 0, GAMMA_HH = 4, GAMMA_C = 8, BETA_C = 9;
  int64_t H, Hp;
  C eps;
  const S* b;        // (4H,) or null
  const S* vectors;  // (10H,)  gamma_ih, gamma_hh, gamma_c, beta_c
  C* statistics;     // (B, 4)  rstd of both products, mean and rstd of c'

  __device__ C reciprocal_deviation(C squares, int64_t count) const {
    return C(1) / C(sqrt(squares / C(count) + eps));
  }
  __device__ void vector(int part, int64_t j, Elements<C>& v) const {
    load(vectors + part * H + j, H - j, v);
  }

  // Sets z to the pre-activation of one gate from its normalized products.
  // x, h: the products with W_ih and with W_hh
  __device__ void pre_activation(int gate, int64_t j, const Elements<C>& x, const Elements<C>& h,
                                 Elements<C>& z) const {
    Elements<C> gamma_ih, gamma_hh;
    Elements<C> bias = {};
    vector(GAMMA_IH + gate, j, gamma_ih);
    vector(GAMMA_HH + gate, j, gamma_hh);
    if (b) load(b + gate * H + j, H - j, bias);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      z[i] = x[i] * gamma_ih[i] + h[i] * gamma_hh[i] + bias[i];
  }

  // u = tanh(gamma_c n + beta_c) from the normalized c'.
  __device__ void activated_c(int64_t j, const Elements<C>& n, Elements<C>& u) const {
    Elements<C> gamma, beta;
    vector(GAMMA_C, j, gamma);
    vector(BETA_C, j, beta);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      u[i] = tanh_(n[i] * gamma[i] + beta[i]);
  }
};

// For a row whose sequence has ended: the state does not change, and what is saved becomes zero.
template <class S, class C>
__device__ void copy_state(const LoopArguments& a, const CellForward<S>& f,
                           const LayerNorm<S>& norm, int64_t b, C* statistics) {
  if (threadIdx.x < norm.STATISTICS) statistics[threadIdx.x] = C(0);
  for (int64_t j = threadIdx.x * PER_THREAD; j < a.Hp; j += ROW_UNITS) {
    Elements<C> h, c;
    const Elements<C> zero = {};
    load(f.h + b * a.Hp + j, PER_THREAD, h);
    load(f.c_before + b * a.Hp + j, PER_THREAD, c);
    for (int slot = 0; slot < norm.SLOTS; ++slot)
      store(f.gates + (b * norm.SLOTS + slot) * a.Hp + j, PER_THREAD, zero);
    store(f.y + b * a.H + j, a.H - j, zero);
    store(f.c_after + b * a.Hp + j, PER_THREAD, c);
    store_state(a, f, b, j, h, c);
  }
}

template <class S>
__global__ void __launch_bounds__(ROW_THREADS)
    layer_norm_cell_kernel(const LoopArguments a, const CellForward<S> f, const LayerNorm<S> norm) {
  using C = typename Computing<S>::type;
  const int64_t b = blockIdx.x;
  const int64_t first = threadIdx.x * PER_THREAD;
  const int64_t width = norm.GATES * a.H;
  const C* z_x = f.z_x + b * width;
  C* z_h = f.z + b * width;
  C* statistics = norm.statistics + b * norm.STATISTICS;
  if (has_ended(a.lengths, f.t, b)) {
    copy_state(a, f, norm, b, statistics);
    return;
  }

  // Means and deviations of both products, over all gates of the row together.
  C mean[2] = {};
  C rstd[2] = {};
  for (int64_t j = first; j < width; j += ROW_UNITS) {
    Elements<C> x, h;
    load(z_x + j, width - j, x);
    load(z_h + j, width - j, h);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      mean[0] += x[i];
      mean[1] += h[i];
    }
  }
  sum_over_block(mean);
  mean[0] /= C(width);
  mean[1] /= C(width);
  for (int64_t j = first; j < width; j += ROW_UNITS) {
    Elements<C> x, h;
    load(z_x + j, width - j, x);
    load(z_h + j, width - j, h);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      if (i >= width - j) continue;
      rstd[0] += (x[i] - mean[0]) * (x[i] - mean[0]);
      rstd[1] += (h[i] - mean[1]) * (h[i] - mean[1]);
    }
  }
  sum_over_block(rstd);
  rstd[0] = norm.reciprocal_deviation(rstd[0], width);
  rstd[1] = norm.reciprocal_deviation(rstd[1], width);

  // The gates, and c'. The output gate replaces the first gate's product, which is not read again.
  C mean_c[1] = {};
  for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
    const int64_t n = a.H - j;
    Elements<C> z[norm.GATES], x, h;
    Elements<C> c = {};
#pragma unroll
    for (int gate = 0; gate < norm.GATES; ++gate) {
      load(z_x + gate * a.H + j, n, x);
      load(z_h + gate * a.H + j, n, h);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        x[i] = i < n ? normalize(x[i], mean[0], rstd[0]) : C(0);
        h[i] = i < n ? normalize(h[i], mean[1], rstd[1]) : C(0);
      }
      S* saved = f.gates + (b * norm.SLOTS + gate) * a.Hp + j;
      store(saved, PER_THREAD, x);
      store(saved + norm.GATES * a.Hp, PER_THREAD, h);
      norm.pre_activation(gate, j, x, h, z[gate]);
    }
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
    norm.activated_c(j, v, u);
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
    statistics[0] = rstd[0];
    statistics[1] = rstd[1];
    statistics[2] = mean_c[0];
    statistics[3] = rstd_c[0];
  }
}

// What the passes of the backward compute for a thread's units.
template <class S>
struct LayerNormUnits {
  using C = typename Computing<S>::type;
  static constexpr int GATES = LayerNormLstmCell::GATES, SLOTS = LayerNormLstmCell::SLOTS;
  const LoopArguments& a;
  const CellGradient<S>& g;
  const LayerNorm<S>& norm;
  int64_t b;
  const C* statistics;  // (4,)  of the row

  Elements<C> gates[GATES];     // activated
  Elements<C> products[SLOTS];  // normalized
  Elements<C> c_before;
  Elements<C> c, ds, dn;  // normalized c', gradients of its tanh's argument and of it
  Elements<C> dh;         // what bypasses the cell
  Elements<C> dz[GATES], dc;

  // From the output to c': sets all but dz[0] to dz[2], and dc. c' is computed again, as zoneout
  // may have replaced it.
  __device__ void through_output(int64_t j) {
    const int64_t n = a.H - j;
    Elements<C> d, dy, u, gamma, update;
    state_gradient(a, g.after, b, j, d);
    load(g.dy + b * a.H + j, n, dy);
    zoneout(a, a.zoneout_h, g.t, b, j, update);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      c_before[i] = C(0);
    if (!resets(a, g.t, b)) load(g.c_before + b * a.Hp + j, n, c_before);
    norm.vector(norm.GAMMA_C, j, gamma);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      load(g.gates + (b * SLOTS + slot) * a.Hp + j, PER_THREAD, products[slot]);
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate)
      norm.pre_activation(gate, j, products[gate], products[GATES + gate], gates[gate]);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const LstmGates<C> activated =
          lstm_gates(LstmGates<C>{gates[0][i], gates[1][i], gates[2][i], gates[3][i]});
      gates[0][i] = activated.i;
      gates[1][i] = activated.f;
      gates[2][i] = activated.g;
      gates[3][i] = activated.o;
      const C c_next = lstm_cell_c<false>(activated, c_before[i]);
      c[i] = i < n ? normalize(c_next, statistics[2], statistics[3]) : C(0);
    }
    norm.activated_c(j, c, u);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const C d_h = d[i] + dy[i];
      dh[i] = (C(1) - update[i]) * d_h;
      dz[3][i] = layer_norm_lstm_output_backward(gates[3][i], u[i], update[i] * d_h, ds[i]);
      dn[i] = ds[i] * gamma[i];
    }
  }

  // From c' to the gates and to c before the step, after through_output. mean_dn, mean_dn_n: of dn
  // and of dn c
  __device__ void through_c(int64_t j, C mean_dn, C mean_dn_n) {
    const int64_t n = a.H - j;
    Elements<C> d, update;
    load(g.dc + b * a.Hp + j, n, d);
    zoneout(a, a.zoneout_c, g.t, b, j, update);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const C dc_next =
          update[i] * d[i] + normalize_backward(c[i], dn[i], statistics[3], mean_dn, mean_dn_n);
      const LstmGates<C> activated{gates[0][i], gates[1][i], gates[2][i], gates[3][i]};
      const LstmGates<C> of_gates =
          layer_norm_lstm_cell_backward(activated, c_before[i], dc_next, dz[3][i], dc[i]);
      dc[i] += (C(1) - update[i]) * d[i];
      dz[0][i] = of_gates.i;
      dz[1][i] = of_gates.f;
      dz[2][i] = of_gates.g;
    }
  }
};

// The 1 lets ptxas use more than 128 registers, without which it would spill.
template <class S>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_cell_backward_kernel(const LoopArguments a, const CellGradient<S> g,
                                    const LayerNorm<S> norm) {
  using C = typename Computing<S>::type;
  constexpr int TERMS = LayerNormLstmCell::TERMS;
  const int64_t b = blockIdx.x;
  const int64_t first = threadIdx.x * PER_THREAD;
  S* dz = g.dz + b * norm.SLOTS * a.H;
  S* terms = g.terms + b * TERMS * a.H;
  const Elements<C> zero = {};

  // Past a sequence's end the state did not change, so its gradient passes unchanged.
  if (has_ended(a.lengths, g.t, b)) {
    for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
      Elements<C> dh;
      state_gradient(a, g.after, b, j, dh);
      store(g.dh + b * a.Hp + j, PER_THREAD, dh);
      for (int slot = 0; slot < norm.SLOTS; ++slot)
        store(dz + slot * a.H + j, a.H - j, zero);
      for (int term = 0; term < TERMS; ++term)
        store(terms + term * a.H + j, a.H - j, zero);
    }
    return;
  }

  // The means of dn and of dn n, first of c', then of the products with W_ih and with W_hh.
  LayerNormUnits<S> row{a, g, norm, b, norm.statistics + b * norm.STATISTICS};
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
#pragma unroll
    for (int slot = 0; slot < norm.SLOTS; ++slot) {
      const int product = slot / norm.GATES;
      Elements<C> gamma;
      norm.vector(norm.GAMMA_IH + slot, j, gamma);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        const C dn = row.dz[slot % norm.GATES][i] * gamma[i];
        mean[2 * product] += dn;
        mean[2 * product + 1] += dn * row.products[slot][i];
      }
    }
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
#pragma unroll
    for (int slot = 0; slot < norm.SLOTS; ++slot) {
      const int product = slot / norm.GATES;
      Elements<C> gamma, d;
      norm.vector(norm.GAMMA_IH + slot, j, gamma);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
        d[i] =
            normalize_backward(row.products[slot][i], row.dz[slot % norm.GATES][i] * gamma[i],
                               row.statistics[product], mean[2 * product], mean[2 * product + 1]);
      store(dz + slot * a.H + j, n, d);
    }
    Elements<C> dgamma;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      dgamma[i] = row.ds[i] * row.c[i];
      if (reset) row.dc[i] = C(0);
    }
#pragma unroll
    for (int gate = 0; gate < norm.GATES; ++gate)
      store(terms + gate * a.H + j, n, row.dz[gate]);
    store(terms + norm.GATES * a.H + j, n, dgamma);
    store(terms + (norm.GATES + 1) * a.H + j, n, row.ds);
    store(g.dh + b * a.Hp + j, PER_THREAD, row.dh);
    store(g.dc + b * a.Hp + j, PER_THREAD, row.dc);
  }
}

}  // namespace fusedseq::cuda
