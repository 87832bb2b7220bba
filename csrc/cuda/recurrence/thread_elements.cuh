// Device functions of loop.cu, weight_preparation.cu and weight_gradients.cu. Their kernels are
// pointwise over matrices: a thread has 4 neighbouring elements of a row, which is one block of
// Philox. Buffers that only these kernels use have rows that are padded to a multiple of 16
// elements; padding is zero.
#pragma once
#include <cstdio>

#include "cuda/launch_error.cuh"
#include "cuda/recurrence/arguments.h"
#include "cuda/vector_access.cuh"
#include "math/mogrifier.h"
#include "math/philox.h"

namespace fusedseq::cuda {

constexpr int PER_THREAD = 4;
// Threads of a block: few, because rows are short and there are SMs enough for all blocks.
constexpr int THREADS = 64;

// A thread's elements.
template <class C>
using Elements = C[PER_THREAD];

// Loads and stores of those of a thread's elements that are in a row; n: how many elements the row
// has from p on.
template <class S, class C>
__device__ void load(const S* p, int64_t n, Elements<C>& v) {
  load(p, n < PER_THREAD ? int(n) : PER_THREAD, aligned<PER_THREAD>(p), v);
}
template <class S, class C>
__device__ void store(S* p, int64_t n, const Elements<C>& v) {
  store(p, n < PER_THREAD ? int(n) : PER_THREAD, aligned<PER_THREAD>(p), v);
}

// v += the elements at p.
template <class C>
__device__ void add(const C* p, int64_t n, Elements<C>& v) {
  Elements<C> w;
  load(p, n, w);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    v[i] += w[i];
}

// The grid of a matrix, and the row and first column of a thread in it.
inline dim3 grid(int64_t rows, int64_t columns) {
  constexpr int PER_BLOCK = PER_THREAD * THREADS;
  return dim3(unsigned(rows), unsigned((columns + PER_BLOCK - 1) / PER_BLOCK));
}
__device__ inline int64_t own_row() {
  return blockIdx.x;
}
__device__ inline int64_t own_column() {
  return (int64_t(blockIdx.y) * THREADS + threadIdx.x) * PER_THREAD;
}

// An error message if a matrix is too large for a grid, else null. The widest rows of any kernel
// have 4 Hp elements.
inline const char* beyond_grid(int64_t rows, int64_t columns) {
  return rows > INT32_MAX || columns > int64_t(65535) * PER_THREAD * THREADS
             ? "more rows or columns than a grid has blocks for"
             : nullptr;
}

// The error of the launches since the last call, with the name of the last kernel; or null.
inline const char* failed_launch(const char* kernel) {
  thread_local char text[512];
  const char* error = launch_error();
  if (!error) return nullptr;
  std::snprintf(text, sizeof text, "%s: %s", kernel, error);
  return text;
}

// Bit i: whether element j + i of a row of a mask is kept. j is a multiple of 4; width: of a row
__device__ inline unsigned keep_bits(const Mask& m, const int64_t* seed, int64_t row, int64_t j,
                                     int64_t width) {
  const uint64_t counter = uint64_t(row) * uint64_t((width + 3) / 4) + uint64_t(j / 4);
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), uint32_t(m.stream), 0};
  philox(uint64_t(*seed), c, Multiply{});
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    bits |= unsigned(c[i] >= m.threshold) << i;
  return bits;
}

// Whether a row is kept by a mask with one element a row.
__device__ inline bool keep_row(const Mask& m, const int64_t* seed, int64_t row) {
  const unsigned bits = keep_bits(m, seed, 0, row, 1);
  return bits >> (row % 4) & 1;
}

// Applies a mask to the thread's elements of a row.
template <class C>
__device__ void drop(const Mask& m, const int64_t* seed, int64_t row, int64_t j, int64_t width,
                     Elements<C>& v) {
  if (!m.threshold) return;
  const unsigned bits = keep_bits(m, seed, row, j, width);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    v[i] = bits >> i & 1 ? v[i] * C(m.scale) : C(0);
}

// Applies `count` rounds to an operand. gates: the saved sigmoids of the first of them; those of
// each next round are `period` elements further.
template <class S, class C>
__device__ void mogrify_all(const S* gates, int64_t period, int count, Elements<C>& v) {
  for (int k = 0; k < count; ++k) {
    Elements<C> s;
    load(gates + k * period, PER_THREAD, s);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      v[i] = mogrify(s[i], v[i]);
  }
}

}  // namespace fusedseq::cuda
