// The operands of the matrix products in this folder.
#pragma once
#include <cstdint>

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// A row-major matrix whose rows are `ld` elements apart. T is const for an input.
template <class T>
struct Matrix {
  T* p;
  int64_t ld;
};

// A left operand with any strides: element (m, k) is p[m * stride_m + k * stride_k].
template <class T>
struct LeftOperand {
  const T* p;
  int64_t stride_m, stride_k;
};

// The result of a product.
template <class T>
struct Output {
  T* p;
  int64_t ld;
  bool whole_vectors;  // whether rows may be written up to a whole vector
  bool accumulate;     // whether the product is added to the old value
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
