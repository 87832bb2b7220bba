// What the kernels of recurrence_loop.cu and recurrence_gradients.cu share. A thread has 4 elements of a row, those of one
// block of Philox; a row is `padded`, a multiple of 16, elements long in what the kernels alone read and write.
#pragma once
#include <cstdio>

#include "cells/mogrifier.h"
#include "pack.cuh"
#include "philox.h"
#include "recurrence_cuda.h"

namespace fusedseq::cuda {

constexpr int N = 4, THREADS = 64;  // few, for rows are short and there are SMs enough for all blocks

template <class C> using Four = C[N];

template <class S, class C> __device__ void load(const S* p, int64_t n, Four<C>& v) {
  load(p, n < N ? int(n) : N, aligned<N>(p), v);
}
template <class S, class C> __device__ void store(S* p, int64_t n, const Four<C>& v) {
  store(p, n < N ? int(n) : N, aligned<N>(p), v);
}

// The thread's place in a grid of `grid(rows, columns)`.
__device__ inline int64_t own_row() { return blockIdx.x; }
__device__ inline int64_t own_column() { return (int64_t(blockIdx.y) * THREADS + threadIdx.x) * N; }

inline dim3 grid(int64_t rows, int64_t columns) {
  return dim3(unsigned(rows), unsigned((columns + N * THREADS - 1) / (N * THREADS)));
}
// What a grid has no room for, or null. The widest row of any kernel is 4 Hp elements.
inline const char* beyond_grid(int64_t rows, int64_t columns) {
  return rows > INT32_MAX || columns > int64_t(65535) * N * THREADS ? "more rows or columns than a grid has blocks for" : nullptr;
}

// What was wrong with the kernels started so far, named by the last of them; or null.
inline const char* failed_launch(const char* kernel) {
  thread_local char text[256];
  const char* error = launch_error();
  if (!error) return nullptr;
  std::snprintf(text, sizeof text, "%s: %s", kernel, error);
  return text;
}

// Bit i: whether element j + i of a row of `width` is kept, j a multiple of 4.
__device__ inline unsigned kept(const Mask& m, const int64_t* seed, int64_t row, int64_t j, int64_t width) {
  const uint64_t counter = uint64_t(row) * uint64_t((width + 3) / 4) + uint64_t(j / 4);
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0};
  philox(uint64_t(*seed) + m.stream, c, Multiply{});
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits |= unsigned(c[i] >= m.threshold) << i;
  return bits;
}

// One element of a mask with one element a row.
__device__ inline bool row_is_kept(const Mask& m, const int64_t* seed, int64_t row) {
  const unsigned bits = kept(m, seed, 0, row, 1);
  return bits >> (row % 4) & 1;
}

template <class C> __device__ void drop(const Mask& m, const int64_t* seed, int64_t row, int64_t j, int64_t width, Four<C>& v) {
  if (!m.threshold) return;
  const unsigned bits = kept(m, seed, row, j, width);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = bits >> i & 1 ? v[i] * C(m.scale) : C(0);
}

// An operand after `count` rounds on it. gates: the first round's saved sigmoids, each `period` after the one before.
template <class S, class C> __device__ void mogrify_all(const S* gates, int64_t period, int count, Four<C>& v) {
  for (int k = 0; k < count; ++k) {
    C s[N];
    load(gates + k * period, N, s);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = mogrify(s[i], v[i]);
  }
}

template <class S> constexpr Type type_of() {
  if constexpr (std::is_same_v<S, float>) return Type::f32;
  else if constexpr (std::is_same_v<S, double>) return Type::f64;
  else if constexpr (std::is_same_v<S, __half>) return Type::f16;
  else return Type::bf16;
}

// Memory cut into pieces; with base null it only counts.
struct Workspace {
  char* base;
  int64_t used = 0;
  template <class T> T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base + used);
    used += (n * int64_t(sizeof(T)) + 255) / 256 * 256;
    return base ? p : nullptr;
  }
};

// Where round k's sigmoids are in a row of all of them, and the sizes of the operand it scales.
struct Round {
  bool on_x;
  int64_t out, in, out_padded, in_padded, offset;
  Round(const Recurrence& r, int64_t k)
      : on_x(k % 2 == 0), out(on_x ? r.X : r.H), in(on_x ? r.H : r.X), out_padded(on_x ? r.Xp : r.Hp),
        in_padded(on_x ? r.Hp : r.Xp), offset(k / 2 * (r.Xp + r.Hp) + (on_x ? 0 : r.Xp)) {}
};

// The first round with the same pointer.
inline int64_t first_use(const void* const* p, int64_t k) {
  int64_t j = 0;
  while (p[j] != p[k]) ++j;
  return j;
}

}  // namespace fusedseq::cuda
