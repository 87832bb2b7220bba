// The weights of a recurrence as its engines take them. Functions return a message where something failed, else null.
#pragma once
#include "product.h"
#include "recurrence_cuda.h"

namespace fusedseq::cuda {

// A (rows, columns) matrix under a mask, by element or by row; what pads a row up to `padded` is zeroed. In place, too.
struct MaskedCopy {
  Type type;
  const void* from;
  void* to;
  int64_t rows, columns, padded, from_stride, to_stride;
  Mask mask;
  bool by_row;
  const int64_t* seed;
};
const char* masked_copy(const MaskedCopy& m, void* stream);

// A low rank's factors multiplied out, each pair once: sets r.Q to matrices in the workspace of that many bytes.
int64_t multiplied_out_bytes(const Recurrence& r);
const char* multiply_out(Recurrence& r, const Product& product, void* workspace);

}  // namespace fusedseq::cuda
