// The LSTM and the Mogrifier LSTM over a whole sequence in one launch: persistent.cuh says how blocks share the work. The
// vectors of a step, each an exchange: h, then what each round makes of x or h; the gates read the last two of them, the
// older one in the course of the last round, so that each vector is read once.
// Included after persistent_launch.cuh.
#pragma once
#include "cells/lstm.h"
#include "cells/mogrifier.h"

namespace fusedseq::cuda {
namespace {

struct Forward {
  Recurrence r;
  Layout l;
  Exchange e;
  Kind x, h;
  const float* input_gates;  // (T, B, 4H)  x W_ih^T, where there are no rounds
  Link link;                 // of a layer of a wavefront
};

inline Forward arguments(const Recurrence& r, const Layout& l) {
  Forward p{r, l, {}, {}, {}, nullptr, {}};
  p.h = kind_after(p.e.group_bytes, r, l, r.H, l.columns_h), p.x = kind_after(p.e.group_bytes, r, l, r.rounds ? r.X : 0, l.columns_x);
  return p;
}

// LINKED: of a wavefront
template <class S, class V, bool LINKED = false> struct ForwardBlock {
  static constexpr int ROUND_STRIDE = plan::stride(8 * V::N), GATE_STRIDE = plan::forward_stride(V::N == 2);
  // k-steps in flight
  static constexpr int LOADS = loads<S, V>(V::TILES == 3 ? 2 : V::KEPT || V::GROUPS * V::N == 4 ? 3 : 6);
  using X = Owned<V, V::X_COLUMNS>;
  using H = Owned<V, V::H_COLUMNS>;

  const Forward& p;
  const Recurrence& r;
  Group<S, V> g;
  const int rounds;
  const Columns cx, ch;
  const X ox;
  const H oh;
  uint32_t epoch;                       // of the newest vector
  const S *Q_x, *Q_h;                   // the weights of the first round on x, on h: the others' follow
  Weights<S> W_ih, W_hh;
  Kept<V, V::N_GATES> kept_ih;
  float x[X::COUNT], next_x[X::COUNT];  // mogrified so far; of the next step
  float h[H::COUNT];                    // what the rounds and gates read
  float carried_h[H::COUNT], c[H::COUNT];
  uint32_t state_kept;                  // bit e: the state dropout keeps element e

  __device__ __forceinline__ ForwardBlock(const Forward& p, int of_layer)
      : p(p), r(p.r), g(p.l, p.e, r.B, of_layer), rounds(V::PLAIN ? 0 : int(p.r.rounds)), cx(g.block, p.l.columns_x, int(r.X)), ch(g.block, p.l.columns_h, int(r.H)),
        ox(g, cx.count), oh(g, ch.count), epoch(1), state_kept(0) {}

  __device__ __forceinline__ int batch(int row) const { return g.first_row + row; }

  // ---- before the first step

  __device__ __forceinline__ S* load_rounds(S* to, int first, const Columns& own, int K) {
    for (int k = first; k < rounds; k += 2) {
      if (k > first && r.Q[k] == r.Q[first]) break;  // one weight for all
      const S* q = static_cast<const S*>(r.Q[k]) + int64_t(own.first) * K;
      to = fill<V, 0, 0>(to, own.count, K, [=](int n, int k) { return q[int64_t(n) * K + k]; });
    }
    return to;
  }

  __device__ __forceinline__ void load_weights() {
    S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
    Q_x = to;
    to = load_rounds(to, 0, cx, int(r.H));
    Q_h = to;
    to = load_rounds(to, 1, ch, int(r.X));
    const int columns = 4 * ch.count, H = int(r.H), X = int(r.X), first = ch.first;
    W_hh = {to, columns};
    to = fill<V, 0, 0>(to, columns, H, [&](int n, int k) {  // column 4 j + gate
      return dropped_weight<S>(r, int64_t(n % 4) * H + first + n / 4, k);
    });
    W_ih = {to, columns};
    const S* w_ih = static_cast<const S*>(r.W_ih);
    const auto ih = [=](int n, int k) { return w_ih[(int64_t(n % 4) * H + first + n / 4) * X + k]; };
    if (rounds) {
      to = fill<V, V::KEPT, 8 * V::N_GATES>(to, columns, X, ih);
      kept_ih.template load<S>(columns, X, g.warp, g.lane, ih);
    }
    g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * GATE_STRIDE;
  }

  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      carried_h[e] = c[e] = h[e] = 0;
      if (!oh[e]) continue;
      const int b = batch(oh.row(e)), j = ch.first + oh.column(e);
      carried_h[e] = float(step_of<S>(r.h0, b, r.H)[j]), c[e] = float(step_of<S>(r.c0, b, r.H)[j]);
      if (!r.state.threshold || kept(r.seed, r.state, b, j, r.H)) state_kept |= 1u << e;
    }
  }

