// One call of dropout, locked_dropout or weight_drop, for dropout.cpp and for the weight drop of
// the recurrences.
#pragma once
#include "ops/tensor.h"

namespace fusedseq {

struct Drop {
  const char *op, *name;  // of the operator and of x, for error messages
  Tensor x;               // (T, B, D), contiguous
  const char* p_name;     // for error messages
  double p;
  Tensor seed;
  int64_t T, B, D;
  bool variational = false;  // the mask is (B,), one value per row, in place of (B, D)
  MaskStream stream = MaskStream::single;
};

Tensor drop_cpu(const Drop& d);

}  // namespace fusedseq
