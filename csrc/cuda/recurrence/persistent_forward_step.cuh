// The phases of a step of the forward persistent kernel: rounds, gates, cell. The class is declared
// in persistent_forward.cuh.
#pragma once
#include "cuda/recurrence/persistent_forward.cuh"
#include "math/mogrifier.h"

namespace fusedseq::cuda {
namespace {

// ---- a round

// The weights of round k.
template <class S, class V, bool LINKED>
__device__ __forceinline__ SharedWeights<S> ForwardBlock<S, V, LINKED>::weights_of(int k) const {
  const int on_h = k % 2;
  const int columns = on_h ? columns_h.count : columns_x.count;
  const bool shared = rounds > on_h + 2 && r.Q[on_h + 2] == r.Q[on_h];
  const int k_steps = on_h ? p.x.k_steps : p.h.k_steps;
  return {(on_h ? Q_h : Q_x) + (shared ? 0 : int64_t(k / 2) * k_steps * columns * K_STEP<S>),
          columns};
}

// Round k: scales x (even k) or h (odd k) by a function of the newest vector, which is the other of
// the two. offset: of the round in a row of round_gates    gates: the last round adds to them
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::round(int64_t t, int k, int64_t offset,
                                                                  Gates& gates) {
  Accumulators<V, V::N> z;
  clear<V>(z);
  const SharedWeights<S> w = weights_of(k);
  const auto of_round = [&](int step) {
    return w.template operands<V::N>(step, g.lane);
  };
  const auto use = [&](const RowFragments<V>& a, const ColumnFragments<V::N>& f) {
    multiply_add<S>(z, a, f);
  };
  // The same with the gates' weights. skipped: k-steps that are not in them
  const auto of_both = [&](const SharedWeights<S>& second, int skipped) {
    return [&, skipped](int step) {
      return RoundAndGates<V>{of_round(step),
                              second.template operands<V::N_GATES>(step - skipped, g.lane)};
    };
  };
  const auto use_both = [&](const RowFragments<V>& a, const RoundAndGates<V>& f) {
    multiply_add<S>(z, a, f.round);
    multiply_add<S>(gates, a, f.gates);
  };

  float bias[MOST];
  const auto fetch = [&] {
    if (k % 2)
      fetch_bias(own_h, columns_h, k, bias);
    else
      fetch_bias(own_x, columns_x, k, bias);
  };
  if (EARLY_INPUT) fetch();

  // The last round is the last to read this vector: it also computes its part of the gates, from
  // W_ih if the vector is x, or from W_hh if it is h.
  if (k + 1 < rounds) {
    g.template multiply<LOADS>(k % 2 ? p.x : p.h, k % 2 ? newest_x() : newest_h(), epoch, of_round,
                               use);
  } else if (k % 2) {
    const auto use_resident = [&](int u, const RowFragments<V>& a) {
      use(a, of_round(k_slice<V>(p.x.k_steps, g.warp).begin + u));
#pragma unroll
      for (int n = 0; n < V::N_GATES; ++n)
        multiply_add<S>(gates, a, n, resident_W_ih.operand[u][n]);
    };
    g.template multiply<LOADS, V::RESIDENT>(p.x, newest_x(), epoch, use_resident,
                                            of_both(W_ih, (g.warp + 1) * V::RESIDENT), use_both);
  } else {
    g.template multiply<LOADS>(p.h, newest_h(), epoch, of_both(W_hh, 0), use_both);
  }
  if (!EARLY_INPUT) fetch();

  if (k % 2)
    finish_round(z, own_h, bias, columns_h, p.h, k, h, t, offset);
  else
    finish_round(z, own_x, bias, columns_x, p.x, k, x, t, offset);
}

// The biases of the thread's elements in round k.
template <class S, class V, bool LINKED>
template <class O>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::fetch_bias(const O& own,
                                                                       const OwnedColumns& columns,
                                                                       int k,
                                                                       float (&bias)[MOST]) const {
  const S* all = static_cast<const S*>(r.bias[k]) + columns.first;
#pragma unroll
  for (int e = 0; e < O::COUNT; ++e)
    bias[e] = r.bias[k] && own.has(e) ? float(all[own.column(e)]) : 0.f;
}

// Sums z over the warps, applies the round to the operand, publishes the result, saves the
// sigmoids.
template <class S, class V, bool LINKED>
template <class O>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::finish_round(
    const Accumulators<V, V::N>& z, const O& own, const float (&bias)[MOST],
    const OwnedColumns& columns, const ExchangedVector& result, int k, float (&operand)[O::COUNT],
    int64_t t, int64_t offset) {
  float s[O::COUNT];
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    // The barrier makes the partial sums of all warps visible to all threads of the group.
    g.template store_partial_sums<ROUND_STRIDE>(z, pass, 0);
    g.sync();
#pragma unroll
    for (int e = pass * O::PER_PASS; e < (pass + 1) * O::PER_PASS; ++e) {
      if (own.has(e)) {
        s[e] = sigmoid(bias[e] + g.template sum<ROUND_STRIDE>(own.row_of_pass(e), own.column(e)));
        operand[e] = mogrify(s[e], operand[e]);
      }
      put(result, own, e, columns.first, operand[e]);
    }
    // The next pass overwrites the partial sums. After the last pass the barrier of publish() does.
    if (pass + 1 < V::PASSES) g.sync();
  }
  publish(k % 2 == 0);

