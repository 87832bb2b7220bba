// Backward persistent kernel of the cells without rounds: the recurrence of
// persistent_cells_forward.cuh backward through time. It computes the gradients of the state only,
// and writes dz and the terms, from which weight_gradients.cu computes the other gradients
// afterwards.
//
// The vector of a step is the gradient of W_hh's product, GATES H wide, element GATES j + gate. The
// weights are transposed: a block owns columns of h.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_backward.cuh"
#include "cuda/recurrence/persistent_cells.cuh"

namespace fusedseq::cuda {
namespace {

// One thread of a block. The arrays are the elements that the thread owns (OwnedElements), in
// registers.
template <class S, class V>
struct CellsBackwardBlock {
  using Cells = CellsOf<V::GATES>;
  static constexpr int GATES = V::GATES, SLOTS = CELL_SLOTS, TERMS = Cells::TERMS;
  static constexpr int STRIDE = plan::backward_stride(V::N == 2, false, true);
  // k-steps whose loads are in flight, as many as the variant has registers for.
  static constexpr int FEW_LOADS = V::GROUPS * V::N == 4 ? 3 : 6;
  static constexpr int LOADS = loads_in_flight<S, V>(V::TILES == 3 ? 2 : FEW_LOADS);
  using H = OwnedElements<V, V::H_COLUMNS>;

  const Backward& p;
  const RecurrenceBackward& b;
  const Recurrence& r;
  GroupProducts<S, V> g;
  const OwnedColumns columns;
  const H own;
  uint32_t epoch;                    // of the newest vector
  SharedWeights<S> W_hh;             // (GATES H, columns): row GATES j + gate
  float dh[H::COUNT], dc[H::COUNT];  // gradients of the state, from step to step
  GateQuad<S> slots[H::COUNT];       // saved by forward, of the step to come, like
  float h_before[H::COUNT], c_before[H::COUNT], dy[H::COUNT];  // these
  uint32_t state_keep;  // bit e: state dropout keeps element e
  // Of the step to come. Bit e: element e's sequence has not ended; its state is zero before the
  // step; its zoneout draws.
  uint32_t alive, reset, draws_h, draws_c;

  __device__ __forceinline__ CellsBackwardBlock(const Backward& p, int block_of_layer)
      : p(p),
        b(p.b),
        r(p.b.forward),
        g(p.l, p.e, p.rows, block_of_layer),
        columns(g.block, p.l.columns_h, int(r.H)),
        own(g, columns.count),
        epoch(0),
        state_keep(0) {}

  __device__ __forceinline__ void run();

 private:
  // The batch row and the unit of element e.
  __device__ __forceinline__ int row(int e) const { return g.first_row + own.row(e); }
  __device__ __forceinline__ int unit(int e) const { return columns.first + own.column(e); }

  __device__ __forceinline__ void load_weights();
  __device__ __forceinline__ void load_state();
  __device__ __forceinline__ void fetch(int64_t n);
  __device__ __forceinline__ GateQuad<S> cell_gradient(int64_t t, int e);
  __device__ __forceinline__ void cell(int64_t t);
  __device__ __forceinline__ void put(const GateQuad<S>& dz, int e);
  __device__ __forceinline__ void add_product(uint32_t zeroed);
};

// ---- before the first step

// The block's columns of W_hh transposed, which are all of its shared memory but for the partial
// sums behind them.
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::load_weights() {
  S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
  const int first = columns.first;
  W_hh = {to, columns.count};
  to = load_to_shared<V, 0, 0, Neighbours::columns>(
      to, columns.count, int(GATES * r.H), [&](int n, int k) {
        return dropped_weight<S>(r, row_of_column<GATES>(k, 0, r.H), first + n);
      });
  g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * STRIDE;
}

// The gradients of the final state, and the state's mask, which is the same in every step.
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::load_state() {
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    dh[e] = dc[e] = 0;
    if (!own.has(e)) continue;
    const int i = row(e), j = unit(e);
    dh[e] = float(step_of<S>(b.dh, i, r.H)[j]);
    if (b.dc) dc[e] = float(step_of<S>(b.dc, i, r.H)[j]);
    if (!r.state.threshold || keep(r.seed, r.state, i, j, r.H)) state_keep |= 1u << e;
  }
}

// ---- a step

// Loads what forward saved of its n-th step, and dy, and draws its masks. Nothing before step 0.
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::fetch(int64_t n) {
  if (n < 0) return;
  const int64_t t = nth_step(r, n);
  const int width = int(r.H), Hp = int(r.Hp);
  const Bits<S>* all_slots = step_of<Bits<S>>(r.gates, t, r.B * SLOTS * r.Hp);
  const S* all_dy = step_of<S>(b.dy, t, r.B * r.H);
  alive = reset = draws_h = draws_c = 0;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int i = row(e), j = unit(e);
    const Bits<S>* slot = all_slots + i * SLOTS * Hp + j;
    slots[e].set_bits(slot[0], slot[Hp], slot[2 * Hp], slot[3 * Hp]);
    const bool resets_here = resets(r, t, i);
    h_before[e] = c_before[e] = 0;
    if (r.cells && !resets_here)
      c_before[e] = n ? step_of<float>(r.cells, step_before(r, t), r.B * r.Hp)[i * Hp + j]
                      : float(step_of<S>(r.c0, i, r.H)[j]);
    if constexpr (GATES == 3) {
      const S* before =
          fusedseq::h_before(r, static_cast<const S*>(r.h0), static_cast<const S*>(r.y), t, i);
      if (before) h_before[e] = float(before[j]);
    }
    dy[e] = float(all_dy[i * width + j]);
    const int64_t of_mask = mask_row(r, t, i);
    alive |= uint32_t(!has_ended(r.lengths, t, i)) << e;
    reset |= uint32_t(resets_here) << e;
    draws_h |= uint32_t(zoneout_draw(r, r.zoneout_h, of_mask, j)) << e;
    draws_c |= uint32_t(zoneout_draw(r, r.zoneout_c, of_mask, j)) << e;
  }
}

