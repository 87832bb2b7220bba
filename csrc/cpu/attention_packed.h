// Attention of sequences whose keys fit in one vector: a vector of logits holds Q keys of each of G queries (8 and 2, for
// up to 8 keys and AVX-512), so the softmax wastes few lanes. Dot products run along the head dim and 16 of them are summed
// across at once; nothing is transposed or packed, and where the type and the head dim allow rows are read and written
// where they stand.
//
// What limits it: memory. L = S = 6, D = 32 in fp32 reads and writes 8.4 KB for a forward and a backward.
#pragma once
#include "attention_backward.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t PACKED_QUERIES = 16;
template <class E> bool packed_takes(const cpu::Attention& a) {
  return a.S <= LANES<typename Compute<E>::type> && a.L <= PACKED_QUERIES && !a.relative_keys;
}

template <class E, int Q> class AttentionPacked {
  using T = typename Compute<E>::type;
  using V = Vec<T>;
  using Mask = typename V::Mask;
  static constexpr int G = LANES<T> / Q;
  static constexpr int64_t UNITS_AHEAD = 4;
  static constexpr int64_t BATCH = 16;  // units whose dropout masks are made at once
  struct Rows {
    const T* p;
    int64_t stride;
  };
  const cpu::Attention& a;
  const AttentionProblem<E> p{a};
  const bool direct = std::is_same<E, T>::value && a.D == p.Dp;
  const bool past_caches = direct && FUSEDSEQ_ISA::past_caches<T>(a.B * a.N * a.L * a.D);

  static HD Mask key() { return lane_numbers<T>() & (Q - 1); }
  static HD Mask query() {
    static constexpr Lanes<T> queries([](int i) { return i / Q; });
    return queries;
  }

  struct Work {
    Buffer<T> q, k, v, dout, to, dk, dv, keep, P, dS;
    // staged: whether rows are not read and written where they stand
    Work(const AttentionProblem<E>& p, bool staged)
        : Work(p, staged ? p.a.L * p.Dp : 0, staged ? p.a.S * p.Dp : 0) {}
    Work(const AttentionProblem<E>& p, int64_t queries, int64_t keys)
        : q(queries), k(keys), v(keys), dout(queries), to(queries), dk(keys), dv(keys),
          keep(p.a.dropped ? BATCH * p.a.L * p.words + 2 * LANES<T> : 0), P((PACKED_QUERIES + G) * Q), dS((PACKED_QUERIES + G) * Q) {}
  };

  HD Rows rows(const void* x, const int64_t* strides, int64_t b, int64_t n, int64_t count, int64_t position, bool turn, T* staged) const {
    const E* first = p.row(x, strides, b, n, 0);
    if constexpr (std::is_same<E, T>::value)
      if (direct && !(turn && p.rope)) return {first, strides[2]};
    p.stage(first, strides[2], count, position, turn, staged);
    return {staged, p.Dp};
  }

  HD Rows keys_of(const void* x, const int64_t* strides, int64_t b, int64_t g, bool turn, T* staged) const {
    if (!a.key_rows) return rows(x, strides, b, g, a.S, 0, turn, staged);
    p.stage_keys(x, strides, b, g, turn, staged);
    return {staged, p.Dp};
  }

  // x_i . y_j for G rows i from `first` on, in the order of the lanes; rows that there are not repeat the last.
  HD V dots(Rows x, int64_t first, Rows y) const {
    V sum[LANES<T>];
    const T *xs[G], *ys[Q];
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; ++i) sum[i] = V(T(0));
#pragma GCC unroll 4
    for (int r = 0; r < G; ++r) xs[r] = x.p + (first + r < a.L ? first + r : a.L - 1) * x.stride;
#pragma GCC unroll 16
    for (int j = 0; j < Q; ++j) ys[j] = y.p + (j < a.S ? j : a.S - 1) * y.stride;
    for (int64_t d = 0; d < p.Dp; d += LANES<T>) {
      V xv[G];
#pragma GCC unroll 4
      for (int r = 0; r < G; ++r) xv[r] = V::load(xs[r] + d);
#pragma GCC unroll 16
      for (int j = 0; j < Q; ++j) {
        const V yv = V::load(ys[j] + d);
#pragma GCC unroll 4
        for (int r = 0; r < G; ++r) sum[r * Q + j] = sum[r * Q + j] + xv[r] * yv;
      }
    }
    return horizontal_sums(sum);
  }

  // The logits of G queries from i on, -inf where a key is not seen.
  HD V logits(Rows q, Rows k, int64_t b, int64_t h, int64_t i, int64_t keys) const {
    V s = dots(q, i, k) * V(T(a.scale));
    const Mask far = key() - query();  // key j is ahead of query i + r by far - i - offset
    if (a.bias || a.mask) s = s + added(b, h, i);
    if (a.alibi) s = s - V(static_cast<const T*>(a.alibi)[h]) * abs_(as_numbers<T>(far) - V(T(i + a.offset)));
    Mask seen = key() < Mask{} + int(keys);
    if (a.causal) seen &= far <= Mask{} + int(i + a.offset < -PACKED_QUERIES ? -PACKED_QUERIES : i + a.offset > 1 << 20 ? 1 << 20 : i + a.offset);
    return select<T>(seen, s, V(-INFINITE<T>));
  }
  V added(int64_t b, int64_t h, int64_t first) const {
    T extra[LANES<T>] = {};
    const int64_t *t = a.bias_strides, *u = a.mask_strides;
    for (int r = 0; r < G && first + r < a.L; ++r)
      for (int64_t j = 0; j < a.S; ++j) {
        const int64_t i = first + r;
        if (a.bias) extra[r * Q + j] = load_scalar(static_cast<const E*>(a.bias) + b * t[0] + h * t[1] + i * t[2] + j * t[3]);
        if (a.mask && !a.mask[b * u[0] + h * u[1] + i * u[2] + j * u[3]]) extra[r * Q + j] = -INFINITE<T>;
      }
    return V::load(extra);
  }

  HD void forward(Work& w, int64_t b, int64_t h, Rows k, Rows v, int64_t keys, const T* keep) const {
    const Rows q = rows(a.q, a.q_strides, b, h, a.L, a.offset, true, w.q);
    const V zero(T(0)), none(-INFINITE<T>);
    T* lse = static_cast<T*>(a.lse) + (b * a.N + h) * a.L;
    for (int64_t i = 0; i < a.L; i += G) {
      const V s = logits(q, k, b, h, i, keys), most = largest<Q>(s);
      const V e = select<T>(s.v != none.v, exp_(s - most), zero), total = sums<Q>(e);
      const Mask blind = total.v == zero.v;  // by its mass, not by `most`: a row of NaN is no masked one
      const V mass = select<T>(blind, V(T(1)), total), y = e / mass;
      (a.dropped ? p.dropped(y, keep + i * p.words) : y).store(w.P + i * Q);
      const V l = select<T>(blind, V(INFINITE<T>), most + log_(mass));
#pragma GCC unroll 4
      for (int r = 0; r < G; ++r)
        if (i + r < a.L) lse[i + r] = l.v[r * Q];
    }
    E* out = static_cast<E*>(a.out) + (b * a.L * a.N + h) * a.D;
    store(w, out, a.L, a.N * a.D, false, [&](T* to, int64_t ld) {
      weighted(w.P, v, keys, to, ld);
    });
  }

  // to (L, Dp) = weights (L, Q) times the rows of the keys there are: behind them may stand anything.
  HD void weighted(const T* weights, Rows x, int64_t keys, T* to, int64_t ld) const {
    if (keys) return product(a.L, keys, weights, Q, 1, x.p, x.stride, p.Dp, to, ld, false);
    for (int64_t i = 0; i < a.L; ++i) memset(to + i * ld, 0, p.Dp * sizeof(T));
  }

  // make(to, row length) writes `count` rows to x, or to memory that is then stored there, turned back where asked.
  template <class F> HD void store(Work& w, E* x, int64_t count, int64_t stride, bool turned, F make, int64_t position = 0) const {
    if constexpr (std::is_same<E, T>::value)
      if (direct && !past_caches && !(turned && p.rope)) return make(x, stride);
    make(w.to, p.Dp);
    finish(w.to, x, count, stride, turned, position);
  }
  void finish(T* from, E* x, int64_t count, int64_t stride, bool turned, int64_t position) const {
    for (int64_t i = 0; i < count; ++i) {
      if (turned && p.rope) rotate(from + i * p.Dp, p.rope + (position + i) * a.D, a.D, T(-1));
      if constexpr (std::is_same<E, T>::value)
        if (past_caches) {
          for (int64_t d = 0; d < a.D; d += LANES<T>) stream(x + i * stride + d, V::load(from + i * p.Dp + d));
          continue;
        }
      p.store_row(from + i * p.Dp, x + i * stride, a.D, T(1));
    }
  }

  // dk, dv: of Dp columns, ldk apart; added to but for the first of a group of heads.
  HD void backward(Work& w, T* bias, int64_t b, int64_t h, Rows k, Rows v, int64_t keys, const T* keep, T* dk, T* dv, int64_t ldk, bool add) const {
    const Rows q = rows(a.q, a.q_strides, b, h, a.L, a.offset, true, w.q);
    const Rows dout = rows(a.dout, a.dout_strides, b, h, a.L, 0, false, w.dout);
    const V zero(T(0)), none(-INFINITE<T>);
    const T* lse = static_cast<const T*>(a.lse) + (b * a.N + h) * a.L;
    for (int64_t i = 0; i < a.L; i += G) {
      const V s = logits(q, k, b, h, i, keys);
      V l(lse[i]);
#pragma GCC unroll 4
      for (int r = 1; r < G; ++r)
        if (i + r < a.L) l = select<T>(query() == Mask{} + r, V(lse[i + r]), l);
      const V e = select<T>((s.v != none.v) & (l.v != -none.v), exp_(s - l), zero);
      V dp = dots(dout, i, v), y = e;
      if (a.dropped) dp = p.dropped(dp, keep + i * p.words), y = p.dropped(e, keep + i * p.words);
      const Mask live = e.v != zero.v;
      const V delta = sums<Q>(select<T>(live, e * dp, zero)), ds = select<T>(live, e * (dp - delta), zero);
      y.store(w.P + i * Q);
      (bias ? ds : ds * V(T(a.scale))).store(w.dS + i * Q);
    }
    if (bias) {
      for (int64_t i = 0; i < a.L; ++i) add_to_bias(bias, w.dS + i * Q, b, h, i);
      for (int64_t i = 0; i < a.L * Q; ++i) w.dS[i] *= T(a.scale);
    }
    const T *P = w.P, *dS = w.dS;
    if (a.dv) product(a.S, a.L, P, 1, Q, dout.p, dout.stride, p.Dp, dv, ldk, add);
    if (a.dk) product(a.S, a.L, dS, 1, Q, q.p, q.stride, p.Dp, dk, ldk, add);
    if (a.dq)
      store(w, static_cast<E*>(a.dq) + b * a.dq_strides[0] + h * a.D, a.L, a.dq_strides[1], true, [&](T* to, int64_t ld) {
        weighted(dS, k, keys, to, ld);
      }, a.offset);
  }
  // The rows of a coming unit: short and many, they begin and end before the machine's own prefetcher follows.
  HD void prefetch(const void* x, const int64_t* strides, int64_t b, int64_t n, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) prefetch_row(p.row(x, strides, b, n, i), a.D * sizeof(E));
  }
  void add_to_bias(T* bias, const T* ds, int64_t b, int64_t h, int64_t i) const {
    const int64_t* t = a.dbias_strides;
    for (int64_t j = 0; j < a.S; ++j) bias[b * t[0] + h * t[1] + i * t[2] + j * t[3]] += ds[j];
  }

 public:
  explicit AttentionPacked(const cpu::Attention& a) : a(a) {}

  void run(cpu::Parallel run, int threads, bool forward_pass) {
    const Share share(a.B * a.N_kv, 1, (forward_pass ? 2 : 5) * attention_work(p), threads);
    // Each part of the work adds to a bias of its own: see attention_backward.h.
    const bool own_bias = a.dbias && share.parts > 1;
    Buffer<T> biases(own_bias ? a.dbias_size * share.parts : 0);
    if (a.dbias) memset(a.dbias, 0, a.dbias_size * sizeof(T));
    if (own_bias) memset(biases, 0, a.dbias_size * share.parts * sizeof(T));
    share.each(run, [&](int64_t part, int64_t first, int64_t last) {
      Work w(p, !direct || past_caches || p.rope || a.key_rows);
      T* bias = own_bias ? biases + part * a.dbias_size : static_cast<T*>(a.dbias);
      const int64_t stride = a.L * p.words, last_head = last * p.group;
      int64_t masks_end = first * p.group, masks_begin = 0;
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t b = unit / a.N_kv, g = unit % a.N_kv, keys = p.keys(b);
        if (const int64_t next = unit + UNITS_AHEAD; next < last && !a.key_rows) {
          const int64_t nb = next / a.N_kv, ng = next % a.N_kv, nh = ng * p.group;
          prefetch(a.q, a.q_strides, nb, nh, a.L), prefetch(a.k, a.k_strides, nb, ng, a.S), prefetch(a.v, a.v_strides, nb, ng, a.S);
          if (!forward_pass) prefetch(a.dout, a.dout_strides, nb, nh, a.L);
        }
        const Rows k = keys_of(a.k, a.k_strides, b, g, true, w.k), v = keys_of(a.v, a.v_strides, b, g, false, w.v);
        const bool whole_keys = direct && !past_caches && !p.rope;
        const int64_t ldk = whole_keys ? a.dk_strides[1] : p.Dp, at = b * a.dk_strides[0] + g * a.D;
        T *dk = w.dk, *dv = w.dv;
        if constexpr (std::is_same<E, T>::value)
          if (whole_keys) dk = static_cast<T*>(a.dk) + at, dv = static_cast<T*>(a.dv) + at;
        for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h) {
          const int64_t head = b * a.N + h;
          if (a.dropped && head >= masks_end) {
            masks_begin = head, masks_end = head + BATCH < last_head ? head + BATCH : last_head;
            p.keep(b, h, 0, (masks_end - masks_begin) * a.L, w.keep);
          }
          const T* keep = w.keep + (head - masks_begin) * stride;
          if (forward_pass) forward(w, b, h, k, v, keys, keep);
          else backward(w, bias, b, h, k, v, keys, keep, dk, dv, ldk, h > g * p.group);
        }
        if (forward_pass || whole_keys) continue;
        if (a.dk) finish(dk, static_cast<E*>(a.dk) + at, a.S, a.dk_strides[1], true, 0);
        if (a.dv) finish(dv, static_cast<E*>(a.dv) + at, a.S, a.dk_strides[1], false, 0);
      }
    });
    if (own_bias) add_parts((const T*)biases, share.parts, a.dbias_size, static_cast<T*>(a.dbias));
  }
};

template <class E> void attention_packed(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  constexpr int lanes = LANES<typename Compute<E>::type>;
  if constexpr (lanes > 4)
    if (a.S <= 4) return AttentionPacked<E, 4>(a).run(run, threads, forward);
  if constexpr (lanes > 8)
    if (a.S <= 8) return AttentionPacked<E, 8>(a).run(run, threads, forward);
  AttentionPacked<E, lanes>(a).run(run, threads, forward);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
