// The functions of csrc/cuda/cluster.cuh for the simulated GPU. That file documents them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fusedseq::cuda::ptx {

#define SIMT_LINE int line = __builtin_LINE()
// Not inlined, so that the return address identifies the kernel's line.
#define SIMT_CALL __attribute__((noinline, no_sanitize("thread"))) inline

inline uint32_t cluster_rank() {
  return simt::cluster_rank();
}
inline void cluster_sync(SIMT_LINE) {
  simt::cluster_arrive(line);
  simt::cluster_wait(line);
}

SIMT_CALL void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  simt::barrier_init(barrier, arrivals, __builtin_return_address(0));
}
inline void fence_barrier_init() {
  simt::fence_barrier_init();
}
SIMT_CALL void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  simt::barrier_arrive(simt::in_cluster(barrier, rank), 0, __builtin_return_address(0));
}
SIMT_CALL void barrier_arrive_expect(uint64_t* barrier, uint32_t rank, uint32_t bytes) {
  simt::barrier_arrive(simt::in_cluster(barrier, rank), bytes, __builtin_return_address(0));
}
SIMT_CALL bool barrier_is_complete(uint64_t* barrier, uint32_t parity, SIMT_LINE) {
  return simt::barrier_is_complete(barrier, parity, line, __builtin_return_address(0));
}

inline void fence_proxy_async() {
  simt::fence_proxy_async();
}
SIMT_CALL void copy_to_both(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  simt::start_copy(to, from, bytes, barrier, 3, __builtin_return_address(0));
}

#undef SIMT_CALL
#undef SIMT_LINE

}  // namespace fusedseq::cuda::ptx
