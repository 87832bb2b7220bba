// The host's part of a persistent kernel: which of its variants, the memory of its exchange, the cooperative launch.
// Included after persistent.cuh.
#pragma once
#include <cuda_runtime.h>

#include "persistent.h"

namespace fusedseq::cuda {

inline int element_bytes(const Recurrence& r) { return r.type == Type::f64 ? 8 : r.type == Type::f32 ? 4 : 2; }

inline const char* message(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch would be blamed for it
  return cudaGetErrorString(error);
}

// A kind of vector `K` wide, behind the `bytes` there are so far.
inline Kind kind_after(int64_t& bytes, const Recurrence& r, const Layout& l, int64_t K, int columns) {
  const Kind kind{bytes, int(plan::steps_of(K, element_bytes(r))), int(K), columns};
  bytes += int64_t(SLOTS) * l.tiles * kind.steps * FRAGMENT;
  return kind;
}

struct Workspace { int64_t flags, bytes; };  // the vectors follow the flags
inline int64_t whole(int64_t bytes) { return plan::divide_up(bytes, 256) * 256; }
inline Workspace workspace(const Exchange& e, const Layout& l) {
  const int64_t groups = int64_t(l.replicas) * l.groups, flags = whole(groups * l.blocks * 4);
  return {flags, whole(flags + groups * e.group_bytes)};
}

// Flags at epoch 0; vectors zero, since what pads them is multiplied by zero weights and must be finite.
inline const char* prepare(Exchange& e, const Layout& l, void* memory, cudaStream_t stream) {
  const Workspace w = workspace(e, l);
  e.flags = static_cast<uint32_t*>(memory), e.vectors = static_cast<char*>(memory) + w.flags;
  return message(cudaMemsetAsync(memory, 0, size_t(w.bytes), stream));
}

// KEPT: 0 for fp32, which has not all of them
template <int KEPT, class F> const char* with_variant(const Layout& l, F f) {
  if constexpr (KEPT > 0) {
    if (l.kept) return f(Variant<1, 2, true, KEPT>());
    if (l.wide && l.tiles == 3) return f(Variant<2, 3, true, 0, true>());
  }
  if (l.groups == 1) return l.wide ? f(Variant<1, 2, true>()) : f(Variant<1, 2, false>());
  return l.wide ? f(Variant<2, 2, true>()) : f(Variant<2, 3, false>());
}

// Every block waits for the others: all of them run at once, or the launch is refused.
template <class P>
const char* launch_persistent(void (*kernel)(const P), int blocks, int64_t shared, const P& p, cudaStream_t stream) {
  if (const char* error = message(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)))) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(32 * WARPS);
  config.dynamicSmemBytes = size_t(shared), config.stream = stream;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
  config.attrs = &cooperative, config.numAttrs = 1;
  return message(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace fusedseq::cuda
