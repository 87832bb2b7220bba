// The part of CUDA's runtime API that csrc/cuda uses, for kernels that run in tests/simt. A launch
// is synchronous: it has run when the call returns, which also returns the errors of the kernel.
#pragma once
#include <cstddef>
#include <new>

#include "../runtime.h"

using cudaStream_t = void*;

#define __CUDA_ARCH_LIST__ 800, 900, 1000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801,
};
inline cudaError_t cudaGetLastError() {
  return cudaError_t(simt::last_error());
}
inline const char* cudaGetErrorName(cudaError_t e) {
  return simt::error_name(e);
}
// The simulation's description of the error if there is one, otherwise its name.
inline const char* cudaGetErrorString(cudaError_t e) {
  return simt::error_text(e);
}

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return cudaError_t(simt::device_attribute(attribute, value));
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
  return cudaError_t(simt::allow_shared(reinterpret_cast<const void*>(kernel), bytes));
}
template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(P...),
                                                          int threads, size_t shared) {
  return cudaError_t(
      simt::blocks_that_fit(reinterpret_cast<const void*>(kernel), threads, shared, blocks));
}

enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore = 0, cudaLaunchAttributeCooperative = 2 };
union cudaLaunchAttributeValue {
  int cooperative;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...),
                               A&&... arguments) {
  bool cooperative = false;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeCooperative) cooperative = c->attrs[i].val.cooperative;
  return cudaError_t(simt::launch(kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, cooperative,
                                  std::forward<A>(arguments)...));
}

// The host's memory, which kernels address as the host does.
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
inline cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = ::operator new(bytes, std::align_val_t(64));
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t = nullptr) {
  return cudaError_t(simt::fill(p, value, bytes));
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  return cudaError_t(simt::copy(to, from, bytes));
}
