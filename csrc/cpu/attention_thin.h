// Attention of one or few queries over many keys, as in decoding: each key and value is read once, where it stands, and
// nothing is staged or transposed for a product of so few rows.
//
// What limits it: memory, of the keys and values.
#pragma once
#include "attention_packed.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class E> bool thin_takes(const cpu::Attention& a) { return a.L * (a.N / a.N_kv) <= 4; }

template <class E> class AttentionThin {
  using T = typename Compute<E>::type;
  using V = Vec<T>;
  static constexpr int CHUNK = 4;  // vectors of a result that are summed in registers
  const cpu::Attention& a;
  const AttentionProblem<E> p{a};

  // s[t] = q . key j + t for LANES keys; those that there are not repeat the last.
  template <class X> HD void dots(const T* q, const X* const* ks, T* s) const {
    V sum[LANES<T>];
#pragma GCC unroll 16
    for (int t = 0; t < LANES<T>; ++t) sum[t] = V(T(0));
    int64_t d = 0;
    for (; d + LANES<T> <= a.D; d += LANES<T>) {
      const V x = V::load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < LANES<T>; ++t) sum[t] = sum[t] + x * load_as(ks[t] + d);
    }
    if (d < a.D) {
      const V x = V::load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < LANES<T>; ++t) sum[t] = sum[t] + x * load_up_to(ks[t] + d, a.D - d);
    }
    horizontal_sums(sum).store(s);
  }
  // o = the first n values, weighted.
  HD void weigh(const T* weights, int64_t b, int64_t g, int64_t n, T* o) const {
    for (int64_t d = 0; d < a.D; d += CHUNK * LANES<T>) {
      V sum[CHUNK];
#pragma GCC unroll 4
      for (int c = 0; c < CHUNK; ++c) sum[c] = V(T(0));
      if (d + CHUNK * LANES<T> <= a.D)
        for (int64_t j = 0; j < n; ++j) {
          const E* v = p.key(a.v, a.v_strides, b, g, j) + d;
#pragma GCC unroll 4
          for (int c = 0; c < CHUNK; ++c) sum[c] = sum[c] + V(weights[j]) * load_as(v + c * LANES<T>);
        }
      else
        for (int64_t j = 0; j < n; ++j) {
          const E* v = p.key(a.v, a.v_strides, b, g, j) + d;
          for (int c = 0; c < CHUNK && d + c * LANES<T> < a.D; ++c)
            sum[c] = sum[c] + V(weights[j]) * load_up_to(v + c * LANES<T>, a.D - d - c * LANES<T>);
        }
      for (int c = 0; c < CHUNK && d + c * LANES<T> < p.Dp; ++c) sum[c].store(o + d + c * LANES<T>);
    }
  }

 public:
  explicit AttentionThin(const cpu::Attention& a) : a(a) {}

  void run(cpu::Parallel run, int threads) const {
    const Share share(a.B * a.N_kv, 1, 2 * attention_work(p), threads);
    const int64_t rows = a.L * p.group;
    share.each(run, [&](int64_t, int64_t first, int64_t last) {
      Buffer<T> q(rows * p.Dp), s(rows * p.Sp), o(p.Dp), turned(p.rope ? p.Dp * LANES<T> : 0), keep(a.dropped ? p.words + LANES<T> : 0);
      Buffer<T> rs(p.relative ? p.R * p.Dp : 0), rt(p.relative ? p.Dp * p.Rp : 0), qr(p.relative ? rows * p.Rp : 0);
      p.stage_table(rs, rt);
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t b = unit / a.N_kv, g = unit % a.N_kv, keys = p.visible(a.L - 1, p.keys(b));
        for (int64_t r = 0; r < rows; ++r)
          p.stage_row(p.row(a.q, a.q_strides, b, g * p.group + r / a.L, r % a.L), r % a.L + a.offset, true, q + r * p.Dp);
        if (p.relative) product(rows, a.D, (const T*)q, p.Dp, 1, (const T*)rt, p.Rp, p.Rp, (T*)qr, p.Rp, false);
        score(b, g, rows, keys, q, turned, s);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t h = g * p.group + r / a.L, i = r % a.L, n = p.visible(i, keys);
          if (a.dropped) p.keep(b, h, i, 1, keep);
          const T inverse = p.softmax(s + r * p.Sp, qr + r * p.Rp, keep, b, h, i, n, n);
          weigh(s + r * p.Sp, b, g, inverse ? n : 0, o);
          p.store_row(o, static_cast<E*>(a.out) + ((b * a.L + i) * a.N + h) * a.D, a.D, inverse);
        }
      }
    });
  }

 private:
  HD void score(int64_t b, int64_t g, int64_t rows, int64_t keys, const T* q, T* turned, T* s) const {
    for (int64_t j = 0; j < keys; j += LANES<T>) {
      const E* ks[LANES<T>];
      const T* turned_ks[LANES<T>];
      for (int t = 0; t < LANES<T>; ++t) {
        const int64_t key = j + t < keys ? j + t : keys - 1;
        ks[t] = p.key(a.k, a.k_strides, b, g, key), turned_ks[t] = turned + t * p.Dp;
        if (p.rope) p.stage_row(ks[t], key, true, turned + t * p.Dp);
      }
      for (int64_t r = 0; r < rows; ++r)
        p.rope ? dots(q + r * p.Dp, turned_ks, s + r * p.Sp + j) : dots(q + r * p.Dp, ks, s + r * p.Sp + j);
    }
  }
};

template <class E> void attention_thin(const cpu::Attention& a, cpu::Parallel run, int threads) {
  AttentionThin<E>(a).run(run, threads);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
