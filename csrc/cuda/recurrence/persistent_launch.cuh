// Host code of the persistent kernels: the choice of the compiled variant, the memory of the
// exchange, and the cooperative launch.
#pragma once
#include <cuda_runtime.h>

#include "cuda/launch_error.cuh"
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_exchange.cuh"

namespace fusedseq::cuda {

inline int element_bytes(const Recurrence& r) {
  switch (r.type) {
    case Type::f64:
      return 8;
    case Type::f32:
      return 4;
    default:
      return 2;
  }
}

// The error as text, or null. Clears it, so that a later launch does not report it again.
inline const char* message(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return error_text(error);
}

// Appends the slots of a vector to a group's part of the exchange buffer, `bytes` long so far.
inline ExchangedVector append_vector(int64_t& bytes, const Recurrence& r, const Layout& l,
                                     int64_t width, int columns_of_block) {
  const int k_steps = int(plan::steps_of(width, element_bytes(r)));
  const ExchangedVector v{bytes, k_steps, int(width), columns_of_block};
  bytes += int64_t(l.words ? WORD_SLOTS : SLOTS) * l.tiles * k_steps * FRAGMENT;
  return v;
}

// The memory of an exchange: the flags, then the vectors.
struct ExchangeBytes {
  int64_t flags, total;
};
inline int64_t round_up_256(int64_t bytes) {
  return plan::divide_up(bytes, 256) * 256;
}
inline ExchangeBytes exchange_bytes(const Exchange& e, const Layout& l) {
  const int64_t groups = int64_t(l.replicas) * l.groups;
  const int64_t flags = round_up_256(groups * l.blocks * 4);
  return {flags, round_up_256(flags + groups * e.group_bytes)};
}

// Sets the flags to epoch 0, and the vectors to zero: the weights of their padding are zero, so the
// padding itself must be finite, and words must be empty.
inline const char* prepare(Exchange& e, const Layout& l, void* memory, cudaStream_t stream) {
  const ExchangeBytes bytes = exchange_bytes(e, l);
  e.flags = static_cast<uint32_t*>(memory);
  e.vectors = static_cast<char*>(memory) + bytes.flags;
  e.lost = lost_wait_record();
  return message(cudaMemsetAsync(memory, 0, size_t(bytes.total), stream));
}

// The batch rows of a launch: slice `number` of the batch.
inline BatchRows slice_rows(const Recurrence& r, const Layout& l, int number) {
  const int64_t end = (number + 1) * l.slice_rows;
  return {int(number * l.slice_rows), int(end < r.B ? end : r.B)};
}

// Calls f with the variant of a layout. RESIDENT: of the direction; 0 for fp32, which has neither
// the variant with resident weights nor those without rounds nor those with words.
template <int RESIDENT, class F>
const char* with_variant(const Layout& l, F f) {
  if constexpr (RESIDENT > 0) {
    if (l.words)
      return l.wide ? f(Variant<1, 2, true, 0, 0, true>()) : f(Variant<1, 2, false, 0, 0, true>());
    if (l.resident) return f(Variant<1, 2, true, RESIDENT>());
    if (l.plain == 9)
      return l.groups == 1 ? f(Variant<1, 2, true, 0, 9>()) : f(Variant<2, 3, true, 0, 9>());
    if (l.plain == 16)
      return l.groups == 1 ? f(Variant<1, 2, true, 0, 16>()) : f(Variant<2, 3, true, 0, 16>());
  }
  if (l.groups == 1) return l.wide ? f(Variant<1, 2, true>()) : f(Variant<1, 2, false>());
  return l.wide ? f(Variant<2, 2, true>()) : f(Variant<2, 3, false>());
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// Bytes of shared memory that a block of the current device can have.
inline int most_shared() {
  int device = 0;
  cudaGetDevice(&device);
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// A cooperative launch: blocks wait for each other, so all of them must run at the same time; the
// driver refuses the launch if they do not fit. The kernel is always allowed the device's maximum
// of shared memory: a limit of this launch's size could be lowered by another host thread, with a
// smaller layer, before the launch.
template <class P>
const char* launch_persistent(void (*kernel)(const P), int blocks, int64_t shared, const P& p,
                              cudaStream_t stream) {
  if (const char* error = message(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared())))
    return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(32 * WARPS);
  config.dynamicSmemBytes = size_t(shared);
  config.stream = stream;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, p);
  const char* error = message(code);
  return code == cudaErrorCooperativeLaunchTooLarge ? LAUNCH_REFUSED : error;
}

}  // namespace fusedseq::cuda
