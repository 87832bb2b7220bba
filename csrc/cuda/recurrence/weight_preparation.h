// Kernels and products that prepare the weights of a recurrence before the loop over time.
// Functions return an error message, or null.
#pragma once
#include "cuda/product.h"
#include "cuda/recurrence/arguments.h"

namespace fusedseq::cuda {

// Copies a (rows, columns) matrix and applies a mask to it: one element an element, or one a row if
// `mask_rows`. Elements of a row from `columns` to `padded` are set to zero. May be in place.
struct MaskedCopy {
  Type type;
  const void* from;
  void* to;
  int64_t rows, columns, padded;
  int64_t from_stride, to_stride;  // elements between rows
  Mask mask;
  bool mask_rows;
  const int64_t* seed;
};
const char* masked_copy(const MaskedCopy& m, void* stream);

// With a low rank, computes Q[k] = A[k] F[k], once for each distinct pair, in a workspace of that
// many bytes, and sets r.Q to the results. With full rank, does nothing.
int64_t multiplied_out_bytes(const Recurrence& r);
const char* multiply_out(Recurrence& r, const Product& product, void* workspace);

}  // namespace fusedseq::cuda
