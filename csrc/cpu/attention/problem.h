// What the attention kernels share: derived sizes, staging of rows, and the softmax of one query
// with all its options.
//
// Staging copies rows of q, k, v or dout into a workspace: converted to the type of computing,
// rotated (RoPE) and padded to whole vectors. Any strides and head dimension are then the same
// code. The kernels that multiply blocks of rows stage them as in operands.h.
#pragma once
#include <limits>
#include <type_traits>

#include "cpu/arguments/attention.h"
#include "cpu/buffer.h"
#include "cpu/gemm/tile.h"
#include "cpu/random_mask.h"
#include "cpu/simd/elementary_functions.h"
#include "cpu/simd/row_arithmetic.h"
#include "cpu/simd/streaming.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real>
constexpr Real INFINITE = std::numeric_limits<Real>::infinity();

// Rotates the pairs (x_2m, x_2m+1) of the first `width` elements of x by the angles of a row of the
// RoPE table (cos, sin, cos, sin, ...), in place; direction = -1 rotates back. x is padded to whole
// vectors.
template <class Real>
void rotate_interleaved(Real* x, const Real* table, int64_t width, Real direction) {
  using Mask = typename Vec<Real>::Mask;
  static constexpr LaneConstants<Real> partners([](int i) { return i ^ 1; });
  static constexpr LaneConstants<Real> evens([](int i) { return i & ~1; });
  static constexpr LaneConstants<Real> odds([](int i) { return i | 1; });
  const Mask swapped = partners, even = evens, odd = odds;
  const Vec<Real> sign =
      as_numbers<Real>((lane_numbers<Real>() & 1) * 2 - 1) * Vec<Real>(direction);
  for (int64_t d = 0; d < width; d += LANES<Real>) {
    const Vec<Real> a = Vec<Real>::load(x + d), t = Vec<Real>::load(table + d, width - d);
    const Vec<Real> cos(FUSEDSEQ_SHUFFLE(t.v, even)), sin(FUSEDSEQ_SHUFFLE(t.v, odd));
    const Vec<Real> b(FUSEDSEQ_SHUFFLE(a.v, swapped));
    const Vec<Real> rotated = a * cos + sign * b * sin;
    const Mask inside =
        lane_numbers<Real>() < Mask{} + int(width - d < LANES<Real> ? width - d : LANES<Real>);
    select<Real>(inside, rotated, a).store(x + d);
  }
}
// The same for the pairs (x_m, x_m+width/2).
template <class Real>
void rotate_halves(Real* x, const Real* table, int64_t width, Real direction) {
  using Mask = typename Vec<Real>::Mask;
  static constexpr LaneConstants<Real> evens([](int i) { return 2 * i; });
  static constexpr LaneConstants<Real> odds([](int i) { return 2 * i + 1; });
  const Mask even = evens, odd = odds;  // of two vectors
  const int64_t half = width / 2;
  for (int64_t m = 0; m < half; m += LANES<Real>) {
    const int64_t n = half - m;
    const Vec<Real> first = Vec<Real>::load(table + 2 * m, 2 * n);
    const Vec<Real> second = 2 * n > LANES<Real>
                                 ? Vec<Real>::load(table + 2 * m + LANES<Real>, 2 * n - LANES<Real>)
                                 : Vec<Real>(Real(0));
    const Vec<Real> cos(FUSEDSEQ_SHUFFLE(first.v, second.v, even));
    const Vec<Real> sin =
        Vec<Real>(FUSEDSEQ_SHUFFLE(first.v, second.v, odd)) * Vec<Real>(direction);
    const Vec<Real> a = Vec<Real>::load(x + m, n), b = Vec<Real>::load(x + half + m, n);
    (a * cos - b * sin).store(x + m, n);
    (a * sin + b * cos).store(x + half + m, n);
  }
}

// The keys that a query sees, [begin, end), of which a row of logits starts with key `base`.
struct SeenKeys {
  int64_t base, begin, end;
  HD int64_t count() const { return end - base; }     // logits of the row, the hidden ones too
  HD int64_t hidden() const { return begin - base; }  // logits before the first visible key
};

