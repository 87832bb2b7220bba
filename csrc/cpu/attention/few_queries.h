// Attention of one or few queries over many keys, as in decoding, forward only. Each key and value
// is read once and where it is: staging or transposing would cost more than a product of so few
// rows.
//
// What limits it: the memory bandwidth of reading the keys and values. The hardware prefetcher does
// not cross pages, so the keys that follow are prefetched where they come from memory. Measured on
// two cores of a Zen 4 EPYC with 50 MB of keys and values: 1.1 to 1.2 times as fast as without.
#pragma once
#include "cpu/attention/operands.h"
#include "cpu/attention/work_split.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns whether this kernel is chosen for a forward pass: a key is used by at most 4 queries.
template <class Stored>
bool few_queries_takes(const cpu::Attention& a) {
  return a.L * (a.N / a.N_kv) <= 4;
}

template <class Stored>
class AttentionFewQueries {
  using Real = RealOf<Stored>;
  using V = Vec<Real>;
  using Problem = AttentionOperands<Stored, Real>;
  static constexpr int CHUNK_VECTORS = 4;  // vectors of a result that are accumulated in registers
  const cpu::Attention& a;
  const Problem p{a};
  // Whether keys and values come from memory, or from the far end of the L3 cache.
  static constexpr int64_t FAR_BYTES = int64_t(8) << 20;
  const bool far = 2 * a.B * a.N_kv * a.S * a.D * int64_t(sizeof(Stored)) > FAR_BYTES;

  // The memory of one thread. rows: all queries of a unit.
  struct Workspace {
    Buffer<Real> q;                    // (rows, Dp)
    Buffer<Real> s;                    // (rows, ld_logits)  logits, then unnormalized probabilities
    Buffer<Real> out;                  // (Dp,)
    Buffer<Real> rotated;              // (LANES, Dp)  keys, only with RoPE
    Buffer<Real> factors;              // (ld_factors,)  the dropout's factors
    Buffer<Real> relative;             // (R, Dp)
    Buffer<Real> relative_transposed;  // (Dp, Rp)
    Buffer<Real> q_relative;           // (rows, Rp)  q times relative_keys
    Workspace(const Problem& p, int64_t rows)
        : q(rows * p.Dp),
          s(rows * p.ld_logits),
          out(p.Dp),
          rotated(p.rope ? p.Dp * LANES<Real> : 0),
          factors(p.a.dropped ? p.ld_factors + LANES<Real> : 0),
          relative(p.relative_size),
          relative_transposed(p.relative ? p.Dp * p.Rp : 0),
          q_relative(p.relative ? rows * p.Rp : 0) {}
  };

  // The keys or the values of a unit, where they are.
  struct Rows {
    const Stored* first;  // of batch row 0 if key_rows is given
    int64_t stride;
    const int64_t* key_rows;  // (S,) or null
    int64_t batch_stride;
    HD const Stored* operator[](int64_t j) const {
      return first + j * stride + (key_rows ? key_rows[j] * batch_stride : 0);
    }
    // to (LANES,) = the rows from j on; beyond the last one before `end` that one is repeated. The
    // addresses are sums, because GCC makes slow vector instructions of products of indices.
    HD void from(int64_t j, int64_t end, const Stored** to) const {
      const Stored* row = first + j * stride;
      for (int t = 0; t < LANES<Real>; ++t) {
        to[t] = row + (key_rows ? key_rows[j] * batch_stride : 0);
        if (j + 1 < end) ++j, row += stride;
      }
    }
  };
  HD Rows rows_of(const void* x, const int64_t* strides, int64_t b, int64_t g) const {
    return {p.row(x, strides, a.key_rows ? 0 : b, g, p.first_key(b)), strides[2],
            a.key_rows ? a.key_rows + b * a.S : nullptr, strides[0]};
  }

