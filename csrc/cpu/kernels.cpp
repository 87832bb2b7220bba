// All CPU kernels of one instruction set. This file is compiled once per instruction set, whose
// name FUSEDSEQ_ISA is the namespace of everything that it includes; dispatch.cpp chooses one of
// the tables at run time.
#include "cpu/kernels.h"

#include "cpu/attention/attention.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/linear_int8.h"
#include "cpu/gemm/rate.h"
#include "cpu/losses/linear_cross_entropy.h"
#include "cpu/pointwise/activation_regularization.h"
#include "cpu/pointwise/bias_activation_dropout.h"
#include "cpu/pointwise/dropout.h"
#include "cpu/pointwise/embedding.h"
#include "cpu/pointwise/nt_asgd.h"
#include "cpu/pointwise/residual_layer_norm.h"
#include "cpu/pointwise/scale.h"
#include "cpu/recurrence/backward.h"
#include "cpu/recurrence/forward.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace fusedseq {
namespace FUSEDSEQ_ISA {

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
    recurrence<float, float>,
    recurrence<double, double>,
    recurrence_backward<float, float>,
    recurrence_backward<double, double>,
    linear<float, float>,
    linear<double, double>,
    linear_backward<float, float>,
    linear_backward<double, double>,
    linear_int8,
    {product_of_int8_rows, MAX_DOT_ROWS},
    attention<true>,
    attention<false>,
    attention_plan,
    residual_layer_norm,
    residual_layer_norm_backward,
    bias_activation_dropout,
    linear_cross_entropy<float, float, float>,
    linear_cross_entropy<double, double, double>,
    scale,
    nt_asgd_squares,
    nt_asgd_step,
    gemm_rate<float>,
    {},
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
