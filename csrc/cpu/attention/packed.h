// Attention of short sequences, whose keys fit in one vector, forward and backward.
//
// Layout: a vector of logits holds KEYS keys of each of QUERIES queries (8 and 2 for up to 8 keys
// with AVX-512), so that the softmax wastes few lanes. Dot products run along the head dimension,
// and as many of them as a vector has lanes are summed horizontally at once. Nothing is transposed
// or packed, and where the head dimension allows it, rows are read and written where they are ("in
// place"). bf16 rows are converted while they are read and written; where Element is bf16_pair, the
// dot products along the head dimension are those of pairs.
//
// What limits it: memory bandwidth. L = S = 6, D = 32 in fp32 reads and writes 8.4 KB for a forward
// and a backward pass.
#pragma once
#include "cpu/attention/backward.h"
#include "cpu/attention/packed_logits.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns whether this kernel takes the call.
template <class Stored>
bool packed_takes(const cpu::Attention& a) {
  return a.S <= LANES<RealOf<Stored>> && a.L <= MAX_PACKED_QUERIES && !a.relative_keys &&
         !a.windowed && !a.softcap && !a.sinks && !a.cu_seqlens_q;
}

// KEYS: the keys of a query that a vector of logits holds
template <class Stored, class Element, int KEYS>
class AttentionPacked : PackedLogits<Stored, Element, KEYS> {
  using Base = PackedLogits<Stored, Element, KEYS>;
  using Real = RealOf<Stored>;
  using V = Vec<Real>;
  using Mask = typename V::Mask;
  using Base::a, Base::p, Base::in_place, Base::QUERIES;
  using Base::dots, Base::key_rows, Base::logits, Base::query, Base::rows;
  using typename Base::Head, typename Base::Problem, typename Base::Rows;
  static constexpr int64_t UNITS_AHEAD = 4;  // how many units ahead rows are prefetched
  static constexpr int64_t MASK_BATCH = 16;  // heads whose dropout masks are generated at once

  // Where the gradients of a key head go. They are written for the first query head of the group
  // and added to for the others. Gradient: Stored where they are in place, else Real.
  template <class Gradient>
  struct KeyGradients {
    Gradient* dk;  // (S, Dp)
    Gradient* dv;  // (S, Dp)
    int64_t ld;    // the row length of both
  };

  // Whether results are written with streaming stores. Half the size is enough for bf16, since a
  // backward pass writes three results.
  const bool streamed = in_place && exceeds_caches<Real>(a.B * a.N * a.L * a.D);
  // Whether dk and dv are computed where they are stored.
  const bool dk_in_place =
      in_place && !streamed && !p.rope && (p.group == 1 || std::is_same<Stored, Real>::value);

  // The memory of one thread. The rows are only needed where rows are staged.
  struct Workspace {
    Buffer<Stored> q;      // (L, Dp)
    Buffer<Stored> k;      // (S, Dp)
    Buffer<Stored> v;      // (S, Dp)
    Buffer<Stored> dout;   // (L, Dp)
    Buffer<Real> row;      // (Dp,)  a row in the type of computing while it is staged
    Buffer<Real> to;       // (L, Dp)  results before they are stored
    Buffer<Real> dk;       // (S, Dp)
    Buffer<Real> dv;       // (S, Dp)
    Buffer<Real> factors;  // (MASK_BATCH, L, ld_factors)  the dropout's factors
    Buffer<Real> P;        // (MAX_PACKED_QUERIES + QUERIES, KEYS)  probabilities, with dropout
    Buffer<Real> dS;       // (MAX_PACKED_QUERIES + QUERIES, KEYS)  the gradient of the logits
    Buffer<Real> max;      // (MAX_PACKED_QUERIES + QUERIES,)  the largest logit of each query
    Buffer<Real> exp_sum;  // (MAX_PACKED_QUERIES + QUERIES,)  the sum of exp(logit - max)
    Workspace(const Problem& p, bool staged)
        : Workspace(p, staged ? p.a.L * p.Dp : 0, staged ? p.a.S * p.Dp : 0) {}
    Workspace(const Problem& p, int64_t queries, int64_t keys)
        : q(queries),
          k(keys),
          v(keys),
          dout(queries),
          row(p.Dp),
          to(queries),
          dk(keys),
          dv(keys),
          factors(p.a.dropped ? MASK_BATCH * p.a.L * p.ld_factors + 2 * LANES<Real> : 0),
          P((MAX_PACKED_QUERIES + QUERIES) * KEYS),
          dS((MAX_PACKED_QUERIES + QUERIES) * KEYS),
          max(MAX_PACKED_QUERIES + QUERIES),
          exp_sum(MAX_PACKED_QUERIES + QUERIES) {}
  };

