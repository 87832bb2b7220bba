// The gradients of attention, in one pass over the query blocks of blocks.h, for any shape. Each
// query's sum of P dP is computed while its row is in the cache, so that the forward pass's result
// is not read.
//
// The probabilities are recomputed as e = exp(logits - lse) from the saved log-sum-exp. Their sum
// is not 1: the rounding of an lse of 200 alone makes it wrong by 1e-5, and where one probability
// is close to 1 that error would not cancel in dP - sum(P dP). So P = e / sum(e), see
// logit_gradient.
//
// With P = softmax(logits), d = the dropout's factors and dP = d * (dout v^T), per query:
//   dv += (d P)^T dout      dlogits = P (dP - sum(P dP))      dq = scale dlogits k
//   dk += scale dlogits^T q     dbias += dlogits
//
// What limits it: as in blocks.h, with five products instead of two.
#pragma once
#include <initializer_list>

#include "cpu/attention/operands.h"
#include "cpu/attention/work_split.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// to (n,) += each row of parts (count, n), in order.
template <class Real>
void add_parts(const Real* parts, int64_t count, int64_t n, Real* to) {
  for (int64_t part = 0; part < count; ++part)
    add_row(parts + part * n, to, n, Real(1));
}

// Returns P (dP - sum(P dP)), the gradient of the logits, for P = e / exp_sum; 0 where e is 0.
// total = sum(e dP), inverse = 1 / exp_sum.
//
// It is exactly 0 where one e alone is not 0: total is then the rounded product e dP, and so is
// dp * exp_sum, which `select` keeps from becoming part of a fused multiply-add.
template <class Real>
HD Vec<Real> logit_gradient(Vec<Real> e, Vec<Real> dp, Vec<Real> exp_sum, Vec<Real> total,
                            Vec<Real> inverse) {
  const Vec<Real> zero(Real(0));
  const typename Vec<Real>::Mask live = e.v != zero.v;
  const Vec<Real> difference = select<Real>(live, dp * exp_sum, zero) - total;
  return select<Real>(live, e * (inverse * inverse) * difference, zero);
}

template <class Stored, class Element>
class AttentionBackward {
  using Real = RealOf<Element>;
  using Problem = AttentionOperands<Stored, Element>;
  const cpu::Attention& a;
  const Problem p{a};
  // Whether a part of the work owns whole heads, in the order of the batch, so that it alone adds
  // to their part of dbias. A copy of a large bias for each part takes longer than its gradient.
  const bool by_head = a.dbias && a.dbias_strides[1] && a.B > 0 && !a.cu_seqlens_q &&
                       a.N_kv >= WorkSplit::FIXED_PARTS;
  const WorkSplit split;

  // Sums to which several parts of the work contribute: dk and dv have a copy for each chunk of a
  // unit that has several, dbias and drelative_keys one for each part. The copies are added in
  // order at the end.
  const bool bias_copies = a.dbias && !by_head && split.parts > 1;
  const int64_t key_size = split.chunks > 1 ? a.S * p.Dp : 0;
  const int64_t table_size = a.drelative_keys ? p.R * p.Dp : 0;
  Buffer<Real> biases;  // (parts, dbias_size) or null
  Buffer<Real> tables;  // (parts, R, Dp) or null  of relative_keys
  Buffer<Real> dks;     // (units, chunks, S, Dp) or null
  Buffer<Real> dvs;     // (units, chunks, S, Dp) or null

