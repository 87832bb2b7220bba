// Instructions that CUDA C++ has no function for. This is the only file with inline PTX.
// tests/simt/include/cuda/ptx.cuh declares the same functions for the simulated GPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusedseq::cuda::ptx {

// The block's dynamic shared memory.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}

// Synchronization between blocks. If load_acquire reads the value that store_release has stored,
// everything that happened before the store is visible after the load.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Loads and stores at the L2 cache, which all blocks share: a load never returns an old line of L1.
// They are not ordered by themselves, only by releases, acquires and barriers.
__device__ __forceinline__ uint16_t load_relaxed(const uint16_t* p) {
  uint16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_relaxed(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(uint16_t* p, uint16_t v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint2* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Words that carry their own validity: a reader polls the data itself, so these accesses need no
// order. The PTX type b32 in place of u32 changes nothing for a GPU; it tells tests/ptx and
// tests/memory_model that other blocks may access the same word at the same time. A vector access
// is one access of each of its words, in any order.
__device__ __forceinline__ uint4 load_words(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_words(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_words(uint2* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}

// Orders the thread's relaxed accesses before it with those after it, for every thread that has
// such a fence, too, between observing a later store of this thread and its own accesses.
__device__ __forceinline__ void fence() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// The value of the next lane of the warp, in which all lanes must take part.
__device__ __forceinline__ float of_next_lane(float v) {
  uint32_t next;
  asm volatile("shfl.sync.down.b32 %0, %1, 1, 31, -1;" : "=r"(next) : "r"(__float_as_uint(v)));
  return __uint_as_float(next);
}

// Stores to the host's memory, unless `host` is null, and ends the kernel with an error.
[[noreturn]] __device__ __forceinline__ void leave_and_trap(uint4* host, uint4 v) {
  if (host)
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(host), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  __threadfence_system();
  __trap();
  __builtin_unreachable();
}

// Called in a loop that waits for another block. It does nothing here, because a block has its
// multiprocessor to itself; the simulated GPU runs other threads.
__device__ __forceinline__ void pause() {}

// Makes the compiler compute a value before the next of these functions: it would otherwise move
// the computation after a wait, next to where the value is used.
template <class T>
__device__ __forceinline__ void compute_now(T*& p) {
  asm volatile("" : "+l"(p));
}
__device__ __forceinline__ void compute_now(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
__device__ __forceinline__ void compute_now(float& v) {
  asm volatile("" : "+f"(v));
}

// A barrier of some of the block's warps, `threads` threads in all. id: 0 to 15; 0 is also used by
// __syncthreads.
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// d += a b, where a is 16 x 16, b is 16 x 8 and d is 16 x 8, spread over the lanes of a warp. Each
// register of a and b has two elements. Lane l = 4 g + t holds
//   a: row g, columns 2t and 2t + 1;  row g + 8, the same columns;
//      row g, columns 2t + 8 and 2t + 9;  row g + 8, the same columns
//   b: column g, rows 2t and 2t + 1;  column g, rows 2t + 8 and 2t + 9
//   d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same where a is 16 x 8 and b is 8 x 8, in bf16: without the columns of a and the rows of b
// from 8 on.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
      "%1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace fusedseq::cuda::ptx
