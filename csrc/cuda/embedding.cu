// embedding: gathers rows of a table, with embedding dropout; and the gradient of the table,
// without atomics.
//
// What limits the gather: memory. N rows of E elements are read and written, 0.5 ns for each
// kilobyte on an H200 at 4.3 TB/s: 4,900 tokens of 650 in fp32 are 25 MB, 6 us. A group of lanes
// owns a row, so that a word's mask is drawn once for many elements.
//
// The gradient of a word's row is the sum over the word's tokens. The ids come sorted and stably,
// so that the tokens of a word are neighbours, in the order of the text. tiles_kernel adds the
// tokens of a word within each tile of TILE_TOKENS tokens. words_kernel adds the parts of words
// with tokens in more than one tile, tile by tile. The order of every sum depends on the ids alone.
// dy is read once (13 MB in the example, 3 us), and the rows of words that occur are written. The
// zeros of the other rows (V = 10,000: 26 MB, 6 us) and the sort come before.
// Timed on an H200: docs/gpu-kernels.md.
#include "cuda/embedding.h"

#include <cassert>

#include "cuda/launch_error.cuh"
#include "cuda/random_mask.cuh"
#include "cuda/vector_access.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int64_t TILE_TOKENS = 16;  // sorted tokens in a tile
constexpr int LOADS = 4;             // rows that a thread loads before it adds them
constexpr int64_t MAX_GRID_X = INT32_MAX;
constexpr int64_t MAX_GRID_Y = 65535;

__device__ void check_id(int64_t id, int64_t V) {
  assert(id >= 0 && id < V && "embedding: ids must be in [0, V)");
}

// A group of 1 << shift lanes gathers a row, N elements a lane at once.
template <class S, int N>
__global__ void __launch_bounds__(THREADS) gather_kernel(const Embedding e, int shift) {
  using C = typename Computing<S>::type;
  const int64_t row = (int64_t(blockIdx.x) * THREADS + threadIdx.x) >> shift;
  if (row >= e.N) return;
  const int64_t id = e.ids[row];
  check_id(id, e.V);

  // The word's mask. The row of a dropped word is not read, and its result is 0 even if it has NaN.
  const bool keep = !e.threshold || keep_in_row(uint64_t(*e.seed), e.threshold, id);
  const S* from = static_cast<const S*>(e.W) + id * e.E;
  S* to = static_cast<S*>(e.y) + row * e.E;
  const C scale = C(e.scale);
  for (int64_t j = (threadIdx.x & ((1 << shift) - 1)) * N; j < e.E; j += N << shift) {
    C v[N] = {};
    if (keep) load(from + j, N, true, v);
#pragma unroll
    for (int i = 0; i < N; ++i)
      v[i] = v[i] * scale;
    store(to + j, N, true, v);
  }
}

// ids, narrow: (N,)
__global__ void __launch_bounds__(THREADS)
    ids_kernel(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow) {
  const int64_t n = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (n >= N) return;
  check_id(ids[n], V);
  narrow[n] = int32_t(ids[n]);
}