// Returns the row length of a matrix with n numbers in a row: an odd number of cache lines. Rows of
// a power of two fall onto a few sets of the L1 cache, where a column's lines evict each other.
template <class Real>
int64_t odd_lines(int64_t n) {
  constexpr int64_t LINE = 64 / sizeof(Real);
  return ((n + LINE - 1) / LINE | 1) * LINE;
}

constexpr int64_t MOST_QUERIES = 48;  // of a block

// Returns how many queries a block has: few enough for its logits (block, ld_logits) to stay in the
// L2 cache and for causal attention to skip keys that no query of the block sees; whole tiles, of
// about equal size.
inline int64_t queries_per_block(int64_t L, int64_t ld_logits) {
  int64_t rows = 65536 / ld_logits / TILE_ROWS<float> * TILE_ROWS<float>;
  if (rows < 2 * TILE_ROWS<float>)
    rows = 2 * TILE_ROWS<float>;
  else if (rows > MOST_QUERIES)
    rows = MOST_QUERIES;
  const int64_t blocks = (L + rows - 1) / rows, equal = (L + blocks - 1) / blocks;
  return (equal + TILE_ROWS<float> - 1) / TILE_ROWS<float> * TILE_ROWS<float>;
}

// Dp and Rp are D and R rounded up to whole vectors, Sp is S rounded up as in odd_lines, and ld_x
// is the row length of x. b is a batch row, h a query head, g a key head, i a query and j a key. In
// the shapes of workspaces `block` stands for block_queries.
template <class Stored, class Real = RealOf<Stored>>
struct AttentionProblem {
  const cpu::Attention& a;
  const int64_t Dp = round_up<Real>(a.D);
  const int64_t Sp = odd_lines<Real>(a.S);
  const int64_t R = 2 * a.K + 1;  // rows of relative_keys
  const int64_t Rp = round_up<Real>(R);
  const int64_t ld_factors = (a.S + 3) / 4 * 4;  // the row length of the dropout mask
  const int64_t group = a.N / a.N_kv;            // query heads that share a key head
  // The row length of logits: keys that some query of a block sees, from a multiple of 16 on.
  static constexpr int64_t KEY_UNIT = 16;  // whole vectors of every type
  const int64_t ld_logits = logits_row_length();
  const int64_t block_queries = queries_per_block(a.L, ld_logits);
  // Whether results are written with streaming stores.
  const bool streamed = std::is_same<Stored, Real>::value && a.D % LANES<Real> == 0 &&
                        exceeds_caches<Stored>(a.queries * a.N * a.D);
  const Real* relative = static_cast<const Real*>(a.relative_keys);  // (R, D) or null
  const Real* rope = static_cast<const Real*>(a.rope);  // (positions, rope_width) or null

  int64_t logits_row_length() const {
    const int64_t window = a.windowed ? a.window_left + a.window_right : a.S;
    return window < a.S ? odd_lines<Real>(min_(a.S, window + MOST_QUERIES + 2 * KEY_UNIT)) : Sp;
  }
  static int64_t min_(int64_t x, int64_t y) { return x < y ? x : y; }

  // The multiply-adds of one product between all queries and keys, and those of batch row b.
  double multiply_adds() const {
    double total = a.cu_seqlens_q ? 0 : double(a.B) * row_multiply_adds(0);
    for (int64_t b = 0; a.cu_seqlens_q && b < a.B; ++b)
      total += row_multiply_adds(b);
    return total;
  }
  double row_multiply_adds(int64_t b) const {
    return double(a.N) * double(queries(b)) * double(min_(stored_keys(b), ld_logits)) * double(a.D);
  }

