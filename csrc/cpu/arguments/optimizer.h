// The arguments of a step of the optimizer NT-ASGD.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

// One parameter tensor of the optimizer. The average has the type of computing: float for bfloat16,
// because in bfloat16 a running mean soon stops changing.
struct NtAsgdTensor {
  Type type;
  int64_t n;
  const void* g;  // (n,)  the gradient
  void* p;        // (n,)  the parameter; null if only the gradient's norm is needed
  void* average;  // (n,) or null if there is no average
};

struct NtAsgd {
  const NtAsgdTensor* tensors;  // (count,)
  int64_t count;
  double clip, lr, weight_decay;
  double mu;  // 1 / (number of averaged parameters); 1 means the average starts with this step
};

}  // namespace fusedseq::cpu