  // The memory of one thread.
  struct Workspace {
    Buffer<Element> k;             // (S, ld_along)  along
    Buffer<Element> k_across;      // (depth(S), Dp)  if pairs
    Buffer<Element> k_transposed;  // (ld_along, Sp)
    Buffer<Element> v;             // (S, ld_along)  along
    Buffer<Element> v_transposed;  // (ld_along, Sp)
    Buffer<Element> q;             // (block, ld_along)  along
    Buffer<Element> q_across;      // (depth(block), Dp)  if pairs
    Buffer<Element> dout;          // (block, ld_along)  along
    Buffer<Element> dout_across;   // (depth(block), Dp)  if pairs
    Buffer<Real> rotation;         // the workspace of staging
    Buffer<Real> s;                // (block, ld_logits)  logits, then probabilities with dropout
    Buffer<Real> dp;           // (block, ld_logits)  dP, then the gradient of the products q k^T
    Buffer<Real> ds_across;    // (depth(block), ld_logits)  that gradient, if pairs
    Buffer<Real> slopes;       // (ld_logits,)  the derivatives of softcap, of one query
    Buffer<Real> dq;           // (block, Dp)
    Buffer<Real> dk;           // (S, Dp)
    Buffer<Real> dv;           // (S, Dp)
    Buffer<Real> factors;      // (block, ld_factors)  the dropout's factors
    Buffer<Element> relative;  // (depth(R), Dp)  across
    Buffer<Element> relative_transposed;  // (ld_along, Rp)
    Buffer<Real> q_relative;              // (block, Rp)  q times relative_keys
    Buffer<Real> dq_relative;             // (block, Rp)  its gradient
    Buffer<Real> dq_relative_across;      // (depth(block), Rp)  if pairs
    explicit Workspace(const Problem& p)
        : k(p.a.S * p.ld_along),
          k_across(Problem::PAIRS ? depth<Element>(p.a.S) * p.Dp : 0),
          k_transposed(p.ld_along * p.Sp),
          v(p.a.S * p.ld_along),
          v_transposed(p.ld_along * p.Sp),
          q(p.block_queries * p.ld_along),
          q_across(Problem::PAIRS ? depth<Element>(p.block_queries) * p.Dp : 0),
          dout(p.block_queries * p.ld_along),
          dout_across(Problem::PAIRS ? depth<Element>(p.block_queries) * p.Dp : 0),
          rotation(p.rotation_size),
          s(p.block_queries * p.ld_logits),
          dp(p.block_queries * p.ld_logits),
          ds_across(Problem::PAIRS ? depth<Element>(p.block_queries) * p.ld_logits : 0),
          slopes(p.a.softcap ? p.ld_logits : 0),
          dq(p.block_queries * p.Dp),
          dk(p.a.S * p.Dp),
          dv(p.a.S * p.Dp),
          factors(p.a.dropped ? p.block_queries * p.ld_factors + LANES<Real> : 0),
          relative(p.relative_size),
          relative_transposed(p.relative ? p.ld_along * p.Rp : 0),
          q_relative(p.relative ? p.block_queries * p.Rp : 0),
          dq_relative(p.relative ? p.block_queries * p.Rp : 0),
          dq_relative_across(p.relative && Problem::PAIRS ? depth<Element>(p.block_queries) * p.Rp
                                                          : 0) {}
  };

  // Query i0 + i, which is row i of its block and sees the keys `seen`. s holds q k^T and becomes
  // the probabilities with dropout; dp holds dout v^T and becomes the gradient of q k^T. Both
  // become zero where a key is hidden, up to `columns`.
  HD void query(Workspace& w, Real* bias, int64_t b, int64_t h, int64_t i0, int64_t i,
                SeenKeys seen, int64_t columns) const {
    Real* s = w.s + i * p.ld_logits;
    Real* dp = w.dp + i * p.ld_logits;
    const int64_t row = (b * a.N + h) * a.L + i0 + i;
    const Real lse = static_cast<const Real*>(a.lse)[row];
    int64_t n = seen.count();
    const Real* factors = w.factors + i * p.ld_factors;
    const Vec<Real> zero(Real(0)), masked(-INFINITE<Real>);
    if (lse == INFINITE<Real>) n = 0;  // the query sees no key
    int64_t end = 0;
    if (a.dsinks) static_cast<Real*>(a.dsinks)[row] = 0;
    if (n) {
      // e, dP and their sums. Where e is 0, dP is not used: it may be anything past the last key.
      Vec<Real> exp_sums = zero, totals = zero;
      Real* const slopes = a.softcap ? (Real*)w.slopes : nullptr;
      p.each_logit(
          s, w.q_relative + i * p.Rp, slopes, b, h, i0 + i, seen, [&](int64_t j, Vec<Real> x) {
            const Vec<Real> e = select<Real>(x.v != masked.v, exp_(x - Vec<Real>(lse)), zero);
            Vec<Real> d = Vec<Real>::load(dp + j);
            if (a.dropped) {
              d = p.dropped(d, factors + j);
              d.store(dp + j);
            }
            e.store(s + j);
            exp_sums = exp_sums + e;
            totals = totals + select<Real>(e.v != zero.v, e * d, zero);
          });

      // A sink has a probability and no value: dP = 0.
      const Real sink = a.sinks ? std::exp(static_cast<const Real*>(a.sinks)[h] - lse) : Real(0);
      const Vec<Real> exp_sum(sum(exp_sums) + sink), total(sum(totals)), scale{Real(a.scale)};
      const Vec<Real> inverse(1 / exp_sum.v[0]);
      if (a.dsinks)
        static_cast<Real*>(a.dsinks)[row] = -sink * inverse.v[0] * inverse.v[0] * total.v[0];

      // P and the gradient of the logits. A bias needs it without the scale.
      const bool of_logits = bias || slopes;
      for (int64_t j = 0; j < n; j += LANES<Real>) {
        const Vec<Real> e = Vec<Real>::load(s + j), d = Vec<Real>::load(dp + j);
        const Vec<Real> ds = logit_gradient(e, d, exp_sum, total, inverse);
        const Vec<Real> y = select<Real>(e.v != zero.v, e * inverse, zero);  // inverse may be NaN
        (a.dropped ? p.dropped(y, factors + j) : y).store(s + j);
        (of_logits ? ds : ds * scale).store(dp + j);
      }
      end = round_up<Real>(n);
      if (bias) add_to_bias(bias, dp, b, h, i0 + i, seen);
      for (int64_t j = 0; slopes && j < end; j += LANES<Real>)
        (Vec<Real>::load(dp + j) * Vec<Real>::load(slopes + j) * scale).store(dp + j);
      for (int64_t j = 0; bias && !slopes && j < end; j += LANES<Real>)
        (Vec<Real>::load(dp + j) * scale).store(dp + j);
    }

    for (int64_t j = end; j < columns; j += LANES<Real>) {
      zero.store(s + j);
      zero.store(dp + j);
    }

    // The gradient of q times relative_keys: keys at the same clipped distance are summed.
    if (p.relative) {
      Real* dq_relative = w.dq_relative + i * p.Rp;
      memset(dq_relative, 0, p.Rp * sizeof(Real));
      p.each_distance(i0 + i + p.offset(b) - seen.base, n,
                      [&](int64_t j, int64_t r) { dq_relative[r] += dp[j]; });
    }
  }

