// Chooses at run time which instruction set's CPU kernels run: the widest one that the processor
// supports, or the one named by the environment variable FUSEDSEQ_ISA.
#pragma once
#include "cpu/kernels.h"

namespace fusedseq::cpu {

// Returns the chosen kernels. Throws std::runtime_error if FUSEDSEQ_ISA names an instruction set
// that is not compiled in or that this processor does not support.
const Kernels& kernels();

const char* isa_compiled();  // the instruction sets compiled in, separated by spaces
const char* isa_found();     // those of them that this processor supports

}  // namespace fusedseq::cpu
