// Matrix products that the CUDA code does not compute itself: the vendor's library does, through
// torch (csrc/ops/vendor_product.cpp), or plain loops in tests/simt.
#pragma once
#include <cstdint>

#include "cuda/type.h"

namespace fusedseq::cuda {

struct Matrix {
  Type type;
  void* data;
  int64_t rows, columns, row_stride, column_stride;  // strides in elements
  Matrix transposed() const { return {type, data, columns, rows, column_stride, row_stride}; }
};

// A row-major matrix with rows `stride` elements apart. `data` is const, so that callers can pass a
// matrix that a product only reads.
inline Matrix matrix(Type type, const void* data, int64_t rows, int64_t columns, int64_t stride) {
  return {type, const_cast<void*>(data), rows, columns, stride, 1};
}

// Computes out = a b, summed in fp32 or better (fp64 for fp64). `out` may be fp32 where a and b are
// of 16 bits. Returns an error message, or null.
struct Product {
  void* context;
  const char* (*run)(void* context, const Matrix& a, const Matrix& b, const Matrix& out);
  const char* operator()(const Matrix& a, const Matrix& b, const Matrix& out) const {
    return run(context, a, b, out);
  }
};

}  // namespace fusedseq::cuda