  // The row of q's memory that holds query 0 of batch row b, where b itself has no stride; the same
  // of k and v; and the row of `out` (B L or queries, N, D).
  HD int64_t first_query(int64_t b) const { return a.cu_seqlens_q ? a.cu_seqlens_q[b] : 0; }
  HD int64_t first_key(int64_t b) const { return a.cu_seqlens_k ? a.cu_seqlens_k[b] : 0; }
  HD int64_t first_result(int64_t b) const { return a.cu_seqlens_q ? a.cu_seqlens_q[b] : b * a.L; }
  // The number of queries and of keys of batch row b that are in memory.
  HD int64_t queries(int64_t b) const {
    return a.cu_seqlens_q ? a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b] : a.L;
  }
  HD int64_t stored_keys(int64_t b) const {
    return a.cu_seqlens_k ? a.cu_seqlens_k[b + 1] - a.cu_seqlens_k[b] : a.S;
  }
  // The position of query 0 of batch row b.
  HD int64_t offset(int64_t b) const {
    return a.cu_seqlens_q ? stored_keys(b) - queries(b) : a.offset;
  }

  // Returns row i of head n of batch row b in q, k, v or dout.
  const Stored* row(const void* p, const int64_t* strides, int64_t b, int64_t n, int64_t i) const {
    return static_cast<const Stored*>(p) + b * strides[0] + n * strides[1] + i * strides[2];
  }
  // Returns key (or value) j of key head g for batch row b; key_rows may place it in another row.
  HD const Stored* key(const void* p, const int64_t* strides, int64_t b, int64_t g,
                       int64_t j) const {
    return row(p, strides, a.key_rows ? a.key_rows[b * a.S + j] : b, g, j);
  }

  // Rotates x (Dp,), a row of q or k, by the angles of `position`; back if direction is -1. Without
  // a table x stays as it is.
  void rotate(Real* x, int64_t position, Real direction) const {
    if (!rope) return;
    const Real* angles = rope + position * a.rope_width;
    if (a.rope_interleaved)
      rotate_interleaved(x, angles, a.rope_width, direction);
    else
      rotate_halves(x, angles, a.rope_width, direction);
  }

  // Stages one row to `to` (Dp,), with the rotation of `position` if `rotated`.
  HD void stage_row(const Stored* x, int64_t position, bool rotated, Real* to) const {
    int64_t d = 0;
    for (; d + LANES<Real> <= a.D; d += LANES<Real>)
      load_as(x + d).store(to + d);
    if (d < a.D) load_up_to(x + d, a.D - d).store(to + d);
    if (rotated) rotate(to, position, Real(1));
  }

  // Returns the number of keys of batch row b.
  HD int64_t keys(int64_t b) const {
    if (a.cu_seqlens_k) return stored_keys(b);
    if (!a.key_lengths || a.key_lengths[b] >= a.S) return a.S;
    return a.key_lengths[b] < 0 ? 0 : a.key_lengths[b];
  }
  // Returns the end of the keys that a query at `position` may see.
  HD int64_t visible(int64_t position, int64_t keys) const {
    if (!a.causal && !a.windowed) return keys;
    const int64_t end = position + a.window_right + 1;
    return end > keys ? keys : end < 0 ? 0 : end;
  }
  // Returns the keys that a query at `position` sees, of a row of logits that starts at `base`.
  HD SeenKeys seen(int64_t position, int64_t keys, int64_t base) const {
    const int64_t end = visible(position, keys), begin = position - a.window_left;
    if (!a.windowed || begin < base) return {base, base, end};
    return {base, begin < end ? begin : end, end};
  }
  // Returns the keys that some of the queries at `position` and the `rows` - 1 next see, from a
  // multiple of KEY_UNIT on.
  HD SeenKeys seen_by_block(int64_t position, int64_t rows, int64_t keys) const {
    const int64_t end = visible(position + rows - 1, keys);
    const int64_t base = seen(position, keys, 0).begin / KEY_UNIT * KEY_UNIT;
    return {base, base, end};
  }

  // Calls f(j, logits of keys base + j, base + j + 1, ...) for each vector of the row of query i. A
  // logit is -inf where a key is hidden and past the last key.
  // s (count(),): the products q k^T, which are overwritten. f may write to s from j on.
  // q_relative (R,): the products of q with relative_keys.
  // slopes (count(),): gets the derivatives of softcap, or null.
  template <class Function>
  HD void each_logit(Real* s, const Real* q_relative, Real* slopes, int64_t b, int64_t h, int64_t i,
                     SeenKeys seen, Function f) const {
    // Relative keys are added before scale and softcap, bias and mask after them.
    const int64_t n = seen.count(), position = i + offset(b) - seen.base;
    Real scale = Real(a.scale);
    if (relative) each_distance(position, n, [&](int64_t j, int64_t r) { s[j] += q_relative[r]; });
    if (a.bias || a.mask || a.softcap || seen.hidden()) {
      if (a.softcap)
        cap(s, n, slopes);
      else
        for (int64_t j = 0; j < n; ++j)
          s[j] *= scale;
      scale = 1;
      if (a.bias) add_bias(s, b, h, i, seen);
      if (a.mask) apply_mask(s, b, h, i, seen);
      for (int64_t j = 0; j < seen.hidden(); ++j)
        s[j] = -INFINITE<Real>;
    }

    // Scale, ALiBi and f in one pass.
    const Vec<Real> slope(a.alibi ? static_cast<const Real*>(a.alibi)[h] : Real(0));
    for (int64_t j = 0; j < n; j += LANES<Real>) {
      Vec<Real> x = Vec<Real>::load(s + j) * Vec<Real>(scale);
      if (a.alibi)
        x = x -
            slope * abs_(as_numbers<Real>(lane_numbers<Real>()) + Vec<Real>(Real(j - position)));
      if (j + LANES<Real> > n)
        x = select<Real>(lane_numbers<Real>() < typename Vec<Real>::Mask{} + int(n - j), x,
                         Vec<Real>(-INFINITE<Real>));
      f(j, x);
    }
  }

  // Replaces s (n,) by softcap tanh(scale s / softcap). slopes (n,): gets 1 - tanh^2, or null.
  HD void cap(Real* s, int64_t n, Real* slopes) const {
    const Vec<Real> factor(Real(a.scale / a.softcap)), most{Real(a.softcap)};
    for (int64_t j = 0; j < n; j += LANES<Real>) {
      const Vec<Real> t = tanh_(Vec<Real>::load(s + j) * factor);
      (t * most).store(s + j);
      if (slopes) (Vec<Real>(Real(1)) - t * t).store(slopes + j);
    }
  }

  // Replaces s, the products q k^T of query i, by its logits as of each_logit. Returns the largest
  // logit, or NaN.
  HD Real logits(Real* s, const Real* q_relative, int64_t b, int64_t h, int64_t i,
                 SeenKeys seen) const {
    const int64_t n = seen.count();
    Vec<Real> high(-INFINITE<Real>);
    each_logit(s, q_relative, nullptr, b, h, i, seen, [&](int64_t j, Vec<Real> x) {
      x.store(s + j);
      high = max_(x, high);
    });

    // max_ ignores NaN: a row of NaN must not be taken for a fully masked one.
    const Real max = max_lane(high);
    for (int64_t j = 0; max == -INFINITE<Real> && j < n; ++j)
      if (s[j] != s[j]) return s[j];
    return max;
  }

  // Replaces s (columns,), of which `seen` products q k^T are visible, by exp(logits - max) with
  // dropout, and by zeros where a key is hidden. Stores lse and returns the factor 1 / (sum of exp)
  // by which the row is still to be multiplied, or 0 if the query sees no key. factors: the factors
  // of the dropout.
  HD Real softmax(Real* s, const Real* q_relative, const Real* factors, int64_t b, int64_t h,
                  int64_t i, SeenKeys seen, int64_t columns) const {
    const int64_t n = seen.count();
    Real max = n ? logits(s, q_relative, b, h, i, seen) : -INFINITE<Real>;
    const bool no_key = max == -INFINITE<Real>;
    const Real sink = a.sinks ? static_cast<const Real*>(a.sinks)[h] : -INFINITE<Real>;
    if (sink > max) max = sink;
    const Vec<Real> zero(Real(0)), masked(-INFINITE<Real>);
    Vec<Real> total(Real(0));
    int64_t j = 0;
    for (; j < n && !no_key; j += LANES<Real>) {
      const Vec<Real> x = Vec<Real>::load(s + j);
      const Vec<Real> e = select<Real>(x.v != masked.v, exp_(x - Vec<Real>(max)), zero);
      total = total + e;
      (a.dropped ? dropped(e, factors + j) : e).store(s + j);
    }
    for (; j < columns; j += LANES<Real>)
      zero.store(s + j);
    const Real exp_sum = sum(total) + (a.sinks ? std::exp(sink - max) : Real(0));
    static_cast<Real*>(a.lse)[(b * a.N + h) * a.L + i] =
        no_key ? INFINITE<Real> : max + std::log(exp_sum);
    return no_key ? Real(0) : Real(1) / exp_sum;
  }

  // Calls f(key, row of relative_keys) for the first n keys of a query at `position`. Distances
  // beyond K are clipped to the first and the last row.
  template <class Function>
  HD void each_distance(int64_t position, int64_t n, Function f) const {
    const auto clamp = [n](int64_t j) {
      return j < 0 ? 0 : j < n ? j : n;
    };
    const int64_t low = clamp(position - a.K), high = clamp(position + a.K);
    for (int64_t j = 0; j < low; ++j)
      f(j, int64_t(0));
    for (int64_t j = low; j < high; ++j)
      f(j, j - position + a.K);
    for (int64_t j = high; j < n; ++j)
      f(j, 2 * a.K);
  }
  // s += the seen part of row i of the bias.
  HD void add_bias(Real* s, int64_t b, int64_t h, int64_t i, SeenKeys seen) const {
    const int64_t *t = a.bias_strides, n = seen.count();
    const Stored* x =
        static_cast<const Stored*>(a.bias) + b * t[0] + h * t[1] + i * t[2] + seen.base * t[3];
    if (t[3] == 1) return add_row(x, s, n, Real(1));
    for (int64_t j = 0; j < n; ++j)
      s[j] += load_scalar(x + j * t[3]);
  }
  // s = -inf where row i of the mask is false.
  HD void apply_mask(Real* s, int64_t b, int64_t h, int64_t i, SeenKeys seen) const {
    const int64_t *t = a.mask_strides, n = seen.count();
    const uint8_t* shown = a.mask + b * t[0] + h * t[1] + i * t[2] + seen.base * t[3];
    if (t[3] == 1)
      for (int64_t j = 0; j < n; ++j)
        s[j] = shown[j] ? s[j] : -INFINITE<Real>;
    else
      for (int64_t j = 0; j < n; ++j)
        s[j] = shown[j * t[3]] ? s[j] : -INFINITE<Real>;
  }

  // Sets `to` (rows, ld_factors) to the dropout's factors of queries i0, i0 + 1, ... for the
  // keys that a block sees: column 0 of a row is key seen.base.
  HD void dropout_factors(int64_t b, int64_t h, int64_t i0, int64_t rows, SeenKeys seen,
                          Real* to) const {
    if (!a.windowed) return dropout_factors(b, h, i0, rows, to);
    const int64_t end = min_(seen.base + round_up<Real>(seen.count() + 1), ld_factors);
    for (int64_t i = 0; i < rows; ++i)
      mask_values<Real>(a.dropout, (b * a.N + h) * a.L + i0 + i, ld_factors, seen.base, end,
                        Real(a.dropout.scale), Real(0), to + i * ld_factors);
  }
  // to (rows, ld_factors) = the dropout's factors of the probabilities of queries i0, i0 + 1,
  // ...: 1 / (1 - p) or 0. Rows are multiples of four long, hence consecutive in the mask.
  HD void dropout_factors(int64_t b, int64_t h, int64_t i0, int64_t rows, Real* to) const {
    mask_values<Real>(a.dropout, (b * a.N + h) * a.L + i0, ld_factors, 0, rows * ld_factors,
                      Real(a.dropout.scale), Real(0), to);
  }
  // Returns x with dropout. A select, so that an infinity is dropped too.
  HD static Vec<Real> dropped(Vec<Real> x, const Real* factors) {
    const Vec<Real> factor = Vec<Real>::load(factors), zero(Real(0));
    return select<Real>(factor.v != zero.v, x * factor, zero);
  }

  // to (D,) = x (D,) * scale, in the type in memory.
  HD void store_row(const Real* x, Stored* to, int64_t D, Real scale) const {
    if constexpr (std::is_same<Stored, Real>::value)
      if (streamed) {
        for (int64_t d = 0; d < D; d += LANES<Real>)
          stream(to + d, Vec<Real>::load(x + d) * Vec<Real>(scale));
        return;
      }
    int64_t d = 0;
    for (; d + LANES<Real> <= D; d += LANES<Real>)
      store_as(to + d, Vec<Real>::load(x + d) * Vec<Real>(scale));
    if (d < D) store_up_to(to + d, Vec<Real>::load(x + d) * Vec<Real>(scale), D - d);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
