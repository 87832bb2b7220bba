// Kernels for tests/simt/test_simt.py: blocks that wait for each other, named barriers, and matrix
// products on tensor cores. Each kernel is correct or has one defect, which must be reported.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cuda/ptx.cuh>

#include "cuda/recurrence/fp32_product.cuh"

namespace {

namespace ptx = fusedseq::cuda::ptx;
#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int THREADS = 64;
enum Defect {
  NONE,
  NO_BARRIER,
  NO_RELEASE,
  NO_WAIT,
  NO_ACQUIRE,
  NO_SYNCWARP,
  NO_SECOND_BARRIER,
  NO_FENCE,
  NO_SECOND_FENCE,
  NO_STORE,
  TOO_FAR
};

template <class... P, class... A>
const char* launch(void (*kernel)(P...), int blocks, int threads, int shared, A... arguments) {
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(blocks);
  c.blockDim = dim3(threads);
  c.dynamicSmemBytes = shared;
  c.attrs = &cooperative;
  c.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&c, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Repeats x[i] = i + the sum of x for this many steps; each block computes THREADS of the elements.
// flags: (blocks,) zeros
// x: (2, blocks * THREADS): x[0] is the initial value, x[steps % 2] the result
__global__ void exchange(Defect defect, int steps, uint32_t* flags, uint16_t* x) {
  const int n = gridDim.x * THREADS, i = blockIdx.x * THREADS + threadIdx.x,
            lane = threadIdx.x % 32;
  for (int t = 1; t <= steps; ++t) {
    const uint16_t* from = x + (t - 1) % 2 * n;
    uint16_t sum = uint16_t(i);
    for (int j = 0; j < n; j += 8) {
      const uint4 v = ptx::load_relaxed(reinterpret_cast<const uint4*>(from + j));
      for (uint32_t two : {v.x, v.y, v.z, v.w})
        sum = uint16_t(sum + two + (two >> 16));
    }
    ptx::store_relaxed(x + t % 2 * n + i, sum);
    if (defect != NO_BARRIER) __syncthreads();
    if (threadIdx.x == 0 && defect != NO_STORE) {
      if (defect == NO_RELEASE)
        ptx::store_relaxed(flags + blockIdx.x, uint32_t(t));
      else
        ptx::store_release(flags + blockIdx.x, uint32_t(t));
    }
    if (defect != NO_WAIT && lane < int(gridDim.x)) {
      if (defect == NO_ACQUIRE)
        while (ptx::load_relaxed(flags + lane) < uint32_t(t))
          ptx::pause();
      else
        while (ptx::load_acquire(flags + lane) < uint32_t(t))
          ptx::pause();
    }
    if (defect != NO_SYNCWARP) __syncwarp();
  }
}

__device__ void grid_barrier(Defect defect, unsigned* arrived, unsigned all) {
  if (defect != NO_BARRIER) __syncthreads();
  if (threadIdx.x == 0) {
    if (defect != NO_FENCE) __threadfence();
    atomicAdd(arrived, 1u);
    while (defect != NO_WAIT && atomicAdd(arrived, 0u) < all)
      ptx::pause();
    if (defect != NO_SECOND_FENCE) __threadfence();
  }
  if (defect != NO_SECOND_BARRIER) __syncthreads();
}
// Moves x[i] to the same place of the next block, for this many steps, with a grid barrier made of
// atomics and fences.    arrived: (1,) zero    x: (2, blocks * THREADS)
__global__ void rotate(Defect defect, int steps, unsigned* arrived, int* x) {
  const int n = gridDim.x * THREADS, i = blockIdx.x * THREADS + threadIdx.x;
  for (int t = 1; t <= steps; ++t) {
    x[t % 2 * n + (i + THREADS) % n] = x[(t - 1) % 2 * n + i];
    grid_barrier(defect, arrived, gridDim.x * t);
  }
}

// The same with CUDA's grid barrier.
__global__ void rotate_in_groups(Defect defect, int steps, int* x) {
  const int n = gridDim.x * THREADS, i = blockIdx.x * THREADS + threadIdx.x;
  for (int t = 1; t <= steps; ++t) {
    x[t % 2 * n + (i + THREADS) % n] = x[(t - 1) % 2 * n + i];
    if (defect != NO_BARRIER) cooperative_groups::this_grid().sync();
  }
}

// Each pair of warps reverses its part of x in dynamic shared memory.    x: (blocks, threads)
__global__ void turn_around(Defect defect, int* x) {
  int* s = reinterpret_cast<int*>(ptx::dynamic_shared()) + threadIdx.x / 64 * 64;
  const int i = threadIdx.x % 64;
  x += blockIdx.x * blockDim.x + threadIdx.x / 64 * 64;
  s[i] = x[i];
  if (defect == TOO_FAR && threadIdx.x == blockDim.x - 1) s[i + 1] = 0;
  if (defect != NO_BARRIER) ptx::barrier(1 + threadIdx.x / 64, 64);
  x[i] = s[63 - i];
}

template <class S>
__device__ uint32_t two(const S* p, int apart) {
  uint16_t low, high;
  memcpy(&low, p, 2);
  memcpy(&high, p + apart, 2);
  return low | uint32_t(high) << 16;
}
// d = a b    a: (16, K)    b: (K, 8)    d: (16, 8)
template <class S>
__global__ void product(int K, const S* a, const S* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  float sum[4] = {};
  for (int k = 0; k < K; k += 16) {
    const S *low = a + g * K + k + t, *high = low + 8 * K, *column = b + (k + t) * 8 + g;
    ptx::mma(sum, {two(low, 1), two(high, 1), two(low + 8, 1), two(high + 8, 1)},
             {two(column, 8), two(column + 64, 8)}, S());
  }
  for (int r = 0; r < 4; ++r)
    d[(g + r / 2 * 8) * 8 + t + r % 2] = sum[r];
}

// The same of fp32 elements, by csrc/cuda/recurrence/fp32_product.cuh.
__global__ void product_of_floats(int K, const uint32_t* a, const uint32_t* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  float sum[4] = {};
  for (int k = 0; k < K; k += 8) {
    const uint32_t *low = a + g * K + k + t, *high = low + 8 * K, *column = b + (k + t) * 8 + g;
    fusedseq::cuda::fragment_multiply_add(sum, {low[0], high[0], low[1], high[1]},
                                          {column[0], column[8]}, float());
  }
  for (int r = 0; r < 4; ++r)
    d[(g + r / 2 * 8) * 8 + t + r % 2] = sum[r];
}

}  // namespace

EXPORT const char* probe_exchange(int defect, int blocks, int steps, uint32_t* flags, uint16_t* x) {
  return launch(exchange, blocks, THREADS, 0, Defect(defect), steps, flags, x);
}
EXPORT const char* probe_rotate(int defect, int blocks, int steps, unsigned* arrived, int* x) {
  return launch(rotate, blocks, THREADS, 0, Defect(defect), steps, arrived, x);
}
EXPORT const char* probe_rotate_in_groups(int defect, int blocks, int steps, unsigned*, int* x) {
  return launch(rotate_in_groups, blocks, THREADS, 0, Defect(defect), steps, x);
}
EXPORT const char* probe_turn_around(int defect, int blocks, int threads, int* x) {
  return launch(turn_around, blocks, threads, threads * int(sizeof(int)), Defect(defect), x);
}
EXPORT const char* probe_product(int type, int K, const void* a, const void* b, float* d) {
  if (type == 0)
    return launch(product_of_floats, 1, 32, 0, K, static_cast<const uint32_t*>(a),
                  static_cast<const uint32_t*>(b), d);
  if (type == 3)
    return launch(product<__half>, 1, 32, 0, K, static_cast<const __half*>(a),
                  static_cast<const __half*>(b), d);
  return launch(product<__nv_bfloat16>, 1, 32, 0, K, static_cast<const __nv_bfloat16*>(a),
                static_cast<const __nv_bfloat16*>(b), d);
}

// Queries the device and launches turn_around, which reverses y into x. facts (6,):
// multiprocessors, maximal shared memory of a block, cooperative launch, capability, blocks of
// turn_around on one multiprocessor, the error of the launch.
EXPORT const char* probe_device(int blocks, int threads, int shared, bool allow, int* facts,
                                const int* y, int* x) {
  int device, major, minor;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(facts, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(facts + 1, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(facts + 2, cudaDevAttrCooperativeLaunch, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  facts[3] = 10 * major + minor;
  cudaMemsetAsync(x, 0, size_t(blocks) * threads * sizeof(int), nullptr);
  cudaMemcpyAsync(x, y, size_t(blocks) * threads * sizeof(int), cudaMemcpyDeviceToDevice, nullptr);
  if (allow) cudaFuncSetAttribute(turn_around, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(facts + 4, turn_around, threads, shared);
  launch(turn_around, blocks, threads, shared, NONE, x);
  const cudaError_t error = cudaGetLastError();
  facts[5] = int(error);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
