// What persistent_forward.cu and persistent_backward.cu share: vectors that all blocks exchange in every phase of a step,
// and products of them with weights that stay in shared memory.
//
// A vector is (rows, K): h, x or the gates' gradients of all rows of a group. Each block publishes its own columns of it
// and reads all of it. It stands in memory as mma reads its A operand, (tiles, k-steps, lanes, 16 bytes): a lane takes 16
// bytes at once, from the L2 cache to registers, since no other warp of the block reads them. Vector number `epoch`
// is in slot epoch % SLOTS of the vectors of its kind. A producer stores, meets its group at a barrier, and one thread
// releases the epoch to the block's flag; a warp that reads waits for the flags of the blocks whose columns it takes.
// Every block reads each vector before it publishes the next: two slots would do.
//
// What limits it: r + 1 exchanges a step, about 1 us each by arithmetic; at B 64 and more the vectors' way from L2 to each of
// the SMs. Nothing of this has been timed on a GPU.
#pragma once
#include <ptx.cuh>

#include <type_traits>

#include "fp32_product.cuh"
#include "pack.cuh"
#include "philox.cuh"
#include "recurrence_cuda.h"
#include "recurrence_plan.h"

namespace fusedseq::cuda {

constexpr int SLOTS = 4;
constexpr int FRAGMENT = 512;                                  // bytes of a vector's tile and k-step
template <class S> constexpr int ALONG = 32 / int(sizeof(S));  // elements of a k-step

// Where a kind of vector stands in a group's part of the exchange.
struct Kind {
  int64_t first;      // byte
  int steps, K;       // along K; the width
  int columns;        // that a block owns of it
};

// What a launch is given beside the recurrence.
struct Exchange {
  uint32_t* flags;    // (replicas, groups, blocks), zero
  void* vectors;      // (replicas, groups, group_bytes)  S, zero
  int64_t group_bytes;
};

// What a layer of a wavefront has to do with the other one, in the same launch: wavefront.cu. A tensor is handed over: forward the
// first layer's y, backward the gradient of it. It is kept for all steps, so that nobody waits before writing it. A step of it is
// stored behind the step's last vector, so that the next epoch releases it, of which the giver publishes one more at its end.
struct Link {
  const uint32_t* flags;  // of the giver's blocks; null in the giver
  int columns, epochs;    // that each of these owns; of a step
  void* handed;           // (T, B, H of the first layer)  S  under the mask; null where the giver's own output does
  Mask mask;
  bool locked;            // the mask is (B, H), else (T, B, H)
  const int64_t* seed;
};

template <class S> using Bits = std::conditional_t<sizeof(S) == 2, uint16_t, uint32_t>;
template <class S> __device__ __forceinline__ Bits<S> bits_of(float v) {
  const S rounded = S(v);
  Bits<S> bits;
  memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
template <class S> __device__ __forceinline__ float value_of(Bits<S> bits) {
  S v;
  memcpy(&v, &bits, sizeof bits);
  return float(v);
}
// Where step t begins in a tensor of that many elements a step: 64 bits of address here, and 32 for what is added to it.
template <class T> __device__ __forceinline__ T* step_of(void* p, int64_t t, int64_t elements) { return static_cast<T*>(p) + t * elements; }
template <class T> __device__ __forceinline__ const T* step_of(const void* p, int64_t t, int64_t elements) {
  return static_cast<const T*>(p) + t * elements;
}

// Element (row, col) of a vector of `steps`.
template <class S> __device__ __forceinline__ int place(int row, int col, int steps) {
  constexpr int OF_LANE = ALONG<S> / 4;
  return (((row / 16 * steps + col / ALONG<S>) * 32 + row % 8 * 4 + col % ALONG<S> / OF_LANE) * 2 + row % 16 / 8) * OF_LANE + col % OF_LANE;
}

// Four elements of a unit's gates, as few registers as they need.
template <class S> struct Quad {
  uint32_t words[sizeof(S)];
  __device__ __forceinline__ void set_bits(Bits<S> a, Bits<S> b, Bits<S> c, Bits<S> d) {
    if constexpr (sizeof(S) == 2) words[0] = a | uint32_t(b) << 16, words[1] = c | uint32_t(d) << 16;
    else words[0] = a, words[1] = b, words[2] = c, words[3] = d;
  }
  __device__ __forceinline__ void set(float a, float b, float c, float d) { set_bits(bits_of<S>(a), bits_of<S>(b), bits_of<S>(c), bits_of<S>(d)); }
  __device__ __forceinline__ Bits<S> bits(int i) const {
    if constexpr (sizeof(S) == 2) return Bits<S>(words[i / 2] >> i % 2 * 16);
    else return words[i];
  }
  __device__ __forceinline__ float operator[](int i) const { return value_of<S>(bits(i)); }
  // As columns col to col + 3 of a vector, col a multiple of 4.
  __device__ __forceinline__ void publish(S* vector, int row, int col, int steps) const {
#pragma unroll
    for (int i = 0; i < int(sizeof(S)); i += 2)
      ptx::store_relaxed(reinterpret_cast<uint2*>(vector + place<S>(row, col + i * 2 / int(sizeof(S)) * 2, steps)), uint2{words[i], words[i + 1]});
  }
};

// A part of the mask, for one element.
__device__ __forceinline__ bool kept(const int64_t* seed, const Mask& m, int64_t row, int64_t j, int64_t width) {
  Words words;
  words.make(uint64_t(*seed) + m.stream, uint64_t(row * ((width + 3) / 4) + j / 4));
  return words[int(j % 4)] >= m.threshold;
}

// Stored for another layer, and read there.
template <class S> __device__ __forceinline__ void hand_over(S* to, S v) {
  ptx::store_relaxed(reinterpret_cast<Bits<S>*>(to), bits_of<S>(float(v)));
}
template <class S> __device__ __forceinline__ float handed(const S* from) {
  return value_of<S>(ptx::load_relaxed(reinterpret_cast<const Bits<S>*>(from)));
}
// As the dropout between the layers leaves it.
template <class S> __device__ __forceinline__ S masked(const Link& k, S v, int64_t t, int64_t B, int b, int j, int64_t width) {
  if (!k.mask.threshold) return v;
  return kept(k.seed, k.mask, k.locked ? b : t * B + b, j, width) ? S(float(v) * float(k.mask.scale)) : S(0.f);
}

// What a unit of row (t, b) takes of its new value.
__device__ __forceinline__ float zoneout_update(const Recurrence& r, const Mask& m, int64_t row, int64_t j) {
  if (!r.training) return float(1 - m.p);
  return kept(r.seed, m, row, j, r.H) ? 1.f : 0.f;
}

// An element of W_hh, as its mask leaves it.
template <class S> __device__ __forceinline__ S dropped_weight(const Recurrence& r, int64_t row, int64_t j) {
  const S w = static_cast<const S*>(r.W_hh)[row * r.H + j];
  if (!r.weight.threshold) return w;
  const bool keep = r.weight_by_row ? kept(r.seed, r.weight, 0, row, 4 * r.H) : kept(r.seed, r.weight, row, j, r.H);
  return keep ? S(float(w) * float(r.weight.scale)) : S(0.f);
}

// The columns of a vector's kind that a block owns.
struct Columns {
  int first, count;
  __device__ __forceinline__ Columns(int block, int each, int width)
      : first(block * each), count(width - first < each ? (width > first ? width - first : 0) : each) {}
};

template <class S> __device__ __forceinline__ int steps_of(int K) { return (K + ALONG<S> - 1) / ALONG<S>; }

// The k-steps of a vector that a warp takes.
struct Slice { int begin, end; };
template <class V> __device__ __forceinline__ Slice slice(int steps, int warp) {
  return {steps * warp / V::SPLIT, steps * (warp + 1) / V::SPLIT};
}

// ---- weights in shared memory: (k-steps, columns, ALONG). Of the first V::KEPT k-steps of each warp's slice, the first
// KEPT_COLUMNS can be in its registers instead; what is left of these k-steps stands behind the others.

// element(n, k): of column n.    returns what is behind the weights
template <class V, int KEPT, int KEPT_COLUMNS, class S, class F>
__device__ __forceinline__ S* fill(S* to, int columns, int K, F element) {
  constexpr int A = ALONG<S>;
  const int steps = steps_of<S>(K), left = columns < KEPT_COLUMNS ? 0 : columns - KEPT_COLUMNS;
  S* rest = to + (steps - KEPT * V::SPLIT) * columns * A;
  for (int i = threadIdx.x; i < steps * A * columns; i += blockDim.x) {
    const int n = i / (steps * A), k = i - n * steps * A, step = k / A;
    const int warp = KEPT ? ((step + 1) * V::SPLIT - 1) / steps : 0, of_slice = step - slice<V>(steps, warp).begin;
    const S value = k < K ? element(n, k) : S(0.f);
    if (KEPT == 0 || of_slice >= KEPT) to[((KEPT ? step - (warp + 1) * KEPT : step) * columns + n) * A + k % A] = value;
    else if (n >= KEPT_COLUMNS) rest[((warp * KEPT + of_slice) * left + n - KEPT_COLUMNS) * A + k % A] = value;
  }
  return rest + KEPT * V::SPLIT * left * A;
}

template <class S> struct Weights {
  const S* shared = nullptr;
  int columns = 0;
  // The B operand of tile n: the lane % 4-th quarter of column 8 n + lane / 4.
  __device__ __forceinline__ uint2 operand(int step, int n, int lane) const {
    const int column = 8 * n + lane / 4;
    if (column >= columns) return uint2{0, 0};
    return *reinterpret_cast<const uint2*>(shared + (step * columns + column) * ALONG<S> + lane % 4 * (ALONG<S> / 4));
  }
};

template <class V, int N> struct Kept {
  uint2 operand[V::KEPT ? V::KEPT : 1][N];
  template <class S, class F> __device__ __forceinline__ void load(int columns, int K, int warp, int lane, F element) {
    constexpr int OF_LANE = ALONG<S> / 4;
    const int begin = slice<V>(steps_of<S>(K), warp).begin;
#pragma unroll
    for (int u = 0; u < V::KEPT; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int column = 8 * n + lane / 4, k = (begin + u) * ALONG<S> + lane % 4 * OF_LANE;
        S w[OF_LANE];
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i) w[i] = column < columns && k + i < K ? element(column, k + i) : S(0.f);
        memcpy(&operand[u][n], w, sizeof w);
      }
  }
};

// K-steps in flight: in fp32, whose parts take registers, two thirds as many.
template <class S, class V> constexpr int loads(int most) { return sizeof(S) == 4 && (V::N == 2 || V::TILES == 3) ? most * 2 / 3 : most; }

// ---- a group of warps, and the rows it has

template <class V, int N> struct Sums { float v[V::TILES][N][4]; };
template <class V, int N> __device__ __forceinline__ void clear(Sums<V, N>& s) {
#pragma unroll
  for (int m = 0; m < V::TILES; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s.v[m][n][i] = 0;
}

template <class S, class V, int N>
__device__ __forceinline__ void add(Sums<V, N>& s, const uint4 (&a)[V::TILES], int n, uint2 b) {
#pragma unroll
  for (int m = 0; m < V::TILES; ++m) {
    const uint32_t rows[4] = {a[m].x, a[m].z, a[m].y, a[m].w}, columns[2] = {b.x, b.y};
    multiply_add(s.v[m][n], rows, columns, S());
  }
}

template <class S, class V> struct Group {
  int block, number, warp, thread, lane;  // thread: of the group; warp likewise
  int first_row;                          // in the batch
  int rows;
  uint32_t* flags;
  char* vectors;
  float* partial;                         // (SPLIT, 16 PASS, stride)

  __device__ __forceinline__ Group(const Layout& l, const Exchange& e, int64_t B, int of_layer)
      : block(of_layer % l.blocks), number(int(threadIdx.x) / V::THREADS), warp(int(threadIdx.x) % V::THREADS / 32),
        thread(int(threadIdx.x) % V::THREADS), lane(int(threadIdx.x) % 32) {
    const int replica = of_layer / l.blocks, index = replica * V::GROUPS + number;
    const int of_replica = int((replica + 1) * l.rows < B ? (replica + 1) * l.rows : B);
    const int most = int((l.rows + 16 * V::GROUPS - 1) / (16 * V::GROUPS)) * 16;
    first_row = replica * int(l.rows) + number * most;
    rows = first_row >= of_replica ? 0 : of_replica - first_row < most ? of_replica - first_row : most;
    flags = e.flags + index * l.blocks;
    vectors = static_cast<char*>(e.vectors) + index * e.group_bytes;
  }

  __device__ __forceinline__ S* vector(const Kind& kind, uint32_t epoch) const {
    return reinterpret_cast<S*>(vectors + kind.first + int64_t(epoch % SLOTS) * V::TILES * kind.steps * FRAGMENT);
  }
  __device__ __forceinline__ void meet() const { ptx::barrier(1 + number, V::THREADS); }
  __device__ __forceinline__ void publish(uint32_t epoch) const {
    meet();
    if (thread == 0) ptx::store_release(flags + block, epoch);
  }
  // Until all columns of the slice have been published.
  __device__ __forceinline__ void wait(const Kind& kind, Slice s, uint32_t epoch) const {
    const int end = s.end * ALONG<S> < kind.K ? s.end * ALONG<S> : kind.K;
    wait(flags, s.begin * ALONG<S>, end, kind.columns, epoch);
  }
  // Until the blocks with these flags, of so many columns each, have published those from `begin` to before `end`.
  __device__ __forceinline__ void wait(const uint32_t* flags, int begin, int end, int columns, uint32_t epoch) const {
    if (end > begin)
      for (int p = begin / columns + lane; p <= (end - 1) / columns; p += 32)
        while (int32_t(ptx::load_acquire(flags + p) - epoch) < 0) ptx::pause();
    __syncwarp();
  }
  // Until the other layer has handed over its `steps` first steps of the block's columns; `before`: epochs before these.
  __device__ __forceinline__ void wait(const Link& k, const Columns& own, int64_t steps, int before) const {
    wait(k.flags, own.first, own.first + own.count, k.columns, uint32_t(steps) * k.epochs + before + 1);
  }

  // The A operands of COUNT k-steps from `step` on; zero past the slice's end and the group's rows.
  template <int COUNT>
  __device__ __forceinline__ void load(uint4 (&a)[COUNT][V::TILES], const S* vector, int steps, int step, int end) const {
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
      for (int m = 0; m < V::TILES; ++m)
        a[u][m] = step + u < end && m * 16 + lane / 4 < rows
                      ? ptx::load_relaxed(reinterpret_cast<const uint4*>(vector) + ((m * steps + step + u) * 32 + lane))
                      : uint4{0, 0, 0, 0};
  }

  // This warp's part of the product of a vector: use(step, a) for each k-step of its slice.
  template <int LOADS, class F> __device__ __forceinline__ void multiply(const Kind& kind, uint32_t epoch, F use) const {
    const Slice s = slice<V>(kind.steps, warp);
    wait(kind, s, epoch);
    each_step<LOADS>(vector(kind, epoch), kind.steps, s.begin, s.end, use);
  }
  // The same where the first V::KEPT k-steps have weights in registers: keep(u, a) for those.
  template <int LOADS, class K, class F>
  __device__ __forceinline__ void multiply(const Kind& kind, uint32_t epoch, K keep, F use) const {
    const Slice s = slice<V>(kind.steps, warp);
    wait(kind, s, epoch);
    const S* v = vector(kind, epoch);
#pragma unroll
    for (int first = 0; first < V::KEPT; first += LOADS) {
      uint4 a[LOADS][V::TILES];
      load(a, v, kind.steps, s.begin + first, s.begin + V::KEPT);
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        if (first + u < V::KEPT) keep(first + u, a[u]);
    }
    each_step<LOADS>(v, kind.steps, s.begin + V::KEPT, s.end, use);
  }
  template <int LOADS, class F>
  __device__ __forceinline__ void each_step(const S* vector, int steps, int begin, int end, F use) const {
#pragma unroll 1
    for (int step = begin; step < end; step += LOADS) {
      uint4 a[LOADS][V::TILES];
      load(a, vector, steps, step, end);
#pragma unroll
      for (int u = 0; u < LOADS; ++u)
        if (step + u < end) use(step + u, a[u]);
    }
  }

  // Lays the sums of a pass out for all of the group to add up, from a column on.
  template <int N, int STRIDE> __device__ __forceinline__ void lay(const Sums<V, N>& sums, int pass, int column) const {
#pragma unroll
    for (int m = 0; m < V::PASS; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (n * 8 + lane % 4 * 2 >= STRIDE) continue;  // a column that nobody owns
          float* to = partial + ((warp * V::PASS + m) * 16 + half * 8 + lane / 4) * STRIDE + column + n * 8 + lane % 4 * 2;
          const float* from = sums.v[pass * V::PASS + m][n] + half * 2;
          *reinterpret_cast<float2*>(to) = float2{from[0], from[1]};
        }
  }
  template <int STRIDE> __device__ __forceinline__ float sum(int row_of_pass, int column) const {
    float s = 0;
#pragma unroll
    for (int w = 0; w < V::SPLIT; ++w) s += partial[(w * V::PASS * 16 + row_of_pass) * STRIDE + column];
    return s;
  }
  template <int STRIDE> __device__ __forceinline__ float4 sum4(int row_of_pass, int column) const {
    float4 s = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < V::SPLIT; ++w) {
      const float4 p = *reinterpret_cast<const float4*>(partial + (w * V::PASS * 16 + row_of_pass) * STRIDE + column);
      s.x += p.x, s.y += p.y, s.z += p.z, s.w += p.w;
    }
    return s;
  }
};

// The elements of a group's rows that a thread owns, in the block's columns of one kind: PER_PASS of each pass. Where they
// are is worked out anew each time, which costs less than the registers to keep it.
template <class V, int MOST> struct Owned {
  static constexpr int PER_PASS = (V::PASS * 16 * MOST + V::THREADS - 1) / V::THREADS, COUNT = V::PASSES * PER_PASS;
  int thread, rows, columns;
  uint32_t reciprocal;  // of columns, times 2^16: exact for the few elements there are
  template <class G> __device__ __forceinline__ Owned(const G& g, int columns)
      : thread(g.thread), rows(g.rows), columns(columns), reciprocal(columns ? 65536 / columns + 1 : 0) {}
  __device__ __forceinline__ int row_of_pass(int e) const { return int((thread + e % PER_PASS * V::THREADS) * reciprocal >> 16); }
  __device__ __forceinline__ int row(int e) const { return e / PER_PASS * V::PASS * 16 + row_of_pass(e); }
  __device__ __forceinline__ int column(int e) const { return thread + e % PER_PASS * V::THREADS - row_of_pass(e) * columns; }
  __device__ __forceinline__ bool operator[](int e) const { return columns && row_of_pass(e) < V::PASS * 16 && row(e) < rows; }
};

}  // namespace fusedseq::cuda