// Stores the sum of a word's tokens, through embedding dropout, to columns j to j + N - 1 of dW.
template <class S, class C, int N>
__device__ void finish(const EmbeddingBackward& b, int64_t id, int64_t j, const C (&sum)[N]) {
  const bool keep =
      !b.threshold || keep_in_row(uint64_t(*b.seed), b.threshold, b.keys ? b.keys[id] : id);
  C v[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    v[i] = keep ? sum[i] * C(b.scale) : C(0);
  store(static_cast<S*>(b.dW) + id * b.E + j, N, true, v);
}

// The tile of a group of lanes, tokens [begin, end), and the lane's first column j.
struct Position {
  int64_t tile, begin, end, j;
};
template <int N>
__device__ Position own_position(const EmbeddingBackward& b, int shift) {
  const int64_t tile = (int64_t(blockIdx.x) * THREADS + threadIdx.x) >> shift;
  const int64_t begin = tile * TILE_TOKENS;
  const int64_t lane = threadIdx.x & ((1 << shift) - 1);
  return {tile, begin, begin + TILE_TOKENS < b.N ? begin + TILE_TOKENS : b.N,
          ((int64_t(blockIdx.y) << shift) + lane) * N};
}

// Where a tile stores its part of the sum of a word that other tiles have tokens of. which: 0 if
// the word begins in an earlier tile, 1 if it begins in this tile and continues in the next
template <class C>
__device__ C* partial(const EmbeddingBackward& b, int64_t tile, int which, int64_t j) {
  return static_cast<C*>(b.partial) + (2 * tile + which) * b.E + j;
}

// Adds the tokens of each word within a tile. A word with all tokens in the tile is finished.
template <class S, int N>
__global__ void __launch_bounds__(THREADS) tiles_kernel(const EmbeddingBackward b, int shift) {
  using C = typename Computing<S>::type;
  const auto [tile, begin, end, j] = own_position<N>(b, shift);
  if (begin >= b.N || j >= b.E) return;
  const S* dy = static_cast<const S*>(b.dy) + j;
  bool from_before = begin > 0 && b.ids[begin - 1] == b.ids[begin];
  C sum[N] = {};
  for (int64_t first = begin; first < end; first += LOADS) {
    // Several loads in flight, then their sums.
    C v[LOADS][N];
#pragma unroll
    for (int a = 0; a < LOADS; ++a)
      if (first + a < end) load(dy + b.order[first + a] * b.E, N, true, v[a]);
#pragma unroll
    for (int a = 0; a < LOADS; ++a) {
      const int64_t at = first + a;
      if (at >= end) break;
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum[i] += v[a][i];

      // At the last token of a word, or of the tile, store the sum and start the next one.
      const int32_t id = b.ids[at];
      const bool last = at + 1 == b.N || b.ids[at + 1] != id;
      if (!last && at + 1 < end) continue;
      if (last && !from_before) {
        finish<S>(b, id, j, sum);
      } else {
        C* out = partial<C>(b, tile, from_before ? 0 : 1, j);
#pragma unroll
        for (int i = 0; i < N; ++i)
          out[i] = sum[i];
      }
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum[i] = C(0);
      from_before = false;
    }
  }
}

// Adds the parts of words with tokens in several tiles. The group of the tile in which such a word
// begins does so; all other groups return.
template <class S, int N>
__global__ void __launch_bounds__(THREADS) words_kernel(const EmbeddingBackward b, int shift) {
  using C = typename Computing<S>::type;
  const auto [tile, begin, end, j] = own_position<N>(b, shift);
  if (end >= b.N || j >= b.E) return;
  const int32_t id = b.ids[end - 1];
  if (b.ids[end] != id || (begin > 0 && b.ids[begin - 1] == id)) return;

  // Binary search for the last tile with the word. Tile `last` begins with the word, tile `beyond`
  // does not.
  int64_t last = tile + 1;
  int64_t beyond = (b.N + TILE_TOKENS - 1) / TILE_TOKENS;
  while (beyond - last > 1) {
    const int64_t middle = (last + beyond) / 2;
    (b.ids[middle * TILE_TOKENS] == id ? last : beyond) = middle;
  }

  // The parts, in the order of the tiles.
  C sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    sum[i] = partial<C>(b, tile, 1, j)[i];
#pragma unroll 4
  for (int64_t k = tile + 1; k <= last; ++k)
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum[i] += partial<C>(b, k, 0, j)[i];
  finish<S>(b, id, j, sum);
}

// The number of lanes for a row of so many accesses, a power of two, as its logarithm: one lane an
// access if `most` lanes are enough.
int lanes_for(int64_t accesses, int most) {
  int shift = 0;
  while ((1 << shift) < accesses && (1 << shift) < most)
    ++shift;
  return shift;
}

template <class S, int N>
const char* gather(const Embedding& e, cudaStream_t stream) {
  const int shift = lanes_for(e.E / N, WARP);
  const int64_t rows = THREADS >> shift;
  const int64_t blocks = (e.N + rows - 1) / rows;
  if (blocks > MAX_GRID_X) return "more rows than a grid has threads for";
  gather_kernel<S, N><<<unsigned(blocks), THREADS, 0, stream>>>(e, shift);
  return launch_error();
}

template <class S, int N>
const char* scatter(const EmbeddingBackward& b, cudaStream_t stream) {
  const int shift = lanes_for(b.E / N, THREADS);
  const int64_t tiles = THREADS >> shift;
  const int64_t blocks = (embedding_tiles(b.N) + tiles - 1) / tiles;
  const int64_t columns = (b.E / N + (1 << shift) - 1) >> shift;
  if (blocks > MAX_GRID_X || columns > MAX_GRID_Y)
    return "more rows or columns than a grid has threads for";
  const dim3 grid{unsigned(blocks), unsigned(columns)};
  tiles_kernel<S, N><<<grid, THREADS, 0, stream>>>(b, shift);
  if (b.N > TILE_TOKENS) words_kernel<S, N><<<grid, THREADS, 0, stream>>>(b, shift);
  return launch_error();
}

// Whether rows of E elements at p can be accessed N elements at once.
template <class S>
bool fits(const void* p, int64_t E, int N) {
  return E % N == 0 && reinterpret_cast<uintptr_t>(p) % (N * sizeof(S)) == 0;
}

// Returns run(S(), N) with the widest access that rows of E elements at p and q allow: 16 bytes, 2
// elements or 1. N is an integral_constant.
template <class S, class F>
const char* by_width(const void* p, const void* q, int64_t E, F run) {
  constexpr int WIDEST = 16 / sizeof(S);
  if (fits<S>(p, E, WIDEST) && fits<S>(q, E, WIDEST))
    return run(S(), std::integral_constant<int, WIDEST>());
  if (WIDEST > 2 && fits<S>(p, E, 2) && fits<S>(q, E, 2))
    return run(S(), std::integral_constant<int, 2>());
  return run(S(), std::integral_constant<int, 1>());
}
// The same for a dtype.
template <class F>
const char* dispatch(Type type, const void* p, const void* q, int64_t E, F run) {
  return by_type(type, [&](auto s) { return by_width<decltype(s)>(p, q, E, run); });
}

}  // namespace

int64_t embedding_tiles(int64_t N) {
  return (N + TILE_TOKENS - 1) / TILE_TOKENS;
}

const char* embedding(const Embedding& e, void* stream) {
  return dispatch(e.type, e.W, e.y, e.E, [&](auto s, auto n) {
    return gather<decltype(s), decltype(n)::value>(e, static_cast<cudaStream_t>(stream));
  });
}

const char* embedding_ids(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow, void* stream) {
  const int64_t blocks = (N + THREADS - 1) / THREADS;
  if (blocks > MAX_GRID_X || V > INT32_MAX) return "more ids or words than fit 32 bits";
  ids_kernel<<<unsigned(blocks), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(N, V, ids,
                                                                                  narrow);
  return launch_error();
}

const char* embedding_backward(const EmbeddingBackward& b, void* stream) {
  return dispatch(b.type, b.dy, b.dW, b.E, [&](auto s, auto n) {
    return scatter<decltype(s), decltype(n)::value>(b, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace fusedseq::cuda
