// Whether matrix products on the CPU multiply bfloat16 numbers.
#pragma once
#include "ops/tensor.h"

namespace fusedseq {

// Whether torch's setting for the precision of products of fp32 tensors on the CPU is bf16: after
// torch.set_float32_matmul_precision("medium"), or with
// torch.backends.mkldnn.matmul.fp32_precision.
bool float32_products_in_bf16();

// Whether the products of a call with tensors of this type on the CPU multiply pairs of bfloat16
// numbers: those of bf16 tensors do where the processor can, those of fp32 tensors where torch's
// setting allows it, too.
inline bool multiplies_in_bf16(ScalarType type) {
  if (!cpu::kernels().bf16.linear) return false;
  return type == ScalarType::BFloat16 || (type == ScalarType::Float && float32_products_in_bf16());
}

}  // namespace fusedseq
