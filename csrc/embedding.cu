// embedding: rows of a table, with embedding dropout in the gather; and its gradient, without an atomic.
//
// What limits the gather is memory: N rows of E read and written, 0.5 ns a kilobyte at an H200's 4.3 TB/s. 4,900 tokens of
// 650 in fp32 are 25 MB, 6 us. A group of lanes has a row, so that a word's mask is made once for many elements.
//
// The gradient of a word is the sum over its tokens. They come sorted, so that those of a word stand together in the order
// of the text; tiles of PIECE tokens add up what lies within, and what a word has in more than one tile is added by a second
// kernel, tile by tile. The order of every sum is a function of the ids alone. It reads dy once (13 MB there, 3 us) and
// writes the rows used; the zeros of the other rows (V = 10,000: 26 MB, 6 us) and the sort come before it. Not timed.
#include "embedding_cuda.h"

#include <cassert>

#include "pack.cuh"
#include "philox.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int THREADS = 256, WARP = 32;
constexpr int64_t PIECE = 16;       // sorted tokens in a tile
constexpr int AHEAD = 4;            // rows that a thread loads before it adds them
constexpr int64_t MOST_BLOCKS = INT32_MAX;
constexpr int64_t MOST_COLUMNS = 65535;  // blocks of a grid in y

__device__ void check_id(int64_t id, int64_t V) { assert(id >= 0 && id < V && "embedding: ids must be in [0, V)"); }

// Rows and columns by groups of 1 << shift lanes, N elements a lane.
template <class S, int N> __global__ void __launch_bounds__(THREADS) gather_kernel(const Embedding e, int shift) {
  using C = typename Computing<S>::type;
  const int64_t row = (int64_t(blockIdx.x) * THREADS + threadIdx.x) >> shift;
  if (row >= e.N) return;
  const int64_t id = e.ids[row];
  check_id(id, e.V);
  const bool kept = !e.threshold || kept_in_row(uint64_t(*e.seed), e.threshold, id);
  const S* from = static_cast<const S*>(e.W) + id * e.E;
  S* to = static_cast<S*>(e.y) + row * e.E;
  const C scale = C(e.scale);
  for (int64_t j = (threadIdx.x & ((1 << shift) - 1)) * N; j < e.E; j += N << shift) {
    C v[N] = {};
    if (kept) load(from + j, N, true, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] * scale;
    store(to + j, N, true, v);
  }
}

__global__ void __launch_bounds__(THREADS) ids_kernel(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow) {
  const int64_t n = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (n >= N) return;
  check_id(ids[n], V);
  narrow[n] = int32_t(ids[n]);
}

// Row `id` of dW from column j on.
template <class S, class C, int N> __device__ void finish(const EmbeddingBackward& b, int64_t id, int64_t j, const C (&sum)[N]) {
  const bool kept = !b.threshold || kept_in_row(uint64_t(*b.seed), b.threshold, b.keys ? b.keys[id] : id);
  C v[N];
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = kept ? sum[i] * C(b.scale) : C(0);
  store(static_cast<S*>(b.dW) + id * b.E + j, N, true, v);
}

// A group's tile of tokens and its lane's first column.
struct Place { int64_t tile, begin, end, j; };
template <int N> __device__ Place own_place(const EmbeddingBackward& b, int shift) {
  const int64_t tile = (int64_t(blockIdx.x) * THREADS + threadIdx.x) >> shift, begin = tile * PIECE;
  const int64_t lane = threadIdx.x & ((1 << shift) - 1);
  return {tile, begin, begin + PIECE < b.N ? begin + PIECE : b.N, ((int64_t(blockIdx.y) << shift) + lane) * N};
}

// Where a tile leaves its part of a word that begins in an earlier tile (0), or begins in it and goes on in the next (1).
template <class C> __device__ C* partial(const EmbeddingBackward& b, int64_t tile, int which, int64_t j) {
  return static_cast<C*>(b.partial) + (2 * tile + which) * b.E + j;
}

template <class S, int N> __global__ void __launch_bounds__(THREADS) tiles_kernel(const EmbeddingBackward b, int shift) {
  using C = typename Computing<S>::type;
  const auto [tile, begin, end, j] = own_place<N>(b, shift);
  if (begin >= b.N || j >= b.E) return;
  const S* dy = static_cast<const S*>(b.dy) + j;
  bool from_before = begin > 0 && b.ids[begin - 1] == b.ids[begin];
  C sum[N] = {};
  for (int64_t first = begin; first < end; first += AHEAD) {
    C v[AHEAD][N];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
      if (first + a < end) load(dy + b.order[first + a] * b.E, N, true, v[a]);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int64_t at = first + a;
      if (at >= end) break;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += v[a][i];
      const int32_t id = b.ids[at];
      const bool last = at + 1 == b.N || b.ids[at + 1] != id;
      if (!last && at + 1 < end) continue;
      if (last && !from_before) {
        finish<S>(b, id, j, sum);
      } else {
        C* out = partial<C>(b, tile, from_before ? 0 : 1, j);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = sum[i];
      }
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = C(0);
      from_before = false;
    }
  }
}

