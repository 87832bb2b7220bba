// Attention of one (batch row, key head) at a time, by blocks of queries: the block's logits against all its keys are
// made at once and stay in the second cache, so the softmax needs no second look. Keys and values are staged once: widened
// to the computing type, rotated, padded to whole vectors, the keys also transposed; any stride and head dim is then the
// same code, and every product runs on gemm.h's register tiles without packing.
//
// What limits it: for short sequences memory (of L = S = 6, D = 32 one reads and writes 3 KB for 9,216 multiply-adds);
// from some 50 keys on, the products.
#pragma once
#include <limits>

#include "pointwise.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T> constexpr T INFINITE = std::numeric_limits<T>::infinity();
// x's pairs turned by the angles of `table`'s row (cos, sin, cos, sin, ...), back by them for direction = -1.
template <class T> void rotate(T* x, const T* table, int64_t D, T direction) {
  using Mask = typename Vec<T>::Mask;
  static constexpr Lanes<T> partners([](int i) { return i ^ 1; }), evens([](int i) { return i & ~1; }), odds([](int i) { return i | 1; });
  const Mask swapped = partners, even = evens, odd = odds;
  const Vec<T> sign = as_numbers<T>((lane_numbers<T>() & 1) * 2 - 1) * Vec<T>(direction);
  for (int64_t d = 0; d < D; d += LANES<T>) {
    const Vec<T> a = Vec<T>::load(x + d), t = Vec<T>::load(table + d, D - d);
    const Vec<T> cos(__builtin_shuffle(t.v, even)), sin(__builtin_shuffle(t.v, odd)), b(__builtin_shuffle(a.v, swapped));
    (a * cos + sign * b * sin).store(x + d);
  }
}

