// What the cells with layer normalization of their products have in common, whose kernels loop.cu
// launches in place of cell_kernel and cell_backward_kernel (loop_layer_norm_lstm.cuh,
// loop_layer_norm_gru.cuh): sums over the hidden units of a row come between the arithmetic of
// math/layer_norm.h. A block computes a row; a thread has 4 neighbouring units of every ROW_UNITS.
//
// What limits the speed: with few rows the latency of the sums, because a row has one SM. Backward
// computes the gates again in each pass, from saved values that are in the L1 cache then. Not
// timed.
#pragma once
#include "cuda/recurrence/loop_backward.cuh"
#include "cuda/recurrence/loop_forward.cuh"
#include "math/layer_norm.h"

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
template <class S, class Cell_>
struct LayerNorm {
  using Cell = Cell_;
  using C = typename Computing<S>::type;
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS, STATISTICS = Cell::STATISTICS;
  static constexpr int Z = 4;  // pre-activations of a hidden unit, whose gradients are terms
  int64_t H, Hp;
  C eps;
  const S* b;        // (Z H,) or null
  const S* vectors;  // (V H,)  gamma_ih and gamma_hh, a part for each slot, then the cell's own
  C* statistics;     // (B, STATISTICS)  rstd of both products, then the cell's own

  __device__ C reciprocal_deviation(C squares, int64_t count) const {
    return C(1) / C(sqrt(squares / C(count) + eps));
  }
  __device__ void vector(int part, int64_t j, Elements<C>& v) const {
    load(vectors + part * H + j, H - j, v);
  }

  // Adds the biases to the pre-activations.
  __device__ void add_biases(int64_t j, Elements<C> (&z)[Z]) const {
    if (!b) return;
#pragma unroll
    for (int i = 0; i < Z; ++i) {
      Elements<C> bias;
      load(b + i * H + j, H - j, bias);
#pragma unroll
      for (int e = 0; e < PER_THREAD; ++e)
        z[i][e] += bias[e];
    }
  }
  // Adds a slot's normalized product to its pre-activation.
  __device__ void add(int slot, int64_t j, const Elements<C>& product, Elements<C> (&z)[Z]) const {
    Elements<C> gamma;
    vector(slot, j, gamma);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      z[Cell::term(slot)][i] += product[i] * gamma[i];
  }
};

// Both products of a row, over whose gates together the means and deviations are.
template <class C>
struct ProductsOfRow {
  const C *x, *h;  // (GATES H,) each
  C mean[2], rstd[2];
};

template <class S, class Cell, class C>
__device__ ProductsOfRow<C> products_of_row(const LayerNorm<S, Cell>& norm, const C* x,
                                            const C* h) {
  const int64_t width = norm.GATES * norm.H;
  const int64_t first = threadIdx.x * PER_THREAD;
  ProductsOfRow<C> p{x, h, {}, {}};
  for (int64_t j = first; j < width; j += ROW_UNITS) {
    Elements<C> from_x, from_h;
    load(x + j, width - j, from_x);
    load(h + j, width - j, from_h);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      p.mean[0] += from_x[i];
      p.mean[1] += from_h[i];
    }
  }
  sum_over_block(p.mean);
  p.mean[0] /= C(width);
  p.mean[1] /= C(width);
  for (int64_t j = first; j < width; j += ROW_UNITS) {
    Elements<C> from_x, from_h;
    load(x + j, width - j, from_x);
    load(h + j, width - j, from_h);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      if (i >= width - j) continue;
      p.rstd[0] += (from_x[i] - p.mean[0]) * (from_x[i] - p.mean[0]);
      p.rstd[1] += (from_h[i] - p.mean[1]) * (from_h[i] - p.mean[1]);
    }
  }
  sum_over_block(p.rstd);
  p.rstd[0] = norm.reciprocal_deviation(p.rstd[0], width);
  p.rstd[1] = norm.reciprocal_deviation(p.rstd[1], width);
  return p;
}

// Normalizes the products of a thread's units, saves them, and adds the pre-activations to z.
// saved: (SLOTS, Hp)
template <class S, class Cell, class C>
__device__ void pre_activations(const LayerNorm<S, Cell>& norm, const ProductsOfRow<C>& p, S* saved,
                                int64_t j, Elements<C> (&z)[LayerNorm<S, Cell>::Z]) {
  const int64_t n = norm.H - j;
#pragma unroll
  for (int slot = 0; slot < norm.SLOTS; ++slot) {
    const int product = slot / norm.GATES;
    Elements<C> v;
    load((product ? p.h : p.x) + slot % norm.GATES * norm.H + j, n, v);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      v[i] = i < n ? normalize(v[i], p.mean[product], p.rstd[product]) : C(0);
    store(saved + slot * norm.Hp + j, PER_THREAD, v);
    norm.add(slot, j, v, z);
  }
  norm.add_biases(j, z);
}

