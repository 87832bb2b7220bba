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
template <class Stored, class Real>
void residual_row(const cpu::ResidualLayerNorm& l, int64_t m, uint32_t* keep, Real* row) {
  row_mask(l.mask, m, l.D, keep);
  drop_row(l.mask, keep, static_cast<const Stored*>(l.x) + m * l.D, row, l.D);
  if (l.residual) add_row(static_cast<const Stored*>(l.residual) + m * l.D, row, l.D, Real(1));
}

// Computes the mean and the reciprocal standard deviation of a row of D elements. The row is padded
// to whole vectors; its padding is overwritten.
template <class Real>
HD void row_statistics(Real* row, int64_t D, Real eps, Real& mean, Real& rstd) {
  // A first mean. If the values are far from zero, their sum rounds it.
  const int64_t padded = round_up<Real>(D);
  for (int64_t j = D; j < padded; ++j)
    row[j] = 0;
  mean = sum_row<Real>(D, [&](int64_t j) { return Vec<Real>::load(row + j); }) / Real(D);

  // The deviations from it are small, so that their sum corrects the mean without such rounding,
  // and their squares give the variance. Padding equal to the mean contributes nothing.
  for (int64_t j = D; j < padded; ++j)
    row[j] = mean;
  Vec<Real> deviations(Real(0)), squares(Real(0));
  for (int64_t j = 0; j < D; j += LANES<Real>) {
    const Vec<Real> d = Vec<Real>::load(row + j) - Vec<Real>(mean);
    deviations = deviations + d;
    squares = squares + d * d;
  }
  const Real shift = sum_lanes(deviations) / Real(D);
  const Real variance = sum_lanes(squares) / Real(D) - shift * shift;
  mean += shift;
  rstd = Real(1) / std::sqrt((variance < 0 ? Real(0) : variance) + eps);
}

// Rows [begin, end).
template <class Stored>
void residual_layer_norm_rows(const cpu::ResidualLayerNorm& l, int64_t begin, int64_t end) {
  using Real = RealOf<Stored>;
  const int64_t D = l.D;
  Buffer<Real> row(round_up<Real>(D));
  Buffer<uint32_t> keep(D);
  const ResultRows<Stored> results(l.y, l.M, D);
  const Stored* weight = static_cast<const Stored*>(l.weight);  // (D,) or null
  const Stored* bias = static_cast<const Stored*>(l.bias);      // (D,) or null
  for (int64_t m = begin; m < end; ++m) {
    residual_row<Stored>(l, m, keep, (Real*)row);
    if (l.s) {
      // y is the norm of s as the caller sees it: rounded, if the type in memory is narrower.
      Stored* s = static_cast<Stored*>(l.s) + m * D;
      for (int64_t j = 0; j < D; j += LANES<Real>)
        store_up_to<Stored>(s + j, load_up_to(row + j, D - j), D - j);
      if (sizeof(Stored) < sizeof(Real)) scale_row_as((const Stored*)s, (Real*)row, D, Real(1));
    }

    // Mean and reciprocal standard deviation are saved for backward.
    Real mean, rstd;
    row_statistics((Real*)row, D, Real(l.eps), mean, rstd);
    static_cast<Real*>(l.mean)[m] = mean;
    static_cast<Real*>(l.rstd)[m] = rstd;

    // Normalize, scale and shift.
    const Vec<Real> center(mean), scale(rstd);
    Stored* y = results.row(m);
    for (int64_t j = 0; j < D; j += LANES<Real>) {
      Vec<Real> v = (Vec<Real>::load(row + j) - center) * scale;
      if (weight) v = v * load_up_to(weight + j, D - j);
      if (bias) v = v + load_up_to(bias + j, D - j);
      store_up_to<Stored>(y + j, v, D - j);
    }
    results.written(m);
  }
}

inline void residual_layer_norm(const cpu::ResidualLayerNorm& l, cpu::Parallel run) {
  by_type(l.type, [&](auto number) {
    using Stored = decltype(number);
    const RowBlocks blocks(l.M, l.D);
    parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
      residual_layer_norm_rows<Stored>(l, blocks.begin(begin), blocks.end(end - 1));
    });
  });
}

