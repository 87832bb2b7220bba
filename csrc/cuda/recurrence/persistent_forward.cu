// Launches the kernel of persistent_forward.cuh, and computes the plan for the current GPU.
#include "cuda/recurrence/persistent_forward.cuh"

#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_launch.cuh"

namespace fusedseq::cuda {

GpuKind current_gpu_kind() {
  int device = 0;
  cudaGetDevice(&device);
  return {device_attribute(cudaDevAttrMultiProcessorCount, device),
          10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
              device_attribute(cudaDevAttrComputeCapabilityMinor, device)};
}

namespace {

// One block per SM: it takes most of the SM's shared memory and registers.
template <class S, class V>
__global__ void __launch_bounds__(32 * WARPS, 1)
    persistent_forward_kernel(const __grid_constant__ Forward p) {
  ForwardBlock<S, V>(p, int(blockIdx.x)).run();
}

template <class S>
struct Launch {
  const Forward& p;
  cudaStream_t stream;
  template <class V>
  const char* operator()(V) const {
    return launch_persistent(persistent_forward_kernel<S, V>, p.l.replicas * p.l.blocks, p.l.shared,
                             p, stream);
  }
};

const char* launch(const Forward& p, cudaStream_t stream) {
  const Layout& l = p.l;
  if (p.r.type == Type::bf16)
    return with_variant<FORWARD_RESIDENT>(l, Launch<__nv_bfloat16>{p, stream});
  if (p.r.type == Type::f16) return with_variant<FORWARD_RESIDENT>(l, Launch<__half>{p, stream});
  return with_variant<0>(l, Launch<float>{p, stream});
}

// The number of distinct weights of rounds first, first + 2, ...
int distinct_weights(const Recurrence& r, int first) {
  if (r.rounds <= first) return 0;
  const bool shared = r.rounds > first + 2 && r.Q[first + 2] == r.Q[first];
  return shared ? 1 : int(r.rounds - first + 1) / 2;
}

Gpu current_gpu() {
  int device = 0;
  cudaGetDevice(&device);
  return {device_attribute(cudaDevAttrMultiProcessorCount, device), most_shared(),
          device_attribute(cudaDevAttrCooperativeLaunch, device) != 0};
}

RecurrenceSize size_of(const Recurrence& r) {
  return {r.steps,
          r.B,
          r.X,
          r.H,
          r.rounds,
          distinct_weights(r, 0),
          distinct_weights(r, 1),
          element_bytes(r),
          gates_of(r.cell),
          needs_cells(r)};
}

}  // namespace

Plan persistent_plan(const Recurrence& r, int64_t shortest, Protocol protocol) {
  Plan loop{};
  loop.why = "the persistent kernels have the cells of LSTM, peephole LSTM and GRU";
  if (r.cell != CellKind::lstm && r.cell != CellKind::peephole_lstm && r.cell != CellKind::gru)
    return loop;
  return recurrence_plan(size_of(r), current_gpu(), shortest, protocol);
}

Wavefront wavefront_plan(const Recurrence& first, const Recurrence& second, int64_t shortest) {
  return wavefront_plan(size_of(first), size_of(second), current_gpu(), shortest);
}

int64_t persistent_bytes(const Recurrence& r, const Layout& l) {
  return exchange_bytes(arguments(r, l).e, l).total + input_gates_bytes(r);
}

const char* persistent_forward(const Recurrence& r, const Layout& l, const Product& product,
                               void* memory, void* stream) {
  if (needs_cells(r)) return cells_forward(r, l, product, memory, stream);
  return run_forward(r, l, product, memory, static_cast<cudaStream_t>(stream), launch);
}

}  // namespace fusedseq::cuda
