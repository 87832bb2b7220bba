// The CUDA stream of the caller, and the report of launch errors. torch's stable ABI provides the
// stream from 2.13 on. Before that the function is only in libtorch_cuda, which this library cannot
// link to, because it also loads under a CPU build of torch: it is looked up at run time.
#pragma once
#ifdef FUSEDSEQ_CUDA
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

namespace fusedseq {

inline void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library
               ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
               : nullptr;
  }();
  STD_TORCH_CHECK(
      function, "CUDA: this torch has no libtorch_cuda.so with aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "CUDA: torch returned no stream for device ",
                  device);
  return stream;
}

// Raises an error of the operator if `error` is a message and not null.
inline void require_launched(const char* op, const char* error) {
  STD_TORCH_CHECK(!error, op, ": ", error ? error : "");
}

}  // namespace fusedseq
#endif
