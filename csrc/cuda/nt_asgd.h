// The kernels of NT-ASGD: nt_asgd.cu, called by csrc/ops/nt_asgd.cpp. Functions that return
// const char* return an error message if a kernel could not be launched, else null.
#pragma once
#include "cpu/arguments/optimizer.h"

namespace fusedseq::cuda {

// Computes the norm of all gradients.
// partial: (nt_asgd_partials(...),)    norm: ()  double if norm_is_double, else float
int64_t nt_asgd_partials(const cpu::NtAsgdTensor* tensors, int64_t count);
const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial,
                         void* norm, bool norm_is_double, void* stream);

// A step of the optimizer. Gradients are clipped to max_norm by the norm in memory, or not if norm
// is null; o.clip is ignored.
const char* nt_asgd_step(const cpu::NtAsgd& o, const void* norm, bool norm_is_double,
                         double max_norm, void* stream);

}  // namespace fusedseq::cuda
