// What _ops.so itself says about its CPU kernels, in plain C for fusedseq.info: always that of the library that runs.
#include <exception>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/memory.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* fusedseq_isa_compiled() { return fusedseq::cpu::isa_compiled(); }
EXPORT const char* fusedseq_isa_found() { return fusedseq::cpu::isa_found(); }

// The one in use; after "error: ", why there is none.
EXPORT const char* fusedseq_isa_used() {
  static std::string answer;
  try {
    answer = fusedseq::cpu::kernels().isa;
  } catch (const std::exception& e) {
    answer = std::string("error: ") + e.what();
  }
  return answer.c_str();
}

// Gives the memory kept for reuse back to the system; returns how much it was, in bytes.
EXPORT size_t fusedseq_empty_cache() { return fusedseq::cpu::empty_cache(); }
