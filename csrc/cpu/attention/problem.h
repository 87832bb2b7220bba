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

template <class T>
constexpr T INFINITE = std::numeric_limits<T>::infinity();

// Rotates the pairs (x_2m, x_2m+1) of the first `width` elements of x by the angles of a row of the
// RoPE table (cos, sin, cos, sin, ...), in place; direction = -1 rotates back. x is padded to whole
// vectors.
template <class T>
void rotate_interleaved(T* x, const T* table, int64_t width, T direction) {
  using Mask = typename Vec<T>::Mask;
  static constexpr LaneConstants<T> partners([](int i) { return i ^ 1; });
  static constexpr LaneConstants<T> evens([](int i) { return i & ~1; });
  static constexpr LaneConstants<T> odds([](int i) { return i | 1; });
  const Mask swapped = partners, even = evens, odd = odds;
  const Vec<T> sign = as_numbers<T>((lane_numbers<T>() & 1) * 2 - 1) * Vec<T>(direction);
  for (int64_t d = 0; d < width; d += LANES<T>) {
    const Vec<T> a = Vec<T>::load(x + d), t = Vec<T>::load(table + d, width - d);
    const Vec<T> cos(FUSEDSEQ_SHUFFLE(t.v, even)), sin(FUSEDSEQ_SHUFFLE(t.v, odd));
    const Vec<T> b(FUSEDSEQ_SHUFFLE(a.v, swapped));
    const Vec<T> rotated = a * cos + sign * b * sin;
    const Mask inside =
        lane_numbers<T>() < Mask{} + int(width - d < LANES<T> ? width - d : LANES<T>);
    select<T>(inside, rotated, a).store(x + d);
  }
}
// The same for the pairs (x_m, x_m+width/2).
template <class T>
void rotate_halves(T* x, const T* table, int64_t width, T direction) {
  using Mask = typename Vec<T>::Mask;
  static constexpr LaneConstants<T> evens([](int i) { return 2 * i; });
  static constexpr LaneConstants<T> odds([](int i) { return 2 * i + 1; });
  const Mask even = evens, odd = odds;  // of two vectors
  const int64_t half = width / 2;
  for (int64_t m = 0; m < half; m += LANES<T>) {
    const int64_t n = half - m;
    const Vec<T> first = Vec<T>::load(table + 2 * m, 2 * n);
    const Vec<T> second =
        2 * n > LANES<T> ? Vec<T>::load(table + 2 * m + LANES<T>, 2 * n - LANES<T>) : Vec<T>(T(0));
    const Vec<T> cos(FUSEDSEQ_SHUFFLE(first.v, second.v, even));
    const Vec<T> sin = Vec<T>(FUSEDSEQ_SHUFFLE(first.v, second.v, odd)) * Vec<T>(direction);
    const Vec<T> a = Vec<T>::load(x + m, n), b = Vec<T>::load(x + half + m, n);
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
template <class T>
int64_t odd_lines(int64_t n) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return ((n + LINE - 1) / LINE | 1) * LINE;
}

constexpr int64_t MOST_QUERIES = 48;  // of a block

// Returns how many queries a block has: few enough for its logits (block, Wp) to stay in the L2
// cache and for causal attention to skip keys that no query of the block sees; whole tiles, of
// about equal size.
inline int64_t queries_per_block(int64_t L, int64_t Wp) {
  int64_t rows = 65536 / Wp / TILE_ROWS<float> * TILE_ROWS<float>;
  if (rows < 2 * TILE_ROWS<float>)
    rows = 2 * TILE_ROWS<float>;
  else if (rows > MOST_QUERIES)
    rows = MOST_QUERIES;
  const int64_t blocks = (L + rows - 1) / rows, equal = (L + blocks - 1) / blocks;
  return (equal + TILE_ROWS<float> - 1) / TILE_ROWS<float> * TILE_ROWS<float>;
}

// E: the element type in memory, T: the type of computing.
template <class E, class T = RealOf<E>>
struct AttentionProblem {
  const cpu::Attention& a;
  const int64_t Dp = round_up<T>(a.D);
  const int64_t Sp = odd_lines<T>(a.S);
  const int64_t R = 2 * a.K + 1;  // rows of relative_keys
  const int64_t Rp = round_up<T>(R);
  const int64_t factor_stride = (a.S + 3) / 4 * 4;  // the row length of the dropout mask
  const int64_t group = a.N / a.N_kv;               // query heads that share a key head
  // The row length of logits: keys that some query of a block sees, from a multiple of 16 on.
  static constexpr int64_t KEY_UNIT = 16;  // whole vectors of every type
  const int64_t Wp = row_length();
  const int64_t block = queries_per_block(a.L, Wp);
  // Whether results are written with streaming stores.
  const bool streamed =
      std::is_same<E, T>::value && a.D % LANES<T> == 0 && exceeds_caches<E>(a.queries * a.N * a.D);
  const T* relative = static_cast<const T*>(a.relative_keys);  // (R, D) or null
  const T* rope = static_cast<const T*>(a.rope);               // (positions, rope_width) or null

  int64_t row_length() const {
    const int64_t window = a.windowed ? a.window_left + a.window_right : a.S;
    return window < a.S ? odd_lines<T>(min_(a.S, window + MOST_QUERIES + 2 * KEY_UNIT)) : Sp;
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
    return double(a.N) * double(queries(b)) * double(min_(stored_keys(b), Wp)) * double(a.D);
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
  const E* row(const void* p, const int64_t* strides, int64_t b, int64_t n, int64_t i) const {
    return static_cast<const E*>(p) + b * strides[0] + n * strides[1] + i * strides[2];
  }
  // Returns key (or value) j of key head g for batch row b; key_rows may place it in another row.
  HD const E* key(const void* p, const int64_t* strides, int64_t b, int64_t g, int64_t j) const {
    return row(p, strides, a.key_rows ? a.key_rows[b * a.S + j] : b, g, j);
  }

  // Rotates x (Dp,), a row of q or k, by the angles of `position`; back if direction is -1. Without
  // a table x stays as it is.
  void rotate(T* x, int64_t position, T direction) const {
    if (!rope) return;
    const T* angles = rope + position * a.rope_width;
    if (a.rope_interleaved)
      rotate_interleaved(x, angles, a.rope_width, direction);
    else
      rotate_halves(x, angles, a.rope_width, direction);
  }

  // Stages one row to `to` (Dp,), with the rotation of `position` if `rotated`.
  HD void stage_row(const E* x, int64_t position, bool rotated, T* to) const {
    int64_t d = 0;
    for (; d + LANES<T> <= a.D; d += LANES<T>)
      load_as(x + d).store(to + d);
    if (d < a.D) load_up_to(x + d, a.D - d).store(to + d);
    if (rotated) rotate(to, position, T(1));
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
  // qr (R,): the products of q with relative_keys.
  // slopes (count(),): gets the derivatives of softcap, or null.
  template <class F>
  HD void each_logit(T* s, const T* qr, T* slopes, int64_t b, int64_t h, int64_t i, SeenKeys seen,
                     F f) const {
    // Relative keys are added before scale and softcap, bias and mask after them.
    const int64_t n = seen.count(), position = i + offset(b) - seen.base;
    T scale = T(a.scale);
    if (relative) each_distance(position, n, [&](int64_t j, int64_t r) { s[j] += qr[r]; });
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
        s[j] = -INFINITE<T>;
    }

    // Scale, ALiBi and f in one pass.
    const Vec<T> slope(a.alibi ? static_cast<const T*>(a.alibi)[h] : T(0));
    for (int64_t j = 0; j < n; j += LANES<T>) {
      Vec<T> x = Vec<T>::load(s + j) * Vec<T>(scale);
      if (a.alibi) x = x - slope * abs_(as_numbers<T>(lane_numbers<T>()) + Vec<T>(T(j - position)));
      if (j + LANES<T> > n)
        x = select<T>(lane_numbers<T>() < typename Vec<T>::Mask{} + int(n - j), x,
                      Vec<T>(-INFINITE<T>));
      f(j, x);
    }
  }

  // Replaces s (n,) by softcap tanh(scale s / softcap). slopes (n,): gets 1 - tanh^2, or null.
  HD void cap(T* s, int64_t n, T* slopes) const {
    const Vec<T> factor(T(a.scale / a.softcap)), most{T(a.softcap)};
    for (int64_t j = 0; j < n; j += LANES<T>) {
      const Vec<T> t = tanh_(Vec<T>::load(s + j) * factor);
      (t * most).store(s + j);
      if (slopes) (Vec<T>(T(1)) - t * t).store(slopes + j);
    }
  }

  // Replaces s, the products q k^T of query i, by its logits as of each_logit. Returns the largest
  // logit, or NaN.
  HD T logits(T* s, const T* qr, int64_t b, int64_t h, int64_t i, SeenKeys seen) const {
    const int64_t n = seen.count();
    Vec<T> high(-INFINITE<T>);
    each_logit(s, qr, nullptr, b, h, i, seen, [&](int64_t j, Vec<T> x) {
      x.store(s + j);
      high = max_(x, high);
    });

    // max_ ignores NaN: a row of NaN must not be taken for a fully masked one.
    const T max = max_lane(high);
    for (int64_t j = 0; max == -INFINITE<T> && j < n; ++j)
      if (s[j] != s[j]) return s[j];
    return max;
  }

  // Replaces s (columns,), of which `seen` products q k^T are visible, by exp(logits - max) with
  // dropout, and by zeros where a key is hidden. Stores lse and returns the factor 1 / (sum of exp)
  // by which the row is still to be multiplied, or 0 if the query sees no key. factors: the factors
  // of the dropout.
  HD T softmax(T* s, const T* qr, const T* factors, int64_t b, int64_t h, int64_t i, SeenKeys seen,
               int64_t columns) const {
    const int64_t n = seen.count();
    T max = n ? logits(s, qr, b, h, i, seen) : -INFINITE<T>;
    const bool no_key = max == -INFINITE<T>;
    const T sink = a.sinks ? static_cast<const T*>(a.sinks)[h] : -INFINITE<T>;
    if (sink > max) max = sink;
    const Vec<T> zero(T(0)), masked(-INFINITE<T>);
    Vec<T> total(T(0));
    int64_t j = 0;
    for (; j < n && !no_key; j += LANES<T>) {
      const Vec<T> x = Vec<T>::load(s + j);
      const Vec<T> e = select<T>(x.v != masked.v, exp_(x - Vec<T>(max)), zero);
      total = total + e;
      (a.dropped ? dropped(e, factors + j) : e).store(s + j);
    }
    for (; j < columns; j += LANES<T>)
      zero.store(s + j);
    const T exp_sum = sum(total) + (a.sinks ? std::exp(sink - max) : T(0));
    static_cast<T*>(a.lse)[(b * a.N + h) * a.L + i] =
        no_key ? INFINITE<T> : max + std::log(exp_sum);
    return no_key ? T(0) : T(1) / exp_sum;
  }

  // Calls f(key, row of relative_keys) for the first n keys of a query at `position`. Distances
  // beyond K are clipped to the first and the last row.
  template <class F>
  HD void each_distance(int64_t position, int64_t n, F f) const {
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
  HD void add_bias(T* s, int64_t b, int64_t h, int64_t i, SeenKeys seen) const {
    const int64_t *t = a.bias_strides, n = seen.count();
    const E* x = static_cast<const E*>(a.bias) + b * t[0] + h * t[1] + i * t[2] + seen.base * t[3];
    if (t[3] == 1) return add_row(x, s, n, T(1));
    for (int64_t j = 0; j < n; ++j)
      s[j] += load_scalar(x + j * t[3]);
  }
  // s = -inf where row i of the mask is false.
  HD void apply_mask(T* s, int64_t b, int64_t h, int64_t i, SeenKeys seen) const {
    const int64_t *t = a.mask_strides, n = seen.count();
    const uint8_t* shown = a.mask + b * t[0] + h * t[1] + i * t[2] + seen.base * t[3];
    if (t[3] == 1)
      for (int64_t j = 0; j < n; ++j)
        s[j] = shown[j] ? s[j] : -INFINITE<T>;
    else
      for (int64_t j = 0; j < n; ++j)
        s[j] = shown[j * t[3]] ? s[j] : -INFINITE<T>;
  }

  // Sets `to` (rows, factor_stride) to the dropout's factors of queries i0, i0 + 1, ... for the
  // keys that a block sees: column 0 of a row is key seen.base.
  HD void dropout_factors(int64_t b, int64_t h, int64_t i0, int64_t rows, SeenKeys seen,
                          T* to) const {
    if (!a.windowed) return dropout_factors(b, h, i0, rows, to);
    const int64_t end = min_(seen.base + round_up<T>(seen.count() + 1), factor_stride);
    for (int64_t i = 0; i < rows; ++i)
      mask_values<T>(a.dropout, (b * a.N + h) * a.L + i0 + i, factor_stride, seen.base, end,
                     T(a.dropout.scale), T(0), to + i * factor_stride);
  }
  // to (rows, factor_stride) = the dropout's factors of the probabilities of queries i0, i0 + 1,
  // ...: 1 / (1 - p) or 0. Rows are multiples of four long, hence consecutive in the mask.
  HD void dropout_factors(int64_t b, int64_t h, int64_t i0, int64_t rows, T* to) const {
    mask_values<T>(a.dropout, (b * a.N + h) * a.L + i0, factor_stride, 0, rows * factor_stride,
                   T(a.dropout.scale), T(0), to);
  }
  // Returns x with dropout. A select, so that an infinity is dropped too.
  HD static Vec<T> dropped(Vec<T> x, const T* factors) {
    const Vec<T> factor = Vec<T>::load(factors), zero(T(0));
    return select<T>(factor.v != zero.v, x * factor, zero);
  }

  // to (D,) = x (D,) * scale, in the type in memory.
  HD void store_row(const T* x, E* to, int64_t D, T scale) const {
    if constexpr (std::is_same<E, T>::value)
      if (streamed) {
        for (int64_t d = 0; d < D; d += LANES<T>)
          stream(to + d, Vec<T>::load(x + d) * Vec<T>(scale));
        return;
      }
    int64_t d = 0;
    for (; d + LANES<T> <= D; d += LANES<T>)
      store_as(to + d, Vec<T>::load(x + d) * Vec<T>(scale));
    if (d < D) store_up_to(to + d, Vec<T>::load(x + d) * Vec<T>(scale), D - d);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