// The gradient of element e's pre-activations. Replaces dh and dc by the gradients that bypass the
// products: those of the state before this step.
template <class S, class V>
__device__ __forceinline__ GateQuad<S> CellsBackwardBlock<S, V>::cell_gradient(int64_t t, int e) {
  GateQuad<S> dz = {};
  float terms[TERMS + 1] = {};
  // Past a sequence's end the state did not change, so its gradient does not either.
  if (alive >> e & 1) {
    float d_h = dh[e] + dy[e], d_c = dc[e];
    const float past_h = bypass_of_zoneout(r, r.zoneout_h, draws_h >> e & 1, d_h);
    const float past_c = bypass_of_zoneout(r, r.zoneout_c, draws_c >> e & 1, d_c);
    const UnitParameters<S> parameters{static_cast<const S*>(r.vectors) + unit(e), int(r.H)};
    float a[SLOTS], d[SLOTS];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      a[slot] = slots[e][slot];
    Cells::with(r, [&](auto cell) {
      decltype(cell)::backward(a, h_before[e], c_before[e], parameters, d_h, d_c, d, terms);
    });
    dh[e] = past_h + d_h;
    dc[e] = reset >> e & 1 ? 0.f : past_c + d_c;
    dz.set(d[0], d[1], d[2], d[3]);
  }
  // Stored at once: the release of dz then also waits for these stores, which only the peephole
  // LSTM has, and the other cells need no registers for the terms.
  if constexpr (TERMS > 0)
    if (r.cell == CellKind::peephole_lstm) {
      S* to = step_of<S>(b.terms, t, r.B * TERMS * r.H) + row(e) * TERMS * int(r.H) + unit(e);
#pragma unroll
      for (int term = 0; term < TERMS; ++term)
        to[term * int(r.H)] = S(terms[term]);
    }
  return dz;
}

// Stores the gradients of element e's part of W_hh's product into the next vector.
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::put(const GateQuad<S>& dz, int e) {
  S* to = g.slot(p.gates, epoch);
  const int first = GATES * unit(e);
  if constexpr (GATES == 4) {
    dz.store_to(to, own.row(e), first, p.gates.k_steps);
  } else {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int gate = hidden_gate<typename Cells::AnyCell>(slot);
      if (gate >= 0)
        ptx::store_relaxed(reinterpret_cast<Bits<S>*>(to) +
                               exchange_index<S>(own.row(e), first + gate, p.gates.k_steps),
                           dz.bits(slot));
    }
  }
}

// The gradient of the pre-activations of step t: published, then stored for the weights' gradients.
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::cell(int64_t t) {
  GateQuad<S> dz[H::COUNT];
  ++epoch;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    dz[e] = cell_gradient(t, e);
    put(dz[e], e);
  }
  g.publish(epoch);

  // Stored after the release, which would otherwise wait for these stores too.
  const int width = int(r.H);
  Bits<S>* all = step_of<Bits<S>>(b.dz, t, r.B * SLOTS * r.H);
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    Bits<S>* to = all + row(e) * SLOTS * width + unit(e);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      to[slot * width] = dz[e].bits(slot);
  }
}

// Adds what comes through W_hh and state dropout to the gradient of the state before the step.
// zeroed: bit e: that state of element e was set to zero, so that it has no gradient
template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::add_product(uint32_t zeroed) {
  Accumulators<V, V::N> sums;
  clear<V>(sums);
  g.template multiply<LOADS>(
      p.gates, epoch, epoch, [&](int step) { return W_hh.template operands<V::N>(step, g.lane); },
      [&](const RowFragments<V>& a, const ColumnFragments<V::N>& f) {
        multiply_add<S>(sums, a, f);
      });
  const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    g.template store_partial_sums<STRIDE>(sums, pass, 0);
    g.sync();
    for_elements_of_pass(own, pass, [&](int e) {
      const float d = g.template sum<STRIDE>(own.row_of_pass(e), own.column(e));
      if (state_keep >> e & 1) dh[e] += d * scale;
      if (zeroed >> e & 1) dh[e] = 0;
    });
    // The next pass overwrites the partial sums. After the last pass the barrier of the next
    // publish() comes first.
    if (pass + 1 < V::PASSES) g.sync();
  }
}

// ---- the loop over time

template <class S, class V>
__device__ __forceinline__ void CellsBackwardBlock<S, V>::run() {
  // Both groups load the weights and use all of them. From here on a group synchronizes only its
  // own threads, so a group without rows may leave.
  load_weights();
  __syncthreads();
  if (g.rows == 0) return;

  load_state();
  fetch(r.steps - 1);
  for (int64_t n = r.steps - 1; n >= 0; --n) {
    cell(nth_step(r, n));
    const uint32_t zeroed = reset;
    // The loads of the next step overlap with the wait for the other blocks' dz.
    fetch(n - 1);
    add_product(zeroed);
  }
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int i = row(e) * int(r.H) + unit(e);
    static_cast<S*>(b.dh0)[i] = S(dh[e]);
    if (b.dc0) static_cast<S*>(b.dc0)[i] = S(dc[e]);
  }
}

}  // namespace
}  // namespace fusedseq::cuda
