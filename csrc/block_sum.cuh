// A sum over the threads of a block.
#pragma once
#include <cuda_runtime.h>

namespace fusedseq::cuda {

// In thread 0, always in the same order. A block that takes a second one needs a barrier between the two.
template <int THREADS> static __device__ double block_sum(double value) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[threadIdx.x];  // not sums[0], which thread 0 may not have written yet
}

}  // namespace fusedseq::cuda
