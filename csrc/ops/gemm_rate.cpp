// The operator gemm_rate: the recurrences' matrix product alone, from which the benchmarks take
// their roofline limit. It is not a public operator. Like them it multiplies bfloat16 numbers where
// torch's setting for fp32 products allows it.
#include "ops/precision.h"

namespace fusedseq {
namespace {

#define GEMM_INPUTS(FIELD)                          \
  FIELD(Tensor, x)        /* (M, K) */              \
  FIELD(Tensor, W)        /* (N, K), packed once */ \
  FIELD(int64_t, repeats) /* how often the product is computed */
FUSEDSEQ_DECLARE(GemmInputs, GEMM_INPUTS)
#define GEMM_OUTPUT(FIELD) FIELD(Tensor, y) /* (M, N) = x W^T */
FUSEDSEQ_DECLARE(GemmOutput, GEMM_OUTPUT)

GemmOutput gemm_rate(const GemmInputs& i) {
  const auto& [x, W, repeats] = i;
  constexpr const char* OP = "gemm_rate";
  require_dimensions(OP, "x", x, 2, "(M, K)");
  require_that(x.size(1) > 0, OP, "x", x, "(M, K) with K at least 1");
  require_dimensions(OP, "W", W, 2, "(N, K)");
  require_shape(OP, "W", W, {W.size(0), x.size(1)});
  require_dtype(OP, "x", x, ScalarType::Float);
  require_dtype(OP, "W", W, ScalarType::Float);
  require_range(OP, "repeats", repeats, 1, 1000000);
  const Tensor A = dense(x), B = dense(W);
  Tensor C = output(A, {A.size(0), B.size(0)});
  const auto& all = cpu::kernels();
  (multiplies_in_bf16(ScalarType::Float) ? all.bf16.gemm : all.gemm_f32)(
      A.size(0), B.size(0), A.size(1), static_cast<const float*>(A.const_data_ptr()),
      static_cast<const float*>(B.const_data_ptr()), static_cast<float*>(C.mutable_data_ptr()),
      repeats, parallel, threads());
  return {C};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<gemm_rate>(m, "gemm_rate");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("gemm_rate", boxed<gemm_rate>);
}

}  // namespace fusedseq
