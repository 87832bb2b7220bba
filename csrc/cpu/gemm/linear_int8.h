// y = x W^T + b with weights in 8 bits: row n of W is scale[n] times the whole numbers W[n].
//
// What limits it: for few rows reading W, a quarter as many bytes as in fp32. Hence two ways of
// computing y, by the number of rows M:
//   - few rows: the dot products of int8_rows.h or of int8_digits.h.
//   - all others: as in gemm.h, the numbers converted while they are packed. Complete sums are
//     multiplied by the scale.
#pragma once
#include "cpu/gemm/int8_rows.h"
#include "cpu/gemm/linear.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Columns [begin, end) of y: packs these rows of W and multiplies.
void linear_int8_panels(const cpu::LinearInt8& l, int64_t begin, int64_t end, float* packed) {
  pack(l.W + begin * l.K, 1, l.K, l.K, end - begin, packed);
  gemm_to<float, float>(l.M, l.K, end - begin, {l.x, l.K}, packed, {l.y + begin, l.N}, nullptr);
  for (int64_t m = 0; m < l.M; ++m)
    for (int64_t n = begin; n < end; n += LANES<float>) {
      const int64_t width = end - n;
      float* y = l.y + m * l.N + n;
      const Vec<float> b = l.b ? Vec<float>::load(l.b + n, width) : Vec<float>(0.f);
      (Vec<float>::load(y, width) * Vec<float>::load(l.scale + n, width) + b).store(y, width);
    }
}

void linear_int8(const cpu::LinearInt8& l, cpu::Parallel run, int threads) {
  const bool dots = l.M <= l.rows.most, few = l.M <= CHUNK_ROWS<float>;
  const int64_t panel = packed_size<float>(l.K, PANEL_COLUMNS<float>);
  // Like linear: one panel for each part if there are few rows, else all of W.
  Buffer<float> packed(dots ? 0 : few ? panel * threads : packed_size<float>(l.K, l.N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<float>(l.N, begin, end, threads);
    if (dots)
      return l.rows.multiply({l.M, l.K, own.size(), l.x, l.K, l.W + own.begin * l.K,
                              l.scale + own.begin, l.b ? l.b + own.begin : nullptr, l.y + own.begin,
                              l.N, false, false});
    const int64_t step = few ? PANEL_COLUMNS<float> : own.size();
    for (int64_t n = own.begin; n < own.end; n += step)
      linear_int8_panels(l, n, n + step < own.end ? n + step : own.end,
                         packed + (few ? panel * begin : l.K * n));
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
