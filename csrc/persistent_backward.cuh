// The recurrence of persistent_forward.cu backward through time, data gradients only: what the weights' gradients are made
// of afterwards is written out. The vectors of a step, each an exchange: the gradients of the gates' pre-activations, 4H
// wide, element 4 j + gate; then those of each round's, from the last to the first. Weights stand transposed, a block owning
// columns of the inputs; those that are dropped are drawn from the same counters again.
// Included after persistent_launch.cuh.
#pragma once
#include "cells/lstm.h"
#include "cells/mogrifier.h"

namespace fusedseq::cuda {
namespace {

struct Backward {
  RecurrenceBackward b;
  Layout l;
  Exchange e;
  Kind gates, x, h;
  Link link;  // of a layer of a wavefront
};

inline Backward arguments(const RecurrenceBackward& b, const Layout& l) {
  Backward p{b, l, {}, {}, {}, {}, {}};
  const Recurrence& r = b.forward;
  p.gates = kind_after(p.e.group_bytes, r, l, 4 * r.H, 4 * l.columns_h);
  p.h = kind_after(p.e.group_bytes, r, l, r.rounds ? r.H : 0, l.columns_h), p.x = kind_after(p.e.group_bytes, r, l, r.rounds ? r.X : 0, l.columns_x);
  return p;
}

// LINKED: of a wavefront
template <class S, class V, bool LINKED = false> struct BackwardBlock {
  static constexpr bool SPARE = !V::KEPT;  // shared memory for the sums of dx and dh at once; registers to fetch early
  static constexpr int STRIDE = plan::backward_stride(V::N == 2, V::KEPT);
  // k-steps in flight
  static constexpr int LOADS = loads<S, V>(V::KEPT ? 1 : V::TILES == 3 ? 2 : V::GROUPS * V::N == 4 ? 3 : 6);
  using X = Owned<V, V::X_COLUMNS>;
  using H = Owned<V, V::H_COLUMNS>;
  static constexpr int MOST = X::COUNT > H::COUNT ? X::COUNT : H::COUNT;

  const Backward& p;
  const RecurrenceBackward& b;
  const Recurrence& r;
  Group<S, V> g;
  const int rounds;
  const Columns cx, ch;
  const X ox;
  const H oh;
  uint32_t epoch;
  const S *Q_x, *Q_h;
  Weights<S> W_ih, W_hh;
  Kept<V, 1> kept_ih;                            // the first tile of columns; of these k-steps, the others:
  Weights<S> rest_ih;
  float dx[X::COUNT], dh[H::COUNT];              // of the operands, in the course of a step
  float carried_dh[H::COUNT], dc[H::COUNT];      // of the state, from step to step
  Quad<S> gates[H::COUNT];                       // saved for the step to come, as what follows
  float c_before[H::COUNT], dy[H::COUNT];
  float s[MOST], operand[MOST];                  // of the round to come
  uint32_t state_kept;

  __device__ __forceinline__ BackwardBlock(const Backward& p, int of_layer)
      : p(p), b(p.b), r(p.b.forward), g(p.l, p.e, r.B, of_layer), rounds(V::PLAIN ? 0 : int(r.rounds)), cx(g.block, p.l.columns_x, int(r.X)), ch(g.block, p.l.columns_h, int(r.H)),
        ox(g, cx.count), oh(g, ch.count), epoch(0), state_kept(0) {}

  __device__ __forceinline__ int batch(int row) const { return g.first_row + row; }

  // ---- before the first step

  __device__ __forceinline__ S* load_rounds(S* to, int first, const Columns& own, int K, int64_t width) {
    for (int k = first; k < rounds; k += 2) {
      if (k > first && r.Q[k] == r.Q[first]) break;  // one weight for all
      const S* q = static_cast<const S*>(r.Q[k]) + own.first;
      to = fill<V, 0, 0>(to, own.count, K, [=](int n, int k) { return q[k * width + n]; });
    }
    return to;
  }

  __device__ __forceinline__ void load_weights() {
    S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
    const int64_t H = r.H, X = r.X;
    Q_x = to;
    to = load_rounds(to, 0, ch, int(X), H);
    Q_h = to;
    to = load_rounds(to, 1, cx, int(H), X);
    W_hh = {to, ch.count};
    to = fill<V, 0, 0>(to, ch.count, int(4 * H), [&](int n, int k) {
      return dropped_weight<S>(r, int64_t(k % 4) * H + k / 4, ch.first + n);
    });
    W_ih = {to, cx.count};
    const S* w_ih = static_cast<const S*>(r.W_ih) + cx.first;
    const auto ih = [=](int n, int k) { return w_ih[(int64_t(k % 4) * H + k / 4) * X + n]; };
    if (rounds) {
      const int steps = p.gates.steps - V::KEPT * V::SPLIT;
      rest_ih = {to + steps * cx.count * ALONG<S>, cx.count < 8 ? 0 : cx.count - 8};
      to = fill<V, V::KEPT, 8>(to, cx.count, int(4 * H), ih);
      kept_ih.template load<S>(cx.count, int(4 * H), g.warp, g.lane, ih);
    }
    g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * STRIDE;
  }

  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      carried_dh[e] = dc[e] = 0;
      if (!oh[e]) continue;
      const int row = batch(oh.row(e)), j = ch.first + oh.column(e);
      carried_dh[e] = float(step_of<S>(b.dh, row, r.H)[j]), dc[e] = float(step_of<S>(b.dc, row, r.H)[j]);
      if (!r.state.threshold || kept(r.seed, r.state, row, j, r.H)) state_kept |= 1u << e;
    }
  }

