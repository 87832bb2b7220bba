// The part of CUDA C++ that csrc/cuda uses, for g++: see tests/simt/README.md.
#pragma once
#include <cmath>
#include <cstring>

#include "../runtime.h"
#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// __shared__ variables are thread-local memory of the library, which the runtime poisons before
// each block. As in CUDA, they have no initializers.
#define __shared__ __constinit thread_local

#define threadIdx (simt::globals.current->thread)
#define blockIdx (simt::globals.current->block)
// No macros, because cudaLaunchConfig_t has members of these names.
static constexpr const dim3 &blockDim = simt::globals.block, &gridDim = simt::globals.grid;
constexpr int warpSize = 32;

#define SIMT_VECTOR(T, name, bytes)                         \
  struct alignas(2 * bytes) name##2 {                       \
    T x, y;                                                 \
  };                                                        \
  struct alignas(4 * bytes > 16 ? 16 : 4 * bytes) name##4 { \
    T x, y, z, w;                                           \
  };                                                        \
  inline name##2 make_##name##2(T x, T y) {                 \
    return {x, y};                                          \
  }                                                         \
  inline name##4 make_##name##4(T x, T y, T z, T w) {       \
    return {x, y, z, w};                                    \
  }
SIMT_VECTOR(float, float, 4)
SIMT_VECTOR(int, int, 4)
SIMT_VECTOR(unsigned, uint, 4)
SIMT_VECTOR(double, double, 8)
#undef SIMT_VECTOR

#define SIMT_LINE int line = __builtin_LINE()
inline void __syncthreads(SIMT_LINE) {
  simt::sync_block(line, false);
}
inline int __syncthreads_count(int predicate, SIMT_LINE) {
  return simt::sync_block(line, predicate);
}
inline int __syncthreads_or(int predicate, SIMT_LINE) {
  return simt::sync_block(line, predicate) > 0;
}
inline int __syncthreads_and(int predicate, SIMT_LINE) {
  return simt::sync_block(line, !predicate) == 0;
}
inline void __syncwarp(unsigned lanes = ~0u, SIMT_LINE) {
  simt::sync_warp(lanes, line);
}
inline void __threadfence() {
  simt::fence();
}
inline void __nanosleep(unsigned, SIMT_LINE) {
  simt::spin(line);
}

namespace simt {

struct Shuffle {
  uint64_t in, out;
  unsigned from;
};
inline void shuffle_all(void** arguments, unsigned lanes) {
  for (unsigned l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    Shuffle* s = static_cast<Shuffle*>(arguments[l]);
    // CUDA leaves the value of a lane that takes no part undefined; here it is all ones.
    s->out = lanes >> s->from & 1 ? static_cast<Shuffle*>(arguments[s->from])->in : ~uint64_t(0);
  }
}
template <class T>
T shuffle(unsigned lanes, T value, unsigned from, int line) {
  static_assert(sizeof(T) <= 8, "CUDA shuffles up to 8 bytes");
  Shuffle s{0, 0, from};
  std::memcpy(&s.in, &value, sizeof value);
  together(lanes, &s, shuffle_all, line);
  std::memcpy(&value, &s.out, sizeof value);
  return value;
}

struct Vote {
  bool in;
  unsigned out;
};
inline void vote_all(void** arguments, unsigned lanes) {
  unsigned ballot = 0;
  for (unsigned l = 0; l < 32; ++l)
    if (lanes >> l & 1) ballot |= unsigned(static_cast<Vote*>(arguments[l])->in) << l;
  for (unsigned l = 0; l < 32; ++l)
    if (lanes >> l & 1) static_cast<Vote*>(arguments[l])->out = ballot;
}
inline unsigned vote(unsigned lanes, bool predicate, int line) {
  Vote v{predicate, 0};
  together(lanes, &v, vote_all, line);
  return v.out;
}
inline unsigned lane() {
  return globals.current->lane;
}

}  // namespace simt

template <class T>
T __shfl_sync(unsigned lanes, T v, int from, int width = 32, SIMT_LINE) {
  return simt::shuffle(lanes, v, (simt::lane() & ~(width - 1)) | (from & (width - 1)), line);
}
template <class T>
T __shfl_down_sync(unsigned lanes, T v, unsigned by, int width = 32, SIMT_LINE) {
  const unsigned l = simt::lane();
  return simt::shuffle(lanes, v, (l & (width - 1)) + by < unsigned(width) ? l + by : l, line);
}
template <class T>
T __shfl_up_sync(unsigned lanes, T v, unsigned by, int width = 32, SIMT_LINE) {
  const unsigned l = simt::lane();
  return simt::shuffle(lanes, v, (l & (width - 1)) >= by ? l - by : l, line);
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T v, int bits, int width = 32, SIMT_LINE) {
  const unsigned l = simt::lane(), from = l ^ unsigned(bits);
  return simt::shuffle(lanes, v, (from & ~(width - 1)) <= (l & ~(width - 1)) ? from : l, line);
}
inline unsigned __ballot_sync(unsigned lanes, int p, SIMT_LINE) {
  return simt::vote(lanes, p, line);
}
inline int __any_sync(unsigned lanes, int p, SIMT_LINE) {
  return simt::vote(lanes, p, line) != 0;
}
inline int __all_sync(unsigned lanes, int p, SIMT_LINE) {
  return simt::vote(lanes, !p, line) == 0;
}

// Loads and stores with cache hints, which the simulation ignores.
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldca(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stwb(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stwt(T* p, T value) {
  *p = value;
}

// One thread runs all fibers, so the statements after simt::atomic() are atomic. The functions are
// not inlined, so that their return address gives the line in the kernel.
#define SIMT_ATOMIC(name, result)                                                     \
  template <class T>                                                                  \
  __attribute__((noinline, no_sanitize("thread"))) T name(T* p, T value, SIMT_LINE) { \
    simt::atomic(p, sizeof(T), line, __builtin_return_address(0));                    \
    const T old = *p;                                                                 \
    *p = result;                                                                      \
    return old;                                                                       \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicExch, value)
#undef SIMT_ATOMIC
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T atomicCAS(T* p, T expected, T value, SIMT_LINE) {
  simt::atomic(p, sizeof(T), line, __builtin_return_address(0));
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}
#undef SIMT_LINE

namespace simt {
template <class To, class From>
To bits_of(From f) {
  static_assert(sizeof(To) == sizeof(From));
  To t;
  std::memcpy(&t, &f, sizeof t);
  return t;
}
}  // namespace simt
inline unsigned __float_as_uint(float f) {
  return simt::bits_of<unsigned>(f);
}
inline int __float_as_int(float f) {
  return simt::bits_of<int>(f);
}
inline float __uint_as_float(unsigned u) {
  return simt::bits_of<float>(u);
}
inline float __int_as_float(int i) {
  return simt::bits_of<float>(i);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz(unsigned(x)) : 32;
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
// Macros, because the C library declares functions of these names. They are more accurate than a
// GPU's.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float rsqrtf(float x) {
  return 1 / sqrtf(x);
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