// The words that go on beyond the tile in which they begin: the parts of their tiles in order.
template <class S, int N> __global__ void __launch_bounds__(THREADS) words_kernel(const EmbeddingBackward b, int shift) {
  using C = typename Computing<S>::type;
  const auto [tile, begin, end, j] = own_place<N>(b, shift);
  if (end >= b.N || j >= b.E) return;
  const int32_t id = b.ids[end - 1];
  if (b.ids[end] != id || (begin > 0 && b.ids[begin - 1] == id)) return;
  int64_t last = tile + 1, beyond = (b.N + PIECE - 1) / PIECE;  // tile `last` begins with the word, `beyond` does not
  while (beyond - last > 1) {
    const int64_t middle = (last + beyond) / 2;
    (b.ids[middle * PIECE] == id ? last : beyond) = middle;
  }
  C sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = partial<C>(b, tile, 1, j)[i];
#pragma unroll 4
  for (int64_t k = tile + 1; k <= last; ++k)
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += partial<C>(b, k, 0, j)[i];
  finish<S>(b, id, j, sum);
}

// Lanes for a row of so many accesses, as a power of two: all that it has, `most` at the most.
int lanes_for(int64_t accesses, int most) {
  int shift = 0;
  while ((1 << shift) < accesses && (1 << shift) < most) ++shift;
  return shift;
}

template <class S, int N> const char* gather(const Embedding& e, cudaStream_t stream) {
  const int shift = lanes_for(e.E / N, WARP);
  const int64_t rows = THREADS >> shift, blocks = (e.N + rows - 1) / rows;
  if (blocks > MOST_BLOCKS) return "more rows than a grid has threads for";
  gather_kernel<S, N><<<unsigned(blocks), THREADS, 0, stream>>>(e, shift);
  return launch_error();
}

template <class S, int N> const char* scatter(const EmbeddingBackward& b, cudaStream_t stream) {
  const int shift = lanes_for(b.E / N, THREADS);
  const int64_t tiles = THREADS >> shift, blocks = (embedding_tiles(b.N) + tiles - 1) / tiles;
  const int64_t columns = (b.E / N + (1 << shift) - 1) >> shift;
  if (blocks > MOST_BLOCKS || columns > MOST_COLUMNS) return "more rows or columns than a grid has threads for";
  const dim3 grid{unsigned(blocks), unsigned(columns)};
  tiles_kernel<S, N><<<grid, THREADS, 0, stream>>>(b, shift);
  if (b.N > PIECE) words_kernel<S, N><<<grid, THREADS, 0, stream>>>(b, shift);
  return launch_error();
}

// Whether rows of E elements at `p` can be read by N elements at once.
template <class S> bool fits(const void* p, int64_t E, int N) {
  return E % N == 0 && reinterpret_cast<uintptr_t>(p) % (N * sizeof(S)) == 0;
}

// run(S(), N) with the most elements of 16 bytes, or 2 or 1, that rows at p and q allow.
template <class S, class F> const char* by_width(const void* p, const void* q, int64_t E, F run) {
  constexpr int WIDEST = 16 / sizeof(S);
  if (fits<S>(p, E, WIDEST) && fits<S>(q, E, WIDEST)) return run(S(), std::integral_constant<int, WIDEST>());
  if (WIDEST > 2 && fits<S>(p, E, 2) && fits<S>(q, E, 2)) return run(S(), std::integral_constant<int, 2>());
  return run(S(), std::integral_constant<int, 1>());
}
// run(S(), N) for a type and the widest access that rows of E at p and q allow.
template <class F> const char* dispatch(Type type, const void* p, const void* q, int64_t E, F run) {
  return by_type(type, [&](auto s) { return by_width<decltype(s)>(p, q, E, run); });
}

}  // namespace

int64_t embedding_tiles(int64_t N) { return (N + PIECE - 1) / PIECE; }

const char* embedding(const Embedding& e, void* stream) {
  return dispatch(e.type, e.W, e.y, e.E, [&](auto s, auto n) {
    return gather<decltype(s), decltype(n)::value>(e, static_cast<cudaStream_t>(stream));
  });
}

const char* embedding_ids(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow, void* stream) {
  const int64_t blocks = (N + THREADS - 1) / THREADS;
  if (blocks > MOST_BLOCKS || V > INT32_MAX) return "more ids, or words, than 32-bit numbers";
  ids_kernel<<<unsigned(blocks), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(N, V, ids, narrow);
  return launch_error();
}

const char* embedding_backward(const EmbeddingBackward& b, void* stream) {
  return dispatch(b.type, b.dy, b.dW, b.E, [&](auto s, auto n) {
    return scatter<decltype(s), decltype(n)::value>(b, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace fusedseq::cuda
