// A kernel for tests/simt/test_simt.py: the blocks of a cluster copy for each other. It is correct
// or has one defect, which must be reported.
#include <cuda_runtime.h>

#include <cuda/cluster.cuh>
#include <cuda/ptx.cuh>

namespace {

namespace ptx = fusedseq::cuda::ptx;

constexpr int ELEMENTS = 64;  // of a block's half of x
enum Defect {
  NONE,
  NO_INIT,
  NO_INIT_FENCE,
  NO_FENCE_OF_PROXIES,
  NO_WAIT,
  NO_BYTES,
  TOO_MANY_BYTES,
  TWICE,
  MISALIGNED,
  OUTSIDE,
  NO_ARRIVAL
};

// x: (2 ELEMENTS,)  y: (blocks, 2 ELEMENTS)  each block's copy of x, to which it first adds 1
__global__ void share(Defect defect, uint32_t* x, uint32_t* flag, uint32_t* y) {
  uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
  uint64_t* barrier = reinterpret_cast<uint64_t*>(staged + 2 * ELEMENTS);
  const uint32_t rank = ptx::cluster_rank();
  const int i = threadIdx.x;
  if (i == 0 && defect != NO_INIT) {
    ptx::barrier_init(barrier, 2);
    if (defect != NO_INIT_FENCE) ptx::fence_barrier_init();
  }
  ptx::cluster_sync();

  // The first block publishes x + 1; every block waits for it.
  if (blockIdx.x == 0) {
    ptx::store_relaxed(x + i, x[i] + 1);
    ptx::store_relaxed(x + ELEMENTS + i, x[ELEMENTS + i] + 1);
    __syncthreads();
    if (i == 0) ptx::store_release(flag, 1);
  }
  if (i == 0) {
    while (!ptx::load_acquire(flag))
      ptx::pause();
    if (defect != NO_FENCE_OF_PROXIES) ptx::fence_proxy_async();
    const uint32_t bytes = ELEMENTS * 4 + (defect == TOO_MANY_BYTES ? 16 : 0);
    for (uint32_t to = 0; to < 2; ++to)
      if (defect == NO_BYTES)
        ptx::barrier_arrive(barrier, to);
      else if (defect != NO_ARRIVAL || to == rank)
        ptx::barrier_arrive_expect(barrier, to, bytes);
    if (defect == TWICE) ptx::barrier_arrive(barrier, rank);
    uint32_t* to = staged + rank * ELEMENTS + (defect == MISALIGNED ? 1 : 0);
    if (defect == OUTSIDE) to = staged + 2 * ELEMENTS;
    ptx::copy_to_both(to, x + rank * ELEMENTS, ELEMENTS * 4, barrier);
  }
  while (defect != NO_WAIT && !ptx::barrier_is_complete(barrier, 0))
    ptx::pause();
  for (int j = i; j < 2 * ELEMENTS; j += ELEMENTS)
    y[blockIdx.x * 2 * ELEMENTS + j] = staged[j];
  ptx::cluster_sync();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* probe_cluster(int defect, int blocks,
                                                                            uint32_t* x,
                                                                            uint32_t* flag,
                                                                            uint32_t* y) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(blocks);
  c.blockDim = dim3(ELEMENTS);
  c.dynamicSmemBytes = 2 * ELEMENTS * 4 + 8;
  c.attrs = attributes;
  c.numAttrs = 2;
  const cudaError_t error = cudaLaunchKernelEx(&c, share, Defect(defect), x, flag, y);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