// One call's problem and the pieces that forward and backward share. E: the element type in memory, T: of computing.
template <class E, class T = typename Compute<E>::type> struct AttentionProblem {
  const cpu::Attention& a;
  const int64_t Dp = round_up<T>(a.D), Sp = round_up<T>(a.S), R = 2 * a.K + 1, Rp = round_up<T>(R),
                words = (a.S + 3) / 4 * 4, group = a.N / a.N_kv;
  // Rows in a block: the logits stay in the second cache, and causal attention skips what a block can't see.
  const int64_t block = [](int64_t L, int64_t Sp) {
    const int64_t rows = 65536 / Sp / MR * MR, most = rows < 2 * MR ? 2 * MR : rows > 48 ? 48 : rows;
    const int64_t blocks = (L + most - 1) / most;
    return (L + blocks - 1) / blocks;
  }(a.L, Sp);
  const bool past = std::is_same<E, T>::value && a.D % LANES<T> == 0 && past_caches<E>(a.B * a.N * a.L * a.D);
  const T* relative = static_cast<const T*>(a.relative_keys);
  const T* rope = static_cast<const T*>(a.rope);

  // n rows of a tensor, to whole vectors of the computing type.
  HD void stage(const E* x, int64_t stride, int64_t n, int64_t position, bool turn, T* to) const {
    for (int64_t i = 0; i < n; ++i, x += stride, to += Dp) stage_row(x, position + i, turn, to);
  }
  HD void stage_row(const E* x, int64_t position, bool turn, T* to) const {
    int64_t d = 0;
    for (; d + LANES<T> <= a.D; d += LANES<T>) load_as(x + d).store(to + d);
    if (d < a.D) load_up_to(x + d, a.D - d).store(to + d);
    if (turn && rope) rotate(to, rope + position * a.D, a.D, T(1));
  }
  // Key (or value) j of a batch row, wherever it stands.
  HD const E* key(const void* p, const int64_t* strides, int64_t b, int64_t g, int64_t j) const {
    return row(p, strides, a.key_rows ? a.key_rows[b * a.S + j] : b, g, j);
  }
  void stage_keys(const void* p, const int64_t* strides, int64_t b, int64_t g, bool turn, T* to) const {
    for (int64_t j = 0; j < a.S; ++j) stage_row(key(p, strides, b, g, j), j, turn, to + j * Dp);
  }
  const E* row(const void* p, const int64_t* strides, int64_t b, int64_t n, int64_t i) const {
    return static_cast<const E*>(p) + b * strides[0] + n * strides[1] + i * strides[2];
  }
  // Queries as the left operand of a product: where they stand, if they can stay.
  HD const T* queries(int64_t b, int64_t n, int64_t i0, int64_t rows, T* staged, int64_t& stride) const {
    const E* x = row(a.q, a.q_strides, b, n, i0);
    if constexpr (std::is_same<E, T>::value)
      if (!rope) return stride = a.q_strides[2], x;
    stage(x, a.q_strides[2], rows, i0 + a.offset, true, staged);
    return stride = Dp, staged;
  }
  // (rows, Dp) to (Dp, columns): columns whole vectors, zero past the rows.
  void transpose_rows(const T* x, int64_t rows, int64_t columns, T* to) const {
    for (int64_t j = 0; j < columns; j += LANES<T>)
      for (int64_t d = 0; d < a.D; d += LANES<T>) {
        Vec<T> square[LANES<T>];
        for (int i = 0; i < LANES<T>; ++i) square[i] = j + i < rows ? Vec<T>::load(x + (j + i) * Dp + d) : Vec<T>(T(0));
        transpose(square);
        for (int i = 0; i < LANES<T>; ++i) square[i].store(to + (d + i) * columns + j);
      }
  }

  HD int64_t keys(int64_t b) const { return a.key_lengths && a.key_lengths[b] < a.S ? (a.key_lengths[b] < 0 ? 0 : a.key_lengths[b]) : a.S; }
  // How many keys query i may see: the first ones.
  HD int64_t visible(int64_t i, int64_t keys) const {
    const int64_t last = i + a.offset + 1;
    return !a.causal || last > keys ? keys : last < 0 ? 0 : last;
  }

  // From q k^T in s to the logits of query i's n visible keys, -inf where one is masked and behind them; the largest.
  HD T logits(T* s, const T* qr, int64_t b, int64_t h, int64_t i, int64_t n) const {
    const int64_t position = i + a.offset;
    T scale = T(a.scale);
    if (relative) each_distance(position, n, [&](int64_t j, int64_t c) { s[j] += qr[c]; });
    if (a.bias || a.mask) {
      for (int64_t j = 0; j < n; ++j) s[j] *= scale;
      scale = 1;
      if (a.bias) add_bias(s, b, h, i, n);
      if (a.mask) hide(s, b, h, i, n);
    }
    const Vec<T> slope(a.alibi ? static_cast<const T*>(a.alibi)[h] : T(0));
    Vec<T> most(-INFINITE<T>);
    for (int64_t j = 0; j < n; j += LANES<T>) {
      Vec<T> x = Vec<T>::load(s + j) * Vec<T>(scale);
      if (a.alibi) x = x - slope * abs_(as_numbers<T>(lane_numbers<T>()) + Vec<T>(T(j - position)));
      if (j + LANES<T> > n) x = select<T>(lane_numbers<T>() < typename Vec<T>::Mask{} + int(n - j), x, Vec<T>(-INFINITE<T>));
      x.store(s + j);
      most = max_(x, most);
    }
    const T top = largest(most);
    for (int64_t j = 0; top == -INFINITE<T> && j < n; ++j)
      if (s[j] != s[j]) return s[j];  // a row of NaN is not a masked one
    return top;
  }
  // From q k^T in s, of which n keys are visible, to exp(logits - their largest), dropped, and zeros up to `columns`; writes
  // lse and returns what the row is then to be multiplied by.
  HD T softmax(T* s, const T* qr, const T* keep, int64_t b, int64_t h, int64_t i, int64_t n, int64_t columns) const {
    const T most = n ? logits(s, qr, b, h, i, n) : -INFINITE<T>;
    const bool blind = most == -INFINITE<T>;
    const Vec<T> zero(T(0)), none(-INFINITE<T>);
    Vec<T> total(T(0));
    int64_t j = 0;
    for (; j < n && !blind; j += LANES<T>) {
      const Vec<T> x = Vec<T>::load(s + j), e = select<T>(x.v != none.v, exp_(x - Vec<T>(most)), zero);
      total = total + e;
      (a.dropped ? dropped(e, keep + j) : e).store(s + j);
    }
    for (; j < columns; j += LANES<T>) zero.store(s + j);
    const T mass = sum(total);
    static_cast<T*>(a.lse)[(b * a.N + h) * a.L + i] = blind ? INFINITE<T> : most + std::log(mass);
    return blind ? T(0) : T(1) / mass;
  }
  // f(key, row of relative_keys) for the first n keys.
  template <class F> HD void each_distance(int64_t position, int64_t n, F f) const {
    const auto within = [n](int64_t j) { return j < 0 ? 0 : j < n ? j : n; };
    const int64_t low = within(position - a.K), high = within(position + a.K);
    for (int64_t j = 0; j < low; ++j) f(j, int64_t(0));
    for (int64_t j = low; j < high; ++j) f(j, j - position + a.K);
    for (int64_t j = high; j < n; ++j) f(j, 2 * a.K);
  }
  HD void add_bias(T* s, int64_t b, int64_t h, int64_t i, int64_t n) const {
    const int64_t* t = a.bias_strides;
    const E* x = static_cast<const E*>(a.bias) + b * t[0] + h * t[1] + i * t[2];
    if (t[3] == 1) return add_row(x, s, n, T(1));
    for (int64_t j = 0; j < n; ++j) s[j] += load_scalar(x + j * t[3]);
  }
  HD void hide(T* s, int64_t b, int64_t h, int64_t i, int64_t n) const {
    const int64_t* t = a.mask_strides;
    const uint8_t* seen = a.mask + b * t[0] + h * t[1] + i * t[2];
    if (t[3] == 1)
      for (int64_t j = 0; j < n; ++j) s[j] = seen[j] ? s[j] : -INFINITE<T>;
    else
      for (int64_t j = 0; j < n; ++j) s[j] = seen[j * t[3]] ? s[j] : -INFINITE<T>;
  }
  // relative_keys in whole vectors, and transposed.
  void stage_table(T* rows, T* columns) const {
    if (!relative) return;
    for (int64_t r = 0; r < R; ++r)
      for (int64_t d = 0; d < Dp; d += LANES<T>) Vec<T>::load(relative + r * a.D + d, a.D - d).store(rows + r * Dp + d);
    transpose_rows(rows, R, Rp, columns);
  }
  // What the probabilities of rows i0 .. are multiplied by: 1/(1-p) or 0, in rows of `words`.
  HD void keep(int64_t b, int64_t h, int64_t i0, int64_t rows, T* to) const {
    mask_values<T>(a.dropout, (b * a.N + h) * a.L + i0, words, 0, rows * words, T(a.dropout.scale), T(0), to);
  }
  HD static Vec<T> dropped(Vec<T> x, const T* keep) {
    const Vec<T> k = Vec<T>::load(keep), zero(T(0));
    return select<T>(k.v != zero.v, x * k, zero);
  }
  HD void store_row(const T* x, E* to, int64_t D, T scale) const {
    if constexpr (std::is_same<E, T>::value)
      if (past) {
        for (int64_t d = 0; d < D; d += LANES<T>) stream(to + d, Vec<T>::load(x + d) * Vec<T>(scale));
        return;
      }
    int64_t d = 0;
    for (; d + LANES<T> <= D; d += LANES<T>) store_as(to + d, Vec<T>::load(x + d) * Vec<T>(scale));
    if (d < D) store_up_to(to + d, Vec<T>::load(x + d) * Vec<T>(scale), D - d);
  }
};

