// activation_regularization: both loss terms in one pass over the two outputs, and both gradients
// in one pass backward. A thread owns 16 bytes of the (B, H) plane and loops over a slice of the
// steps, with the neighbours in time in registers.
//
// What limits the speed: memory. On an H200 at 4.3 TB/s, 0.23 ns for each kilobyte of the two
// outputs forward, and twice that backward, which also writes. Outputs of 70 x 20 x 400 in fp32
// are 4.5 MB, 1 us and 2 us: less than a kernel launch, of which there are two forward. Sums are in
// fp64, over blocks of threads in a fixed order. Timed on an H200: docs/gpu-kernels.md.
#include "cuda/regularization.h"

#include "cuda/block_sum.cuh"
#include "cuda/launch_error.cuh"
#include "cuda/plane_grid.cuh"
#include "cuda/vector_access.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int THREADS = 256;
// Threads that keep a GPU busy. With more, each thread would read a neighbour's step for few of its
// own.
constexpr int64_t TARGET_THREADS = 1 << 17;

// A thread's n elements of the plane from `first` on, and its steps [begin, end). Nothing if n is
// 0.
struct Slice {
  int64_t first, begin, end;
  int n;
};
template <int N>
__device__ Slice own_slice(const ActivationRegularization& a) {
  const int64_t first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * N;
  const int64_t left = a.N - first;
  const int most = left < N ? int(left) : N;
  return {first, a.T * blockIdx.y / gridDim.y, a.T * (blockIdx.y + 1) / gridDim.y,
          left < 0 ? 0 : most};
}

// The thread's elements of step t of a (T, plane) tensor.
template <class S, class C, int N>
__device__ void load_step(const void* x, int64_t plane, int64_t t, const Slice& s, C (&v)[N]) {
  const S* p = static_cast<const S*>(x) + t * plane + s.first;
  load(p, s.n, aligned<N>(p), v);
}
template <class S, class C, int N>
__device__ void store_step(void* x, int64_t plane, int64_t t, const Slice& s, const C (&v)[N]) {
  S* p = static_cast<S*>(x) + t * plane + s.first;
  store(p, s.n, aligned<N>(p), v);
}

// The block's sums of both terms: of the squares of `dropped`, and of the squared steps of `raw`.
template <class S>
__global__ void __launch_bounds__(THREADS) sums_kernel(const ActivationRegularization a) {
  using C = typename Computing<S>::type;
  constexpr int N = 16 / sizeof(S);
  const Slice s = own_slice<N>(a);
  double ar = 0, tar = 0;
  if (s.n > 0) {
    C before[N] = {};
    if (s.begin > 0) load_step<S>(a.raw, a.N, s.begin - 1, s, before);
    for (int64_t t = s.begin; t < s.end; ++t) {
      C dropped[N], raw[N], squares = 0, steps = 0;
      load_step<S>(a.dropped, a.N, t, s, dropped);
      load_step<S>(a.raw, a.N, t, s, raw);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const C step = t > 0 ? raw[i] - before[i] : C(0);
        squares += dropped[i] * dropped[i];
        steps += step * step;
        before[i] = raw[i];
      }
      ar += double(squares);
      tar += double(steps);
    }
  }

  // Threads without elements take part too. The barrier lets the second sum reuse the shared
  // memory.
  ar = block_sum<THREADS>(ar);
  __syncthreads();
  tar = block_sum<THREADS>(tar);
  const int64_t block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t blocks = int64_t(gridDim.x) * gridDim.y;
  if (threadIdx.x == 0) {
    a.partial[block] = ar;
    a.partial[blocks + block] = tar;
  }
}

// The loss from the blocks' sums. Launched with one block.
template <class S>
__global__ void __launch_bounds__(THREADS)
    loss_kernel(const ActivationRegularization a, int64_t blocks) {
  double ar = 0, tar = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += THREADS) {
    ar += a.partial[i];
    tar += a.partial[blocks + i];
  }
  ar = block_sum<THREADS>(ar);
  __syncthreads();
  tar = block_sum<THREADS>(tar);
  if (threadIdx.x == 0)
    *static_cast<S*>(a.loss) = S(typename Computing<S>::type(a.alpha * ar + a.beta * tar));
}

// Both gradients of the thread's elements and steps.
template <class S>
__global__ void __launch_bounds__(THREADS) gradients_kernel(const ActivationRegularization a) {
  using C = typename Computing<S>::type;
  constexpr int N = 16 / sizeof(S);
  const Slice s = own_slice<N>(a);
  if (s.n == 0 || s.begin == s.end) return;
  const double dloss = double(C(*static_cast<const S*>(a.dloss)));
  const C ar = C(2 * a.alpha * dloss);
  const C tar = C(2 * a.beta * dloss);

  // A window of three steps of `raw` moves along T.
  C before[N] = {}, now[N];
  if (s.begin > 0) load_step<S>(a.raw, a.N, s.begin - 1, s, before);
  load_step<S>(a.raw, a.N, s.begin, s, now);
  for (int64_t t = s.begin; t < s.end; ++t) {
    C after[N] = {}, v[N];
    if (t + 1 < a.T) load_step<S>(a.raw, a.N, t + 1, s, after);
    load_step<S>(a.dropped, a.N, t, s, v);
#pragma unroll
    for (int i = 0; i < N; ++i)
      v[i] *= ar;
    store_step<S>(a.ddropped, a.N, t, s, v);

    // Each step appears in two differences, but the first and the last step in one.
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = tar * ((t > 0 ? now[i] - before[i] : C(0)) - (t + 1 < a.T ? after[i] - now[i] : C(0)));
      before[i] = now[i];
      now[i] = after[i];
    }
    store_step<S>(a.draw, a.N, t, s, v);
  }
}

template <class S>
dim3 grid_for(int64_t T, int64_t N) {
  return plane_grid(T, N, 16 / sizeof(S), THREADS, TARGET_THREADS);
}
constexpr const char* TOO_LARGE = "more elements in a step than a grid has threads for";

template <class S>
const char* forward(const ActivationRegularization& a, cudaStream_t stream) {
  const dim3 grid = grid_for<S>(a.T, a.N);
  if (a.N > 0 && grid.x == 0) return TOO_LARGE;
  if (grid.x) sums_kernel<S><<<grid, THREADS, 0, stream>>>(a);
  loss_kernel<S><<<1, THREADS, 0, stream>>>(a, int64_t(grid.x) * grid.y);
  return launch_error();
}

template <class S>
const char* backward(const ActivationRegularization& a, cudaStream_t stream) {
  const dim3 grid = grid_for<S>(a.T, a.N);
  if (grid.x == 0) return TOO_LARGE;
  gradients_kernel<S><<<grid, THREADS, 0, stream>>>(a);
  return launch_error();
}

}  // namespace

int64_t activation_regularization_blocks(Type type, int64_t T, int64_t N) {
  const dim3 grid = by_type(type, [&](auto s) { return grid_for<decltype(s)>(T, N); });
  return int64_t(grid.x) * grid.y;
}

const char* activation_regularization(const ActivationRegularization& a, void* stream) {
  return by_type(
      a.type, [&](auto s) { return forward<decltype(s)>(a, static_cast<cudaStream_t>(stream)); });
}

const char* activation_regularization_backward(const ActivationRegularization& a, void* stream) {
  return by_type(
      a.type, [&](auto s) { return backward<decltype(s)>(a, static_cast<cudaStream_t>(stream)); });
}

}  // namespace fusedseq::cuda
