// s = residual + dropout(x) and y = LayerNorm(s): one pass over memory forward, one backward. Each
// row is computed in a buffer in the L1 cache, where several loops over it cost little compared
// with Philox and memory.
//
// If the caller does not use s (post-norm), backward recomputes it from x and residual: reading two
// tensors costs as much time as writing s forward and reading it backward, and needs no memory for
// s.
//
// What limits it: memory bandwidth, and Philox where there is dropout.
#pragma once
#include "cpu/arguments/pointwise.h"
#include "cpu/pointwise/row_blocks.h"
#include "cpu/pointwise/row_dropout.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// row (D,) = residual + dropout(x) of row m. The row's mask is left in keep (D,).
template <class S, class C>
void residual_row(const cpu::ResidualLayerNorm& l, int64_t m, uint32_t* keep, C* row) {
  row_mask(l.mask, m, l.D, keep);
  drop_row(l.mask, keep, static_cast<const S*>(l.x) + m * l.D, row, l.D);
  if (l.residual) add_row(static_cast<const S*>(l.residual) + m * l.D, row, l.D, C(1));
}

// Computes the mean and the reciprocal standard deviation of a row of D elements. The row is padded
// to whole vectors; its padding is overwritten.
template <class C>
HD void row_statistics(C* row, int64_t D, C eps, C& mean, C& rstd) {
  // A first mean. If the values are far from zero, their sum rounds it.
  const int64_t padded = round_up<C>(D);
  for (int64_t j = D; j < padded; ++j)
    row[j] = 0;
  mean = sum_row<C>(D, [&](int64_t j) { return Vec<C>::load(row + j); }) / C(D);

  // The deviations from it are small, so that their sum corrects the mean without such rounding,
  // and their squares give the variance. Padding equal to the mean contributes nothing.
  for (int64_t j = D; j < padded; ++j)
    row[j] = mean;
  Vec<C> deviations(C(0)), squares(C(0));
  for (int64_t j = 0; j < D; j += LANES<C>) {
    const Vec<C> d = Vec<C>::load(row + j) - Vec<C>(mean);
    deviations = deviations + d;
    squares = squares + d * d;
  }
  const C shift = sum_lanes(deviations) / C(D);
  const C variance = sum_lanes(squares) / C(D) - shift * shift;
  mean += shift;
  rstd = C(1) / std::sqrt((variance < 0 ? C(0) : variance) + eps);
}

