#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#ifdef FUSEDSEQ_AARCH64
#include <sys/auxv.h>
#endif
#ifdef FUSEDSEQ_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
namespace avx512_bf16 {
extern const cpu::Bf16Kernels kernels;
extern const cpu::Int8Rows int8_rows;
}  // namespace avx512_bf16
namespace avx512_amx {
extern const cpu::Bf16Kernels kernels;
extern const cpu::Int8Rows int8_rows;
}  // namespace avx512_amx
#endif
#ifdef FUSEDSEQ_AARCH64
namespace baseline_bf16 {
extern const cpu::Bf16Kernels kernels;
}
#endif

namespace cpu {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool supported;  // by this processor
};

// The kernels of an instruction set with those of kernels_bf16.cpp added, under a new name.
[[maybe_unused]] Kernels with_bf16(Kernels set, const char* isa, const Bf16Kernels& bf16,
                                   const Int8Rows* int8_rows = nullptr) {
  set.isa = isa;
  set.bf16 = bf16;
  if (int8_rows) set.int8_rows = *int8_rows;
  return set;
}

#ifdef FUSEDSEQ_X86
// Returns whether the processor has AMX for bfloat16 and Linux lets this process use it: programs
// ask for the tile registers, see arch/x86/xstate.rst in the kernel's documentation.
bool has_amx() {
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;  // of CPUID leaf 7, EDX
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d & AMX_BF16) || !(d & AMX_TILE)) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// Returns the compiled instruction sets, the widest first, and their number in `count`.
const Candidate* candidates(int& count) {
#ifdef FUSEDSEQ_X86
  __builtin_cpu_init();
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma");
  static const Kernels with_pairs =
      with_bf16(avx512::kernels, "avx512_bf16", avx512_bf16::kernels, &avx512_bf16::int8_rows);
  static const Kernels with_tiles =
      with_bf16(avx512::kernels, "avx512_amx", avx512_amx::kernels, &avx512_amx::int8_rows);
  // Every processor with the dot product of bfloat16 pairs has that of bytes.
  const bool has_pairs =
      has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  static const Candidate all[] = {
      {&with_tiles, has_pairs && has_amx()},
      {&with_pairs, has_pairs},
      {&avx512::kernels, has_avx512},
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi2")},
      {&baseline::kernels, true},
  };
  count = 5;
#elif defined(FUSEDSEQ_AARCH64)
  constexpr unsigned long HAS_BF16 = 1 << 14;  // of AT_HWCAP2, HWCAP2_BF16 in <asm/hwcap.h>
  static const Kernels with_pairs =
      with_bf16(baseline::kernels, "baseline_bf16", baseline_bf16::kernels);
  static const Candidate all[] = {{&with_pairs, (getauxval(AT_HWCAP2) & HAS_BF16) != 0},
                                  {&baseline::kernels, true}};
  count = 2;
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
