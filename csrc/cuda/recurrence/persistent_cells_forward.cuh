// Forward persistent kernel of the cells without rounds: LSTM, peephole LSTM and GRU, with `starts`
// and in both orders of the steps. persistent_exchange.cuh explains how the blocks share
// the work. There is one exchange in a step, of h after state dropout, and the product of x with
// W_ih has been computed for all steps before the launch.
//
// The kernel of persistent_forward.cuh, whose registers are all in use, stays that of an LSTM in
// the usual order without `starts`.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_cells.cuh"
#include "cuda/recurrence/persistent_forward.cuh"

namespace fusedseq::cuda {
namespace {

// One thread of a block. The arrays are the elements that the thread owns (OwnedElements), in
// registers.
template <class S, class V>
struct CellsForwardBlock {
  using Cells = CellsOf<V::GATES>;
  static constexpr int GATES = V::GATES, SLOTS = CELL_SLOTS;
  static constexpr int STRIDE = plan::forward_stride(V::N == 2, V::PLAIN, GATES);
  // k-steps whose loads are in flight, as many as the variant has registers for.
  static constexpr int FEW_LOADS = V::GROUPS * V::N == 4 ? 2 : 6;
  static constexpr int MORE_LOADS = V::TILES == 3 ? (V::PLAIN ? 1 : 2) : FEW_LOADS;
  static constexpr int LOADS = loads_in_flight<S, V>(MORE_LOADS);
  using H = OwnedElements<V, V::H_COLUMNS>;
  using Gates = Accumulators<V, V::N_GATES>;
  // Whether there are registers to load the gates' biases and input before the wait.
  static constexpr bool EARLY_INPUT = H::COUNT <= 2 && sizeof(S) == 2;

  const Forward& p;
  const Recurrence& r;
  GroupProducts<S, V> g;
  const OwnedColumns columns;
  const H own;
  uint32_t epoch;                  // of the newest vector
  SharedWeights<S> W_hh;           // (H, GATES columns): column GATES j + gate
  float h[H::COUNT], c[H::COUNT];  // the state; h is zero already where the next step resets it
  uint32_t state_keep;             // bit e: state dropout keeps element e
  uint32_t reset;                  // bit e: element e's state is zero before the step to come
  // Of the step to come. Bit e: element e's sequence has not ended; its zoneout draws; the step
  // after it resets the element.
  uint32_t alive, draws_h, draws_c, next_reset;
  float inputs[EARLY_INPUT ? H::COUNT : 1][SLOTS];  // bias, and W_ih's product

  __device__ __forceinline__ CellsForwardBlock(const Forward& p, int block_of_layer)
      : p(p),
        r(p.r),
        g(p.l, p.e, p.rows, block_of_layer),
        columns(g.block, p.l.columns_h, int(p.r.H)),
        own(g, columns.count),
        epoch(0),
        state_keep(0),
        reset(0) {}

  __device__ __forceinline__ void run();

 private:
  // The batch row and the unit of element e.
  __device__ __forceinline__ int row(int e) const { return g.first_row + own.row(e); }
  __device__ __forceinline__ int unit(int e) const { return columns.first + own.column(e); }

  __device__ __forceinline__ void load_weights();
  __device__ __forceinline__ void load_state();
  __device__ __forceinline__ void publish_state();
  __device__ __forceinline__ void fetch(int64_t t, bool is_last);
  __device__ __forceinline__ void load_input(int64_t t, int e, float (&z)[SLOTS]) const;
  __device__ __forceinline__ void add_products(int e, float (&z)[SLOTS]) const;
  __device__ __forceinline__ void cell(int64_t t, const Gates& sums);
  __device__ __forceinline__ GateQuad<S> update(int64_t t, int e);
  __device__ __forceinline__ void save(int64_t t, const GateQuad<S> (&saved)[H::COUNT],
                                       const Bits<S> (&y)[H::COUNT]);
};

// ---- before the first step

// The block's columns of W_hh, which are all of its shared memory but for the partial sums after
// them.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::load_weights() {
  S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
  const int first = columns.first;
  W_hh = {to, GATES * columns.count};
  to = load_to_shared<V, 0, 0, Neighbours::rows>(
      to, GATES * columns.count, int(r.H),
      [&](int n, int k) { return dropped_weight<S>(r, row_of_column<GATES>(n, first, r.H), k); });
  g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * STRIDE;
}

// h0, c0, and the state's mask, which is the same in every step.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::load_state() {
  const int64_t first_step = nth_step(r, 0);
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    h[e] = c[e] = 0;
    if (!own.has(e)) continue;
    const int b = row(e), j = unit(e);
    if (resets(r, first_step, b))
      reset |= 1u << e;
    else
      h[e] = float(step_of<S>(r.h0, b, r.H)[j]);
    if (r.c0) c[e] = float(step_of<S>(r.c0, b, r.H)[j]);
    if (!r.state.threshold || keep(r.seed, r.state, b, j, r.H)) state_keep |= 1u << e;
  }
}

// Publishes h after state dropout, the next vector.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::publish_state() {
  const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
  Bits<S>* to = reinterpret_cast<Bits<S>*>(g.slot(p.h, epoch + 1));
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e)
    if (own.has(e))
      ptx::store_relaxed(to + exchange_index<S>(own.row(e), unit(e), p.h.k_steps),
                         bits_of<S>(state_keep >> e & 1 ? h[e] * scale : 0.f));
  g.publish(++epoch);
}

// ---- a step

