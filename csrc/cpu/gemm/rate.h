// The benchmark of the matrix products.
#pragma once
#include "cpu/buffer.h"
#include "cpu/gemm/gemm.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// C (M, N) = A (M, K) W^T with W (N, K), which is packed once, as are bf16 pairs of A, and
// multiplied `repeats` times. The benchmarks measure with it the rate of the recurrence's product,
// as a roofline limit. Returns the number of floating-point operations of the products.
template <class Element>
double gemm_rate(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                 int64_t repeats, cpu::Parallel run, int threads) {
  const int64_t left_size = left_copy_size<Element, float>(K);
  Buffer<Element> packed(packed_size<Element>(K, N)), left_copies(left_size * threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<Element>(N, begin, end, threads);
    Element* const columns = packed + depth<Element>(K) * own.begin;
    pack(W + own.begin * K, 1, K, K, own.size(), columns);
    for (int64_t i = 0; i < repeats; ++i)
      gemm<Element, float>(M, K, own.size(), {A, K}, columns, {C + own.begin, N, false, false},
                           left_copies + left_size * begin);
  });
  return 2. * double(M) * double(N) * double(K) * double(repeats);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
