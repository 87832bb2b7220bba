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
  // Only the narrowest variant has registers for sums that are set to zero before a wait.
  if (V::N == 1 && V::GROUPS == 1) {
#pragma unroll
    for (int m = 0; m < V::TILES; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::compute_now(sums.v[m][n][i]);
  }
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

// The same of all column tiles.
template <class S, class V, int N>
__device__ __forceinline__ void multiply_add(Accumulators<V, N>& sums, const RowFragments<V>& a,
                                             const ColumnFragments<N>& f) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    multiply_add<S>(sums, a, n, f.b[n]);
}

// The number of k-steps whose loads are in flight at once: `most`, but in fp32, where splitting the
// operands takes registers, half or two thirds of it in the variants that are short of registers.
template <class S, class V>
constexpr int loads_in_flight(int most) {
  if (sizeof(S) == 4 && V::N == 2 && V::GROUPS == 1) return most / 2;
  return sizeof(S) == 4 && (V::N == 2 || V::TILES == 3) ? most * 2 / 3 : most;
}

// A warp group, and its products and sums. (Members, because as free functions that take a group
// they cost up to 10 more registers in fp32, by nvcc 13.)
template <class S, class V>
struct GroupProducts : WarpGroup<S, V> {
  using Base = WarpGroup<S, V>;
  using Base::block;
  using Base::lane;
  using Base::lost;
  using Base::partial;
  using Base::rows;
  using Base::slot;
  using Base::wait;
  using Base::warp;
  using Base::WarpGroup;

  // In fp32 the addresses of three row tiles would take too many registers.
  static constexpr int POINTERS = V::TILES == 3 && sizeof(S) == 4 ? 1 : V::TILES;

  // Loads the A operands of COUNT k-steps of which `left` exist. A lane without rows, and what is
  // past the last k-step, leaves them as they are: neither reaches a sum that is used.
  // from: of each row tile, or of the first, the lane's part of the first of these k-steps
  // tile: from one row tile to the next
  template <int COUNT>
  __device__ __forceinline__ void load_fragments(RowFragments<V> (&a)[COUNT],
                                                 const uint4* const (&from)[POINTERS], int tile,
                                                 int left) const {
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m)
        if (u < left && m * 16 + lane / 4 < rows)
          a[u][m] = ptx::load_relaxed((POINTERS > 1 ? from[m] : from[0] + m * tile) + u * 32);
  }

  // The same by words: loads until none of them is empty. Of the first k-steps it polls one
  // fragment first, and loads the others when that has arrived, since polls of all of them would
  // compete with the other blocks' loads. step: the first of these k-steps
  template <int COUNT>
  __device__ __forceinline__ void load_words(RowFragments<V> (&a)[COUNT],
                                             const uint4* const (&from)[POINTERS],
                                             const ExchangedVector& v, int step, KSlice s,
                                             uint32_t epoch) const {
    uint32_t polls = 0;
    const auto poll = [&] {
      if (++polls == MAX_POLLS) give_up(a, v, step, s, epoch);
      ptx::pause();
    };
    // What does not exist is not empty.
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m)
        a[u][m] = uint4{ZEROS, ZEROS, ZEROS, ZEROS};
    if (step == s.begin && exists(0, 0, step, s)) {
#pragma unroll 1
      while (!least(a[0][0] = ptx::load_words(from[0])))
        poll();
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m)
        if (exists(u, m, step, s)) a[u][m] = ptx::load_words(from[m] + u * 32);
    const auto complete = [&] {
      uint32_t all = ZEROS;
#pragma unroll
      for (int u = 0; u < COUNT; ++u)
#pragma unroll
        for (int m = 0; m < V::TILES; ++m)
          all = least(all, least(a[u][m]));
      return all != 0;
    };
