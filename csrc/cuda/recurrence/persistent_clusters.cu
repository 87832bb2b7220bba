// Launches the kernels of persistent_forward.cuh and persistent_backward.cuh in clusters of two
// blocks: persistent_cluster.cuh. The plan of plan.h chooses them only where they are asked for.
// On an H200 they took 2.2 to 3 times as long as without clusters.
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_backward.cuh"
#include "cuda/recurrence/persistent_forward.cuh"
#include "cuda/recurrence/persistent_launch.cuh"

namespace fusedseq::cuda {
namespace {

// GPUs before compute capability 9.0 have no clusters, and the plan no such layout for them.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define RUN_IN_CLUSTERS(block) block.run()
#else
#define RUN_IN_CLUSTERS(block) __trap()
#endif

// One block per SM: it takes most of the SM's shared memory and registers.
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    clusters_forward_kernel(const __grid_constant__ Forward p) {
  RUN_IN_CLUSTERS((ForwardBlock<S, V>(p, int(blockIdx.x))));
}
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    clusters_backward_kernel(const __grid_constant__ Backward p) {
  RUN_IN_CLUSTERS((BackwardBlock<S, V>(p, int(blockIdx.x))));
}

template <class P>
const char* launch(void (*kernel)(const P), const P& p, cudaStream_t stream) {
  return launch_persistent(kernel, p.l.replicas * p.l.blocks, p.l.shared, p, stream, 2);
}

template <class S>
const char* launch(const Forward& p, cudaStream_t stream) {
  return p.l.wide ? launch(clusters_forward_kernel<S, ClusterVariant<true>>, p, stream)
                  : launch(clusters_forward_kernel<S, ClusterVariant<false>>, p, stream);
}
template <class S>
const char* launch(const Backward& p, cudaStream_t stream) {
  return p.l.wide ? launch(clusters_backward_kernel<S, ClusterVariant<true>>, p, stream)
                  : launch(clusters_backward_kernel<S, ClusterVariant<false>>, p, stream);
}

// Launches the kernel of a dtype, of 16 bits.
template <class P>
const char* launch_of_type(Type type, const P& p, cudaStream_t stream) {
  if (type == Type::bf16) return launch<__nv_bfloat16>(p, stream);
  return launch<__half>(p, stream);
}

}  // namespace

const char* clusters_forward(const Recurrence& r, const Layout& l, const Product& product,
                             void* memory, void* stream) {
  return run_forward(
      r, l, product, memory, static_cast<cudaStream_t>(stream),
      [&](const Forward& p, cudaStream_t s) { return launch_of_type(r.type, p, s); });
}

const char* clusters_backward(const RecurrenceBackward& b, const Layout& l, void* memory,
                              void* stream) {
  return run_backward(
      b, l, memory, static_cast<cudaStream_t>(stream),
      [&](const Backward& p, cudaStream_t s) { return launch_of_type(b.forward.type, p, s); });
}

}  // namespace fusedseq::cuda
