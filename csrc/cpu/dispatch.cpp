#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fusedseq {

namespace baseline { extern const cpu::Kernels kernels; }
#ifdef FUSEDSEQ_X86
namespace avx2 { extern const cpu::Kernels kernels; }
namespace avx512 { extern const cpu::Kernels kernels; }
#endif

namespace cpu {
namespace {

struct Choice {
  const Kernels* kernels;
  bool found;
};

// Widest first.
const Choice* choices(int& n) {
#ifdef FUSEDSEQ_X86
  __builtin_cpu_init();
  static const Choice all[] = {
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma")},
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")},
      {&baseline::kernels, true},
  };
  n = 3;
#else
  static const Choice all[] = {{&baseline::kernels, true}};
  n = 1;
#endif
  return all;
}

std::string names(bool found_only) {
  int n;
  const Choice* all = choices(n);
  std::string out;
  for (int i = n - 1; i >= 0; --i)
    if (all[i].found || !found_only) out += (out.empty() ? "" : " ") + std::string(all[i].kernels->isa);
  return out;
}

const Kernels& choose() {
  int n;
  const Choice* all = choices(n);
  const char* wanted = std::getenv("FUSEDSEQ_ISA");
  for (int i = 0; i < n; ++i)
    if (all[i].found && (!wanted || !*wanted || std::string(wanted) == all[i].kernels->isa)) return *all[i].kernels;
  throw std::runtime_error("FUSEDSEQ_ISA must be one of those this machine runs (" + names(true) + "), got " + wanted);
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
