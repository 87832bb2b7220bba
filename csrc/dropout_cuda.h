// What csrc/dropout.cu gives csrc/dropout.cpp.
#pragma once
#include <cstdint>

#include "cuda_type.h"

namespace fusedseq::cuda {

struct Dropout {
  Type type;
  int64_t T, B, D;
  const void* x;        // (T, B, D)
  void* y;              // (T, B, D)
  const int64_t* seed;  // on the device
  uint64_t threshold;   // round(p * 2^32)
  double scale;         // of what is kept
  bool by_row;          // the mask is (B,), else (B, D), by philox.h's rule; the same for every t
};

// A message where the kernel could not be started, else null.
const char* dropout(const Dropout& d, void* stream);

}  // namespace fusedseq::cuda
