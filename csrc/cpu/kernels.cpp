// Compiled once per instruction set, with FUSEDSEQ_ISA naming it; dispatch.cpp chooses among them at run time.
#include "kernels.h"

#include "attention_backward.h"
#include "attention_packed.h"
#include "attention_thin.h"
#include "bias_activation_dropout.h"
#include "linear.h"
#include "linear_cross_entropy.h"
#include "nt_asgd.h"
#include "recurrence_backward.h"
#include "residual_layer_norm.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T> static void recurrence(const cpu::Recurrence<T>& r, cpu::Parallel run, int threads) {
  const auto go = [&](auto&& forward) {
    parallel(run, threads, [&](int64_t begin, int64_t end) { forward.run(begin, end); });
  };
  r.cap_input_gate ? go(Forward<T, true>(r, threads)) : go(Forward<T, false>(r, threads));
}

template <class T> static void recurrence_backward(const cpu::RecurrenceBackward<T>& r, cpu::Parallel run, int threads) {
  const auto go = [&](auto&& backward) {
    parallel(run, threads, [&](int64_t begin, int64_t end) { backward.run(begin, end); });
  };
  r.forward.cap_input_gate ? go(Backward<T, true>(r, threads)) : go(Backward<T, false>(r, threads));
}

template <class E> static cpu::AttentionKernel attention_kernel(const cpu::Attention& a) {
  return packed_takes<E>(a) ? cpu::AttentionKernel::packed : thin_takes<E>(a) ? cpu::AttentionKernel::thin : cpu::AttentionKernel::rows;
}
template <class E> static void attention_type(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  const cpu::AttentionKernel kernel = attention_kernel<E>(a);
  if (kernel == cpu::AttentionKernel::packed) return attention_packed<E>(a, run, threads, forward);
  if (kernel == cpu::AttentionKernel::thin && forward) return attention_thin<E>(a, run, threads);
  forward ? attention_rows<E>(a, run, threads) : AttentionBackward<E>(a, threads).run(run);
}
static void attention_any(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  switch (a.type) {
    case cpu::Type::f32: return attention_type<float>(a, run, threads, forward);
    case cpu::Type::f64: return attention_type<double>(a, run, threads, forward);
    case cpu::Type::bf16: return attention_type<bfloat16>(a, run, threads, forward);
  }
}
static void attention(const cpu::Attention& a, cpu::Parallel run, int threads) { attention_any(a, run, threads, true); }
static void attention_backward(const cpu::Attention& a, cpu::Parallel run, int threads) { attention_any(a, run, threads, false); }
template <class E> static cpu::AttentionPlan attention_plan_of(const cpu::Attention& a) {
  return {attention_kernel<E>(a), AttentionProblem<E>{a}.block};
}
static cpu::AttentionPlan attention_plan(const cpu::Attention& a) {
  switch (a.type) {
    case cpu::Type::f64: return attention_plan_of<double>(a);
    case cpu::Type::bf16: return attention_plan_of<bfloat16>(a);
    default: return attention_plan_of<float>(a);
  }
}

// C (M, N) = A (M, K) W^T, W (N, K) packed once and multiplied `repeats` times: the rate of the product inside the
// recurrence, for the benchmark's roofline. Returns the floating-point operations of the products.
static double gemm_f32(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C, int64_t repeats,
                       cpu::Parallel run, int threads) {
  Buffer<float> packed(packed_size<float>(K, N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<float>(N, begin, end, threads);
    pack(W + own.begin * K, 1, K, K, own.size(), packed + K * own.begin);
    for (int64_t i = 0; i < repeats; ++i)
      gemm(M, K, A, K, (const float*)packed + K * own.begin, own.size(), C + own.begin, N, false, false);
  });
  return 2. * double(M) * double(N) * double(K) * double(repeats);
}

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
