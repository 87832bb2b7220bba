// Kernels for tests/simt/test_simt.py: two that use what the simulation supports, and others with
// one defect each that it must report.
#include <cuda_runtime.h>

namespace {

// Adds 1 to ok (1,) for each thread in which shuffles, votes, barriers and atomics work.
__global__ void features(int* ok) {
  __shared__ int squares[64];
  const int i = threadIdx.x, l = i % 32;
  squares[i] = l < 16 ? -1 : i * i;
  __syncwarp();
  if (l < 16) squares[i] = __shfl_xor_sync(0x0000ffffu, i * i, 0, 16);
  __syncthreads();
  bool good = squares[63 - i] == (63 - i) * (63 - i);
  good = good && __shfl_up_sync(~0u, l, 1) == (l ? l - 1 : 0) &&
         __shfl_down_sync(~0u, l, 2, 8) == (l % 8 < 6 ? l + 2 : l);
  good =
      good && __shfl_sync(~0u, l, 5, 16) == (l & 16) + 5 && __shfl_xor_sync(~0u, l, 3) == (l ^ 3);
  good = good && __ballot_sync(~0u, l & 1) == 0xaaaaaaaau && __all_sync(~0u, l < 32) &&
         !__any_sync(~0u, l == 40);
  good = good && __syncthreads_count(l < 4) == 8 && __syncthreads_or(i == 63) &&
         !__syncthreads_and(i == 63);
  atomicAdd(ok, int(good));
}
__global__ void largest(int* out) {  // (1,)
  atomicMax(out, int(blockIdx.x * blockDim.x + threadIdx.x));
}

// The name of each kernel below says its defect. out: (128,) zeros

__global__ void lost_update(int* out) {
  *out += 1;
}
__global__ void two_blocks(int* out) {
  out[threadIdx.x] = 42;
}
__global__ void beyond(int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x + 1] = 1;
}
__global__ void uninitialized(int* out) {
  __shared__ int s[64];
  if (threadIdx.x != 7) s[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];
}
__global__ void beyond_shared(int* out) {
  __shared__ int s[64];
  s[threadIdx.x + 1] = 1;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];
}
__global__ void write_after_read(int* out) {
  __shared__ int s[64];
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    s[threadIdx.x] = i;
    __syncthreads();
    sum += s[63 - threadIdx.x];
  }
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}
__global__ void no_syncwarp(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void two_barriers(int* out) {
  if (threadIdx.x & 1)
    __syncthreads();
  else {
    atomicAdd(out, 1);
    __syncthreads();
  }
}
__global__ void ended(int*) {
  if (threadIdx.x < 60) __syncthreads();
}
__global__ void deadlock(int*) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __syncthreads();
}
__global__ void foreign_lane(int*) {
  __any_sync(0x0000ffffu, 1);
}
__global__ void misaligned(int* out) {
  *reinterpret_cast<int4*>(out + 1) = int4{1, 2, 3, 4};
}

using Kernel = void (*)(int*);
constexpr Kernel KERNELS[] = {
    features,         largest,     lost_update,  two_blocks, beyond,   uninitialized, beyond_shared,
    write_after_read, no_syncwarp, two_barriers, ended,      deadlock, foreign_lane,  misaligned};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* probe(int kernel, int blocks,
                                                                    int threads, int* out) {
  const Kernel run = KERNELS[kernel];
  run<<<blocks, threads>>>(out);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