  __device__ __forceinline__ void fetch_x(int64_t t) {
    const S* from = step_of<S>(r.x, t, r.B * r.X) + cx.first;
    if (LINKED && p.link.flags && t < r.steps) g.wait(p.link, cx, t + 1, 1);
#pragma unroll
    for (int e = 0; e < X::COUNT; ++e) {
      const int i = batch(ox.row(e)) * int(r.X) + ox.column(e);
      next_x[e] = ox[e] && t < r.steps ? LINKED ? handed<S>(from + i) : float(from[i]) : 0.f;
    }
  }

  __device__ __forceinline__ void put(const Kind& kind, int row, int column, float value) {
    ptx::store_relaxed(reinterpret_cast<Bits<S>*>(g.vector(kind, epoch + 1)) + place<S>(row, column, kind.steps), bits_of<S>(value));
  }
  __device__ __forceinline__ void publish() { g.publish(++epoch); }

  __device__ __forceinline__ void first_state() {
    epoch = 0;
    put_state();
    publish();
  }
  __device__ __forceinline__ void put_state() {
    const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      h[e] = state_kept >> e & 1 ? carried_h[e] * scale : 0.f;
      if (oh[e]) put(p.h, oh.row(e), ch.first + oh.column(e), h[e]);
    }
  }

  // ---- a round

  __device__ __forceinline__ Weights<S> weights_of(int k) const {
    const int kind = k % 2, columns = kind ? ch.count : cx.count;
    const bool shared = rounds > kind + 2 && r.Q[kind + 2] == r.Q[kind];
    return {(kind ? Q_h : Q_x) + (shared ? 0 : int64_t(k / 2) * (kind ? p.x.steps : p.h.steps) * columns * ALONG<S>), columns};
  }

  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset, Sums<V, V::N_GATES>& gates) {
    Sums<V, V::N> z;
    clear<V>(z);
    const Weights<S> w = weights_of(k);
    const auto use = [&](int step, const uint4(&a)[V::TILES]) {
#pragma unroll
      for (int n = 0; n < V::N; ++n) add<S>(z, a, n, w.operand(step, n, g.lane));
    };
    const auto use_with = [&](const Weights<S>& second, int skipped) {
      return [&, skipped](int step, const uint4(&a)[V::TILES]) {
        use(step, a);
#pragma unroll
        for (int n = 0; n < V::N_GATES; ++n) add<S>(gates, a, n, second.operand(step - skipped, n, g.lane));
      };
    };
    if (k + 1 < rounds) {
      g.template multiply<LOADS>(k % 2 ? p.x : p.h, epoch, use);
    } else if (k % 2) {
      const auto keep = [&](int u, const uint4(&a)[V::TILES]) {
        use(slice<V>(p.x.steps, g.warp).begin + u, a);
#pragma unroll
        for (int n = 0; n < V::N_GATES; ++n) add<S>(gates, a, n, kept_ih.operand[u][n]);
      };
      g.template multiply<LOADS>(p.x, epoch, keep, use_with(W_ih, (g.warp + 1) * V::KEPT));
    } else {
      g.template multiply<LOADS>(p.h, epoch, use_with(W_hh, 0));
    }
    if (k % 2) finish_round(z, oh, ch, p.h, k, h, t, offset);
    else finish_round(z, ox, cx, p.x, k, x, t, offset);
  }

  template <class O>
  __device__ __forceinline__ void finish_round(const Sums<V, V::N>& z, const O& own, const Columns& columns, const Kind& kind, int k,
                                               float (&operand)[O::COUNT], int64_t t, int64_t offset) {
    float s[O::COUNT];
#pragma unroll
    for (int pass = 0; pass < V::PASSES; ++pass) {
      g.template lay<V::N, ROUND_STRIDE>(z, pass, 0);
      g.meet();
#pragma unroll
      for (int e = pass * O::PER_PASS; e < (pass + 1) * O::PER_PASS; ++e) {
        if (!own[e]) continue;
        const int j = columns.first + own.column(e);
        const float b = r.bias[k] ? float(static_cast<const S*>(r.bias[k])[j]) : 0.f;
        s[e] = sigmoid(b + g.template sum<ROUND_STRIDE>(own.row_of_pass(e), own.column(e)));
        operand[e] = mogrify(s[e], operand[e]);
        put(kind, own.row(e), j, operand[e]);
      }
      if (pass + 1 < V::PASSES) g.meet();
    }
    publish();
    S* to = step_of<S>(r.round_gates, t, r.B * r.round_width) + offset + columns.first;
#pragma unroll
    for (int e = 0; e < O::COUNT; ++e)
      if (own[e]) to[batch(own.row(e)) * int(r.round_width) + own.column(e)] = S(s[e]);
  }

  // ---- the gates

  __device__ __forceinline__ void gates_of_newest(Sums<V, V::N_GATES>& gates) {
    const auto with = [&](const Weights<S>& w, int skipped) {
      return [&, w, skipped](int step, const uint4(&a)[V::TILES]) {
#pragma unroll
        for (int n = 0; n < V::N_GATES; ++n) add<S>(gates, a, n, w.operand(step - skipped, n, g.lane));
      };
    };
    const auto keep = [&](int u, const uint4(&a)[V::TILES]) {
#pragma unroll
      for (int n = 0; n < V::N_GATES; ++n) add<S>(gates, a, n, kept_ih.operand[u][n]);
    };
    if (rounds % 2) g.template multiply<LOADS>(p.x, epoch, keep, with(W_ih, (g.warp + 1) * V::KEPT));
    else g.template multiply<LOADS>(p.h, epoch, with(W_hh, 0));
  }

  __device__ __forceinline__ static float mix(float u, float after, float before) { return u * after + (1.f - u) * before; }

  __device__ __forceinline__ void cell(int64_t t, const Sums<V, V::N_GATES>& sums) {
    Quad<S> saved[H::COUNT];  // the gates, as they will be stored
    uint32_t alive = 0;
#pragma unroll
    for (int pass = 0; pass < V::PASSES; ++pass) {
      g.template lay<V::N_GATES, GATE_STRIDE>(sums, pass, 0);
      g.meet();
#pragma unroll
      for (int e = pass * H::PER_PASS; e < (pass + 1) * H::PER_PASS; ++e) {
        if (!oh[e]) continue;
        const int b = batch(oh.row(e)), j = ch.first + oh.column(e), H = int(r.H);
        const float4 z = g.template sum4<GATE_STRIDE>(oh.row_of_pass(e), 4 * oh.column(e));
        LstmGates<float> a{z.x, z.y, z.z, z.w};
        if (const S* bias = static_cast<const S*>(r.b))
          a.i += float(bias[j]), a.f += float(bias[H + j]), a.g += float(bias[2 * H + j]), a.o += float(bias[3 * H + j]);
        if (!rounds) {
          const float* in = step_of<float>(p.input_gates, t, r.B * 4 * r.H) + b * 4 * H + j;
          a.i += in[0], a.f += in[H], a.g += in[2 * H], a.o += in[3 * H];
        }
        a = lstm_gates(a);
        saved[e].set(a.i, a.f, a.g, a.o);
        LstmState<float> state = r.cap_input_gate ? lstm_cell<true>(a, c[e]) : lstm_cell<false>(a, c[e]);
        if (r.zoneout_h.threshold) state.h = mix(zoneout_update(r, r.zoneout_h, t * r.B + b, j), state.h, carried_h[e]);
        if (r.zoneout_c.threshold) state.c = mix(zoneout_update(r, r.zoneout_c, t * r.B + b, j), state.c, c[e]);
        if (r.lengths && t >= r.lengths[b]) continue;
        alive |= 1u << e;
        carried_h[e] = state.h, c[e] = state.c;
      }
      if (pass + 1 < V::PASSES) g.meet();
    }
    put_state();
    publish();
    save(t, saved, alive);
  }

  __device__ __forceinline__ void save(int64_t t, const Quad<S> (&saved)[H::COUNT], uint32_t alive) {
    S* y = step_of<S>(r.y, t, r.B * r.H) + ch.first;
    float* cells = step_of<float>(r.cells, t, r.B * r.Hp) + ch.first;
    Bits<S>* gates = step_of<Bits<S>>(r.gates, t, r.B * 4 * r.Hp) + ch.first;
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const int b = batch(oh.row(e)), j = oh.column(e), Hp = int(r.Hp);
      const S value = alive >> e & 1 ? S(carried_h[e]) : S(0.f);
      if (LINKED) give(y + b * int(r.H) + j, value, t, b, j);
      else y[b * int(r.H) + j] = value;
      cells[b * Hp + j] = c[e];
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) gates[(b * 4 + gate) * Hp + j] = saved[e].bits(gate);
    }
  }

  __device__ __forceinline__ void give(S* y, S value, int64_t t, int b, int j) {
    hand_over(y, value);
    if (!p.link.handed) return;
    S* to = step_of<S>(p.link.handed, t, r.B * r.H) + b * int(r.H) + ch.first + j;
    hand_over(to, masked(p.link, value, t, r.B, b, ch.first + j, r.H));
  }

  // ----

  __device__ __forceinline__ void run() {
    load_weights();
    __syncthreads();
    if (g.rows == 0) return;
    load_state();
    first_state();
    if (rounds) fetch_x(0);
    for (int64_t t = 0; t < r.steps; ++t) {
      Sums<V, V::N_GATES> gates;
      clear<V>(gates);
#pragma unroll
      for (int e = 0; e < X::COUNT; ++e) x[e] = next_x[e];
      int64_t offset = 0;
#pragma unroll 1
      for (int k = 0; k < rounds; offset += k % 2 ? r.Hp : r.Xp, ++k) round(t, k, offset, gates);
      if (rounds) fetch_x(t + 1);
      gates_of_newest(gates);
      cell(t, gates);
    }
    if (LINKED) publish();  // the last y
#pragma unroll
    for (int e = 0; e < H::COUNT; ++e) {
      if (!oh[e]) continue;
      const int i = batch(oh.row(e)) * int(r.H) + ch.first + oh.column(e);
      static_cast<S*>(r.h)[i] = S(carried_h[e]), static_cast<S*>(r.c)[i] = S(c[e]);
    }
  }
};

}  // namespace
}  // namespace fusedseq::cuda
