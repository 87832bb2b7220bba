// The instructions that access memory or wait for other threads, as generate.py's code calls them,
// on the simulated GPU of tests/simt. A function that is not inlined gives tests/simt the address
// of its call, from which error messages find the line of the PTX.
#pragma once
#include <cstring>

#include "runtime.h"
#include "values.h"

namespace simt {
[[noreturn]] void fault_in_kernel(const char* format, ...) __attribute__((format(printf, 1, 2)));
}

namespace ptx {

#define PTX_CALL __attribute__((noinline)) inline

// ---- ordinary loads and stores (PTX ISA, Data Movement and Conversion Instructions: ld, st). The
// checked build reports races, accesses outside of buffers and reads of uninitialized memory.

inline void require_aligned(const char* p, size_t bytes) {
  if (uintptr_t(p) % bytes)
    simt::fault_in_kernel("a pointer that needs alignment to %zu bytes", bytes);
}
#ifdef PTX_CHECKED
#define PTX_ACCESS PTX_CALL
inline const bool checks = (simt::check_accesses(), true);
inline void check(const char* p, size_t bytes, bool write, void* pc) {
  simt::access(p, bytes, write, pc);
}
#else
#define PTX_ACCESS inline
inline void check(const char*, size_t, bool, void*) {}
#endif
template <class T, int N>
PTX_ACCESS void load(const char* p, T (&values)[N]) {
  require_aligned(p, sizeof values);
  check(p, sizeof values, false, __builtin_return_address(0));
  std::memcpy(values, p, sizeof values);
}
template <class T, int N>
PTX_ACCESS void store(char* p, const T (&values)[N]) {
  require_aligned(p, sizeof values);
  check(p, sizeof values, true, __builtin_return_address(0));
  std::memcpy(p, values, sizeof values);
}
// Parameters and local memory belong to one thread.
template <class T, int N>
inline void load_own(const char* p, T (&values)[N]) {
  std::memcpy(values, p, sizeof values);
}
template <class T, int N>
inline void store_own(char* p, const T (&values)[N]) {
  std::memcpy(p, values, sizeof values);
}

// ---- strong operations (PTX ISA, Memory Consistency Model)

template <class T, int N>
PTX_CALL void load_acquire(const char* p, T (&values)[N], int line) {
  simt::load(p, values, sizeof values, true, line, __builtin_return_address(0));
}
template <class T, int N>
PTX_CALL void load_relaxed(const char* p, T (&values)[N], int line) {
  simt::load(p, values, sizeof values, false, line, __builtin_return_address(0));
}
template <class T, int N>
PTX_CALL void store_release(char* p, const T (&values)[N]) {
  simt::store(p, values, sizeof values, true, __builtin_return_address(0));
}
template <class T, int N>
PTX_CALL void store_relaxed(char* p, const T (&values)[N]) {
  simt::store(p, values, sizeof values, false, __builtin_return_address(0));
}

// Relaxed accesses of the type b32: words that other threads poll and store at the same time, as
// csrc/cuda/ptx.cuh says.
template <class T, int N>
PTX_CALL void load_words(const char* p, T (&values)[N], int line) {
  simt::load_words(p, values, sizeof values, line, __builtin_return_address(0));
}
template <class T, int N>
PTX_CALL void store_words(char* p, const T (&values)[N]) {
  simt::store_words(p, values, sizeof values, __builtin_return_address(0));
}

// ---- other calls

// csrc's assertions call this function of the device library.
[[noreturn]] inline void assertfail(const char* expression, const char*, unsigned line, const char*,
                                    uint64_t) {
  simt::fault_in_kernel("line %u: assertion %s failed", line, expression);
}

// mma (PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions). The arrays come from
// fragments.py: where element v of lane l stands in the matrices, which are stored by rows.
struct MmaLayout {
  int k;                                    // a: (16, k), b: (k, 8), d: (16, 8)
  int a, b, bits;                           // elements of a and of b per lane; bits of an element
  const unsigned char *of_a, *of_b, *of_d;  // (32, a), (32, b), (32, 4)
};
struct MmaArguments {
  float* d;  // (4,)  in: c, out: d
  const uint32_t *a, *b;
  const MmaLayout* layout;
  float (*number)(const uint32_t* registers, int element);
};
inline float number_f16(const uint32_t* registers, int i) {
  return of_f16(uint16_t(registers[i / 2] >> i % 2 * 16));
}
inline float number_bf16(const uint32_t* registers, int i) {
  return of_bf16(uint16_t(registers[i / 2] >> i % 2 * 16));
}
// The lower 13 bits of the mantissa are not read.
inline float number_tf32(const uint32_t* registers, int i) {
  return bits<float>(registers[i] & ~0x1fffu);
}
void mma_of_warp(void** arguments, unsigned lanes);  // fragments.cpp
inline void mma(MmaArguments arguments, int line) {
  simt::together(~0u, &arguments, mma_of_warp, line);
}

}  // namespace ptx
