// dropout, locked_dropout and weight_drop as one call, for dropout.cpp and for the recurrences, which drop their W_hh.
#pragma once
#include "tensor.h"

namespace fusedseq {

// x, dense, as a (T, B, D) tensor; the mask is (B, D), or (B,) by row, under the key *seed + stream.
struct Drop {
  const char* op;
  Tensor x;
  double p;
  Tensor seed;
  int64_t T, B, D;
  bool by_row = false;
  uint64_t stream = 0;
};

Tensor drop_cpu(const Drop& d);

}  // namespace fusedseq
