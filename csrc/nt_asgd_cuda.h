// What csrc/nt_asgd.cu gives csrc/nt_asgd.cpp. Both return a message where a kernel could not be started, else null.
#pragma once
#include "cpu/kernels.h"

namespace fusedseq::cuda {

// The norm of all g in `norm`, a double where `wide`, else a float. partial: (nt_asgd_partials(...),)
int64_t nt_asgd_partials(const cpu::NtAsgdTensor* tensors, int64_t count);
const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial, void* norm, bool wide, void* stream);

// o.clip is not looked at: gradients are clipped to max_norm by the norm in memory, or not where norm is null.
const char* nt_asgd_step(const cpu::NtAsgd& o, const void* norm, bool wide, double max_norm, void* stream);

}  // namespace fusedseq::cuda