// For a row whose sequence has ended: the state does not change, and what is saved becomes zero.
template <class S, class Cell>
__device__ void copy_state(const LoopArguments& a, const CellForward<S>& f,
                           const LayerNorm<S, Cell>& norm, int64_t b) {
  using C = typename Computing<S>::type;
  if (threadIdx.x < norm.STATISTICS) norm.statistics[b * norm.STATISTICS + threadIdx.x] = C(0);
  for (int64_t j = threadIdx.x * PER_THREAD; j < a.Hp; j += ROW_UNITS) {
    Elements<C> h;
    Elements<C> c = {};
    const Elements<C> zero = {};
    load(f.h + b * a.Hp + j, PER_THREAD, h);
    for (int slot = 0; slot < norm.SLOTS; ++slot)
      store(f.gates + (b * norm.SLOTS + slot) * a.Hp + j, PER_THREAD, zero);
    store(f.y + b * a.H + j, a.H - j, zero);
    if (Cell::HAS_C) {
      load(f.c_before + b * a.Hp + j, PER_THREAD, c);
      store(f.c_after + b * a.Hp + j, PER_THREAD, c);
    }
    store_state(a, f, b, j, h, c);
  }
}

// The gradients of such a row: that of the state passes unchanged.
template <class S, class Cell>
__device__ void copy_state_gradient(const LoopArguments& a, const CellGradient<S>& g,
                                    const LayerNorm<S, Cell>& norm, int64_t b) {
  using C = typename Computing<S>::type;
  const Elements<C> zero = {};
  for (int64_t j = threadIdx.x * PER_THREAD; j < a.Hp; j += ROW_UNITS) {
    Elements<C> dh;
    state_gradient(a, g.after, b, j, dh);
    store(g.dh + b * a.Hp + j, PER_THREAD, dh);
    for (int slot = 0; slot < norm.SLOTS; ++slot)
      store(g.dz + (b * norm.SLOTS + slot) * a.H + j, a.H - j, zero);
    for (int term = 0; term < Cell::TERMS; ++term)
      store(g.terms + (b * Cell::TERMS + term) * a.H + j, a.H - j, zero);
  }
}

// Adds, for a thread's units, the gradients dn of the normalized products and dn n to the sums for
// the product with W_ih, then to those for the one with W_hh.
// dz: the gradients of the pre-activations
template <class S, class Cell, class C>
__device__ void add_gradients(const LayerNorm<S, Cell>& norm, int64_t j,
                              const Elements<C> (&products)[Cell::SLOTS],
                              const Elements<C> (&dz)[LayerNorm<S, Cell>::Z], C (&sums)[4]) {
#pragma unroll
  for (int slot = 0; slot < norm.SLOTS; ++slot) {
    const int product = slot / norm.GATES;
    Elements<C> gamma;
    norm.vector(slot, j, gamma);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const C dn = dz[Cell::term(slot)][i] * gamma[i];
      sums[2 * product] += dn;
      sums[2 * product + 1] += dn * products[slot][i];
    }
  }
}

// Stores the gradients of the products, from the means of what add_gradients has added, and dz as
// terms.
template <class S, class Cell, class C>
__device__ void store_gradients(const CellGradient<S>& g, const LayerNorm<S, Cell>& norm, int64_t b,
                                int64_t j, const Elements<C> (&products)[Cell::SLOTS],
                                const Elements<C> (&dz)[LayerNorm<S, Cell>::Z],
                                const C (&mean)[4]) {
  const C* rstd = norm.statistics + b * norm.STATISTICS;
  const int64_t n = norm.H - j;
#pragma unroll
  for (int slot = 0; slot < norm.SLOTS; ++slot) {
    const int product = slot / norm.GATES;
    Elements<C> gamma, d;
    norm.vector(slot, j, gamma);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      d[i] = normalize_backward(products[slot][i], dz[Cell::term(slot)][i] * gamma[i],
                                rstd[product], mean[2 * product], mean[2 * product + 1]);
    store(g.dz + (b * norm.SLOTS + slot) * norm.H + j, n, d);
  }
#pragma unroll
  for (int i = 0; i < norm.Z; ++i)
    store(g.terms + (b * Cell::TERMS + i) * norm.H + j, n, dz[i]);
}

}  // namespace fusedseq::cuda