  // s (LANES,) = the products of q with LANES keys. CHUNK_VECTORS vectors of one key at a time, so
  // that memory is read in order. Prefetches the rows `next`.
  template <bool PREFETCH, class Key>
  HD void dots(const Real* q, const Key* const* keys, const Stored* const* next, Real* s) const {
    V sum[LANES<Real>];
#pragma GCC unroll 16
    for (int t = 0; t < LANES<Real>; ++t)
      sum[t] = V(Real(0));
    int64_t d = 0;
    for (; d + CHUNK_VECTORS * LANES<Real> <= a.D; d += CHUNK_VECTORS * LANES<Real>)
      add_products<PREFETCH, CHUNK_VECTORS>(q, keys, next, d, sum);
    for (; d + LANES<Real> <= a.D; d += LANES<Real>)
      add_products<PREFETCH, 1>(q, keys, next, d, sum);
    if (d < a.D) {
      const V x = V::load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < LANES<Real>; ++t)
        sum[t] = sum[t] + x * load_up_to(keys[t] + d, a.D - d);
    }
    horizontal_sums(sum).store(s);
  }

  // sum[t] += q times key t, for N vectors from element d on.
  template <bool PREFETCH, int VECTORS, class Key>
  HD void add_products(const Real* q, const Key* const* keys, const Stored* const* next, int64_t d,
                       V (&sum)[LANES<Real>]) const {
    V x[VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; ++n)
      x[n] = V::load(q + d + n * LANES<Real>);
#pragma GCC unroll 16
    for (int t = 0; t < LANES<Real>; ++t)
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; ++n) {
        const int64_t at = d + n * LANES<Real>;
        if (PREFETCH) __builtin_prefetch(next[t] + at);
        sum[t] = sum[t] + x[n] * load_as(keys[t] + at);
      }
  }

  // s (rows, ld_logits) = the products of all queries of a unit with keys [base, keys), LANES keys
  // at a time. Beyond the last key it is repeated. PREFETCH: the first query prefetches the LANES
  // keys that follow, or the first values.
  template <bool PREFETCH>
  HD void products_with_keys(Workspace& w, const Rows& k, const Rows& v, int64_t rows, int64_t base,
                             int64_t keys) const {
    Real* const s = w.s - base;
    for (int64_t j = base; j < keys; j += LANES<Real>) {
      const Stored *ks[LANES<Real>], *next[LANES<Real>];
      k.from(j, keys, ks);
      if (PREFETCH && j + LANES<Real> < keys)
        k.from(j + LANES<Real>, keys, next);
      else if (PREFETCH)
        v.from(base, keys, next);
      const Real* rotated[LANES<Real>];
      for (int t = 0; t < LANES<Real> && p.rope; ++t) {
        rotated[t] = w.rotated + t * p.Dp;
        p.stage_row(ks[t], j + t < keys ? j + t : keys - 1, true, w.rotated + t * p.Dp);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const Real* q = w.q + r * p.Dp;
        Real* to = s + r * p.ld_logits + j;
        if (p.rope)
          dots<false>(q, rotated, next, to);
        else if (PREFETCH && r == 0)
          dots<true>(q, ks, next, to);
        else
          dots<false>(q, ks, next, to);
      }
    }
  }

  // out (Dp,) = the sum of values [first, first + n), weighted. CHUNK_VECTORS vectors of the result
  // at a time; the last ones may be fewer and not whole.
  HD void weighted_sum(const Real* weights, const Rows& v, int64_t first, int64_t n,
                       Real* out) const {
    for (int64_t d = 0; d < a.D; d += CHUNK_VECTORS * LANES<Real>) {
      V sum[CHUNK_VECTORS];
#pragma GCC unroll 4
      for (int c = 0; c < CHUNK_VECTORS; ++c)
        sum[c] = V(Real(0));
      if (d + CHUNK_VECTORS * LANES<Real> <= a.D)
        for (int64_t j = 0; j < n; ++j) {
          const Stored* row = v[first + j] + d;
#pragma GCC unroll 4
          for (int c = 0; c < CHUNK_VECTORS; ++c)
            sum[c] = sum[c] + V(weights[j]) * load_as(row + c * LANES<Real>);
        }
      else
        for (int64_t j = 0; j < n; ++j) {
          const Stored* row = v[first + j] + d;
          for (int c = 0; c < CHUNK_VECTORS && d + c * LANES<Real> < a.D; ++c)
            sum[c] = sum[c] +
                     V(weights[j]) * load_up_to(row + c * LANES<Real>, a.D - d - c * LANES<Real>);
        }
      for (int c = 0; c < CHUNK_VECTORS && d + c * LANES<Real> < p.Dp; ++c)
        sum[c].store(out + d + c * LANES<Real>);
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
      product<Real>(rows, a.D, p.Rp, {w.q, p.Dp, 1}, {w.relative_transposed, p.Rp},
                    {w.q_relative, p.Rp}, false);
    const Rows k = rows_of(a.k, a.k_strides, b, g), v = rows_of(a.v, a.v_strides, b, g);
    if (far)
      products_with_keys<true>(w, k, v, rows, block.base, block.end);
    else
      products_with_keys<false>(w, k, v, rows, block.base, block.end);

    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = g * p.group + r / L, i = r % L;
      const SeenKeys seen = p.seen(i + offset, block.end, block.base);
      Real* s = w.s + r * p.ld_logits;
      if (a.dropped) p.dropout_factors(b, h, i, 1, seen, w.factors);
      const Real inverse =
          p.softmax(s, w.q_relative + r * p.Rp, w.factors, b, h, i, seen, seen.count());
      weighted_sum(s, v, seen.base, inverse ? seen.count() : 0, w.out);
      p.store_row(w.out, static_cast<Stored*>(a.out) + ((p.first_result(b) + i) * a.N + h) * a.D,
                  a.D, inverse);
    }
  }

 public:
  explicit AttentionFewQueries(const cpu::Attention& a) : a(a) {}

  void run(cpu::Parallel run, int threads) const {
    const WorkSplit split(a.B * a.N_kv, 1, 2 * p.multiply_adds(), threads, 0, false,
                          work_before(p));
    const int64_t rows = a.L * p.group;
    split.each(run, [&](int64_t, int64_t first, int64_t last) {
      Workspace w(p, rows);
      p.stage_relative_keys(w.relative, w.relative_transposed);
      for (int64_t u = first; u < last; ++u)
        unit(w, u / a.N_kv, u % a.N_kv);
    });
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