// Rows [begin, end).
template <class S>
void residual_layer_norm_rows(const cpu::ResidualLayerNorm& l, int64_t begin, int64_t end) {
  using C = RealOf<S>;
  const int64_t D = l.D;
  Buffer<C> row(round_up<C>(D));
  Buffer<uint32_t> keep(D);
  const ResultRows<S> results(l.y, l.M, D);
  const S* weight = static_cast<const S*>(l.weight);  // (D,) or null
  const S* bias = static_cast<const S*>(l.bias);      // (D,) or null
  for (int64_t m = begin; m < end; ++m) {
    residual_row<S>(l, m, keep, (C*)row);
    if (l.s) {
      // y is the norm of s as the caller sees it: rounded, if the type in memory is narrower.
      S* s = static_cast<S*>(l.s) + m * D;
      for (int64_t j = 0; j < D; j += LANES<C>)
        store_up_to<S>(s + j, load_up_to(row + j, D - j), D - j);
      if (sizeof(S) < sizeof(C)) scale_row_as((const S*)s, (C*)row, D, C(1));
    }

    // Mean and reciprocal standard deviation are saved for backward.
    C mean, rstd;
    row_statistics((C*)row, D, C(l.eps), mean, rstd);
    static_cast<C*>(l.mean)[m] = mean;
    static_cast<C*>(l.rstd)[m] = rstd;

    // Normalize, scale and shift.
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

// Rows [begin, end) of the gradients; dweight and dbias (D rounded up to vectors) are added to
// unless they are null. With n = (s - mean) rstd and g = dy weight, the gradient of s is
// rstd (g - mean(g) - n mean(g n)), plus ds, the gradient of the output s.
template <class S, class C>
void residual_layer_norm_backward_rows(const cpu::ResidualLayerNormBackward& b, int64_t begin,
                                       int64_t end, C* dweight, C* dbias) {
  const cpu::ResidualLayerNorm& l = b.forward;
  const int64_t D = l.D, padded = round_up<C>(D);
  Buffer<C> row(padded), g(padded);  // s, then n; and g, then the gradient of s
  Buffer<uint32_t> keep(D);
  const ResultRows<S> dresiduals(b.dresidual, l.M, D), dxs(b.dx, l.M, D);
  const S* weight = static_cast<const S*>(l.weight);  // (D,) or null
  for (int64_t m = begin; m < end; ++m) {
    // Read or recompute s. Padding equal to the mean makes n zero there; dy is zero there, too.
    if (l.s)
      scale_row_as(static_cast<const S*>(l.s) + m * D, (C*)row, D, C(1));
    else
      residual_row<S>(l, m, keep, (C*)row);
    const C mean = static_cast<const C*>(l.mean)[m], rstd = static_cast<const C*>(l.rstd)[m];
    for (int64_t j = D; j < padded; ++j)
      row[j] = mean;

    // n, g and mean(g); the gradients of weight and bias are summed on the way.
    const S* dy = static_cast<const S*>(b.dy) + m * D;  // (D,)
    const Vec<C> center(mean), scale(rstd);
    const C g_sum = sum_row<C>(D, [&](int64_t j) {
      const Vec<C> d = load_up_to(dy + j, D - j), n = (Vec<C>::load(row + j) - center) * scale;
      const Vec<C> v = weight ? d * load_up_to(weight + j, D - j) : d;
      n.store(row + j);
      v.store(g + j);
      if (dweight) (Vec<C>::load(dweight + j) + d * n).store(dweight + j);
      if (dbias) (Vec<C>::load(dbias + j) + d).store(dbias + j);
      return v;
    });
    const C g_mean = g_sum / C(D);
    if (!b.dx && !b.dresidual) continue;
    const C gn_sum =
        sum_row<C>(D, [&](int64_t j) { return Vec<C>::load(g + j) * Vec<C>::load(row + j); });
    const C gn_mean = gn_sum / C(D);

    // The gradient of s, which is that of the residual.
    const S* ds = b.ds ? static_cast<const S*>(b.ds) + m * D : nullptr;  // (D,) or null
    S* dresidual = dresiduals.row(m);                                    // (D,) or null
    for (int64_t j = 0; j < D; j += LANES<C>) {
      const Vec<C> along_n = Vec<C>::load(row + j) * Vec<C>(gn_mean);
      Vec<C> d = (Vec<C>::load(g + j) - Vec<C>(g_mean) - along_n) * scale;
      if (ds) d = d + load_up_to(ds + j, D - j);
      d.store(g + j);
      if (dresidual) store_up_to<S>(dresidual + j, d, D - j);
    }
    dresiduals.written(m);

    // Through the dropout into x. If s was recomputed, its mask is still in `keep`.
    if (!b.dx) continue;
    if (l.s) row_mask(l.mask, m, D, keep);
    drop_row(l.mask, keep, (const C*)g, dxs.row(m), D);
    dxs.written(m);
  }
}

inline void residual_layer_norm_backward(const cpu::ResidualLayerNormBackward& b,
                                         cpu::Parallel run) {
  by_type(b.forward.type, [&](auto s) {
    using S = decltype(s);
    using C = RealOf<S>;
    const int64_t D = b.forward.D;
    const RowBlocks blocks(b.forward.M, D);
    const BlockSums<C> dweight(blocks, D, b.dweight), dbias(blocks, D, b.dbias);
    parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        residual_layer_norm_backward_rows<S>(b, blocks.begin(i), blocks.end(i), dweight.of(i),
                                             dbias.of(i));
    });
    dweight.total(static_cast<C*>(b.dweight), run);
    dbias.total(static_cast<C*>(b.dbias), run);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
