// The kernels whose products multiply pairs of bfloat16 numbers, and on x86 the product with
// weights in 8 bits by dot products of bytes. This file is compiled for each instruction set that
// has such an instruction, under a name of its own; dispatch.cpp adds the functions to the table of
// the wider set that they belong to.
#include "cpu/attention/attention.h"
#include "cpu/gemm/int8_digits.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/rate.h"
#include "cpu/kernels.h"
#include "cpu/losses/linear_cross_entropy.h"
#include "cpu/recurrence/backward.h"
#include "cpu/recurrence/forward.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// In the order of the fields of cpu::Bf16Kernels.
extern const cpu::Bf16Kernels kernels;
const cpu::Bf16Kernels kernels = {
    recurrence<bf16_pair, float>,
    recurrence_backward<bf16_pair, float>,
    linear<bf16_pair, bfloat16>,
    linear_backward<bf16_pair, bfloat16>,
    linear<bf16_pair, float>,
    linear_backward<bf16_pair, float>,
    linear_cross_entropy<bf16_pair, float, bfloat16>,
    linear_cross_entropy<bf16_pair, float, float>,
    attention_in_pairs<true>,
    attention_in_pairs<false>,
    gemm_rate<bf16_pair>,
};

#ifdef __AVX512VNNI__
extern const cpu::Int8Rows int8_rows;
const cpu::Int8Rows int8_rows = {product_of_digits, MAX_DIGIT_ROWS};
#endif

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
