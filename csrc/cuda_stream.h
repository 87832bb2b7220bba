// The stream that the caller works on. torch's stable ABI has it from 2.13 on; before that the function is in
// libtorch_cuda alone, which a library that also loads under a CPU build of torch can't link to.
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
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(function, "CUDA: this torch has no libtorch_cuda.so with aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "CUDA: torch gives no stream for device ", device);
  return stream;
}

// error: a message, or null
inline void require_launched(const char* op, const char* error) { STD_TORCH_CHECK(!error, op, ": ", error ? error : ""); }

}  // namespace fusedseq
#endif
