// Errors of kernel launches, as messages.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/recurrence/lost_wait.h"

namespace fusedseq::cuda {

// Names the GPU in use, and the compute capabilities that this file was compiled for.
inline const char* no_kernel_for_gpu() {
  static thread_local char text[256];
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  int n = std::snprintf(text, sizeof text,
                        "this build has no kernel for a GPU of compute capability %d.%d, only for",
                        major, minor);
  for (const int arch : {__CUDA_ARCH_LIST__})
    if (n > 0 && n < int(sizeof text))
      n += std::snprintf(text + n, sizeof text - n, " %d.%d", arch / 100, arch / 10 % 10);
  return text;
}

// The text of an error; what caused it, if a persistent kernel has ended itself before: every later
// CUDA call of the process fails then.
inline const char* error_text(cudaError_t error) {
  const char* lost = lost_wait();
  return lost ? lost : cudaGetErrorString(error);
}

// The error of the launches since the last call, or null.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) return no_kernel_for_gpu();
  return error == cudaSuccess ? nullptr : error_text(error);
}

}  // namespace fusedseq::cuda
