// The sum of a value over the threads of a block.
#pragma once
#include <cuda_runtime.h>

namespace fusedseq::cuda {

// Returns the sum in thread 0, always added in the same order; other threads get a partial sum. A
// second call in the same block needs a barrier before it, because it reuses the shared memory.
template <int THREADS>
static __device__ double block_sum(double value) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    // The other half must have written its sums before they are read.
    __syncthreads();
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  // Not sums[0]: thread 0 may not have written it yet.
  return sums[threadIdx.x];
}

}  // namespace fusedseq::cuda
