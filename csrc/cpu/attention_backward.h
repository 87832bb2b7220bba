// Attention's gradients, one pass over the blocks of attention.h: the probabilities come back from their log-sum-exp, and
// a query's sum of P dP is taken while its row is at hand, so the forward's result is not read.
#pragma once
#include <initializer_list>

#include "attention.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// to[i] += the parts' i, in order.
template <class T> void add_parts(const T* parts, int64_t count, int64_t n, T* to) {
  for (int64_t part = 0; part < count; ++part) add_row(parts + part * n, to, n, T(1));
}

template <class E> class AttentionBackward {
  using T = typename Compute<E>::type;
  using Problem = AttentionProblem<E>;
  const cpu::Attention& a;
  const Problem p{a};
  const int64_t blocks = (a.L + p.block - 1) / p.block;
  const Share share;
  // Where several units, or several chunks of one, add to the same bias, each part of the work adds to its own.
  const bool shared_bias = a.dbias && share.parts > 1;
  const int64_t key_size = share.chunks > 1 ? a.S * p.Dp : 0, table_size = a.drelative_keys ? p.R * p.Dp : 0;
  Buffer<T> biases, tables, dks, dvs;

  // One thread's memory.
  struct Work {
    Buffer<T> ks, kt, vs, vt, qs, dos, s, dp, dq, dk, dv, keep, rs, rt, qr, g;
    explicit Work(const Problem& p)
        : ks(p.a.S * p.Dp), kt(p.Dp * p.Sp), vs(p.a.S * p.Dp), vt(p.Dp * p.Sp), qs(p.block * p.Dp), dos(p.block * p.Dp),
          s(p.block * p.Sp), dp(p.block * p.Sp), dq(p.block * p.Dp), dk(p.a.S * p.Dp), dv(p.a.S * p.Dp),
          keep(p.a.dropped ? p.block * p.words + LANES<T> : 0), rs(p.relative ? p.R * p.Dp : 0),
          rt(p.relative ? p.Dp * p.Rp : 0), qr(p.relative ? p.block * p.Rp : 0), g(p.relative ? p.block * p.Rp : 0) {}
  };

  // Row i of a block: from q k^T in s and dout v^T in dp to the dropped probabilities in s and the logits' gradient, times
  // the scale, in dp.
  HD void row(Work& w, T* bias, int64_t b, int64_t h, int64_t i0, int64_t i, int64_t n, int64_t columns) const {
    T *s = w.s + i * p.Sp, *dp = w.dp + i * p.Sp;
    const T lse = static_cast<const T*>(a.lse)[(b * a.N + h) * a.L + i0 + i];
    const T* keep = w.keep + i * p.words;
    const Vec<T> zero(T(0)), none(-INFINITE<T>);
    if (lse == INFINITE<T>) n = 0;
    int64_t end = 0;
    if (n) {
      p.logits(s, w.qr + i * p.Rp, b, h, i0 + i, n);
      Vec<T> total = zero;
      for (int64_t j = 0; j < n; j += LANES<T>) {
        const Vec<T> x = Vec<T>::load(s + j), e = select<T>(x.v != none.v, exp_(x - Vec<T>(lse)), zero);
        Vec<T> d = Vec<T>::load(dp + j);
        if (a.dropped) d = p.dropped(d, keep + j), d.store(dp + j);
        e.store(s + j);
        total = total + select<T>(e.v != zero.v, e * d, zero);  // what is behind the last key may be anything
      }
      const Vec<T> delta(sum(total)), scale{T(a.scale)};
      for (int64_t j = 0; j < n; j += LANES<T>) {
        const Vec<T> e = Vec<T>::load(s + j);
        const Vec<T> ds = select<T>(e.v != zero.v, e * (Vec<T>::load(dp + j) - delta), zero);
        if (a.dropped) p.dropped(e, keep + j).store(s + j);
        (bias ? ds : ds * scale).store(dp + j);
      }
      end = round_up<T>(n);
      if (bias) {
        add_to_bias(bias, dp, b, h, i0 + i, n);
        for (int64_t j = 0; j < end; j += LANES<T>) (Vec<T>::load(dp + j) * scale).store(dp + j);
      }
    }
    for (int64_t j = end; j < columns; j += LANES<T>) zero.store(s + j), zero.store(dp + j);
    if (p.relative) {
      T* g = w.g + i * p.Rp;
      memset(g, 0, p.Rp * sizeof(T));
      p.each_distance(i0 + i + a.offset, n, [&](int64_t j, int64_t c) { g[c] += dp[j]; });
    }
  }
  HD void add_to_bias(T* bias, const T* ds, int64_t b, int64_t h, int64_t i, int64_t n) const {
    const int64_t* t = a.dbias_strides;
    T* to = bias + b * t[0] + h * t[1] + i * t[2];
    if (t[3]) return add_row(ds, to, n, T(1));
    T total = 0;
    for (int64_t j = 0; j < n; ++j) total += ds[j];
    *to += total;
  }

  void unit(Work& w, T* bias, T* table, int64_t b, int64_t g, int64_t chunk, T* dk, T* dv) const {
    p.stage_keys(a.k, a.k_strides, b, g, true, w.ks);
    p.transpose_rows(w.ks, a.S, p.Sp, w.kt);
    p.stage_keys(a.v, a.v_strides, b, g, false, w.vs);
    p.transpose_rows(w.vs, a.S, p.Sp, w.vt);
    const int64_t keys = p.keys(b), i_begin = blocks * chunk / share.chunks * p.block,
                  i_end = blocks * (chunk + 1) / share.chunks * p.block;
    int64_t written = 0;  // keys whose gradients have been set rather than added to
    for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h)
      for (int64_t i0 = i_begin; i0 < i_end && i0 < a.L; i0 += p.block) {
        const int64_t rows = a.L - i0 < p.block ? a.L - i0 : p.block, columns = p.visible(i0 + rows - 1, keys);
        const int64_t wide = round_up<T>(columns);
        p.stage(p.row(a.q, a.q_strides, b, h, i0), a.q_strides[2], rows, i0 + a.offset, true, w.qs);
        p.stage(p.row(a.dout, a.dout_strides, b, h, i0), a.dout_strides[2], rows, 0, false, w.dos);
        const T *q = w.qs, *dout = w.dos;
        product(rows, a.D, q, p.Dp, 1, (const T*)w.kt, p.Sp, wide, (T*)w.s, p.Sp, false);
        product(rows, a.D, dout, p.Dp, 1, (const T*)w.vt, p.Sp, wide, (T*)w.dp, p.Sp, false);
        if (p.relative) product(rows, a.D, q, p.Dp, 1, (const T*)w.rt, p.Rp, p.Rp, (T*)w.qr, p.Rp, false);
        if (a.dropped) p.keep(b, h, i0, rows, w.keep);
        for (int64_t i = 0; i < rows; ++i) row(w, bias, b, h, i0, i, p.visible(i0 + i, keys), columns);
        const T *probabilities = w.s, *ds = w.dp;
        const int64_t old = written < columns ? written : columns;
        const auto gradient = [&](const T* left, const T* right, T* to) {
          product(old, rows, left, 1, p.Sp, right, p.Dp, p.Dp, to, p.Dp, true);
          product(columns - old, rows, left + old, 1, p.Sp, right, p.Dp, p.Dp, to + old * p.Dp, p.Dp, false);
        };
        if (a.dv) gradient(probabilities, dout, dv);
        if (a.dk) gradient(ds, q, dk);
        written = written < columns ? columns : written;
        if (table) product(p.R, rows, (const T*)w.g, 1, p.Rp, q, p.Dp, p.Dp, table, p.Dp, true);
        if (!a.dq) continue;
        product(rows, columns, ds, p.Sp, 1, (const T*)w.ks, p.Dp, p.Dp, (T*)w.dq, p.Dp, false);
        if (p.relative) product(rows, p.R, (const T*)w.g, p.Rp, 1, (const T*)w.rs, p.Dp, p.Dp, (T*)w.dq, p.Dp, true);
        for (int64_t i = 0; i < rows; ++i) {
          if (p.rope) rotate(w.dq + i * p.Dp, p.rope + (i0 + i + a.offset) * a.D, a.D, T(-1));
          p.store_row(w.dq + i * p.Dp, static_cast<E*>(a.dq) + b * a.dq_strides[0] + (i0 + i) * a.dq_strides[1] + h * a.D, a.D, T(1));
        }
      }
    for (T* rest : {dk, dv}) memset(rest + written * p.Dp, 0, (a.S - written) * p.Dp * sizeof(T));
  }
  void store_keys(int64_t unit, T* x, void* to, bool turned) const {
    const int64_t b = unit / a.N_kv, g = unit % a.N_kv;
    for (int64_t j = 0; to && j < a.S; ++j) {
      if (turned && p.rope) rotate(x + j * p.Dp, p.rope + j * a.D, a.D, T(-1));
      p.store_row(x + j * p.Dp, static_cast<E*>(to) + b * a.dk_strides[0] + j * a.dk_strides[1] + g * a.D, a.D, T(1));
    }
  }

 public:
  AttentionBackward(const cpu::Attention& a, int threads)
      : a(a), share(a.B * a.N_kv, blocks, 5 * attention_work(p), threads),
        biases(shared_bias ? a.dbias_size * share.parts : 0), tables(table_size * share.parts),
        dks(key_size * share.units * share.chunks), dvs(key_size * share.units * share.chunks) {}

  void run(cpu::Parallel run) {
    if (a.dbias) memset(a.dbias, 0, a.dbias_size * sizeof(T));
    if (shared_bias) memset(biases, 0, a.dbias_size * share.parts * sizeof(T));
    memset(tables, 0, table_size * share.parts * sizeof(T));
    share.each(run, [&](int64_t part, int64_t first, int64_t last) {
      Work w(p);
      T* bias = shared_bias ? biases + part * a.dbias_size : static_cast<T*>(a.dbias);
      T* table = table_size ? tables + part * table_size : nullptr;
      p.stage_table(w.rs, w.rt);
      for (int64_t item = first; item < last; ++item) {
        const int64_t u = item / share.chunks;
        T *dk = key_size ? dks + item * key_size : (T*)w.dk, *dv = key_size ? dvs + item * key_size : (T*)w.dv;
        unit(w, bias, table, u / a.N_kv, u % a.N_kv, item % share.chunks, dk, dv);
        if (!key_size) store_keys(u, dk, a.dk, true), store_keys(u, dv, a.dv, false);
      }
    });
    for (int64_t u = 0; key_size && u < share.units; ++u) {
      T *dk = dks + u * share.chunks * key_size, *dv = dvs + u * share.chunks * key_size;
      add_parts(dk + key_size, share.chunks - 1, key_size, dk), add_parts(dv + key_size, share.chunks - 1, key_size, dv);
      store_keys(u, dk, a.dk, true), store_keys(u, dv, a.dv, false);
    }
    stream_fence();
    if (shared_bias) add_parts((const T*)biases, share.parts, a.dbias_size, static_cast<T*>(a.dbias));
    if (!table_size) return;
    add_parts(tables + table_size, share.parts - 1, table_size, (T*)tables);
    for (int64_t r = 0; r < p.R; ++r)
      memcpy(static_cast<T*>(a.drelative_keys) + r * a.D, tables + r * p.Dp, a.D * sizeof(T));
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
