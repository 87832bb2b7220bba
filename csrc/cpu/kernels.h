// The interface of the CPU kernels: csrc/ops/*.cpp fills the structs of cpu/arguments and calls the
// functions of the table `Kernels`, which csrc/cpu/kernels.cpp defines once per instruction set.
// Nothing here depends on torch.
#pragma once
#include "cpu/arguments/attention.h"
#include "cpu/arguments/losses.h"
#include "cpu/arguments/optimizer.h"
#include "cpu/arguments/pointwise.h"
#include "cpu/arguments/products.h"
#include "cpu/arguments/recurrence.h"

namespace fusedseq::cpu {

// The functions whose products multiply pairs of bfloat16 numbers and add in float, which some
// instruction sets can; see csrc/cpu/simd/bf16_pair.h. All are null in the others. Operands that
// are floats in memory are rounded to bfloat16 for the products only.
struct Bf16Kernels {
  void (*recurrence)(const Recurrence<float>*, int count, Parallel, int threads);
  void (*recurrence_backward)(const RecurrenceBackward<float>*, int count, Parallel, int threads);
  void (*linear)(const Linear<bfloat16>&, Parallel, int threads);
  void (*linear_backward)(const Linear<bfloat16>&, Parallel, int threads);
  void (*linear_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_backward_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_cross_entropy)(const LinearCrossEntropy<float, bfloat16>&, Parallel, int threads);
  void (*linear_cross_entropy_f32)(const LinearCrossEntropy<float>&, Parallel, int threads);
  void (*attention)(const Attention&, Parallel, int threads);  // of bf16 and of fp32 tensors
  void (*attention_backward)(const Attention&, Parallel, int threads);
  double (*gemm)(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                 int64_t repeats, Parallel, int threads);
};

// The functions that each instruction set provides. `threads` is the number of parts of the work.
struct Kernels {
  const char* isa;
  int vector_bytes;
  // keep[j - begin] = whether the mask keeps element j of row `row`, for j in [begin, end).
  void (*keep_mask)(const Mask&, int64_t row, int64_t S, int64_t begin, int64_t end, uint8_t* keep);
  void (*dropout)(const Dropout&, Parallel, int threads);
  void (*embedding)(const Embedding&, Parallel, int threads);
  // dW (V, E) is in the type of computing; `zeroed` says that it already contains zeros.
  void (*embedding_backward)(const Embedding&, const void* dy, void* dW, bool zeroed, Parallel,
                             int threads);
  double (*activation_regularization)(const ActivationRegularization&, Parallel, int threads);
  void (*activation_regularization_backward)(const ActivationRegularization&, double dloss,
                                             Parallel, int threads);
  // One recurrence, or two with the same cell that run at the same time; `threads` is the number of
  // parts of the work of each.
  void (*recurrence_f32)(const Recurrence<float>*, int count, Parallel, int threads);
  void (*recurrence_f64)(const Recurrence<double>*, int count, Parallel, int threads);
  void (*recurrence_backward_f32)(const RecurrenceBackward<float>*, int count, Parallel,
                                  int threads);
  void (*recurrence_backward_f64)(const RecurrenceBackward<double>*, int count, Parallel,
                                  int threads);
  void (*linear_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_f64)(const Linear<double>&, Parallel, int threads);
  void (*linear_backward_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_backward_f64)(const Linear<double>&, Parallel, int threads);
  void (*linear_int8)(const LinearInt8&, Parallel, int threads);
  Int8Rows int8_rows;
  void (*attention)(const Attention&, Parallel, int threads);
  void (*attention_backward)(const Attention&, Parallel, int threads);
  AttentionPlan (*attention_plan)(const Attention&);
  void (*residual_layer_norm)(const ResidualLayerNorm&, Parallel);
  void (*residual_layer_norm_backward)(const ResidualLayerNormBackward&, Parallel);
  void (*bias_activation_dropout)(const BiasActivationDropout&, Parallel);
  void (*linear_cross_entropy_f32)(const LinearCrossEntropy<float>&, Parallel, int threads);
  void (*linear_cross_entropy_f64)(const LinearCrossEntropy<double>&, Parallel, int threads);
  void (*scale)(const Scale&, Parallel);
  double (*nt_asgd_squares)(const NtAsgd&, Parallel);  // the sum of the squares of all gradients
  void (*nt_asgd_step)(const NtAsgd&, Parallel);
  // The benchmark of the matrix product. Returns the number of floating-point operations.
  double (*gemm_f32)(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                     int64_t repeats, Parallel, int threads);
  // The functions of kernels_bf16.cpp.
  Bf16Kernels bf16;
};

}  // namespace fusedseq::cpu
