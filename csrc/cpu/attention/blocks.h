// Attention by blocks of queries, for any shape. A unit of work is one (batch row, key head). The
// logits of a block of queries against all keys of the unit are computed at once and stay in the L2
// cache, so that the softmax is a plain one, not the online softmax of flash attention.
//
// Layout: keys and values are staged once per unit (see problem.h), the keys also transposed. Every
// product then runs on the register tile without packing.
//
// What limits it: for short sequences memory bandwidth (L = S = 6, D = 32 reads and writes 3 KB for
// 9,216 multiply-adds); from about 50 keys on, the products.
#pragma once
#include "cpu/attention/operands.h"
#include "cpu/attention/work_split.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Stored, class Element>
class AttentionBlocks {
  using Real = RealOf<Element>;
  using Problem = AttentionOperands<Stored, Element>;
  const cpu::Attention& a;
  const Problem p{a};
  const WorkSplit split;

  // The memory of one thread.
  struct Workspace {
    Buffer<Element> k;             // (S, ld_along)  along
    Buffer<Element> k_transposed;  // (ld_along, Sp)
    Buffer<Element> v;             // (depth(S), Dp)  across
    Buffer<Element> q;             // (block, ld_along)  along
    Buffer<Real> s;                // (block, ld_logits)  logits, then unnormalized probabilities
    Buffer<Real> out;              // (block, Dp)
    Buffer<Real> factors;          // (block, ld_factors)  the dropout's factors
    Buffer<Real> normalizers;      // (block,)
    Buffer<Real> rotation;         // the workspace of staging
    Buffer<Element> relative;      // (depth(R), Dp)  across
    Buffer<Element> relative_transposed;  // (ld_along, Rp)
    Buffer<Real> q_relative;              // (block, Rp)  q times relative_keys
    explicit Workspace(const Problem& p)
        : k(p.a.S * p.ld_along),
          k_transposed(p.ld_along * p.Sp),
          v(depth<Element>(p.a.S) * p.Dp),
          q(p.block_queries * p.ld_along),
          s(p.block_queries * p.ld_logits),
          out(p.block_queries * p.Dp),
          factors(p.a.dropped ? p.block_queries * p.ld_factors + LANES<Real> : 0),
          normalizers(p.block_queries),
          rotation(p.rotation_size),
          relative(p.relative_size),
          relative_transposed(p.relative ? p.ld_along * p.Rp : 0),
          q_relative(p.relative ? p.block_queries * p.Rp : 0) {}
  };

  // The queries from i0 on of head h, which see some of the first `keys` keys.
  HD void query_block(Workspace& w, int64_t b, int64_t h, int64_t i0, int64_t keys) const {
    const int64_t left = p.queries(b) - i0, rows = left < p.block_queries ? left : p.block_queries;
    const int64_t position = i0 + p.offset(b);
    const SeenKeys block = p.seen_by_block(position, rows, keys);
    const int64_t columns = block.count();

    // The products with the keys and with the relative keys.
    const LeftOperand<Element> q = p.left_queries(b, h, i0, rows, w.rotation, w.q);
    product<Element>(rows, p.D_elements, round_up<Real>(columns), q,
                     {w.k_transposed + block.base, p.Sp}, {w.s, p.ld_logits}, false);
    if (p.relative)
      product<Element>(rows, p.D_elements, p.Rp, q, {w.relative_transposed, p.Rp},
                       {w.q_relative, p.Rp}, false);

    // The softmax of each query. It is normalized after the product with the values, where a row
    // has D elements instead of S.
    if (a.dropped) p.dropout_factors(b, h, i0, rows, block, w.factors);
    for (int64_t i = 0; i < rows; ++i) {
      Real* s = w.s + i * p.ld_logits;
      const SeenKeys seen = p.seen(position + i, keys, block.base);
      w.normalizers[i] = p.softmax(s, w.q_relative + i * p.Rp, w.factors + i * p.ld_factors, b, h,
                                   i0 + i, seen, columns);
    }

    // The product with the values.
    const LeftOperand<Element> probabilities = p.left_along(w.s, rows, p.ld_logits, columns);
    const Element* v = w.v + block.base / NUMBERS<Element> * p.Dp;
    product<Element>(rows, depth<Element>(columns), p.Dp, probabilities, {v, p.Dp}, {w.out, p.Dp},
                     false);
    for (int64_t i = 0; i < rows; ++i) {
      Stored* out = static_cast<Stored*>(a.out) + ((p.first_result(b) + i0 + i) * a.N + h) * a.D;
      p.store_row(w.out + i * p.Dp, out, a.D, w.normalizers[i]);
    }
  }

  // One chunk of the query blocks of batch row b and key head g, for all query heads of the group.
  HD void unit(Workspace& w, int64_t b, int64_t g, int64_t chunk) const {
    const int64_t L = p.queries(b), blocks = (L + p.block_queries - 1) / p.block_queries,
                  keys = p.keys(b);
    const int64_t i_begin = blocks * chunk / split.chunks * p.block_queries;
    const int64_t i_end = blocks * (chunk + 1) / split.chunks * p.block_queries;
    if (i_begin == i_end) return;
    p.stage_along(p.key_rows(a.k, a.k_strides, b, g), keys, 0, true, w.rotation, w.k);
    p.transpose_rows(w.k, keys, p.Sp, w.k_transposed);
    p.stage_across(p.key_rows(a.v, a.v_strides, b, g), keys, 0, false, w.rotation, w.v);
    for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h)
      for (int64_t i0 = i_begin; i0 < i_end && i0 < L; i0 += p.block_queries)
        query_block(w, b, h, i0, keys);
  }

 public:
  AttentionBlocks(const cpu::Attention& a, int threads)
      : a(a),
        split(a.B * a.N_kv, (a.L + p.block_queries - 1) / p.block_queries, 2 * p.multiply_adds(),
              threads, 0, false, work_before(p)) {}

  void run(cpu::Parallel run) const {
    split.each(run, [&](int64_t, int64_t first, int64_t last) {
      Workspace w(p);
      p.stage_relative_keys(w.relative, w.relative_transposed);
      for (int64_t item = first; item < last; ++item) {
        const int64_t u = item / split.chunks;
        unit(w, u / a.N_kv, u % a.N_kv, item % split.chunks);
      }
    });
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
