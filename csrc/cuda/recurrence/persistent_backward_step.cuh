// The phases of a step of the backward persistent kernel: cell, gates, rounds. The class is
// declared in persistent_backward.cuh.
#pragma once
#include "cuda/recurrence/persistent_backward.cuh"
#include "math/lstm.h"
#include "math/mogrifier.h"

namespace fusedseq::cuda {
namespace {

// ---- saved tensors

// Loads what forward saved of step t, and dy, and draws its masks. Nothing before step 0.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::fetch(int64_t t) {
  if (t < 0) return;
  const int width = int(r.H), Hp = int(r.Hp);
  const Bits<S>* all_gates = step_of<Bits<S>>(r.gates, t, r.B * 4 * r.Hp) + columns_h.first;
  const float* cells = step_of<float>(r.cells, t - 1, r.B * r.Hp) + columns_h.first;
  const S* c0 = static_cast<const S*>(r.c0) + columns_h.first;
  const S* all_dy = step_of<S>(b.dy, t, r.B * r.H) + columns_h.first;
  alive = draws_h = draws_c = 0;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int row = batch(own_h.row(e));
    const int j = own_h.column(e);
    const Bits<S>* gate = all_gates + row * 4 * Hp + j;
    gates[e].set_bits(gate[0], gate[Hp], gate[2 * Hp], gate[3 * Hp]);
    c_before[e] = t ? cells[row * Hp + j] : float(c0[row * width + j]);
    if (!LINKED || b.dy) dy[e] = float(all_dy[row * width + j]);
    const int unit = columns_h.first + j;
    alive |= uint32_t(!has_ended(r.lengths, t, row)) << e;
    draws_h |= uint32_t(zoneout_draw(r, r.zoneout_h, t * r.B + row, unit)) << e;
    draws_c |= uint32_t(zoneout_draw(r, r.zoneout_c, t * r.B + row, unit)) << e;
  }
  if (LINKED && p.link.flags) add_linked_dy(t);
}

// In the first layer of a wavefront: adds the gradient of y that the second layer has computed, and
// waits for it. b.dy is null if y has no other gradient.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::add_linked_dy(int64_t t) {
  g.wait(p.link, columns_h, r.steps - t, 0);
  const S* from = step_of<S>(p.link.tensor, t, r.B * r.H) + columns_h.first;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const float d = load_linked<S>(from + batch(own_h.row(e)) * int(r.H) + own_h.column(e));
    // Rounded to S, like the sum of the two gradients when the layers run one after the other.
    dy[e] = b.dy ? float(S(dy[e] + d)) : d;
  }
}

// Loads the sigmoid of round k of step t to s, and recomputes the operand that it scaled.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::fetch_round(int64_t t, int k) {
  if (k % 2) {
    const S* h = t ? step_of<S>(r.y, t - 1, r.B * r.H) : static_cast<const S*>(r.h0);
    fetch_round(own_h, t, k, columns_h.first, r.Xp, h, int(r.H));
  } else {
    fetch_round(own_x, t, k, columns_x.first, 0, step_of<S>(r.x, t, r.B * r.X), int(r.X));
  }
}

// first: the block's first column    offset: in a row of round_gates, of the first round on this
// side initial: (B, width), the operand before dropout and rounds
template <class S, class V, bool LINKED>
template <class O>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::fetch_round(
    const O& own, int64_t t, int k, int first, int64_t offset, const S* initial, int width) {
  const float scale = k % 2 && r.state.threshold ? float(r.state.scale) : 1.f;
  const S* all = step_of<S>(r.round_gates, t, r.B * r.round_width) + offset + first;
#pragma unroll
  for (int e = 0; e < O::COUNT; ++e) {
    if (!own.has(e)) continue;
    const int row = batch(own.row(e));
    const int j = own.column(e);
    const S* gate = all + row * int(r.round_width) + j;
    const bool kept = k % 2 ? state_keep >> e & 1 : !has_ended(r.lengths, t, row);
    float v = kept ? float(initial[row * width + first + j]) * scale : 0.f;
    // The earlier rounds on this operand, of which only the sigmoids are saved.
#pragma unroll 1
    for (int i = k % 2; i < k; i += 2) {
      v = mogrify(float(*gate), v);
      gate += r.Xp + r.Hp;
    }
    s[e] = float(*gate);
    operand[e] = v;
  }
}

// ---- the cell

// The gradient of element e's gates before their activation functions. Replaces carried_dh and dc
// by the gradients that bypass the gates: those of the state before this step.
template <class S, class V, bool LINKED>
__device__ __forceinline__ GateQuad<S> BackwardBlock<S, V, LINKED>::cell_gradient(int e) {
  GateQuad<S> dz = {};
  // Past a sequence's end the state did not change, so its gradient does not either.
  if (!(alive >> e & 1)) return dz;
  float d_h = carried_dh[e] + dy[e], d_c = dc[e];
  const float past_h = bypass_of_zoneout(r, r.zoneout_h, draws_h >> e & 1, d_h);
  const float past_c = bypass_of_zoneout(r, r.zoneout_c, draws_c >> e & 1, d_c);
  const LstmGates<float> a{gates[e][0], gates[e][1], gates[e][2], gates[e][3]};
  const LstmGates<float> d = r.cap_input_gate ? lstm_cell_backward<true>(a, c_before[e], d_h, d_c)
                                              : lstm_cell_backward<false>(a, c_before[e], d_h, d_c);
  carried_dh[e] = past_h;
  dc[e] = d_c + past_c;
  dz.set(d.i, d.f, d.g, d.o);
  return dz;
}

