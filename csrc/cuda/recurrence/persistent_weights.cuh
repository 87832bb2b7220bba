// The weights of a persistent kernel's block: loaded once, before the first step, into shared
// memory and, for some k-steps of W_ih, into registers.
//
// In shared memory a weight matrix is (k-steps, columns, K_STEP): 32 bytes for a column and k-step,
// from which a lane reads the 8 bytes of its B operand of mma.sync. The lanes' bytes are
// contiguous, so the reads have no bank conflicts. The padding of the last k-step is zero.
//
// With V::RESIDENT > 0, shared memory is too small for W_ih. Of each warp's slice of the k-steps,
// the first V::RESIDENT have the weights of the first RESIDENT_COLUMNS columns in registers. Shared
// memory then holds the other k-steps, and after them what is left of the resident k-steps: their
// columns from RESIDENT_COLUMNS on.
#pragma once
#include <cuda_runtime.h>

#include <cstring>

#include "cuda/recurrence/persistent_exchange.cuh"

namespace fusedseq::cuda {

// The k-steps over which a warp sums.
struct KSlice {
  int begin, end;
};
template <class V>
__device__ __forceinline__ KSlice k_slice(int k_steps, int warp) {
  return {k_steps * warp / V::SPLIT, k_steps * (warp + 1) / V::SPLIT};
}

// The order in which neighbouring threads load elements: the one in which global memory has them.
enum class Neighbours { rows, columns };

// Copies a weight matrix to shared memory, all threads of the block together.
// element(n, k): the weight of column n and row k.    Returns the address after the weights.
template <class V, int RESIDENT, int RESIDENT_COLUMNS, Neighbours NEIGHBOURS, class S, class F>
__device__ __forceinline__ S* load_to_shared(S* to, int columns, int K, F element) {
  constexpr int A = K_STEP<S>;
  const int steps = k_steps_of<S>(K);
  const int columns_left = columns < RESIDENT_COLUMNS ? 0 : columns - RESIDENT_COLUMNS;
  S* rest = to + (steps - RESIDENT * V::SPLIT) * columns * A;
  for (int i = threadIdx.x; i < steps * A * columns; i += blockDim.x) {
    constexpr bool BY_COLUMN = NEIGHBOURS == Neighbours::columns;
    const int n = BY_COLUMN ? i % columns : i / (steps * A);
    const int k = BY_COLUMN ? i / columns : i - n * steps * A;
    const int step = k / A;
    // The warp that reads this k-step, and the k-step's number in the warp's slice.
    const int warp = RESIDENT ? ((step + 1) * V::SPLIT - 1) / steps : 0;
    const int of_slice = step - k_slice<V>(steps, warp).begin;
    const S value = k < K ? element(n, k) : S(0.f);
    if (RESIDENT == 0 || of_slice >= RESIDENT)
      to[((RESIDENT ? step - (warp + 1) * RESIDENT : step) * columns + n) * A + k % A] = value;
    else if (n >= RESIDENT_COLUMNS)
      rest[((warp * RESIDENT + of_slice) * columns_left + n - RESIDENT_COLUMNS) * A + k % A] =
          value;
  }
  return rest + RESIDENT * V::SPLIT * columns_left * A;
}

// A lane's B operands of one k-step, for N column tiles.
template <int N>
struct ColumnFragments {
  uint2 b[N];
};

// A weight matrix in shared memory.
template <class S>
struct SharedWeights {
  const S* shared = nullptr;  // (k-steps, columns, K_STEP)
  int columns = 0;
  // The lane's B operand of column tile n: of column 8 n + lane / 4 the (lane % 4)-th quarter of
  // the k-step. Zero past the last column.
  __device__ __forceinline__ uint2 operand(int step, int n, int lane) const {
    const int column = 8 * n + lane / 4;
    if (column >= columns) return uint2{0, 0};
    return *reinterpret_cast<const uint2*>(shared + (step * columns + column) * K_STEP<S> +
                                           lane % 4 * (K_STEP<S> / 4));
  }
  template <int N>
  __device__ __forceinline__ ColumnFragments<N> operands(int step, int lane) const {
    ColumnFragments<N> f;
#pragma unroll
    for (int n = 0; n < N; ++n)
      f.b[n] = operand(step, n, lane);
    return f;
  }
};

// The B operands that a lane holds in registers: N column tiles of the first V::RESIDENT k-steps of
// its warp's slice.
template <class V, int N>
struct ResidentWeights {
  uint2 operand[V::RESIDENT ? V::RESIDENT : 1][N];

  // element: as of load_to_shared
  template <class S, class F>
  __device__ __forceinline__ void load(int columns, int K, int warp, int lane, F element) {
    constexpr int OF_LANE = K_STEP<S> / 4;
    const int begin = k_slice<V>(k_steps_of<S>(K), warp).begin;
#pragma unroll
    for (int u = 0; u < V::RESIDENT; ++u) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int column = 8 * n + lane / 4;
        const int k = (begin + u) * K_STEP<S> + lane % 4 * OF_LANE;
        S w[OF_LANE];
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
          w[i] = column < columns && k + i < K ? element(column, k + i) : S(0.f);
        memcpy(&operand[u][n], w, sizeof w);
      }
    }
  }
};

}  // namespace fusedseq::cuda
