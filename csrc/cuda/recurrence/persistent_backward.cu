// Launches the kernel of persistent_backward.cuh.
#include "cuda/recurrence/persistent_backward.cuh"

#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_launch.cuh"

namespace fusedseq::cuda {
namespace {

// One block per SM: it takes most of the SM's shared memory and registers.
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    persistent_backward_kernel(const __grid_constant__ Backward p) {
  BackwardBlock<S, V>(p, int(blockIdx.x)).run();
}

template <class S>
struct Launch {
  const Backward& p;
  cudaStream_t stream;
  template <class V>
  const char* operator()(V) const {
    return launch_persistent(persistent_backward_kernel<S, V>, p.l.replicas * p.l.blocks,
                             p.l.shared, p, stream);
  }
};

const char* launch(const Backward& p, cudaStream_t stream) {
  const Layout& l = p.l;
  const Type type = p.b.forward.type;
  if (type == Type::bf16)
    return with_variant<BACKWARD_RESIDENT>(l, Launch<__nv_bfloat16>{p, stream});
  if (type == Type::f16) return with_variant<BACKWARD_RESIDENT>(l, Launch<__half>{p, stream});
  return with_variant<0>(l, Launch<float>{p, stream});
}

}  // namespace

int64_t persistent_backward_bytes(const Recurrence& r, const Layout& l) {
  RecurrenceBackward b{};
  b.forward = r;
  return exchange_bytes(arguments(b, l).e, l).total;
}

const char* persistent_backward(const RecurrenceBackward& b, const Layout& l, void* memory,
                                void* stream) {
  if (needs_cells(b.forward)) return cells_backward(b, l, memory, stream);
  return run_backward(b, l, memory, static_cast<cudaStream_t>(stream), launch);
}

}  // namespace fusedseq::cuda
