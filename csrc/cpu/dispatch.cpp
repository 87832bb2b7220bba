#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fusedseq {

namespace baseline {
extern const cpu::Kernels kernels;
}
#ifdef FUSEDSEQ_X86
namespace avx2 {
extern const cpu::Kernels kernels;
}
namespace avx512 {
extern const cpu::Kernels kernels;
}
#endif

namespace cpu {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool supported;  // by this processor
};

// Returns the compiled instruction sets, the widest first, and their number in `count`.
const Candidate* candidates(int& count) {
#ifdef FUSEDSEQ_X86
  __builtin_cpu_init();
  static const Candidate all[] = {
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma")},
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi2")},
      {&baseline::kernels, true},
  };
  count = 3;
#else
  static const Candidate all[] = {{&baseline::kernels, true}};
  count = 1;
#endif
  return all;
}

// Returns the names of the instruction sets, the narrowest first, separated by spaces.
std::string names(bool supported_only) {
  int count;
  const Candidate* all = candidates(count);
  std::string out;
  for (int i = count - 1; i >= 0; --i)
    if (all[i].supported || !supported_only)
      out += (out.empty() ? "" : " ") + std::string(all[i].kernels->isa);
  return out;
}

// Returns the widest supported candidate, or the one that FUSEDSEQ_ISA names.
const Kernels& choose() {
  int count;
  const Candidate* all = candidates(count);
  const char* requested = std::getenv("FUSEDSEQ_ISA");
  const bool any = !requested || !*requested;
  for (int i = 0; i < count; ++i)
    if (all[i].supported && (any || std::string(requested) == all[i].kernels->isa))
      return *all[i].kernels;
  throw std::runtime_error("FUSEDSEQ_ISA must be one of those this machine runs (" + names(true) +
                           "), got " + requested);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}
const char* isa_compiled() {
  static const std::string s = names(false);
  return s.c_str();
}
const char* isa_found() {
  static const std::string s = names(true);
  return s.c_str();
}

}  // namespace cpu
}  // namespace fusedseq
