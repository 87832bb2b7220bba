// The kernel of dropout, locked_dropout and weight_drop: dropout.cu, called by
// csrc/ops/dropout.cpp.
#pragma once
#include <cstdint>

#include "cuda/type.h"

namespace fusedseq::cuda {

struct Dropout {
  Type type;
  int64_t T, B, D;
  const void* x;        // (T, B, D)
  void* y;              // (T, B, D)
  const int64_t* seed;  // ()  on the device
  uint64_t threshold;   // round(p * 2^32)
  double scale;         // of elements that are kept
  bool mask_rows;       // the mask is (B,), else (B, D); the same for every t
};

// Returns an error message if the kernel could not be launched, else null.
const char* dropout(const Dropout& d, void* stream);

}  // namespace fusedseq::cuda