// Rows [begin, end) of the gradients; dweight and dbias (D rounded up to vectors) are added to
// unless they are null. With n = (s - mean) rstd and g = dy weight, the gradient of s is
// rstd (g - mean(g) - n mean(g n)), plus ds, the gradient of the output s.
template <class Stored, class Real>
void residual_layer_norm_backward_rows(const cpu::ResidualLayerNormBackward& b, int64_t begin,
                                       int64_t end, Real* dweight, Real* dbias) {
  const cpu::ResidualLayerNorm& l = b.forward;
  const int64_t D = l.D, padded = round_up<Real>(D);
  Buffer<Real> row(padded), g(padded);  // s, then n; and g, then the gradient of s
  Buffer<uint32_t> keep(D);
  const ResultRows<Stored> dresiduals(b.dresidual, l.M, D), dxs(b.dx, l.M, D);
  const Stored* weight = static_cast<const Stored*>(l.weight);  // (D,) or null
  for (int64_t m = begin; m < end; ++m) {
    // Read or recompute s. Padding equal to the mean makes n zero there; dy is zero there, too.
    if (l.s)
      scale_row_as(static_cast<const Stored*>(l.s) + m * D, (Real*)row, D, Real(1));
    else
      residual_row<Stored>(l, m, keep, (Real*)row);
    const Real mean = static_cast<const Real*>(l.mean)[m],
               rstd = static_cast<const Real*>(l.rstd)[m];
    for (int64_t j = D; j < padded; ++j)
      row[j] = mean;

    // n, g and mean(g); the gradients of weight and bias are summed on the way.
    const Stored* dy = static_cast<const Stored*>(b.dy) + m * D;  // (D,)
    const Vec<Real> center(mean), scale(rstd);
    const Real g_sum = sum_row<Real>(D, [&](int64_t j) {
      const Vec<Real> d = load_up_to(dy + j, D - j),
                      n = (Vec<Real>::load(row + j) - center) * scale;
      const Vec<Real> v = weight ? d * load_up_to(weight + j, D - j) : d;
      n.store(row + j);
      v.store(g + j);
      if (dweight) (Vec<Real>::load(dweight + j) + d * n).store(dweight + j);
      if (dbias) (Vec<Real>::load(dbias + j) + d).store(dbias + j);
      return v;
    });
    const Real g_mean = g_sum / Real(D);
    if (!b.dx && !b.dresidual) continue;
    const Real gn_sum = sum_row<Real>(
        D, [&](int64_t j) { return Vec<Real>::load(g + j) * Vec<Real>::load(row + j); });
    const Real gn_mean = gn_sum / Real(D);

    // The gradient of s, which is that of the residual.
    const Stored* ds = b.ds ? static_cast<const Stored*>(b.ds) + m * D : nullptr;  // (D,) or null
    Stored* dresidual = dresiduals.row(m);                                         // (D,) or null
    for (int64_t j = 0; j < D; j += LANES<Real>) {
      const Vec<Real> along_n = Vec<Real>::load(row + j) * Vec<Real>(gn_mean);
      Vec<Real> d = (Vec<Real>::load(g + j) - Vec<Real>(g_mean) - along_n) * scale;
      if (ds) d = d + load_up_to(ds + j, D - j);
      d.store(g + j);
      if (dresidual) store_up_to<Stored>(dresidual + j, d, D - j);
    }
    dresiduals.written(m);

    // Through the dropout into x. If s was recomputed, its mask is still in `keep`.
    if (!b.dx) continue;
    if (l.s) row_mask(l.mask, m, D, keep);
    drop_row(l.mask, keep, (const Real*)g, dxs.row(m), D);
    dxs.written(m);
  }
}

inline void residual_layer_norm_backward(const cpu::ResidualLayerNormBackward& b,
                                         cpu::Parallel run) {
  by_type(b.forward.type, [&](auto number) {
    using Stored = decltype(number);
    using Real = RealOf<Stored>;
    const int64_t D = b.forward.D;
    const RowBlocks blocks(b.forward.M, D);
    const BlockSums<Real> dweight(blocks, D, b.dweight), dbias(blocks, D, b.dbias);
    parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        residual_layer_norm_backward_rows<Stored>(b, blocks.begin(i), blocks.end(i), dweight.of(i),
                                                  dbias.of(i));
    });
    dweight.total(static_cast<Real*>(b.dweight), run);
    dbias.total(static_cast<Real*>(b.dbias), run);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