  // One head, forward.
  HD void forward(Workspace& w, const Head& head) const {
    const int64_t b = head.b, h = head.h;
    const Rows q = rows(w.row, a.q, a.q_strides, b, h, a.L, a.offset, true, w.q);
    const V zero(Real(0)), masked(-INFINITE<Real>);
    Real* lse = static_cast<Real*>(a.lse) + (b * a.N + h) * a.L;  // (L,)
    for (int64_t i = 0; i < a.L; i += QUERIES) {
      // The softmax of QUERIES queries: maxima and sums over groups of KEYS lanes.
      const V s = logits(q, head, i), max = group_max<KEYS>(s);
      const V e = select<Real>(s.v != masked.v, exp_(s - max), zero), total = group_sums<KEYS>(e);

      // A query sees no key if the sum of exp is 0. (The maximum cannot tell: it ignores NaN, and a
      // row of NaN is not a masked one.)
      const Mask no_key = total.v == zero.v;
      const V exp_sum = select<Real>(no_key, V(Real(1)), total), y = e / exp_sum;
      (a.dropped ? p.dropped(y, head.factors + i * p.ld_factors) : y).store(w.P + i * KEYS);
#pragma GCC unroll 4
      for (int r = 0; r < QUERIES; ++r) {
        w.max[i + r] = no_key[r * KEYS] ? INFINITE<Real> : max.v[r * KEYS];
        w.exp_sum[i + r] = exp_sum.v[r * KEYS];
      }
    }
    // The log-sum-exp of all queries at once: one logarithm for a vector of them.
    for (int64_t i = 0; i < a.L; i += LANES<Real>)
      (V::load(w.max + i) + log_(V::load(w.exp_sum + i))).store(lse + i, a.L - i);
    Stored* out = static_cast<Stored*>(a.out) + (b * a.L * a.N + h) * a.D;  // (L, N, D)
    store(w, out, a.L, a.N * a.D, false,
          [&](auto* to, int64_t ld) { weighted_sum(w.P, head.v, head.keys, to, ld); });
  }

  // to (L, Dp) = weights (L, KEYS) times the rows x of the existing keys; what follows these rows
  // in memory may be anything.
  template <class Gradient>
  HD void weighted_sum(const Real* weights, Rows x, int64_t keys, Gradient* to, int64_t ld) const {
    if (keys)
      return product<Real>(a.L, keys, p.Dp, {weights, KEYS, 1}, x, Matrix<Gradient>{to, ld}, false);
    for (int64_t i = 0; i < a.L; ++i)
      memset(to + i * ld, 0, p.Dp * sizeof(Gradient));
  }

  // Stores `count` rows that compute(to, row length) writes: to x directly if possible, else to the
  // workspace and from there to x, rotated back if `rotated`.
  template <class Function>
  HD void store(Workspace& w, Stored* x, int64_t count, int64_t stride, bool rotated,
                Function compute, int64_t position = 0) const {
    if (in_place && !streamed && !(rotated && p.rope)) return compute(x, stride);
    compute((Real*)w.to, p.Dp);
    store_rows(w.to, x, count, stride, rotated, position);
  }
  // Stores rows `from` (count, Dp) to x.
  void store_rows(Real* from, Stored* x, int64_t count, int64_t stride, bool rotated,
                  int64_t position) const {
    for (int64_t i = 0; i < count; ++i) {
      if (rotated) p.rotate(from + i * p.Dp, position + i, Real(-1));
      if (streamed) {
        for (int64_t d = 0; d < a.D; d += LANES<Real>)
          stream_as(x + i * stride + d, V::load(from + i * p.Dp + d));
        continue;
      }
      p.store_row(from + i * p.Dp, x + i * stride, a.D, Real(1));
    }
  }

