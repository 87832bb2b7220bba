// The launch of persistent_forward.cuh, and the plan for the current GPU.
#include "persistent.cuh"
#include "persistent_launch.cuh"
#include "persistent_forward.cuh"

namespace fusedseq::cuda {
namespace {

template <class S, class V> __global__ void __launch_bounds__(32 * WARPS, 1) persistent_forward_kernel(const __grid_constant__ Forward p) {
  ForwardBlock<S, V>(p, int(blockIdx.x)).run();
}

template <class S> struct Launch {
  const Forward& p;
  cudaStream_t stream;
  template <class V> const char* operator()(V) const {
    return launch_persistent(persistent_forward_kernel<S, V>, p.l.replicas * p.l.blocks, p.l.shared, p, stream);
  }
};

int uses(const Recurrence& r, int first) {  // different weights
  if (r.rounds <= first) return 0;
  return r.rounds > first + 2 && r.Q[first + 2] == r.Q[first] ? 1 : int(r.rounds - first + 1) / 2;
}

int fact(cudaDeviceAttr what, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, what, device) == cudaSuccess ? value : 0;
}

Gpu this_gpu() {
  int device = 0;
  cudaGetDevice(&device);
  return {fact(cudaDevAttrMultiProcessorCount, device), fact(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          fact(cudaDevAttrCooperativeLaunch, device) != 0};
}

RecurrenceSize size_of(const Recurrence& r) {
  return {r.steps, r.B, r.X, r.H, r.rounds, uses(r, 0), uses(r, 1), element_bytes(r)};
}

}  // namespace

Plan persistent_plan(const Recurrence& r, int64_t shortest) { return recurrence_plan(size_of(r), this_gpu(), shortest); }

Wavefront wavefront_plan(const Recurrence& first, const Recurrence& second, int64_t shortest) {
  return wavefront_plan(size_of(first), size_of(second), this_gpu(), shortest);
}

int64_t persistent_bytes(const Recurrence& r, const Layout& l) {
  return workspace(arguments(r, l).e, l).bytes + (r.rounds ? 0 : r.steps * r.B * 4 * r.H * int64_t(sizeof(float)));
}

const char* persistent_forward(const Recurrence& r, const Layout& l, const Product& product, void* memory, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  Forward p = arguments(r, l);
  if (const char* error = prepare(p.e, l, memory, stream)) return error;
  if (!r.rounds) {
    float* gates = reinterpret_cast<float*>(static_cast<char*>(memory) + workspace(p.e, l).bytes);
    p.input_gates = gates;
    const Matrix x = matrix(r.type, r.x, r.steps * r.B, r.X, r.X), W = matrix(r.type, r.W_ih, 4 * r.H, r.X, r.X);
    if (const char* error = product(x, W.transposed(), matrix(Type::f32, gates, r.steps * r.B, 4 * r.H, 4 * r.H))) return error;
  }
  if (r.type == Type::bf16) return with_variant<FORWARD_KEPT>(l, Launch<__nv_bfloat16>{p, stream});
  if (r.type == Type::f16) return with_variant<FORWARD_KEPT>(l, Launch<__half>{p, stream});
  return with_variant<0>(l, Launch<float>{p, stream});
}

}  // namespace fusedseq::cuda
