// The functions of csrc/cuda/ptx.cuh for the simulated GPU. That file documents them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fusedseq::cuda::ptx {

#define SIMT_LINE int line = __builtin_LINE()
// Not inlined, so that the return address identifies the kernel's line.
#define SIMT_CALL __attribute__((noinline, no_sanitize("thread"))) inline

inline char* dynamic_shared() {
  return simt::globals.current->shared;
}

SIMT_CALL uint32_t load_acquire(const uint32_t* p, SIMT_LINE) {
  uint32_t v;
  simt::load(p, &v, sizeof v, true, line, __builtin_return_address(0));
  return v;
}
SIMT_CALL void store_release(uint32_t* p, uint32_t v) {
  simt::store(p, &v, sizeof v, true, __builtin_return_address(0));
}

template <class T>
SIMT_CALL T load_relaxed(const T* p, SIMT_LINE) {
  static_assert(std::is_same_v<T, uint16_t> || std::is_same_v<T, uint32_t> ||
                std::is_same_v<T, uint4>);
  T v;
  simt::load(p, &v, sizeof v, false, line, __builtin_return_address(0));
  return v;
}
SIMT_CALL void store_relaxed(uint16_t* p, uint16_t v) {
  simt::store(p, &v, sizeof v, false, __builtin_return_address(0));
}
SIMT_CALL void store_relaxed(uint32_t* p, uint32_t v) {
  simt::store(p, &v, sizeof v, false, __builtin_return_address(0));
}
SIMT_CALL void store_relaxed(uint2* p, uint2 v) {
  simt::store(p, &v, sizeof v, false, __builtin_return_address(0));
}
SIMT_CALL void store_relaxed(uint4* p, uint4 v) {
  simt::store(p, &v, sizeof v, false, __builtin_return_address(0));
}

SIMT_CALL uint4 load_words(const uint4* p, SIMT_LINE) {
  uint4 v;
  simt::load_words(p, &v, sizeof v, line, __builtin_return_address(0));
  return v;
}
SIMT_CALL void store_words(uint32_t* p, uint32_t v) {
  simt::store_words(p, &v, sizeof v, __builtin_return_address(0));
}
SIMT_CALL void store_words(uint2* p, uint2 v) {
  simt::store_words(p, &v, sizeof v, __builtin_return_address(0));
}
inline void fence() {
  simt::fence();
}
inline float of_next_lane(float v, SIMT_LINE) {
  return __shfl_down_sync(~0u, v, 1, 32, line);
}

[[noreturn]] inline void leave_and_trap(uint4* host, uint4 v) {
  if (host) *host = v;
  simt::trap();
}

inline void pause(SIMT_LINE) {
  simt::spin(line);
}

template <class T>
inline void compute_now(T&) {}

inline void barrier(int id, int threads, SIMT_LINE) {
  simt::sync_named(id, threads, line);
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16,
                SIMT_LINE) {
  simt::mma(d, a, b, false, line);
}
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half, SIMT_LINE) {
  simt::mma(d, a, b, true, line);
}
inline void mma(float (&d)[4], const uint32_t (&a)[2], uint32_t b, SIMT_LINE) {
  const uint32_t all_of_a[4] = {a[0], a[1], 0, 0}, all_of_b[2] = {b, 0};
  simt::mma(d, all_of_a, all_of_b, false, line);
}

#undef SIMT_CALL
#undef SIMT_LINE

}  // namespace fusedseq::cuda::ptx