// Cuts [0, units) into parts for the threads, and each unit's queries into chunks where there are few units; calls
// body(part, unit, chunk, chunks) and, in each part, begin(part) before.
struct Share {
  int64_t units, chunks;
  int parts;
  Share(int64_t units, int64_t blocks, double work, int threads) : units(units), chunks(1), parts(threads) {
    const double useful = work / 50000 + 1;  // multiply-adds that are worth a thread
    if (useful < parts) parts = int(useful);
    if (parts > 1 && units < 2 * parts) chunks = (2 * parts + units - 1) / units;
    if (chunks > blocks) chunks = blocks;
    if (units * chunks < parts) parts = units * chunks > 0 ? int(units * chunks) : 1;
  }
  template <class F> void each(cpu::Parallel run, F body) const {
    const int64_t items = units * chunks;
    parallel(run, parts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) body(part, items * part / parts, items * (part + 1) / parts);
      stream_fence();
    });
  }
};
template <class P> double attention_work(const P& p) {
  return double(p.a.B) * double(p.a.N) * double(p.a.L) * double(p.a.S) * double(p.a.D);
}

template <class E> void attention_rows(const cpu::Attention& a, cpu::Parallel run, int threads) {
  using T = typename Compute<E>::type;
  const AttentionProblem<E> p{a};
  const int64_t blocks = (a.L + p.block - 1) / p.block;
  const Share share(a.B * a.N_kv, blocks, 2 * attention_work(p), threads);
  share.each(run, [&](int64_t, int64_t first, int64_t last) {
    const bool dropped = a.dropped;
    Buffer<T> ks(a.S * p.Dp), kt(p.Dp * p.Sp), vs(a.S * p.Dp), qs(p.block * p.Dp), s(p.block * p.Sp), o(p.block * p.Dp),
        keep(dropped ? p.block * p.words + LANES<T> : 0), inverse(p.block);
    Buffer<T> rs(p.relative ? p.R * p.Dp : 0), rt(p.relative ? p.Dp * p.Rp : 0), qr(p.relative ? p.block * p.Rp : 0);
    p.stage_table(rs, rt);
    for (int64_t item = first; item < last; ++item) {
      const int64_t unit = item / share.chunks, chunk = item % share.chunks, b = unit / a.N_kv, g = unit % a.N_kv;
      p.stage_keys(a.k, a.k_strides, b, g, true, ks);
      p.transpose_rows(ks, a.S, p.Sp, kt);
      p.stage_keys(a.v, a.v_strides, b, g, false, vs);
      const int64_t keys = p.keys(b), i_begin = blocks * chunk / share.chunks * p.block,
                    i_end = blocks * (chunk + 1) / share.chunks * p.block;
      for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h)
        for (int64_t i0 = i_begin; i0 < i_end && i0 < a.L; i0 += p.block) {
          const int64_t rows = a.L - i0 < p.block ? a.L - i0 : p.block, columns = p.visible(i0 + rows - 1, keys);
          int64_t stride;
          const T* q = p.queries(b, h, i0, rows, qs, stride);
          product(rows, a.D, q, stride, 1, (const T*)kt, p.Sp, round_up<T>(columns), (T*)s, p.Sp, false);
          if (p.relative) product(rows, a.D, q, stride, 1, (const T*)rt, p.Rp, p.Rp, (T*)qr, p.Rp, false);
          if (dropped) p.keep(b, h, i0, rows, keep);
          for (int64_t i = 0; i < rows; ++i) {
            T* x = s + i * p.Sp;
            const int64_t n = p.visible(i0 + i, keys);
            inverse[i] = p.softmax(x, qr + i * p.Rp, keep + i * p.words, b, h, i0 + i, n, columns);
          }
          product(rows, columns, (const T*)s, p.Sp, 1, (const T*)vs, p.Dp, p.Dp, (T*)o, p.Dp, false);
          for (int64_t i = 0; i < rows; ++i)
            p.store_row(o + i * p.Dp, static_cast<E*>(a.out) + ((b * a.L + i0 + i) * a.N + h) * a.D, a.D, inverse[i]);
        }
    }
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
