// Facts about the CPU kernels of _ops.so, as plain C functions that pyext/fusedseq/_load.py calls:
// they describe the library that is loaded, whatever build_info.json says.
#include <exception>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/memory.h"
#include "cuda/recurrence/lost_wait.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* fusedseq_isa_compiled() {
  return fusedseq::cpu::isa_compiled();
}
EXPORT const char* fusedseq_isa_found() {
  return fusedseq::cpu::isa_found();
}

// The instruction set in use, or "error: " and the reason why there is none.
EXPORT const char* fusedseq_isa_used() {
  static const std::string answer = [] {
    try {
      return std::string(fusedseq::cpu::kernels().isa);
    } catch (const std::exception& e) {
      return std::string("error: ") + e.what();
    }
  }();
  return answer.c_str();
}

// Why the CUDA context of this process is gone, or null: see cuda/recurrence/lost_wait.h.
EXPORT const char* fusedseq_lost_wait() {
#ifdef FUSEDSEQ_CUDA
  return fusedseq::cuda::lost_wait();
#else
  return nullptr;
#endif
}

// Releases the memory that is cached for reuse; returns the number of bytes.
EXPORT size_t fusedseq_empty_cache() {
  return fusedseq::cpu::empty_cache();
}