  // Adds ds, the gradient of the logits of query i, to the gradient of the bias; sums over the keys
  // if the bias is broadcast along them.
  HD void add_to_bias(Real* bias, const Real* ds, int64_t b, int64_t h, int64_t i,
                      SeenKeys seen) const {
    const int64_t *t = a.dbias_strides, n = seen.count();
    Real* to = bias + b * t[0] + h * t[1] + i * t[2] + seen.base * t[3];
    if (t[3]) return add_row(ds, to, n, Real(1));
    Real total = 0;
    for (int64_t j = 0; j < n; ++j)
      total += ds[j];
    *to += total;
  }

  // The sums to which the queries of a unit contribute.
  struct Sums {
    Real* bias;       // in the shape of dbias, or null
    Real* table;      // (R, Dp), the gradient of relative_keys, or null
    Real* dk;         // (S, Dp)
    Real* dv;         // (S, Dp)
    int64_t written;  // rows of dk and dv that earlier blocks have added to; others are unset
  };

  // The queries from i0 on of head h, which see some of the first `keys` keys.
  HD void query_block(Workspace& w, Sums& sums, int64_t b, int64_t h, int64_t i0,
                      int64_t keys) const {
    const int64_t left = p.queries(b) - i0, rows = left < p.block_queries ? left : p.block_queries;
    const int64_t position = i0 + p.offset(b);
    const SeenKeys block = p.seen_by_block(position, rows, keys);
    const int64_t base = block.base, columns = block.count(), padded = round_up<Real>(columns);

    // The products q k^T, dout v^T and q times relative_keys.
    const auto q_rows = p.query_rows(a.q, a.q_strides, b, h, i0);
    const auto dout_rows = p.query_rows(a.dout, a.dout_strides, b, h, i0);
    p.stage_along(q_rows, rows, position, true, w.rotation, w.q);
    p.stage_along(dout_rows, rows, 0, false, w.rotation, w.dout);
    const Element *q = w.q, *dout = w.dout;
    const int64_t D = p.D_elements;
    product<Element>(rows, D, padded, {q, p.ld_along, 1}, {w.k_transposed + base, p.Sp},
                     {w.s, p.ld_logits}, false);
    product<Element>(rows, D, padded, {dout, p.ld_along, 1}, {w.v_transposed + base, p.Sp},
                     {w.dp, p.ld_logits}, false);
    if (p.relative)
      product<Element>(rows, D, p.Rp, {q, p.ld_along, 1}, {w.relative_transposed, p.Rp},
                       {w.q_relative, p.Rp}, false);

    // Through the softmax of each query.
    if (a.dropped) p.dropout_factors(b, h, i0, rows, block, w.factors);
    for (int64_t i = 0; i < rows; ++i)
      query(w, sums.bias, b, h, i0, i, p.seen(position + i, keys, base), columns);

    // dv and dk: rows that earlier blocks have written are added to, the others are written. Keys
    // between these blocks and this one, which no query has seen, get zeros.
    zero_rows(sums, base);
    const int64_t old = sums.written < block.end ? sums.written - base : columns;
    const int64_t depth_of_rows = depth<Element>(rows);
    const auto key_gradient = [&](LeftOperand<Element> left, const Element* right, Real* to) {
      to += base * p.Dp;
      product<Element>(old, depth_of_rows, p.Dp, left, {right, p.Dp}, {to, p.Dp}, true);
      product<Element>(columns - old, depth_of_rows, p.Dp, {left.p + old, 1, left.stride_k},
                       {right, p.Dp}, {to + old * p.Dp, p.Dp}, false);
    };
    const Element* q_across =
        p.also_across(q, q_rows, rows, position, true, w.rotation, w.q_across);
    if (a.dv)
      key_gradient(p.left_across(w.s, rows, p.ld_logits, columns, w.s),
                   p.also_across(dout, dout_rows, rows, 0, false, w.rotation, w.dout_across),
                   sums.dv);
    if (a.dk)
      key_gradient(p.left_across(w.dp, rows, p.ld_logits, columns, w.ds_across), q_across, sums.dk);
    sums.written = sums.written < block.end ? block.end : sums.written;

    if (sums.table)
      product<Element>(p.R, depth_of_rows, p.Dp,
                       p.left_across(w.dq_relative, rows, p.Rp, p.R, w.dq_relative_across),
                       {q_across, p.Dp}, {sums.table, p.Dp}, true);
    if (a.dq) store_dq(w, b, h, i0, rows, block);
  }
  // Zeros the rows of dk and dv up to `end` that no block has written.
  void zero_rows(Sums& sums, int64_t end) const {
    if (end <= sums.written) return;
    for (Real* rest : {sums.dk, sums.dv})
      memset(rest + sums.written * p.Dp, 0, (end - sums.written) * p.Dp * sizeof(Real));
    sums.written = end;
  }

