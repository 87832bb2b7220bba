// The logits of attention of short sequences, for packed.h: a vector holds those of KEYS keys for
// each of QUERIES queries.
#pragma once
#include "cpu/attention/problem.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t MAX_PACKED_QUERIES = 16;

// KEYS: the keys of a query that a vector of logits holds
template <class Stored, class Element, int KEYS>
struct PackedLogits {
  using Real = RealOf<Stored>;
  using V = Vec<Real>;
  using Mask = typename V::Mask;
  using Problem = AttentionProblem<Stored>;
  static constexpr int QUERIES = LANES<Real> / KEYS;

  using Rows = Matrix<const Stored>;  // rows of Dp elements, in place or staged

  // One query head of one batch row.
  struct Head {
    int64_t b, h;
    Rows k, v;            // of its key head
    int64_t keys;         // how many of them exist
    const Real* factors;  // (L, ld_factors)  the dropout's factors
  };

  const cpu::Attention& a;
  const Problem p{a};
  const bool in_place = a.D == p.Dp;

  // The key and the query (within its vector) of each lane.
  static HD Mask key() { return lane_numbers<Real>() & (KEYS - 1); }
  static HD Mask query() {
    static constexpr LaneConstants<Real> queries([](int i) { return i / KEYS; });
    return queries;
  }

  // Returns `count` rows of head n, in place if possible, else staged with the rotation if
  // `rotated`. row (Dp,): the workspace of staging.
  HD Rows rows(Real* row, const void* x, const int64_t* strides, int64_t b, int64_t n,
               int64_t count, int64_t position, bool rotated, Stored* staged) const {
    const Stored* first = p.row(x, strides, b, n, 0);
    if (in_place && !(rotated && p.rope)) return {first, strides[2]};
    for (int64_t i = 0; i < count; ++i)
      stage_row(row, first + i * strides[2], position + i, rotated, staged + i * p.Dp);
    return {staged, p.Dp};
  }
  // The keys or values of key head g.
  HD Rows key_rows(Real* row, const void* x, const int64_t* strides, int64_t b, int64_t g,
                   bool rotated, Stored* staged) const {
    if (!a.key_rows) return rows(row, x, strides, b, g, a.S, 0, rotated, staged);
    for (int64_t j = 0; j < a.S; ++j)
      stage_row(row, p.key(x, strides, b, g, j), j, rotated, staged + j * p.Dp);
    return {staged, p.Dp};
  }
  // Stages a row to `to` (Dp,), rounded to the type in memory again.
  HD void stage_row(Real* row, const Stored* x, int64_t position, bool rotated, Stored* to) const {
    if constexpr (std::is_same<Stored, Real>::value) {
      p.stage_row(x, position, rotated, to);
    } else {
      p.stage_row(x, position, rotated, row);
      for (int64_t d = 0; d < p.Dp; d += LANES<Real>)
        store_as(to + d, V::load(row + d));
    }
  }

  // Returns x_i . y_j in the order of the lanes: QUERIES rows i from `first` on, KEYS rows j.
  // Beyond the last row of x or y that row is repeated.
  HD V dots(Rows x, int64_t first, Rows y) const {
    V sum[LANES<Real>];
    const Stored *xs[QUERIES], *ys[KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < LANES<Real>; ++i)
      sum[i] = V(Real(0));
#pragma GCC unroll 4
    for (int r = 0; r < QUERIES; ++r)
      xs[r] = x.p + (first + r < a.L ? first + r : a.L - 1) * x.ld;
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; ++j)
      ys[j] = y.p + (j < a.S ? j : a.S - 1) * y.ld;

    for (int64_t d = 0; d < p.Dp; d += NUMBERS<Element> * LANES<Element>) {
      Vec<Element> xv[QUERIES];
#pragma GCC unroll 4
      for (int r = 0; r < QUERIES; ++r)
        xv[r] = elements(xs[r] + d, p.Dp - d);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        const Vec<Element> yv = elements(ys[j] + d, p.Dp - d);
#pragma GCC unroll 4
        for (int r = 0; r < QUERIES; ++r)
          sum[r * KEYS + j] = multiply_add(sum[r * KEYS + j], xv[r], yv);
      }
    }
    return horizontal_sums(sum);
  }
  // A vector of elements of a row, of which n numbers are left.
  static HD Vec<Element> elements(const Stored* x, int64_t n) {
    if constexpr (std::is_same<Element, Real>::value)
      return load_as(x);
    else
      return load_along<Element>(x, n);
  }

  // Returns the logits of QUERIES queries from i on, -inf where a query does not see a key.
  HD V logits(Rows q, const Head& head, int64_t i) const {
    V s = dots(q, i, head.k) * V(Real(a.scale));
    // Key j is (distance - i - offset) positions ahead of query i + r.
    const Mask distance = key() - query();
    if (a.bias) s = s + bias(head.b, head.h, i);
    if (a.alibi)
      s = s - V(static_cast<const Real*>(a.alibi)[head.h]) *
                  abs_(as_numbers<Real>(distance) - V(Real(i + a.offset)));
    Mask seen = key() < Mask{} + int(head.keys);
    if (a.mask) seen &= shown(head.b, head.h, i);
    if (a.causal) {
      // The position is clamped to the range of the lanes' integers, and beyond any distance.
      const int64_t position = i + a.offset < -MAX_PACKED_QUERIES ? -MAX_PACKED_QUERIES
                               : i + a.offset > 1 << 20           ? 1 << 20
                                                                  : i + a.offset;
      seen &= distance <= Mask{} + int(position);
    }
    return select<Real>(seen, s, V(-INFINITE<Real>));
  }
  // Returns the bias of QUERIES queries from `first` on.
  V bias(int64_t b, int64_t h, int64_t first) const {
    Real bias[LANES<Real>] = {};
    const int64_t* t = a.bias_strides;
    const Stored* of_head = static_cast<const Stored*>(a.bias) + b * t[0] + h * t[1];
    for (int r = 0; r < QUERIES && first + r < a.L; ++r)
      for (int64_t j = 0; j < a.S; ++j)
        bias[r * KEYS + j] = load_scalar(of_head + (first + r) * t[2] + j * t[3]);
    return V::load(bias);
  }
  // Returns where the mask of QUERIES queries from `first` on shows a key.
  Mask shown(int64_t b, int64_t h, int64_t first) const {
    Real hidden[LANES<Real>] = {};
    const int64_t* t = a.mask_strides;
    for (int r = 0; r < QUERIES && first + r < a.L; ++r)
      for (int64_t j = 0; j < a.S; ++j)
        hidden[r * KEYS + j] = !a.mask[b * t[0] + h * t[1] + (first + r) * t[2] + j * t[3]];
    return V::load(hidden).v == V(Real(0)).v;
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