  // What the forward pass saved of step t, and dy.
  __device__ __forceinline__ void fetch(int64_t t) {
    if (t < 0) return;
    const Bits<S>* a = step_of<Bits<S>>(r.gates, t, r.B * 4 * r.Hp) + ch.first;
    const float* cells = step_of<float>(r.cells, t - 1, r.B * r.Hp) + ch.first;
    const S *c0 = static_cast<const S*>(r.c0) + ch.first, *upstream = step_of<S>(b.dy, t, r.B * r.H) + ch.first;
    const int width = int(r.H), Hp = int(r.Hp);
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const int row = batch(oh.row(e)), j = oh.column(e);
      const Bits<S>* gate = a + row * 4 * Hp + j;
      gates[e].set_bits(gate[0], gate[Hp], gate[2 * Hp], gate[3 * Hp]);
      c_before[e] = t ? cells[row * Hp + j] : float(c0[row * width + j]);
      if (!LINKED || b.dy) dy[e] = float(upstream[row * width + j]);
    }
    if (LINKED && p.link.flags) take(t);
  }
  __device__ __forceinline__ void take(int64_t t) {
    g.wait(p.link, ch, r.steps - t, 0);
    const S* from = step_of<S>(p.link.handed, t, r.B * r.H) + ch.first;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const float d = handed<S>(from + batch(oh.row(e)) * int(r.H) + oh.column(e));
      dy[e] = b.dy ? float(S(dy[e] + d)) : d;
    }
  }

  // The sigmoid of round k and the operand that it scaled.
  __device__ __forceinline__ void fetch_round(int64_t t, int k) {
    if (k % 2) fetch_round(oh, t, k, ch.first, r.Xp, t ? step_of<S>(r.y, t - 1, r.B * r.H) : static_cast<const S*>(r.h0), int(r.H));
    else fetch_round(ox, t, k, cx.first, 0, step_of<S>(r.x, t, r.B * r.X), int(r.X));
  }
  template <class O>
  __device__ __forceinline__ void fetch_round(const O& own, int64_t t, int k, int first, int64_t offset, const S* initial, int width) {
    const float scale = k % 2 && r.state.threshold ? float(r.state.scale) : 1.f;
    const S* all = step_of<S>(r.round_gates, t, r.B * r.round_width) + offset + first;
#pragma unroll
    for (int e = 0; e < O::COUNT; ++e) {
      if (!own[e]) continue;
      const int row = batch(own.row(e)), j = own.column(e);
      const S* gate = all + row * int(r.round_width) + j;
      float v = k % 2 == 0 || state_kept >> e & 1 ? float(initial[row * width + first + j]) * scale : 0.f;
#pragma unroll 1
      for (int i = k % 2; i < k; i += 2, gate += r.Xp + r.Hp) v = mogrify(float(*gate), v);
      s[e] = float(*gate), operand[e] = v;
    }
  }

  // ---- the gates

  __device__ __forceinline__ void cell(int64_t t) {
    if (!SPARE) fetch(t);
    Quad<S> dz[H::COUNT];
    ++epoch;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const int row = batch(oh.row(e)), j = ch.first + oh.column(e);
      dz[e] = {};
      if (!r.lengths || t < r.lengths[row]) {  // past the end: the state's gradient passes by
        float d_h = carried_dh[e] + dy[e], d_c = dc[e], past_h = 0, past_c = 0;
        if (r.zoneout_h.threshold) part(zoneout_update(r, r.zoneout_h, t * r.B + row, j), d_h, past_h);
        if (r.zoneout_c.threshold) part(zoneout_update(r, r.zoneout_c, t * r.B + row, j), d_c, past_c);
        const LstmGates<float> a{gates[e][0], gates[e][1], gates[e][2], gates[e][3]};
        const LstmGates<float> d =
            r.cap_input_gate ? lstm_cell_backward<true>(a, c_before[e], d_h, d_c) : lstm_cell_backward<false>(a, c_before[e], d_h, d_c);
        carried_dh[e] = past_h, dc[e] = d_c + past_c;
        dz[e].set(d.i, d.f, d.g, d.o);
      }
      dz[e].publish(g.vector(p.gates, epoch), oh.row(e), 4 * j, p.gates.steps);
    }
    g.publish(epoch);
    Bits<S>* all = step_of<Bits<S>>(b.dz, t, r.B * 4 * r.H) + ch.first;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      Bits<S>* to = all + batch(oh.row(e)) * 4 * int(r.H) + oh.column(e);
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) to[gate * int(r.H)] = dz[e].bits(gate);
    }
  }
  __device__ __forceinline__ static void part(float u, float& d, float& past) { past = (1.f - u) * d, d = u * d; }

  __device__ __forceinline__ void operands_of_gates() {
    Sums<V, V::N> on_x, on_h;
    clear<V>(on_x), clear<V>(on_h);
    const auto h = [&](int step, const uint4(&a)[V::TILES]) {
#pragma unroll
      for (int n = 0; n < V::N; ++n) add<S>(on_h, a, n, W_hh.operand(step, n, g.lane));
    };
    if (rounds) {
      const int begin = slice<V>(p.gates.steps, g.warp).begin, skipped = (g.warp + 1) * V::KEPT;
      g.template multiply<LOADS>(
          p.gates, epoch,
          [&](int u, const uint4(&a)[V::TILES]) {
            h(begin + u, a);
            add<S>(on_x, a, 0, kept_ih.operand[u][0]);
#pragma unroll
            for (int n = 1; n < V::N; ++n) add<S>(on_x, a, n, rest_ih.operand(g.warp * V::KEPT + u, n - 1, g.lane));
          },
          [&](int step, const uint4(&a)[V::TILES]) {
            h(step, a);
#pragma unroll
            for (int n = 0; n < V::N; ++n) add<S>(on_x, a, n, W_ih.operand(step - skipped, n, g.lane));
          });
    } else {
      g.template multiply<LOADS>(p.gates, epoch, h);
    }
#pragma unroll
    for (int pass = 0; pass < V::PASSES; ++pass) {
      constexpr int SECOND = SPARE ? 8 * V::N : 0;
      g.template lay<V::N, STRIDE>(on_x, pass, 0);
      if (SPARE) g.template lay<V::N, STRIDE>(on_h, pass, SECOND);
      g.meet();
      for_pass(ox, pass, [&](int e) { dx[e] = g.template sum<STRIDE>(ox.row_of_pass(e), ox.column(e)); });
      if (!SPARE) g.meet(), g.template lay<V::N, STRIDE>(on_h, pass, SECOND), g.meet();
      for_pass(oh, pass, [&](int e) { dh[e] = g.template sum<STRIDE>(oh.row_of_pass(e), SECOND + oh.column(e)); });
      if (pass + 1 < V::PASSES) g.meet();
    }
  }
  template <class O, class F> __device__ __forceinline__ static void for_pass(const O& own, int pass, F f) {
#pragma unroll
    for (int e = pass * O::PER_PASS; e < (pass + 1) * O::PER_PASS; ++e)
      if (own[e]) f(e);
  }

  // ---- a round

  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset) {
    if (!SPARE) fetch_round(t, k);
    if (k % 2) round(t, k, offset, oh, ch.first, p.h, dh, ox, cx.count, Q_h, dx);
    else round(t, k, offset, ox, cx.first, p.x, dx, oh, ch.count, Q_x, dh);
  }
  template <class O, class I>
  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset, const O& own, int first, const Kind& kind, float (&d)[O::COUNT],
                                        const I& in, int columns, const S* weights, float (&d_in)[I::COUNT]) {
    float dz[O::COUNT];
    ++epoch;
#pragma unroll
    for (int e = 0; e < O::COUNT; ++e) {
      if (!own[e]) continue;
      dz[e] = mogrify_backward(s[e], operand[e], d[e]);
      ptx::store_relaxed(reinterpret_cast<Bits<S>*>(g.vector(kind, epoch)) + place<S>(own.row(e), first + own.column(e), kind.steps), bits_of<S>(dz[e]));
    }
    g.publish(epoch);
    S* to = step_of<S>(b.dround, t, r.B * r.round_width) + offset + first;
#pragma unroll
    for (int e = 0; e < O::COUNT; ++e)
      if (own[e]) to[batch(own.row(e)) * int(r.round_width) + own.column(e)] = S(dz[e]);
    if (SPARE && k) fetch_round(t, k - 1);
    else if (SPARE) fetch(t - 1);

    Sums<V, V::N> sums;
    clear<V>(sums);
    const bool shared = rounds > k % 2 + 2 && r.Q[k % 2 + 2] == r.Q[k % 2];
    const Weights<S> w{weights + (shared ? 0 : int64_t(k / 2) * kind.steps * columns * ALONG<S>), columns};
    g.template multiply<LOADS>(kind, epoch, [&](int step, const uint4(&a)[V::TILES]) {
#pragma unroll
      for (int n = 0; n < V::N; ++n) add<S>(sums, a, n, w.operand(step, n, g.lane));
    });
#pragma unroll
    for (int pass = 0; pass < V::PASSES; ++pass) {
      g.template lay<V::N, STRIDE>(sums, pass, 0);
      g.meet();
      for_pass(in, pass, [&](int e) { d_in[e] += g.template sum<STRIDE>(in.row_of_pass(e), in.column(e)); });
      if (pass + 1 < V::PASSES) g.meet();
    }
  }

  // ----

  __device__ __forceinline__ void step(int64_t t) {
    cell(t);
    if (SPARE && rounds) fetch_round(t, rounds - 1);
    else if (SPARE) fetch(t - 1);
    operands_of_gates();
    int64_t offset = r.round_width;
#pragma unroll 1
    for (int k = rounds - 1; k >= 0; --k) {
      offset -= k % 2 ? r.Hp : r.Xp;
      round(t, k, offset);
    }
    const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e)
      if (oh[e] && state_kept >> e & 1) carried_dh[e] += dh[e] * scale;
    if (!rounds || !b.dx) return;
    S* to = step_of<S>(b.dx, t, r.B * r.X) + cx.first;
#pragma unroll
    for (int e = 0; e < X::COUNT; ++e)
      if (ox[e]) give(to + batch(ox.row(e)) * int(r.X) + ox.column(e), S(dx[e]), t, batch(ox.row(e)), cx.first + ox.column(e));
  }
  __device__ __forceinline__ void give(S* to, S value, int64_t t, int b, int j) {
    if (LINKED) hand_over(to, masked(p.link, value, t, r.B, b, j, r.X));
    else *to = value;
  }

  __device__ __forceinline__ void run() {
    load_weights();
    __syncthreads();
    if (g.rows == 0) return;
    load_state();
    if (SPARE) fetch(r.steps - 1);
    for (int64_t t = r.steps - 1; t >= 0; --t) step(t);
    if (LINKED) g.publish(++epoch);  // the first step's dx
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const int i = batch(oh.row(e)) * int(r.H) + ch.first + oh.column(e);
      static_cast<S*>(b.dh0)[i] = S(carried_dh[e]), static_cast<S*>(b.dc0)[i] = S(dc[e]);
    }
  }
};

}  // namespace
}  // namespace fusedseq::cuda