  // Stored after the release, which would otherwise wait for these stores too.
  S* to = step_of<S>(r.round_gates, t, r.B * r.round_width) + offset + columns.first;
#pragma unroll
  for (int e = 0; e < O::COUNT; ++e)
    if (own.has(e)) to[batch(own.row(e)) * int(r.round_width) + own.column(e)] = S(s[e]);
}

// ---- the gates

// Adds the newest vector's part of the gates: x if the number of rounds is odd, else h. The other
// part was added in the last round, or, without rounds, is input_gates.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::gates_of_newest(Gates& gates) {
  const auto of = [&](const SharedWeights<S>& w, int skipped) {
    return [&, skipped](int step) {
      return w.template operands<V::N_GATES>(step - skipped, g.lane);
    };
  };
  const auto use = [&](const RowFragments<V>& a, const ColumnFragments<V::N_GATES>& f) {
    multiply_add<S>(gates, a, f);
  };
  const auto use_resident = [&](int u, const RowFragments<V>& a) {
#pragma unroll
    for (int n = 0; n < V::N_GATES; ++n)
      multiply_add<S>(gates, a, n, resident_W_ih.operand[u][n]);
  };
  if (rounds % 2)
    g.template multiply<LOADS, V::RESIDENT>(p.x, newest_x(), epoch, use_resident,
                                            of(W_ih, (g.warp + 1) * V::RESIDENT), use);
  else
    g.template multiply<LOADS>(p.h, newest_h(), epoch, of(W_hh, 0), use);
}

// What the gates of unit j and batch row b add besides the exchanged vectors.
template <class S, class V, bool LINKED>
__device__ __forceinline__ float4 ForwardBlock<S, V, LINKED>::gate_input(int64_t t, int b,
                                                                         int j) const {
  const int H_ = int(r.H);
  float4 in = {0, 0, 0, 0};
  if (const S* bias = static_cast<const S*>(r.b))
    in = float4{float(bias[j]), float(bias[H_ + j]), float(bias[2 * H_ + j]),
                float(bias[3 * H_ + j])};
  if (rounds) return in;
  const float* product = step_of<float>(p.input_gates, t, r.B * 4 * r.H) + b * 4 * H_ + j;
  in.x += product[0];
  in.y += product[H_];
  in.z += product[2 * H_];
  in.w += product[3 * H_];
  return in;
}

// Loads and draws what the cell of step t reads, before the group waits for the newest vector.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::fetch_cell(int64_t t) {
  alive = draws_h = draws_c = 0;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int b = batch(own_h.row(e));
    const int j = columns_h.first + own_h.column(e);
    if (EARLY_INPUT) gate_inputs[e] = gate_input(t, b, j);
    alive |= uint32_t(!has_ended(r.lengths, t, b)) << e;
    draws_h |= uint32_t(zoneout_draw(r, r.zoneout_h, t * r.B + b, j)) << e;
    draws_c |= uint32_t(zoneout_draw(r, r.zoneout_c, t * r.B + b, j)) << e;
  }
}