#pragma unroll 1
    while (!complete()) {
      poll();
#pragma unroll
      for (int u = 0; u < COUNT; ++u)
#pragma unroll
        for (int m = 0; m < V::TILES; ++m)
          if (!least(a[u][m])) a[u][m] = ptx::load_words(from[m] + u * 32);
    }
    __syncwarp();
  }
  __device__ __forceinline__ bool exists(int u, int m, int step, KSlice s) const {
    return step + u < s.end && m * 16 + lane / 4 < rows;
  }

  // Ends the kernel: names the owner of the first of a lane's words that is empty.
  template <int COUNT>
  __device__ __forceinline__ void give_up(const RowFragments<V> (&a)[COUNT],
                                          const ExchangedVector& v, int step, KSlice s,
                                          uint32_t epoch) const {
    int column = 0;
    bool found = false;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m) {
        if (found || least(a[u][m])) continue;
        found = true;
        column = (step + u) * K_STEP<S> + lane % 4 * 4 + (a[u][m].x && a[u][m].z ? 2 : 0);
      }
    const int first_block = int(blockIdx.x) - block;
    give_up_words(lost, V::THREADS, uint32_t(first_block + column / v.columns_of_block), epoch);
  }

  // Whether the B operands of the first k-steps are loaded before the wait: only the narrow
  // variants in 16 bits have registers for them, and not for those of a round and of the gates.
  template <class Columns>
  static constexpr bool EARLY_WEIGHTS =
      V::N == 1 && sizeof(S) == 2 && sizeof(Columns) <= sizeof(ColumnFragments<3>);

  // The warp's part of the product of a vector: waits for the columns of its slice, and calls
  // use(a, operands(step)) for each of its k-steps, with the loads of LOADS k-steps in flight.
  // use_resident(u, a) is called for the first RESIDENT k-steps instead, in an unrolled loop, since
  // registers cannot be indexed. What does not depend on the vector comes before the wait.
  // number: of the slot
  template <int LOADS, int RESIDENT, class R, class B, class F>
  __device__ __forceinline__ void multiply(const ExchangedVector& v, uint32_t number,
                                           uint32_t epoch, R use_resident, B operands,
                                           F use) const {
    const KSlice s = k_slice<V>(v.k_steps, warp);
    const uint4* from[POINTERS];
    const int tile = v.k_steps * 32;
#pragma unroll
    for (int m = 0; m < POINTERS; ++m) {
      from[m] = reinterpret_cast<const uint4*>(slot(v, number)) + (m * tile + s.begin * 32 + lane);
      ptx::compute_now(from[m]);
    }
    using Columns = decltype(operands(0));
    constexpr bool EARLY = EARLY_WEIGHTS<Columns>;
    RowFragments<V> a[LOADS] = {};
    if (EARLY) {
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
#pragma unroll
        for (int m = 0; m < V::TILES; ++m)
          ptx::compute_now(a[u][m]);
    }
    Columns b[LOADS];
    const auto load_operands = [&](int step, int u) {
      b[u] = operands(step + u < s.end ? step + u : s.end - 1);
    };
    if (EARLY && s.begin < s.end) {
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        load_operands(s.begin, u);
    }

    if (!V::WORDS) wait(v, s, epoch);
    const auto advance = [&](int steps) {
#pragma unroll
      for (int m = 0; m < POINTERS; ++m)
        from[m] += steps * 32;
    };
#pragma unroll
    for (int first = 0; first < RESIDENT; first += LOADS) {
      load_fragments(a, from, tile, RESIDENT - first);
      advance(RESIDENT - first < LOADS ? RESIDENT - first : LOADS);
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        if (first + u < RESIDENT) use_resident(first + u, a[u]);
    }
#pragma unroll 1
    for (int step = s.begin + RESIDENT; step < s.end; step += LOADS) {
      if constexpr (V::WORDS)
        load_words(a, from, v, step, s, epoch);
      else
        load_fragments(a, from, tile, s.end - step);
      advance(LOADS);
#pragma unroll
      for (int u = 0; u < LOADS; ++u) {
        // The load does not wait for the comparison, except where that takes too many registers.
        const bool exists = step + u < s.end;
        constexpr bool FULL = sizeof(S) == 4 || V::RESIDENT || V::PLAIN == 16;
        if ((!FULL || exists) && (!EARLY || step > s.begin)) load_operands(step, u);
        if (exists) use(a[u], b[u]);
      }
    }
  }

  // The same without k-steps in registers.
  template <int LOADS, class B, class F>
  __device__ __forceinline__ void multiply(const ExchangedVector& v, uint32_t number,
                                           uint32_t epoch, B operands, F use) const {
    multiply<LOADS, 0>(v, number, epoch, [](int, const RowFragments<V>&) {}, operands, use);
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