  // One head, backward. add: whether this is not the first head of its group.
  template <class Gradient>
  HD void backward(Workspace& w, const Head& head, const KeyGradients<Gradient>& to, bool add,
                   Real* bias) const {
    const int64_t b = head.b, h = head.h;
    const Rows q = rows(w.row, a.q, a.q_strides, b, h, a.L, a.offset, true, w.q);
    const Rows dout = rows(w.row, a.dout, a.dout_strides, b, h, a.L, 0, false, w.dout);
    const V zero(Real(0)), masked(-INFINITE<Real>);
    const Real* lse = static_cast<const Real*>(a.lse) + (b * a.N + h) * a.L;  // (L,)
    for (int64_t i = 0; i < a.L; i += QUERIES) {
      // The probabilities exp(logits - lse), from the saved log-sum-exp of each query, divided by
      // their sum: see backward.h. Of a query that sees no key lse is +inf.
      const V s = logits(q, head, i);
      V l(lse[i]);
#pragma GCC unroll 4
      for (int r = 1; r < QUERIES; ++r)
        if (i + r < a.L) l = select<Real>(query() == Mask{} + r, V(lse[i + r]), l);
      const V exps = select<Real>((s.v != masked.v) & (l.v != -masked.v), exp_(s - l), zero);
      // The sum of a row that has a NaN is NaN: of two operands max_ returns the second one then.
      const V sums = max_(V(std::numeric_limits<Real>::min()), group_sums<KEYS>(exps));
      const V e = select<Real>(exps.v != zero.v, exps / sums, zero);

      // Their gradient dP, and from it that of the logits, P (dP - sum(P dP)), which is exactly 0
      // where one P is 1. Where P is 0, dP is not used: it may be anything.
      V dp = dots(dout, i, head.v), y = e;
      if (a.dropped) {
        dp = p.dropped(dp, head.factors + i * p.ld_factors);
        y = p.dropped(e, head.factors + i * p.ld_factors);
      }
      const Mask live = e.v != zero.v;
      const V delta = group_sums<KEYS>(select<Real>(live, e * dp, zero));
      const V ds = select<Real>(live, e * (dp - delta), zero);
      y.store(w.P + i * KEYS);
      (bias ? ds : ds * V(Real(a.scale))).store(w.dS + i * KEYS);
    }

    // A bias needs the gradient of the logits without the scale.
    if (bias) {
      for (int64_t i = 0; i < a.L; ++i)
        add_to_bias(bias, w.dS + i * KEYS, b, h, i);
      for (int64_t i = 0; i < a.L * KEYS; ++i)
        w.dS[i] *= Real(a.scale);
    }

    const Real *P = w.P, *dS = w.dS;
    if (a.dv)
      product<Real>(a.S, a.L, p.Dp, {P, 1, KEYS}, dout, Matrix<Gradient>{to.dv, to.ld}, add);
    if (a.dk) product<Real>(a.S, a.L, p.Dp, {dS, 1, KEYS}, q, Matrix<Gradient>{to.dk, to.ld}, add);
    if (a.dq)
      store(
          w, static_cast<Stored*>(a.dq) + b * a.dq_strides[0] + h * a.D, a.L, a.dq_strides[1], true,
          [&](auto* dq, int64_t ld) { weighted_sum(dS, head.k, head.keys, dq, ld); }, a.offset);
  }
  // Adds ds (S,), the gradient of the logits of query i, to the gradient of the bias.
  void add_to_bias(Real* bias, const Real* ds, int64_t b, int64_t h, int64_t i) const {
    const int64_t* t = a.dbias_strides;
    for (int64_t j = 0; j < a.S; ++j)
      bias[b * t[0] + h * t[1] + i * t[2] + j * t[3]] += ds[j];
  }

  // Prefetches the rows of a coming unit. There are many short runs of rows, each of which ends
  // before the hardware prefetcher follows it.
  HD void prefetch_rows(const void* x, const int64_t* strides, int64_t b, int64_t n,
                        int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
      prefetch_row(p.row(x, strides, b, n, i), a.D * sizeof(Stored));
  }
  HD void prefetch_unit(int64_t unit, bool forward_pass) const {
    const int64_t b = unit / a.N_kv, g = unit % a.N_kv, h = g * p.group;
    prefetch_rows(a.q, a.q_strides, b, h, a.L);
    prefetch_rows(a.k, a.k_strides, b, g, a.S);
    prefetch_rows(a.v, a.v_strides, b, g, a.S);
    if (!forward_pass) prefetch_rows(a.dout, a.dout_strides, b, h, a.L);
  }