// The gradient of the gates' pre-activations of step t: published, then stored for the weights'
// gradients.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::cell(int64_t t) {
  if (!SPARE) fetch(t);
  GateQuad<S> dz[H::COUNT];
  ++epoch;
  ++uses_gates;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int j = columns_h.first + own_h.column(e);
    dz[e] = cell_gradient(e);
    if constexpr (V::WORDS)
      dz[e].store_words_to(g.slot(p.gates, uses_gates), g.slot(p.gates, uses_gates - RESET_AFTER),
                           own_h.row(e), 4 * j, p.gates.k_steps);
    else
      dz[e].store_to(g.slot(p.gates, epoch), own_h.row(e), 4 * j, p.gates.k_steps);
  }
  publish();

  // Stored after the release, which would otherwise wait for these stores too.
  Bits<S>* all = step_of<Bits<S>>(b.dz, t, r.B * 4 * r.H) + columns_h.first;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    Bits<S>* to = all + batch(own_h.row(e)) * 4 * int(r.H) + own_h.column(e);
#pragma unroll
    for (int gate = 0; gate < 4; ++gate)
      to[gate * int(r.H)] = dz[e].bits(gate);
  }
}

// ---- the gates

// The warp's part of dz W_ih and dz W_hh. Each k-step of dz is loaded once for both products.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::multiply_gates(
    Accumulators<V, V::N>& on_x, Accumulators<V, V::N>& on_h) {
  const auto of_h = [&](int step) {
    return W_hh.template operands<V::N>(step, g.lane);
  };
  const auto use_for_h = [&](const RowFragments<V>& a, const ColumnFragments<V::N>& f) {
    multiply_add<S>(on_h, a, f);
  };
  const uint32_t number = V::WORDS ? uses_gates : epoch;
  if (rounds) {
    const int begin = k_slice<V>(p.gates.k_steps, g.warp).begin;
    const int skipped = (g.warp + 1) * V::RESIDENT;
    const auto use_resident = [&](int u, const RowFragments<V>& a) {
      use_for_h(a, of_h(begin + u));
      multiply_add<S>(on_x, a, 0, resident_W_ih.operand[u][0]);
#pragma unroll
      for (int n = 1; n < V::N; ++n)
        multiply_add<S>(on_x, a, n, rest_W_ih.operand(g.warp * V::RESIDENT + u, n - 1, g.lane));
    };
    const auto of_both = [&](int step) {
      return SidesOfGates<V>{W_ih.template operands<V::N>(step - skipped, g.lane), of_h(step)};
    };
    const auto use_both = [&](const RowFragments<V>& a, const SidesOfGates<V>& f) {
      use_for_h(a, f.h);
      multiply_add<S>(on_x, a, f.x);
    };
    g.template multiply<LOADS, V::RESIDENT>(p.gates, number, epoch, use_resident, of_both,
                                            use_both);
  } else {
    // dx is one product over all steps after the loop.
    g.template multiply<LOADS>(p.gates, number, epoch, of_h, use_for_h);
  }
}

template <class O, class F>
__device__ __forceinline__ void for_elements_of_pass(const O& own, int pass, F f) {
#pragma unroll
  for (int e = pass * O::PER_PASS; e < (pass + 1) * O::PER_PASS; ++e)
    if (own.has(e)) f(e);
}

// dx and dh, the gradients of what the gates read, from the newest vector, dz.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::operands_of_gates() {
  Accumulators<V, V::N> on_x, on_h;
  clear<V>(on_x);
  clear<V>(on_h);
  multiply_gates(on_x, on_h);
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    // With SPARE shared memory the partial sums of dh are beside those of dx, and one barrier makes
    // both visible. Else dh's overwrite dx's, between two barriers. Without rounds there is no dx.
    constexpr int SECOND = SPARE && !V::PLAIN ? 8 * V::N : 0;
    if (!V::PLAIN) g.template store_partial_sums<STRIDE>(on_x, pass, 0);
    if (SPARE) g.template store_partial_sums<STRIDE>(on_h, pass, SECOND);
    g.sync();
    for_elements_of_pass(own_x, pass, [&](int e) {
      dx[e] = g.template sum<STRIDE>(own_x.row_of_pass(e), own_x.column(e));
    });
    if (!SPARE) {
      g.sync();
      g.template store_partial_sums<STRIDE>(on_h, pass, SECOND);
      g.sync();
    }
    for_elements_of_pass(own_h, pass, [&](int e) {
      dh[e] = g.template sum<STRIDE>(own_h.row_of_pass(e), SECOND + own_h.column(e));
    });
    // The next pass overwrites the partial sums. After the last pass the barrier of the next
    // publish() comes first.
    if (pass + 1 < V::PASSES) g.sync();
  }
}

