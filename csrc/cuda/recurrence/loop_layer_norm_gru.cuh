// The cell of the GRU with layer normalization, forward and backward, for loop.cu: the arithmetic
// of math/gru.h on normalized products. A row has 2 sums forward and 1 backward.
#pragma once
#include "cuda/recurrence/loop_layer_norm.cuh"
#include "math/gru.h"

namespace fusedseq::cuda {

// The 1 lets ptxas use more than 80 registers on sm_120, where it would spill in fp32.
template <class S>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_gru_kernel(const LoopArguments a, const CellForward<S> f,
                          const LayerNorm<S, LayerNormGruCell> norm) {
  using C = typename Computing<S>::type;
  const int64_t b = blockIdx.x;
  const int64_t width = norm.GATES * a.H;
  if (has_ended(a.lengths, f.t, b)) {
    copy_state(a, f, norm, b);
    return;
  }
  const ProductsOfRow<C> p = products_of_row(norm, f.z_x + b * width, f.z + b * width);

  // The gates, and h' after zoneout.
  for (int64_t j = threadIdx.x * PER_THREAD; j < a.Hp; j += ROW_UNITS) {
    const int64_t n = a.H - j;
    Elements<C> z[norm.Z] = {}, h, update;
    const Elements<C> no_c = {};
    pre_activations(norm, p, f.gates + b * norm.SLOTS * a.Hp, j, z);
    load(f.h + b * a.Hp + j, PER_THREAD, h);
    zoneout(a, a.zoneout_h, f.t, b, j, update);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const GruGates<C> gates = gru_gates(GruGates<C>{z[0][i], z[1][i], z[2][i], z[3][i]});
      h[i] = i < n ? mix(update[i], gru_cell(gates, h[i]), h[i]) : C(0);
    }
    store(f.y + b * a.H + j, n, h);
    store_state(a, f, b, j, h, no_c);
  }
  if (threadIdx.x == 0) {
    norm.statistics[b * norm.STATISTICS] = p.rstd[0];
    norm.statistics[b * norm.STATISTICS + 1] = p.rstd[1];
  }
}

// What the passes of the backward compute for a thread's units.
template <class S>
struct LayerNormGruUnits {
  using C = typename Computing<S>::type;
  using Norm = LayerNorm<S, LayerNormGruCell>;
  const LoopArguments& a;
  const CellGradient<S>& g;
  const Norm& norm;
  int64_t b;

  Elements<C> products[Norm::SLOTS];  // normalized
  Elements<C> dz[Norm::Z];
  Elements<C> dh;  // of h before the step, without what comes through the products

  __device__ void compute(int64_t j) {
    const int64_t n = a.H - j;
    Elements<C> z[Norm::Z] = {}, dy, update;
    Elements<C> h = {};
    state_gradient(a, g.after, b, j, dh);
    load(g.dy + b * a.H + j, n, dy);
    zoneout(a, a.zoneout_h, g.t, b, j, update);
    if (const S* before = h_before(a, g.h0, g.y, g.t, b)) load(before + j, n, h);
#pragma unroll
    for (int slot = 0; slot < norm.SLOTS; ++slot) {
      load(g.gates + (b * norm.SLOTS + slot) * a.Hp + j, PER_THREAD, products[slot]);
      norm.add(slot, j, products[slot], z);
    }
    norm.add_biases(j, z);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const GruGates<C> gates = gru_gates(GruGates<C>{z[0][i], z[1][i], z[2][i], z[3][i]});
      C d = dh[i] + dy[i];
      const C past = bypass(update[i], d);
      const GruGates<C> of_gates = gru_cell_backward(gates, h[i], d);
      dh[i] = past + d;
      dz[0][i] = of_gates.r;
      dz[1][i] = of_gates.z;
      dz[2][i] = of_gates.n;
      dz[3][i] = of_gates.q;
    }
  }
};

template <class S>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_gru_backward_kernel(const LoopArguments a, const CellGradient<S> g,
                                   const LayerNorm<S, LayerNormGruCell> norm) {
  using C = typename Computing<S>::type;
  const int64_t b = blockIdx.x;
  const int64_t first = threadIdx.x * PER_THREAD;
  if (has_ended(a.lengths, g.t, b)) {
    copy_state_gradient(a, g, norm, b);
    return;
  }

  // The means of dn and of dn n of both products, then the gradients.
  LayerNormGruUnits<S> row{a, g, norm, b};
  C mean[4] = {};
  for (int64_t j = first; j < a.H; j += ROW_UNITS) {
    row.compute(j);
    add_gradients(norm, j, row.products, row.dz, mean);
  }
  sum_over_block(mean);
#pragma unroll
  for (int n = 0; n < 4; ++n)
    mean[n] /= C(norm.GATES * a.H);
  for (int64_t j = first; j < a.Hp; j += ROW_UNITS) {
    row.compute(j);
    store_gradients(g, norm, b, j, row.products, row.dz, mean);
    store(g.dh + b * a.Hp + j, PER_THREAD, row.dh);
  }
}

}  // namespace fusedseq::cuda
