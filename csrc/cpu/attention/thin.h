// Attention of one or few queries over many keys, as in decoding, forward only. Each key and value
// is read once and where it is: staging or transposing would cost more than a product of so few
// rows.
//
// What limits it: the memory bandwidth of reading the keys and values.
#pragma once
#include "cpu/attention/operands.h"
#include "cpu/attention/work_split.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns whether this kernel is chosen for a forward pass: a key is used by at most 4 queries.
template <class E>
bool thin_takes(const cpu::Attention& a) {
  return a.L * (a.N / a.N_kv) <= 4;
}

template <class E>
class AttentionThin {
  using T = typename Compute<E>::type;
  using V = Vec<T>;
  using Problem = AttentionOperands<E, T>;
  static constexpr int CHUNK = 4;  // vectors of a result that are accumulated in registers
  const cpu::Attention& a;
  const Problem p{a};

  // The memory of one thread. rows: all queries of a unit.
  struct Workspace {
    Buffer<T> q;               // (rows, Dp)
    Buffer<T> s;               // (rows, Wp)  logits, then unnormalised probabilities
    Buffer<T> out;             // (Dp,)
    Buffer<T> rotated;         // (LANES, Dp)  keys, only with RoPE
    Buffer<T> keep;            // (keep_stride,)  the dropout's factors
    Buffer<T> relative;        // (R, Dp)
    Buffer<T> rel_transposed;  // (Dp, Rp)
    Buffer<T> qr;              // (rows, Rp)  q times relative_keys
    Workspace(const Problem& p, int64_t rows)
        : q(rows * p.Dp),
          s(rows * p.Wp),
          out(p.Dp),
          rotated(p.rope ? p.Dp * LANES<T> : 0),
          keep(p.a.dropped ? p.keep_stride + LANES<T> : 0),
          relative(p.relative_size),
          rel_transposed(p.relative ? p.Dp * p.Rp : 0),
          qr(p.relative ? rows * p.Rp : 0) {}
  };

  // s (LANES,) = the products of q with LANES keys.
  template <class X>
  HD void dots(const T* q, const X* const* keys, T* s) const {
    V sum[LANES<T>];
#pragma GCC unroll 16
    for (int t = 0; t < LANES<T>; ++t)
      sum[t] = V(T(0));
    int64_t d = 0;
    for (; d + LANES<T> <= a.D; d += LANES<T>) {
      const V x = V::load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < LANES<T>; ++t)
        sum[t] = sum[t] + x * load_as(keys[t] + d);
    }
    if (d < a.D) {
      const V x = V::load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < LANES<T>; ++t)
        sum[t] = sum[t] + x * load_up_to(keys[t] + d, a.D - d);
    }
    horizontal_sums(sum).store(s);
  }

  // s (rows, Wp) = the products of all queries of a unit with keys [base, keys), LANES keys at a
  // time. Beyond the last key it is repeated.
  HD void products_with_keys(Workspace& w, int64_t b, int64_t g, int64_t rows, int64_t base,
                             int64_t keys) const {
    const T* q = w.q;
    const int64_t first = p.first_key(b);
    T *rotated = w.rotated, *s = w.s - base;
    for (int64_t j = base; j < keys; j += LANES<T>) {
      const E* ks[LANES<T>];
      const T* rotated_ks[LANES<T>];
      for (int t = 0; t < LANES<T>; ++t) {
        const int64_t key = j + t < keys ? j + t : keys - 1;
        ks[t] = p.key(a.k, a.k_strides, b, g, first + key);
        rotated_ks[t] = rotated + t * p.Dp;
        if (p.rope) p.stage_row(ks[t], key, true, rotated + t * p.Dp);
      }
      for (int64_t r = 0; r < rows; ++r) {
        if (p.rope)
          dots(q + r * p.Dp, rotated_ks, s + r * p.Wp + j);
        else
          dots(q + r * p.Dp, ks, s + r * p.Wp + j);
      }
    }
  }

  // out (Dp,) = the sum of n values from row `first` on, weighted. CHUNK vectors of the result at a
  // time; the last ones may be fewer and not whole.
  HD void weighted_sum(const T* weights, int64_t b, int64_t g, int64_t first, int64_t n,
                       T* out) const {
    for (int64_t d = 0; d < a.D; d += CHUNK * LANES<T>) {
      V sum[CHUNK];
#pragma GCC unroll 4
      for (int c = 0; c < CHUNK; ++c)
        sum[c] = V(T(0));
      if (d + CHUNK * LANES<T> <= a.D)
        for (int64_t j = 0; j < n; ++j) {
          const E* v = p.key(a.v, a.v_strides, b, g, first + j) + d;
#pragma GCC unroll 4
          for (int c = 0; c < CHUNK; ++c)
            sum[c] = sum[c] + V(weights[j]) * load_as(v + c * LANES<T>);
        }
      else
        for (int64_t j = 0; j < n; ++j) {
          const E* v = p.key(a.v, a.v_strides, b, g, first + j) + d;
          for (int c = 0; c < CHUNK && d + c * LANES<T> < a.D; ++c)
            sum[c] = sum[c] + V(weights[j]) * load_up_to(v + c * LANES<T>, a.D - d - c * LANES<T>);
        }
      for (int c = 0; c < CHUNK && d + c * LANES<T> < p.Dp; ++c)
        sum[c].store(out + d + c * LANES<T>);
    }
  }

  // All queries of batch row b and key head g: row r is query r % L of the group's head r / L.
  HD void unit(Workspace& w, int64_t b, int64_t g) const {
    const int64_t L = p.queries(b), rows = L * p.group, offset = p.offset(b);
    const SeenKeys block = p.seen_by_block(offset, L, p.keys(b));
    const int64_t first = p.first_query(b);
    for (int64_t r = 0; r < rows; ++r)
      p.stage_row(p.row(a.q, a.q_strides, b, g * p.group + r / L, first + r % L), r % L + offset,
                  true, w.q + r * p.Dp);
    if (p.relative)
      product<T>(rows, a.D, p.Rp, {w.q, p.Dp, 1}, {w.rel_transposed, p.Rp}, {w.qr, p.Rp}, false);
    products_with_keys(w, b, g, rows, block.base, block.end);

    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = g * p.group + r / L, i = r % L;
      const SeenKeys seen = p.seen(i + offset, block.end, block.base);
      T* s = w.s + r * p.Wp;
      if (a.dropped) p.dropout_factors(b, h, i, 1, seen, w.keep);
      const T inverse = p.softmax(s, w.qr + r * p.Rp, w.keep, b, h, i, seen, seen.count());
      weighted_sum(s, b, g, p.first_key(b) + seen.base, inverse ? seen.count() : 0, w.out);
      p.store_row(w.out, static_cast<E*>(a.out) + ((p.first_result(b) + i) * a.N + h) * a.D, a.D,
                  inverse);
    }
  }

 public:
  explicit AttentionThin(const cpu::Attention& a) : a(a) {}

  void run(cpu::Parallel run, int threads) const {
    const WorkSplit split(a.B * a.N_kv, 1, 2 * p.multiply_adds(), threads, 0, false,
                          work_before(p));
    const int64_t rows = a.L * p.group;
    split.each(run, [&](int64_t, int64_t first, int64_t last) {
      Workspace w(p, rows);
      p.stage_relative_keys(w.relative, w.rel_transposed);
      for (int64_t u = first; u < last; ++u)
        unit(w, u / a.N_kv, u % a.N_kv);
    });
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
