// Which instruction set's kernels run: the widest the machine has, or the one named by FUSEDSEQ_ISA.
#pragma once
#include "kernels.h"

namespace fusedseq::cpu {

const Kernels& kernels();     // throws std::runtime_error where FUSEDSEQ_ISA names one that can't run here
const char* isa_compiled();   // space-separated
const char* isa_found();      // the compiled ones this machine can run

}  // namespace fusedseq::cpu
