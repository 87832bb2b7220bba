// All CPU kernels of one instruction set. This file is compiled once per instruction set, whose
// name FUSEDSEQ_ISA is the namespace of everything that it includes; dispatch.cpp chooses one of
// the tables at run time.
#include "cpu/kernels.h"

#include "cpu/attention/attention.h"
#include "cpu/gemm/linear.h"
#include "cpu/losses/linear_cross_entropy.h"
#include "cpu/pointwise/activation_regularization.h"
#include "cpu/pointwise/bias_activation_dropout.h"
#include "cpu/pointwise/dropout.h"
#include "cpu/pointwise/embedding.h"
#include "cpu/pointwise/nt_asgd.h"
#include "cpu/pointwise/residual_layer_norm.h"
#include "cpu/recurrence/backward.h"
#include "cpu/recurrence/forward.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// C (M, N) = A (M, K) W^T with W (N, K), which is packed once and multiplied `repeats` times. The
// benchmarks measure with it the rate of the recurrence's product, as a roofline limit. Returns the
// number of floating-point operations of the products.
static double gemm_f32(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                       int64_t repeats, cpu::Parallel run, int threads) {
  Buffer<float> packed(packed_size<float>(K, N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<float>(N, begin, end, threads);
    pack(W + own.begin * K, 1, K, K, own.size(), packed + K * own.begin);
    for (int64_t i = 0; i < repeats; ++i)
      gemm<float>(M, K, own.size(), {A, K}, packed + K * own.begin,
                  {C + own.begin, N, false, false});
  });
  return 2. * double(M) * double(N) * double(K) * double(repeats);
}

// In the order of the fields of cpu::Kernels.
extern const cpu::Kernels kernels;
const cpu::Kernels kernels = {
    STRING(FUSEDSEQ_ISA),
    VECTOR_BYTES,
    keep_mask,
    dropout,
    embedding,
    embedding_backward,
    activation_regularization,
    activation_regularization_backward,
    recurrence<float>,
    recurrence<double>,
    recurrence_backward<float>,
    recurrence_backward<double>,
    linear<float>,
    linear<double>,
    linear_backward<float>,
    linear_backward<double>,
    attention,
    attention_backward,
    attention_plan,
    residual_layer_norm,
    residual_layer_norm_backward,
    bias_activation_dropout,
    linear_cross_entropy<float>,
    linear_cross_entropy<double>,
    nt_asgd_squares,
    nt_asgd_step,
    gemm_f32,
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