  // The heads [begin, end), counted over the whole batch, whose dropout factors are in w.factors.
  struct MaskBatch {
    int64_t begin, end;
  };

  // All heads of batch row b and key head g. last_head: the end of the heads of this part of the
  // work, up to which masks are generated in batches.
  HD void unit(Workspace& w, Real* bias, MaskBatch& masks, int64_t b, int64_t g, int64_t last_head,
               bool forward_pass) const {
    const int64_t keys = p.keys(b);
    const Rows k = key_rows(w.row, a.k, a.k_strides, b, g, true, w.k);
    const Rows v = key_rows(w.row, a.v, a.v_strides, b, g, false, w.v);
    const int64_t at = b * a.dk_strides[0] + g * a.D;  // of the key head's gradients
    Stored* const dk = a.dk ? static_cast<Stored*>(a.dk) + at : nullptr;
    Stored* const dv = a.dv ? static_cast<Stored*>(a.dv) + at : nullptr;
    for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h) {
      const int64_t head = b * a.N + h;
      if (a.dropped && head >= masks.end) {
        masks.begin = head;
        masks.end = head + MASK_BATCH < last_head ? head + MASK_BATCH : last_head;
        p.dropout_factors(b, h, 0, (masks.end - masks.begin) * a.L, w.factors);
      }
      const Real* factors = w.factors + (head - masks.begin) * a.L * p.ld_factors;
      const Head operands{b, h, k, v, keys, factors};
      const bool add = h > g * p.group;
      if (forward_pass)
        forward(w, operands);
      else if (dk_in_place)
        backward(w, operands, KeyGradients<Stored>{dk, dv, a.dk_strides[1]}, add, bias);
      else
        backward(w, operands, KeyGradients<Real>{w.dk, w.dv, p.Dp}, add, bias);
    }

    if (forward_pass || dk_in_place) return;
    if (a.dk) store_rows(w.dk, dk, a.S, a.dk_strides[1], true, 0);
    if (a.dv) store_rows(w.dv, dv, a.S, a.dk_strides[1], false, 0);
  }

 public:
  explicit AttentionPacked(const cpu::Attention& call) : Base{call} {}

  void run(cpu::Parallel run, int threads, bool forward_pass) {
    const double work = (forward_pass ? 2 : 5) * p.multiply_adds();
    const WorkSplit split(a.B * a.N_kv, 1, work, threads, 0, a.dbias);

    // Each part of the work adds to a bias of its own, as in AttentionBackward.
    const bool bias_copies = a.dbias && split.parts > 1;
    Buffer<Real> biases(bias_copies ? a.dbias_size * split.parts : 0);
    if (a.dbias) memset(a.dbias, 0, a.dbias_size * sizeof(Real));
    if (bias_copies) memset(biases, 0, a.dbias_size * split.parts * sizeof(Real));

    split.each(run, [&](int64_t part, int64_t first, int64_t last) {
      Workspace w(p, !in_place || !dk_in_place || a.key_rows);
      Real* bias = bias_copies ? biases + part * a.dbias_size : static_cast<Real*>(a.dbias);
      MaskBatch masks{0, first * p.group};
      for (int64_t u = first; u < last; ++u) {
        const int64_t next = u + UNITS_AHEAD;
        if (next < last && !a.key_rows) prefetch_unit(next, forward_pass);
        unit(w, bias, masks, u / a.N_kv, u % a.N_kv, last * p.group, forward_pass);
      }
    });
    if (bias_copies)
      add_parts((const Real*)biases, split.parts, a.dbias_size, static_cast<Real*>(a.dbias));
  }
};

// Chooses the smallest number of keys for a vector that is enough.
template <class Stored, class Element>
void attention_packed(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  constexpr int lanes = LANES<RealOf<Stored>>;
  if constexpr (lanes > 4)
    if (a.S <= 4) return AttentionPacked<Stored, Element, 4>(a).run(run, threads, forward);
  if constexpr (lanes > 8)
    if (a.S <= 8) return AttentionPacked<Stored, Element, 8>(a).run(run, threads, forward);
  AttentionPacked<Stored, Element, lanes>(a).run(run, threads, forward);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
