// dropout, locked_dropout and weight_drop: multiplies a (T, B, D) tensor by a mask of its last two
// dimensions. A thread owns 16 bytes of the (B, D) plane, draws their mask once, and applies it to
// some of the T steps.
//
// What limits the speed: memory, if T is more than a few: 0.5 ns for each kilobyte read and
// written, on an H200 at 4.3 TB/s. With T = 1 the integer arithmetic of Philox, about 18
// instructions an element, takes as long.
// Timed on an H200: docs/gpu-kernels.md.
#include "cuda/dropout.h"

#include "cuda/launch_error.cuh"
#include "cuda/plane_grid.cuh"
#include "cuda/random_mask.cuh"
#include "cuda/vector_access.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int THREADS = 256;
// Threads that keep a GPU busy: a plane with fewer is split along T as well.
constexpr int64_t TARGET_THREADS = 1 << 18;

// The row of the plane's element `first`, and the position j in the row. The division is of 32-bit
// numbers where these suffice, which is much faster.
struct Position {
  int64_t row, j;
};
__device__ Position position(int64_t first, int64_t D) {
  const int64_t row = (first | D) >> 32 ? first / D : uint32_t(first) / uint32_t(D);
  return {row, first - row * D};
}

// Bit i: whether element first + i is kept, by a mask with one element an element of the plane.
// WHOLE: D is a multiple of N, so that all N elements are in one row.
template <int N, bool WHOLE>
__device__ unsigned keep_bits(const Dropout& d, uint64_t seed, int64_t first) {
  auto [row, j] = position(first, d.D);
  const int64_t blocks = (d.D + 3) / 4;
  PhiloxBlock words;
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    // A Philox block has the words of 4 elements of a row.
    const int word = int(WHOLE && N % 4 == 0 ? i : j) % 4;
    if (i == 0 || word == 0) words.make(seed, uint64_t(row * blocks + j / 4));
    bits |= unsigned(words[word] >= d.threshold) << i;
    if (++j == d.D) {
      j = 0;
      ++row;
    }
  }
  return bits;
}

// The same by a mask with one element a row.
template <int N>
__device__ unsigned keep_bits_of_rows(const Dropout& d, uint64_t seed, int64_t first) {
  auto [row, j] = position(first, d.D);
  PhiloxBlock words;
  unsigned bits = 0;
  for (int i = 0; i < N; ++i) {
    if (i == 0 || j == 0) words.make(seed, uint64_t(row / 4));
    bits |= unsigned(words[int(row % 4)] >= d.threshold) << i;
    if (++j == d.D) {
      j = 0;
      ++row;
    }
  }
  return bits;
}

template <class S, bool WHOLE>
__global__ void __launch_bounds__(THREADS) dropout_kernel(const Dropout d) {
  using C = typename Computing<S>::type;
  constexpr int N = 16 / sizeof(S);
  const int64_t plane = d.B * d.D;
  const int64_t first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * N;
  if (first >= plane) return;
  const int n = plane - first < N ? int(plane - first) : N;

  // The mask, once for all steps.
  const uint64_t seed = uint64_t(*d.seed);
  const unsigned bits =
      d.mask_rows ? keep_bits_of_rows<N>(d, seed, first) : keep_bits<N, WHOLE>(d, seed, first);
  const C scale = C(d.scale);

  // The steps of this slice of T. A dropped element is 0 even where x is NaN.
  for (int64_t t = blockIdx.y; t < d.T; t += gridDim.y) {
    const S* x = static_cast<const S*>(d.x) + t * plane + first;
    S* y = static_cast<S*>(d.y) + t * plane + first;
    C v[N];
    load(x, n, aligned<N>(x), v);
#pragma unroll
    for (int i = 0; i < N; ++i)
      v[i] = bits >> i & 1 ? v[i] * scale : C(0);
    store(y, n, aligned<N>(y), v);
  }
}

template <class S>
const char* launch(const Dropout& d, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(S);
  const dim3 grid = plane_grid(d.T, d.B * d.D, N, THREADS, TARGET_THREADS);
  if (grid.x == 0) return "more elements in a step than a grid has threads for";
  if (d.D % N == 0)
    dropout_kernel<S, true><<<grid, THREADS, 0, stream>>>(d);
  else
    dropout_kernel<S, false><<<grid, THREADS, 0, stream>>>(d);
  return launch_error();
}

}  // namespace

const char* dropout(const Dropout& d, void* stream) {
  return by_type(d.type,
                 [&](auto s) { return launch<decltype(s)>(d, static_cast<cudaStream_t>(stream)); });
}

}  // namespace fusedseq::cuda
