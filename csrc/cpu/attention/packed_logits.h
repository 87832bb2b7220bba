// The logits of attention of short sequences, for packed.h: a vector holds those of KEYS keys for
// each of QUERIES queries.
#pragma once
#include "cpu/attention/problem.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t MAX_PACKED_QUERIES = 16;

// E: the element type in memory, X: the type of the elements of the dot products.
template <class E, class X, int KEYS>
struct PackedLogits {
  using T = RealOf<E>;
  using V = Vec<T>;
  using Mask = typename V::Mask;
  using Problem = AttentionProblem<E>;
  static constexpr int QUERIES = LANES<T> / KEYS;

  using Rows = Matrix<const E>;  // rows of Dp elements, in place or staged

  // One query head of one batch row.
  struct Head {
    int64_t b, h;
    Rows k, v;         // of its key head
    int64_t keys;      // how many of them exist
    const T* factors;  // (L, factor_stride)  the dropout's factors
  };

  const cpu::Attention& a;
  const Problem p{a};
  const bool in_place = a.D == p.Dp;

  // The key and the query (within its vector) of each lane.
  static HD Mask key() { return lane_numbers<T>() & (KEYS - 1); }
  static HD Mask query() {
    static constexpr LaneConstants<T> queries([](int i) { return i / KEYS; });
    return queries;
  }

  // Returns `count` rows of head n, in place if possible, else staged with the rotation if
  // `rotated`. row (Dp,): the workspace of staging.
  HD Rows rows(T* row, const void* x, const int64_t* strides, int64_t b, int64_t n, int64_t count,
               int64_t position, bool rotated, E* staged) const {
    const E* first = p.row(x, strides, b, n, 0);
    if (in_place && !(rotated && p.rope)) return {first, strides[2]};
    for (int64_t i = 0; i < count; ++i)
      stage_row(row, first + i * strides[2], position + i, rotated, staged + i * p.Dp);
    return {staged, p.Dp};
  }
  // The keys or values of key head g.
  HD Rows key_rows(T* row, const void* x, const int64_t* strides, int64_t b, int64_t g,
                   bool rotated, E* staged) const {
    if (!a.key_rows) return rows(row, x, strides, b, g, a.S, 0, rotated, staged);
    for (int64_t j = 0; j < a.S; ++j)
      stage_row(row, p.key(x, strides, b, g, j), j, rotated, staged + j * p.Dp);
    return {staged, p.Dp};
  }
  // Stages a row to `to` (Dp,), rounded to E again.
  HD void stage_row(T* row, const E* x, int64_t position, bool rotated, E* to) const {
    if constexpr (std::is_same<E, T>::value) {
      p.stage_row(x, position, rotated, to);
    } else {
      p.stage_row(x, position, rotated, row);
      for (int64_t d = 0; d < p.Dp; d += LANES<T>)
        store_as(to + d, V::load(row + d));
    }
  }

  // Returns x_i . y_j in the order of the lanes: QUERIES rows i from `first` on, KEYS rows j.
  // Beyond the last row of x or y that row is repeated.
  HD V dots(Rows x, int64_t first, Rows y) const {
    V sum[LANES<T>];
    const E *xs[QUERIES], *ys[KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; ++i)
      sum[i] = V(T(0));
#pragma GCC unroll 4
    for (int r = 0; r < QUERIES; ++r)
      xs[r] = x.p + (first + r < a.L ? first + r : a.L - 1) * x.ld;
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; ++j)
      ys[j] = y.p + (j < a.S ? j : a.S - 1) * y.ld;

    for (int64_t d = 0; d < p.Dp; d += NUMBERS<X> * LANES<X>) {
      Vec<X> xv[QUERIES];
#pragma GCC unroll 4
      for (int r = 0; r < QUERIES; ++r)
        xv[r] = elements(xs[r] + d, p.Dp - d);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        const Vec<X> yv = elements(ys[j] + d, p.Dp - d);
#pragma GCC unroll 4
        for (int r = 0; r < QUERIES; ++r)
          sum[r * KEYS + j] = multiply_add(sum[r * KEYS + j], xv[r], yv);
      }
    }
    return horizontal_sums(sum);
  }
  // A vector of elements of a row, of which n numbers are left.
  static HD Vec<X> elements(const E* x, int64_t n) {
    if constexpr (std::is_same<X, T>::value)
      return load_as(x);
    else
      return load_along<X>(x, n);
  }

  // Returns the logits of QUERIES queries from i on, -inf where a query does not see a key.
  HD V logits(Rows q, const Head& head, int64_t i) const {
    V s = dots(q, i, head.k) * V(T(a.scale));
    // Key j is (distance - i - offset) positions ahead of query i + r.
    const Mask distance = key() - query();
    if (a.bias) s = s + bias(head.b, head.h, i);
    if (a.alibi)
      s = s - V(static_cast<const T*>(a.alibi)[head.h]) *
                  abs_(as_numbers<T>(distance) - V(T(i + a.offset)));
    Mask seen = key() < Mask{} + int(head.keys);
    if (a.mask) seen &= shown(head.b, head.h, i);
    if (a.causal) {
      // The position is clamped to the range of the lanes' integers, and beyond any distance.
      const int64_t position = i + a.offset < -MAX_PACKED_QUERIES ? -MAX_PACKED_QUERIES
                               : i + a.offset > 1 << 20           ? 1 << 20
                                                                  : i + a.offset;
      seen &= distance <= Mask{} + int(position);
    }
    return select<T>(seen, s, V(-INFINITE<T>));
  }
  // Returns the bias of QUERIES queries from `first` on.
  V bias(int64_t b, int64_t h, int64_t first) const {
    T bias[LANES<T>] = {};
    const int64_t* t = a.bias_strides;
    const E* of_head = static_cast<const E*>(a.bias) + b * t[0] + h * t[1];
    for (int r = 0; r < QUERIES && first + r < a.L; ++r)
      for (int64_t j = 0; j < a.S; ++j)
        bias[r * KEYS + j] = load_scalar(of_head + (first + r) * t[2] + j * t[3]);
    return V::load(bias);
  }
  // Returns where the mask of QUERIES queries from `first` on shows a key.
  Mask shown(int64_t b, int64_t h, int64_t first) const {
    T hidden[LANES<T>] = {};
    const int64_t* t = a.mask_strides;
    for (int r = 0; r < QUERIES && first + r < a.L; ++r)
      for (int64_t j = 0; j < a.S; ++j)
        hidden[r * KEYS + j] = !a.mask[b * t[0] + h * t[1] + (first + r) * t[2] + j * t[3]];
    return V::load(hidden).v == V(T(0)).v;
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
