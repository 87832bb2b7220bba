// Instructions of thread block clusters that CUDA C++ has no function for: barriers in shared
// memory (mbarrier) and bulk copies. They exist from compute capability 9.0 on. With ptx.cuh this
// is the only file with inline PTX. tests/simt/include/cuda/cluster.cuh declares the same functions
// for the simulated GPU.
//
// A pointer to shared memory is of the calling block; with a block's rank in the cluster it stands
// for the same place in the shared memory of that block.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fusedseq::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t shared_address(const void* p, uint32_t rank) {
  uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(a)
               : "r"(shared_address(p)), "r"(rank));
  return a;
}

// The number of the block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster. What they did before it is visible to all of them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier in shared memory. A phase of it is complete when `arrivals` threads have arrived and
// all bytes have been copied that they announced. Phases alternate between 0 and 1.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes the thread's initializations of barriers visible after the next cluster_sync to the other
// block and to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives at the barrier of the block with this rank. What the thread has done or observed before
// is visible to whoever sees the phase completed.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   shared_address(barrier, rank))
               : "memory");
}
// The same, and announces bytes that a bulk copy brings.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t rank,
                                                      uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier, rank)),
               "r"(bytes)
               : "memory");
}
// Whether the newest phase of this parity is complete; waits for it for a short time.
__device__ __forceinline__ bool barrier_is_complete(uint64_t* barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n\t"
      ".reg .pred complete;\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, complete;\n\t"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete;
}

// Bulk copies read and write memory by the asynchronous proxy. This orders what the thread has done
// or observed before by ordinary loads and stores, before its bulk copies from now on.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Copies from global memory to the same place in the shared memory of both blocks, and counts the
// bytes at the barrier of each. Addresses and bytes: multiples of 16
__device__ __forceinline__ void copy_to_both(void* to, const void* from, uint32_t bytes,
                                             uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(uint16_t(3))
      : "memory");
}

}  // namespace fusedseq::cuda::ptx