  // dq of a block, from the gradients of the logits and of q times relative_keys.
  HD void store_dq(Workspace& w, int64_t b, int64_t h, int64_t i0, int64_t rows,
                   SeenKeys block) const {
    const Element* k = (Problem::PAIRS ? w.k_across : w.k) + block.base / NUMBERS<Element> * p.Dp;
    const int64_t columns = block.count();
    product<Element>(rows, depth<Element>(columns), p.Dp,
                     p.left_along(w.dp, rows, p.ld_logits, columns), {k, p.Dp}, {w.dq, p.Dp},
                     false);
    if (p.relative)
      product<Element>(rows, depth<Element>(p.R), p.Dp,
                       p.left_along(w.dq_relative, rows, p.Rp, p.R), {w.relative, p.Dp},
                       {w.dq, p.Dp}, true);
    for (int64_t i = 0; i < rows; ++i) {
      Real* dq = w.dq + i * p.Dp;
      p.rotate(dq, i0 + i + p.offset(b), Real(-1));
      const int64_t row = p.first_query(b) + i0 + i;
      Stored* to =
          static_cast<Stored*>(a.dq) + b * a.dq_strides[0] + row * a.dq_strides[1] + h * a.D;
      p.store_row(dq, to, a.D, Real(1));
    }
  }

  // Stages the keys and values of batch row b and key head g.
  void stage_unit(Workspace& w, int64_t b, int64_t g) const {
    const int64_t keys = p.keys(b);
    const auto k_rows = p.key_rows(a.k, a.k_strides, b, g);
    p.stage_along(k_rows, keys, 0, true, w.rotation, w.k);
    p.transpose_rows(w.k, keys, p.Sp, w.k_transposed);
    p.also_across(w.k, k_rows, keys, 0, true, w.rotation, w.k_across);
    p.stage_along(p.key_rows(a.v, a.v_strides, b, g), keys, 0, false, w.rotation, w.v);
    p.transpose_rows(w.v, keys, p.Sp, w.v_transposed);
  }

  // One chunk of the query blocks of batch row b and key head g, for all query heads of the group.
  void unit(Workspace& w, Sums& sums, int64_t b, int64_t g, int64_t chunk) const {
    const int64_t L = p.queries(b), blocks = (L + p.block_queries - 1) / p.block_queries,
                  keys = p.keys(b);
    const int64_t i_begin = blocks * chunk / split.chunks * p.block_queries;
    const int64_t i_end = blocks * (chunk + 1) / split.chunks * p.block_queries;
    for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h)
      for (int64_t i0 = i_begin; i0 < i_end && i0 < L; i0 += p.block_queries)
        query_block(w, sums, b, h, i0, keys);