// The activated gates of element e, batch row b and unit j, from the warps' partial sums.
template <class S, class V, bool LINKED>
__device__ __forceinline__ LstmGates<float> ForwardBlock<S, V, LINKED>::activated_gates(int64_t t,
                                                                                        int e,
                                                                                        int b,
                                                                                        int j) {
  const float4 z = g.template sum4<GATE_STRIDE>(own_h.row_of_pass(e), 4 * own_h.column(e));
  const float4 in = EARLY_INPUT ? gate_inputs[EARLY_INPUT ? e : 0] : gate_input(t, b, j);
  return lstm_gates(LstmGates<float>{z.x + in.x, z.y + in.y, z.z + in.z, z.w + in.w});
}

// Sums the gates over the warps, applies the cell, publishes the new h, saves what backward needs.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::cell(int64_t t, const Gates& sums) {
  GateQuad<S> saved[H::COUNT];
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    g.template store_partial_sums<GATE_STRIDE>(sums, pass, 0);
    g.sync();
#pragma unroll
    for (int e = pass * H::PER_PASS; e < (pass + 1) * H::PER_PASS; ++e) {
      if (!own_h.has(e)) continue;
      const int b = batch(own_h.row(e));
      const int j = columns_h.first + own_h.column(e);
      const LstmGates<float> a = activated_gates(t, e, b, j);
      saved[e].set(a.i, a.f, a.g, a.o);
      LstmState<float> state =
          r.cap_input_gate ? lstm_cell<true>(a, c[e]) : lstm_cell<false>(a, c[e]);
      state.h = after_zoneout(r, r.zoneout_h, draws_h >> e & 1, state.h, carried_h[e]);
      state.c = after_zoneout(r, r.zoneout_c, draws_c >> e & 1, state.c, c[e]);
      // Past a sequence's end its state does not change.
      if (!(alive >> e & 1)) continue;
      carried_h[e] = state.h;
      c[e] = state.c;
    }
    // As in finish_round: the next pass overwrites the partial sums.
    if (pass + 1 < V::PASSES) g.sync();
  }

  // The other blocks wait for the state: it is published before the saved tensors are stored.
  put_state();
  publish(false);
  save(t, saved);
}

// Stores y (0 past a sequence's end), the cell state and the gates of step t.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::save(
    int64_t t, const GateQuad<S> (&saved)[H::COUNT]) {
  S* y = step_of<S>(r.y, t, r.B * r.H) + columns_h.first;
  float* cells = step_of<float>(r.cells, t, r.B * r.Hp) + columns_h.first;
  Bits<S>* gates = step_of<Bits<S>>(r.gates, t, r.B * 4 * r.Hp) + columns_h.first;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int b = batch(own_h.row(e)), j = own_h.column(e), Hp = int(r.Hp);
    const S value = alive >> e & 1 ? S(carried_h[e]) : S(0.f);
    if (LINKED)
      store_y(y + b * int(r.H) + j, value, t, b, j);
    else
      y[b * int(r.H) + j] = value;
    cells[b * Hp + j] = c[e];
#pragma unroll
    for (int gate = 0; gate < 4; ++gate)
      gates[(b * 4 + gate) * Hp + j] = saved[e].bits(gate);
  }
}

// Stores y so that the wavefront's other layer can read it, and, if there is dropout between the
// layers, the tensor after that dropout. j: of the block's columns
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::store_y(S* y, S value, int64_t t, int b,
                                                                    int j) {
  store_linked(y, value);
  if (!p.link.tensor) return;
  S* to = step_of<S>(p.link.tensor, t, r.B * r.H) + b * int(r.H) + columns_h.first + j;
  store_linked(to, masked(p.link, value, t, r.B, b, columns_h.first + j, r.H));
}

}  // namespace
}  // namespace fusedseq::cuda
