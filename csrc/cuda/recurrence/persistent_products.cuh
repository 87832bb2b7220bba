// Products of an exchanged vector with the block's weights on tensor cores: vectors are the A
// operand (16 batch rows), weights the B operand (8 columns). K is split over the warps of a group;
// the warps' partial sums are added through shared memory, always in the same order, so that
// results do not depend on timing.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/fp32_product.cuh"
#include "cuda/recurrence/persistent_group.cuh"
#include "cuda/recurrence/persistent_weights.cuh"

namespace fusedseq::cuda {

// A lane's A operands of one k-step, for all row tiles of its group.
template <class V>
using RowFragments = uint4[V::TILES];

// A lane's sums of N column tiles, in the layout of ptx::mma's d.
template <class V, int N>
struct Accumulators {
  float v[V::TILES][N][4];
};

template <class V, int N>
__device__ __forceinline__ void clear(Accumulators<V, N>& sums) {
#pragma unroll
  for (int m = 0; m < V::TILES; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums.v[m][n][i] = 0;
}

// Adds the product of one k-step to column tile n of the sums. b: the lane's B operand
template <class S, class V, int N>
__device__ __forceinline__ void multiply_add(Accumulators<V, N>& sums, const RowFragments<V>& a,
                                             int n, uint2 b) {
#pragma unroll
  for (int m = 0; m < V::TILES; ++m) {
    // x and y are of row g, z and w of row g + 8. A lane holds 4 consecutive elements along K where
    // ptx::mma describes two pairs 8 apart. The weights are laid out alike, and the order of a
    // sum's terms does not matter.
    const uint32_t rows[4] = {a[m].x, a[m].z, a[m].y, a[m].w};
    const uint32_t columns[2] = {b.x, b.y};
    fragment_multiply_add(sums.v[m][n], rows, columns, S());
  }
}

// The number of k-steps whose loads are in flight at once: `most`, but in fp32, where splitting the
// operands takes registers, two thirds of it in the variants that are short of registers.
template <class S, class V>
constexpr int loads_in_flight(int most) {
  return sizeof(S) == 4 && (V::N == 2 || V::TILES == 3) ? most * 2 / 3 : most;
}

// A warp group, and its products and sums. (Members, because as free functions that take a group
// they cost up to 10 more registers in fp32, by nvcc 13.)
template <class S, class V>
struct GroupProducts : WarpGroup<S, V> {
  using Base = WarpGroup<S, V>;
  using Base::lane;
  using Base::partial;
  using Base::rows;
  using Base::slot;
  using Base::wait;
  using Base::warp;
  using Base::WarpGroup;

  // Loads the A operands of COUNT k-steps from `step` on. Zeros past `end` and past the group's
  // rows.
  template <int COUNT>
  __device__ __forceinline__ void load_fragments(RowFragments<V> (&a)[COUNT], const S* vector,
                                                 int k_steps, int step, int end) const {
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m)
        a[u][m] = step + u < end && m * 16 + lane / 4 < rows
                      ? ptx::load_relaxed(reinterpret_cast<const uint4*>(vector) +
                                          ((m * k_steps + step + u) * 32 + lane))
                      : uint4{0, 0, 0, 0};
  }

  // Calls use(step, a) for the k-steps [begin, end), with the loads of LOADS k-steps in flight.
  template <int LOADS, class F>
  __device__ __forceinline__ void for_k_steps(const S* vector, int k_steps, int begin, int end,
                                              F use) const {
#pragma unroll 1
    for (int step = begin; step < end; step += LOADS) {
      RowFragments<V> a[LOADS];
      load_fragments(a, vector, k_steps, step, end);
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        if (step + u < end) use(step + u, a[u]);
    }
  }

  // The warp's part of the product of a vector: waits for the columns of its slice, and calls
  // use(step, a) for each of its k-steps.
  template <int LOADS, class F>
  __device__ __forceinline__ void multiply(const ExchangedVector& v, uint32_t epoch, F use) const {
    const KSlice s = k_slice<V>(v.k_steps, warp);
    wait(v, s, epoch);
    for_k_steps<LOADS>(slot(v, epoch), v.k_steps, s.begin, s.end, use);
  }

  // The same with resident weights: use_resident(u, a) for the first V::RESIDENT k-steps of the
  // slice, in an unrolled loop, since registers cannot be indexed; then use(step, a) for the
  // others.
  template <int LOADS, class R, class F>
  __device__ __forceinline__ void multiply(const ExchangedVector& v, uint32_t epoch, R use_resident,
                                           F use) const {
    const KSlice s = k_slice<V>(v.k_steps, warp);
    wait(v, s, epoch);
    const S* vector = slot(v, epoch);
#pragma unroll
    for (int first = 0; first < V::RESIDENT; first += LOADS) {
      RowFragments<V> a[LOADS];
      load_fragments(a, vector, v.k_steps, s.begin + first, s.begin + V::RESIDENT);
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        if (first + u < V::RESIDENT) use_resident(first + u, a[u]);
    }
    for_k_steps<LOADS>(vector, v.k_steps, s.begin + V::RESIDENT, s.end, use);
  }

  // Stores the warp's sums of the row tiles of a pass to shared memory, from `column` on. A barrier
  // of the group must follow before `sum` reads them, and one before the next call overwrites them.
  template <int STRIDE, int N>
  __device__ __forceinline__ void store_partial_sums(const Accumulators<V, N>& sums, int pass,
                                                     int column) const {
#pragma unroll
    for (int m = 0; m < V::PASS; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (n * 8 + lane % 4 * 2 >= STRIDE) continue;  // a column that no block owns
          float* to = partial + ((warp * V::PASS + m) * 16 + half * 8 + lane / 4) * STRIDE +
                      column + n * 8 + lane % 4 * 2;
          const float* from = sums.v[pass * V::PASS + m][n] + half * 2;
          *reinterpret_cast<float2*>(to) = float2{from[0], from[1]};
        }
  }

  // The sum over the warps of one element of a pass.
  template <int STRIDE>
  __device__ __forceinline__ float sum(int row_of_pass, int column) const {
    float s = 0;
#pragma unroll
    for (int w = 0; w < V::SPLIT; ++w)
      s += partial[(w * V::PASS * 16 + row_of_pass) * STRIDE + column];
    return s;
  }

  // The same of four columns from `column`, a multiple of 4, on.
  template <int STRIDE>
  __device__ __forceinline__ float4 sum4(int row_of_pass, int column) const {
    float4 s = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < V::SPLIT; ++w) {
      const float4 p = *reinterpret_cast<const float4*>(
          partial + (w * V::PASS * 16 + row_of_pass) * STRIDE + column);
      s.x += p.x;
      s.y += p.y;
      s.z += p.z;
      s.w += p.w;
    }
    return s;
  }
};

}  // namespace fusedseq::cuda
