// residual + dropout(x) and LayerNorm over it: one pass over memory forward, one backward. A row is computed in a
// buffer in the cache, where the loops over it cost little beside Philox and memory.
//
// Where the caller wants no s (post-norm) the backward makes it again from x and residual: reading two tensors there
// costs as much as writing s forward and reading it back, without the memory.
#pragma once
#include "rows.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// s = residual + dropout(x) of row m in `row`; `keep` gets the row's mask.
template <class S, class C> void residual_row(const cpu::ResidualLayerNorm& l, int64_t m, uint32_t* keep, C* row) {
  row_mask(l.mask, m, l.D, keep);
  drop_row(l.mask, keep, static_cast<const S*>(l.x) + m * l.D, row, l.D);
  if (l.residual) add_row(static_cast<const S*>(l.residual) + m * l.D, row, l.D, C(1));
}

template <class S> void residual_layer_norm_rows(const cpu::ResidualLayerNorm& l, int64_t begin, int64_t end) {
  using C = typename Compute<S>::type;
  const int64_t D = l.D, padded = round_up<C>(D);
  Buffer<C> row(padded);
  Buffer<uint32_t> keep(D);
  const ResultRows<S> results(l.y, l.M, D);
  const S *weight = static_cast<const S*>(l.weight), *bias = static_cast<const S*>(l.bias);
  for (int64_t m = begin; m < end; ++m) {
    residual_row<S>(l, m, keep, (C*)row);
    if (l.s) {  // y is the norm of the s that is given out, also where that is rounded
      S* s = static_cast<S*>(l.s) + m * D;
      for (int64_t j = 0; j < D; j += LANES<C>) store_up_to<S>(s + j, load_up_to(row + j, D - j), D - j);
      if (sizeof(S) < sizeof(C)) scale_row_as((const S*)s, (C*)row, D, C(1));
    }
    for (int64_t j = D; j < padded; ++j) row[j] = 0;
    // Far from zero the sum rounds the mean; the sum of what is left around it does not.
    C mean = sum_row<C>(D, [&](int64_t j) { return Vec<C>::load(row + j); }) / C(D);
    for (int64_t j = D; j < padded; ++j) row[j] = mean;
    Vec<C> left(C(0)), squares(C(0));
    for (int64_t j = 0; j < D; j += LANES<C>) {
      const Vec<C> d = Vec<C>::load(row + j) - Vec<C>(mean);
      left = left + d, squares = squares + d * d;
    }
    const C shift = sum_lanes(left) / C(D), variance = sum_lanes(squares) / C(D) - shift * shift;
    mean += shift;
    const C rstd = C(1) / std::sqrt((variance < 0 ? C(0) : variance) + C(l.eps));
    static_cast<C*>(l.mean)[m] = mean, static_cast<C*>(l.rstd)[m] = rstd;
    const Vec<C> center(mean), scale(rstd);
    S* y = results.row(m);
    for (int64_t j = 0; j < D; j += LANES<C>) {
      Vec<C> v = (Vec<C>::load(row + j) - center) * scale;
      if (weight) v = v * load_up_to(weight + j, D - j);
      if (bias) v = v + load_up_to(bias + j, D - j);
      store_up_to<S>(y + j, v, D - j);
    }
    results.written(m);
  }
}

inline void residual_layer_norm(const cpu::ResidualLayerNorm& l, cpu::Parallel run) {
  by_type(l.type, [&](auto s) {
    using S = decltype(s);
    const RowBlocks blocks(l.M, l.D);
    parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
      residual_layer_norm_rows<S>(l, blocks.begin(begin), blocks.end(end - 1));
    });
  });
}

// With n = (s - mean) rstd and g = dy weight, over a row: ds = rstd (g - mean(g) - n mean(g n)), plus the ds from above.
template <class S, class C>
void residual_layer_norm_backward_rows(const cpu::ResidualLayerNormBackward& b, int64_t begin, int64_t end, C* dweight, C* dbias) {
  const cpu::ResidualLayerNorm& l = b.forward;
  const int64_t D = l.D, padded = round_up<C>(D);
  Buffer<C> row(padded), g(padded);
  Buffer<uint32_t> keep(D);
  const ResultRows<S> dresiduals(b.dresidual, l.M, D), dxs(b.dx, l.M, D);
  const S* weight = static_cast<const S*>(l.weight);
  for (int64_t m = begin; m < end; ++m) {
    if (l.s) scale_row_as(static_cast<const S*>(l.s) + m * D, (C*)row, D, C(1));
    else residual_row<S>(l, m, keep, (C*)row);
    const C mean = static_cast<const C*>(l.mean)[m], rstd = static_cast<const C*>(l.rstd)[m];
    for (int64_t j = D; j < padded; ++j) row[j] = mean;  // past the row n and dy are 0
    const S* dy = static_cast<const S*>(b.dy) + m * D;
    const Vec<C> center(mean), scale(rstd);
    const C g_mean = sum_row<C>(D, [&](int64_t j) {
      const Vec<C> d = load_up_to(dy + j, D - j), n = (Vec<C>::load(row + j) - center) * scale;
      const Vec<C> v = weight ? d * load_up_to(weight + j, D - j) : d;
      n.store(row + j);
      v.store(g + j);
      if (dweight) (Vec<C>::load(dweight + j) + d * n).store(dweight + j);
      if (dbias) (Vec<C>::load(dbias + j) + d).store(dbias + j);
      return v;
    }) / C(D);
    if (!b.dx && !b.dresidual) continue;
    const C gn_mean = sum_row<C>(D, [&](int64_t j) { return Vec<C>::load(g + j) * Vec<C>::load(row + j); }) / C(D);
    const S* ds = b.ds ? static_cast<const S*>(b.ds) + m * D : nullptr;
    S* dresidual = dresiduals.row(m);
    for (int64_t j = 0; j < D; j += LANES<C>) {
      Vec<C> d = (Vec<C>::load(g + j) - Vec<C>(g_mean) - Vec<C>::load(row + j) * Vec<C>(gn_mean)) * scale;
      if (ds) d = d + load_up_to(ds + j, D - j);
      d.store(g + j);
      if (dresidual) store_up_to<S>(dresidual + j, d, D - j);
    }
    dresiduals.written(m);
    if (!b.dx) continue;
    if (l.s) row_mask(l.mask, m, D, keep);
    drop_row(l.mask, keep, (const C*)g, dxs.row(m), D);
    dxs.written(m);
  }
}

inline void residual_layer_norm_backward(const cpu::ResidualLayerNormBackward& b, cpu::Parallel run) {
  by_type(b.forward.type, [&](auto s) {
    using S = decltype(s);
    using C = typename Compute<S>::type;
    const RowBlocks blocks(b.forward.M, b.forward.D);
    const BlockSums<C> dweight(blocks, b.forward.D, b.dweight), dbias(blocks, b.forward.D, b.dbias);
    parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        residual_layer_norm_backward_rows<S>(b, blocks.begin(i), blocks.end(i), dweight.of(i), dbias.of(i));
    });
    dweight.total(static_cast<C*>(b.dweight), run);
    dbias.total(static_cast<C*>(b.dbias), run);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
