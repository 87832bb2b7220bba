// Launches the kernels of persistent_cells_forward.cuh and persistent_cells_backward.cuh: cells
// other than the LSTM's, `starts`, and the reverse order of the steps. Those of the peephole LSTM
// were timed on an H200: docs/gpu-kernels.md.
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_cells_backward.cuh"
#include "cuda/recurrence/persistent_cells_forward.cuh"
#include "cuda/recurrence/persistent_launch.cuh"

namespace fusedseq::cuda {
namespace {

// One block per SM: it takes most of the SM's shared memory and registers.
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    persistent_cells_forward_kernel(const __grid_constant__ Forward p) {
  CellsForwardBlock<S, V>(p, int(blockIdx.x)).run();
}
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    persistent_cells_backward_kernel(const __grid_constant__ Backward p) {
  CellsBackwardBlock<S, V>(p, int(blockIdx.x)).run();
}

template <class S, class V>
const char* launch(const Forward& p, cudaStream_t stream) {
  return launch_persistent(persistent_cells_forward_kernel<S, V>, p.l.replicas * p.l.blocks,
                           p.l.shared, p, stream);
}
template <class S, class V>
const char* launch(const Backward& p, cudaStream_t stream) {
  return launch_persistent(persistent_cells_backward_kernel<S, V>, p.l.replicas * p.l.blocks,
                           p.l.shared, p, stream);
}

// Launches the kernel of the layout's variant.
template <class S, int GATES, class P>
const char* launch_of_cells(const P& p, cudaStream_t stream) {
  const Layout& l = p.l;
  const bool one = l.groups == 1;
  if (!l.wide)
    return one ? launch<S, CellVariant<GATES, 1, 2, false>>(p, stream)
               : launch<S, CellVariant<GATES, 2, 3, false>>(p, stream);
  if constexpr (sizeof(S) == 2)
    return one ? launch<S, CellVariant<GATES, 1, 2, true, 16>>(p, stream)
               : launch<S, CellVariant<GATES, 2, 3, true, 16>>(p, stream);
  else
    return one ? launch<S, CellVariant<GATES, 1, 2, true>>(p, stream)
               : launch<S, CellVariant<GATES, 2, 2, true>>(p, stream);
}

template <class S, class P>
const char* launch_of_type(CellKind cell, const P& p, cudaStream_t stream) {
  return cell == CellKind::gru ? launch_of_cells<S, 3>(p, stream)
                               : launch_of_cells<S, 4>(p, stream);
}

template <class P>
const char* launch_any(const Recurrence& r, const P& p, cudaStream_t stream) {
  if (r.type == Type::bf16) return launch_of_type<__nv_bfloat16>(r.cell, p, stream);
  if (r.type == Type::f16) return launch_of_type<__half>(r.cell, p, stream);
  return launch_of_type<float>(r.cell, p, stream);
}

}  // namespace

const char* cells_forward(const Recurrence& r, const Layout& l, const Product& product,
                          void* memory, void* stream) {
  return run_forward(r, l, product, memory, static_cast<cudaStream_t>(stream),
                     [&](const Forward& p, cudaStream_t s) { return launch_any(r, p, s); });
}

const char* cells_backward(const RecurrenceBackward& b, const Layout& l, void* memory,
                           void* stream) {
  return run_backward(
      b, l, memory, static_cast<cudaStream_t>(stream),
      [&](const Backward& p, cudaStream_t s) { return launch_any(b.forward, p, s); });
}

}  // namespace fusedseq::cuda
