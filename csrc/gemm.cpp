// gemm_rate: the product inside the recurrence, alone, for the roofline of the benchmarks. Not a public operator.
#include "tensor.h"

namespace fusedseq {
namespace {

// x (M, K) times W (N, K) transposed, W packed once, `repeats` times: (M, N).
Tensor gemm_rate(Tensor x, Tensor W, int64_t repeats) {
  require(x.dim() == 2 && W.dim() == 2 && x.size(1) == W.size(1) && x.scalar_type() == ScalarType::Float &&
              W.scalar_type() == ScalarType::Float, "gemm_rate", "x must be (M, K) and W (N, K), float32");
  const Tensor A = dense(x), B = dense(W);
  Tensor C = output(A, {A.size(0), B.size(0)});
  cpu::kernels().gemm_f32(A.size(0), B.size(0), A.size(1), static_cast<const float*>(A.const_data_ptr()),
                          static_cast<const float*>(B.const_data_ptr()), static_cast<float*>(C.mutable_data_ptr()), repeats,
                          parallel, threads());
  return C;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) { m.def("gemm_rate(Tensor x, Tensor W, int repeats) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) { m.impl("gemm_rate", TORCH_BOX(&gemm_rate)); }

}  // namespace fusedseq