// ---- a round

// Round k of step t. offset: of the round in a row of dround
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::round(int64_t t, int k,
                                                                   int64_t offset) {
  if (!SPARE) fetch_round(t, k);
  const RoundSide<X> on_x{own_x, columns_x, p.x, dx, uses_x};
  const RoundSide<H> on_h{own_h, columns_h, p.h, dh, uses_h};
  if (k % 2)
    round(t, k, offset, on_h, on_x, Q_h);
  else
    round(t, k, offset, on_x, on_h, Q_x);
}

// scaled: the side that the round scales    read: the side that its sigmoid is a function of
template <class S, class V, bool LINKED>
template <class O, class I>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::round(int64_t t, int k, int64_t offset,
                                                                   RoundSide<O> scaled,
                                                                   RoundSide<I> read,
                                                                   const S* weights) {
  // The gradient of the sigmoid's argument; mogrify_backward also updates the operand's gradient.
  const O& own = scaled.own;
  const ExchangedVector& v = scaled.vector;
  const int first = scaled.columns.first;
  float dz[O::COUNT];
  ++epoch;
  ++scaled.uses;
#pragma unroll
  for (int e = 0; e < O::COUNT; ++e) {
    const bool has = own.has(e);
    if (has) dz[e] = mogrify_backward(s[e], operand[e], scaled.d[e]);
    if constexpr (V::WORDS)
      g.put_word(v, scaled.uses, has, own.row(e), first + own.column(e), has ? dz[e] : 0.f);
    else if (has)
      ptx::store_relaxed(reinterpret_cast<Bits<S>*>(g.slot(v, epoch)) +
                             exchange_index<S>(own.row(e), first + own.column(e), v.k_steps),
                         bits_of<S>(dz[e]));
  }
  publish();

  // After the release: dz for the weights' gradients, and the loads of the next phase, which
  // overlap with the wait for the other blocks.
  S* to = step_of<S>(b.dround, t, r.B * r.round_width) + offset + first;
#pragma unroll
  for (int e = 0; e < O::COUNT; ++e)
    if (own.has(e)) to[batch(own.row(e)) * int(r.round_width) + own.column(e)] = S(dz[e]);
  if (SPARE && k)
    fetch_round(t, k - 1);
  else if (SPARE)
    fetch(t - 1);

  // dz times the round's weights, which is added to the gradient of the other side.
  Accumulators<V, V::N> sums;
  clear<V>(sums);
  const int columns = read.columns.count;
  const bool shared = rounds > k % 2 + 2 && r.Q[k % 2 + 2] == r.Q[k % 2];
  const SharedWeights<S> w{
      weights + (shared ? 0 : int64_t(k / 2) * v.k_steps * columns * K_STEP<S>), columns};
  g.template multiply<ROUND_LOADS>(
      v, V::WORDS ? scaled.uses : epoch, epoch,
      [&](int step) { return w.template operands<V::N>(step, g.lane); },
      [&](const RowFragments<V>& a, const ColumnFragments<V::N>& f) {
        multiply_add<S>(sums, a, f);
      });
#pragma unroll
  for (int pass = 0; pass < V::PASSES; ++pass) {
    // Barriers as in operands_of_gates.
    g.template store_partial_sums<STRIDE>(sums, pass, 0);
    g.sync();
    for_elements_of_pass(read.own, pass, [&](int e) {
      read.d[e] += g.template sum<STRIDE>(read.own.row_of_pass(e), read.own.column(e));
    });
    if (pass + 1 < V::PASSES) g.sync();
  }
}

// ---- a step

template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::step(int64_t t) {
  // The loads of the next phase overlap with the wait for the other blocks' dz.
  cell(t);
  if (SPARE && rounds)
    fetch_round(t, rounds - 1);
  else if (SPARE)
    fetch(t - 1);
  operands_of_gates();
  int64_t offset = r.round_width;
#pragma unroll 1
  for (int k = rounds - 1; k >= 0; --k) {
    offset -= k % 2 ? r.Hp : r.Xp;
    round(t, k, offset);
  }

  // Through state dropout to the state before this step.
  const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e)
    if (own_h.has(e) && state_keep >> e & 1) carried_dh[e] += dh[e] * scale;

  if (!rounds || !b.dx) return;
  S* to = step_of<S>(b.dx, t, r.B * r.X) + columns_x.first;
#pragma unroll
  for (int e = 0; e < X::COUNT; ++e)
    if (own_x.has(e))
      store_dx(to + batch(own_x.row(e)) * int(r.X) + own_x.column(e), S(dx[e]), t,
               batch(own_x.row(e)), columns_x.first + own_x.column(e));
}

// In a wavefront, dx is the first layer's gradient of y: it passes through the dropout between the
// layers, and is stored so that the other layer can read it.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::store_dx(S* to, S value, int64_t t,
                                                                      int b, int j) {
  if (LINKED)
    store_linked(to, masked(p.link, value, t, r.B, b, j, r.X));
  else
    *to = value;
}

}  // namespace
}  // namespace fusedseq::cuda