    zero_rows(sums, p.stored_keys(b));  // that no query of the chunk sees
  }

  // Stores x (S, Dp), dk or dv of a unit; dk is rotated back first.
  void store_keys(int64_t unit, Real* x, void* to, bool rotated) const {
    const int64_t b = unit / a.N_kv, g = unit % a.N_kv, first = p.first_key(b);
    for (int64_t j = 0; to && j < p.stored_keys(b); ++j) {
      if (rotated) p.rotate(x + j * p.Dp, j, Real(-1));
      p.store_row(
          x + j * p.Dp,
          static_cast<Stored*>(to) + b * a.dk_strides[0] + (first + j) * a.dk_strides[1] + g * a.D,
          a.D, Real(1));
    }
  }

 public:
  AttentionBackward(const cpu::Attention& a, int threads)
      : a(a),
        split(work_split(threads)),
        biases(bias_copies ? a.dbias_size * split.parts : 0),
        tables(table_size * split.parts),
        dks(key_size * split.units * split.chunks),
        dvs(key_size * split.units * split.chunks) {}

  void run(cpu::Parallel run) {
    if (a.dbias) memset(a.dbias, 0, a.dbias_size * sizeof(Real));
    if (bias_copies) memset(biases, 0, a.dbias_size * split.parts * sizeof(Real));
    if (table_size) memset(tables, 0, table_size * split.parts * sizeof(Real));
    split.each(run, [&](int64_t part, int64_t first, int64_t last) {
      Workspace w(p);
      Real* bias = bias_copies ? biases + part * a.dbias_size : static_cast<Real*>(a.dbias);
      Real* table = table_size ? tables + part * table_size : nullptr;
      p.stage_relative_keys(w.relative, w.relative_transposed);
      for (int64_t item = first; item < last; ++item) {
        const int64_t u = unit_of(item);
        if (item == first || item % split.chunks == 0) stage_unit(w, u / a.N_kv, u % a.N_kv);
        Real* dk = key_size ? dks + item * key_size : (Real*)w.dk;
        Real* dv = key_size ? dvs + item * key_size : (Real*)w.dv;
        Sums sums{bias, table, dk, dv, 0};
        unit(w, sums, u / a.N_kv, u % a.N_kv, item % split.chunks);
        if (!key_size) {
          store_keys(u, dk, a.dk, true);
          store_keys(u, dv, a.dv, false);
        }
      }
    });
    add_copies(run);
  }

 private:
  WorkSplit work_split(int threads) const {
    const int64_t units = a.B * a.N_kv, blocks = (a.L + p.block_queries - 1) / p.block_queries;
    const double work = 5 * p.multiply_adds();
    WorkSplit split(units, blocks, work, threads, WorkSplit::chunks_of_a_sum(units, blocks, work),
                    (a.dbias && !by_head) || a.drelative_keys, work_before(p));
    if (by_head) split.own_whole(a.B);  // there is one chunk, since there are many units
    return split;
  }

  // Returns the unit of an item of work.
  int64_t unit_of(int64_t item) const {
    return by_head ? item % a.B * a.N_kv + item / a.B : item / split.chunks;
  }

  // Adds up the copies of dk, dv, dbias and drelative_keys. Of each unit one item of work adds
  // those of dk and one those of dv.
  void add_copies(cpu::Parallel run) {
    if (key_size)
      parallel(run, 2 * split.units, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t u = item / 2;
          const bool is_key = item % 2 == 0;
          Real* sum = (is_key ? (Real*)dks : (Real*)dvs) + u * split.chunks * key_size;
          add_parts((const Real*)sum + key_size, split.chunks - 1, key_size, sum);
          store_keys(u, sum, is_key ? a.dk : a.dv, is_key);
        }
        stream_fence();
      });
    if (bias_copies)
      add_parts((const Real*)biases, split.parts, a.dbias_size, static_cast<Real*>(a.dbias));
    if (!table_size) return;
    add_parts(tables + table_size, split.parts - 1, table_size, (Real*)tables);
    for (int64_t r = 0; r < p.R; ++r)
      memcpy(static_cast<Real*>(a.drelative_keys) + r * a.D, tables + r * p.Dp, a.D * sizeof(Real));
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
