// dropout, locked_dropout, weight_drop: a (T, B, D) tensor under a mask of its last two dimensions. A thread has 16 bytes
// of the (B, D) plane, makes their mask once and goes over some of the steps with it.
//
// What limits it is memory where T is more than a few: 0.5 ns a kilobyte read and written on an H200 at 4.3 TB/s. With
// T = 1 Philox's integer arithmetic, about 18 instructions an element, takes as long. Not timed.
#include "dropout_cuda.h"
#include "pack.cuh"
#include "philox.cuh"
#include "plane.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int THREADS = 256;
constexpr int64_t ENOUGH = 1 << 18;  // threads that keep a GPU busy: what has fewer in its plane is cut along T as well

// Element `first` of the plane: its row, and where in it. 32 bits, where they are enough, divide much faster.
struct Place { int64_t row, j; };
__device__ Place place(int64_t first, int64_t D) {
  const int64_t row = (first | D) >> 32 ? first / D : uint32_t(first) / uint32_t(D);
  return {row, first - row * D};
}

// Bit i: whether element first + i is kept. WHOLE: D is a multiple of N, so that all are in one row.
template <int N, bool WHOLE> __device__ unsigned kept_of_chunk(const Dropout& d, uint64_t seed, int64_t first) {
  auto [row, j] = place(first, d.D);
  const int64_t blocks = (d.D + 3) / 4;
  Words words;
  unsigned kept = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int word = int(WHOLE && N % 4 == 0 ? i : j) % 4;
    if (i == 0 || word == 0) words.make(seed, uint64_t(row * blocks + j / 4));
    kept |= unsigned(words[word] >= d.threshold) << i;
    if (++j == d.D) j = 0, ++row;
  }
  return kept;
}

// As that, of a mask with one element for each row.
template <int N> __device__ unsigned kept_by_row(const Dropout& d, uint64_t seed, int64_t first) {
  auto [row, j] = place(first, d.D);
  Words words;
  unsigned kept = 0;
  for (int i = 0; i < N; ++i) {
    if (i == 0 || j == 0) words.make(seed, uint64_t(row / 4));
    kept |= unsigned(words[int(row % 4)] >= d.threshold) << i;
    if (++j == d.D) j = 0, ++row;
  }
  return kept;
}

template <class S, bool WHOLE> __global__ void __launch_bounds__(THREADS) dropout_kernel(const Dropout d) {
  using C = typename Computing<S>::type;
  constexpr int N = 16 / sizeof(S);
  const int64_t plane = d.B * d.D, first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * N;
  if (first >= plane) return;
  const int n = plane - first < N ? int(plane - first) : N;
  const uint64_t seed = uint64_t(*d.seed);
  const unsigned kept = d.by_row ? kept_by_row<N>(d, seed, first) : kept_of_chunk<N, WHOLE>(d, seed, first);
  const C scale = C(d.scale);
  for (int64_t t = blockIdx.y; t < d.T; t += gridDim.y) {
    const S* x = static_cast<const S*>(d.x) + t * plane + first;
    S* y = static_cast<S*>(d.y) + t * plane + first;
    C v[N];
    load(x, n, aligned<N>(x), v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = kept >> i & 1 ? v[i] * scale : C(0);
    store(y, n, aligned<N>(y), v);
  }
}

template <class S> const char* start(const Dropout& d, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(S);
  const dim3 grid = plane_grid(d.T, d.B * d.D, N, THREADS, ENOUGH);
  if (grid.x == 0) return "more elements in a step than a grid has threads for";
  if (d.D % N == 0) dropout_kernel<S, true><<<grid, THREADS, 0, stream>>>(d);
  else dropout_kernel<S, false><<<grid, THREADS, 0, stream>>>(d);
  return launch_error();
}

}  // namespace

const char* dropout(const Dropout& d, void* stream) {
  return by_type(d.type, [&](auto s) { return start<decltype(s)>(d, static_cast<cudaStream_t>(stream)); });
}

}  // namespace fusedseq::cuda