// What the cell of step t reads besides the vector.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::fetch(int64_t t, bool is_last) {
  alive = draws_h = draws_c = next_reset = 0;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int b = row(e), j = unit(e);
    const int64_t of_mask = mask_row(r, t, b);
    if constexpr (EARLY_INPUT) load_input(t, e, inputs[e]);
    alive |= uint32_t(!has_ended(r.lengths, t, b)) << e;
    draws_h |= uint32_t(zoneout_draw(r, r.zoneout_h, of_mask, j)) << e;
    draws_c |= uint32_t(zoneout_draw(r, r.zoneout_c, of_mask, j)) << e;
    next_reset |= uint32_t(!is_last && resets(r, step_after(r, t), b)) << e;
  }
}

// The biases of element e's slots, and W_ih's product.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::load_input(int64_t t, int e,
                                                                    float (&z)[SLOTS]) const {
  const int width = int(r.H), j = unit(e);
  const S* bias = static_cast<const S*>(r.b);
  const float* product =
      step_of<float>(p.input_gates, t, r.B * GATES * r.H) + row(e) * GATES * width + j;
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    z[slot] = bias ? float(bias[slot * width + j]) : 0.f;
    if (slot < GATES) z[slot] += product[slot * width];
  }
}

// Adds W_hh's product, the sum over the warps.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::add_products(int e,
                                                                      float (&z)[SLOTS]) const {
  const int at = own.row_of_pass(e), first = GATES * own.column(e);
  if constexpr (GATES == 4) {
    const float4 sums = g.template sum4<STRIDE>(at, first);
    z[0] += sums.x;
    z[1] += sums.y;
    z[2] += sums.z;
    z[3] += sums.w;
  } else {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int gate = hidden_gate<typename Cells::AnyCell>(slot);
      if (gate >= 0) z[slot] += g.template sum<STRIDE>(at, first + gate);
    }
  }
}

// Updates the state of element e, and returns what backward needs of it.
template <class S, class V>
__device__ __forceinline__ GateQuad<S> CellsForwardBlock<S, V>::update(int64_t t, int e) {
  float z[SLOTS];
  if constexpr (EARLY_INPUT) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      z[slot] = inputs[e][slot];
  } else {
    load_input(t, e, z);
  }
  add_products(e, z);
  if (reset >> e & 1) c[e] = 0;
  float next_h = h[e], next_c = c[e];
  const UnitParameters<S> parameters{static_cast<const S*>(r.vectors) + unit(e), int(r.H)};
  Cells::with(r, [&](auto cell) { decltype(cell)::forward(z, next_h, next_c, parameters); });
  // Past a sequence's end its state does not change.
  if (alive >> e & 1) {
    h[e] = after_zoneout(r, r.zoneout_h, draws_h >> e & 1, next_h, h[e]);
    c[e] = after_zoneout(r, r.zoneout_c, draws_c >> e & 1, next_c, c[e]);
  }
  GateQuad<S> saved;
  saved.set(z[0], z[1], z[2], z[3]);
  return saved;
}

// Sums the gates over the warps, applies the cell, publishes the new h, saves what backward needs.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::cell(int64_t t, const Gates& sums) {
  GateQuad<S> saved[H::COUNT];
  Bits<S> y[H::COUNT];
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    // The barrier makes the partial sums of all warps visible to all threads of the group.
    g.template store_partial_sums<STRIDE>(sums, pass, 0);
    g.sync();
#pragma unroll
    for (int e = pass * H::PER_PASS; e < (pass + 1) * H::PER_PASS; ++e) {
      if (!own.has(e)) continue;
      saved[e] = update(t, e);
      y[e] = bits_of<S>(alive >> e & 1 ? h[e] : 0.f);
    }
    // The next pass overwrites the partial sums. After the last pass the barrier of publish() does.
    if (pass + 1 < V::PASSES) g.sync();
  }
  reset = next_reset;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e)
    if (reset >> e & 1) h[e] = 0;

  // The other blocks wait for the state: it is published before the saved tensors are stored.
  publish_state();
  save(t, saved, y);
}

// Stores y (0 past a sequence's end), the cell state and the slots of step t.
template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::save(int64_t t,
                                                              const GateQuad<S> (&saved)[H::COUNT],
                                                              const Bits<S> (&y)[H::COUNT]) {
  const int width = int(r.H), Hp = int(r.Hp);
  Bits<S>* all_y = step_of<Bits<S>>(r.y, t, r.B * r.H);
  Bits<S>* slots = step_of<Bits<S>>(r.gates, t, r.B * SLOTS * r.Hp);
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int b = row(e), j = unit(e);
    all_y[b * width + j] = y[e];
    if (r.cells) step_of<float>(r.cells, t, r.B * r.Hp)[b * Hp + j] = c[e];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      slots[(b * SLOTS + slot) * Hp + j] = saved[e].bits(slot);
  }
}

// ---- the loop over time

template <class S, class V>
__device__ __forceinline__ void CellsForwardBlock<S, V>::run() {
  // Both groups load the weights and use all of them. From here on a group synchronizes only its
  // own threads, so a group without rows may leave.
  load_weights();
  __syncthreads();
  if (g.rows == 0) return;

  // Epoch 1 is h0.
  load_state();
  publish_state();
  for (int64_t n = 0; n < r.steps; ++n) {
    const int64_t t = nth_step(r, n);
    Gates gates;
    clear<V>(gates);
    fetch(t, n + 1 == r.steps);
    g.template multiply<LOADS>(
        p.h, epoch, epoch,
        [&](int step) { return W_hh.template operands<V::N_GATES>(step, g.lane); },
        [&](const RowFragments<V>& a, const ColumnFragments<V::N_GATES>& f) {
          multiply_add<S>(gates, a, f);
        });
    cell(t, gates);
  }
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int i = row(e) * int(r.H) + unit(e);
    static_cast<S*>(r.h)[i] = S(h[e]);
    if (r.c) static_cast<S*>(r.c)[i] = S(c[e]);
  }
}

}  // namespace
}  // namespace fusedseq::cuda
