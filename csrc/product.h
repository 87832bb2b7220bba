// Matrix products that the CUDA code leaves to others: to the vendor's library by way of torch, in tests/simt to plain
// loops.
#pragma once
#include <cstdint>

#include "cuda_type.h"

namespace fusedseq::cuda {

struct Matrix {
  Type type;
  void* data;
  int64_t rows, columns, row_stride, column_stride;  // strides in elements
  Matrix transposed() const { return {type, data, columns, rows, column_stride, row_stride}; }
};

// A matrix of rows `stride` elements apart; what is only read is const for the caller.
inline Matrix matrix(Type type, const void* data, int64_t rows, int64_t columns, int64_t stride) {
  return {type, const_cast<void*>(data), rows, columns, stride, 1};
}

// out = a b, summed in fp32 (fp64) at least; out may be fp32 where a and b are of 16 bits. A message, or null.
struct Product {
  void* context;
  const char* (*run)(void* context, const Matrix& a, const Matrix& b, const Matrix& out);
  const char* operator()(const Matrix& a, const Matrix& b, const Matrix& out) const { return run(context, a, b, out); }
};

}  // namespace fusedseq::cuda
