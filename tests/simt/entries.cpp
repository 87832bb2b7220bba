// What tests/test_simt.py calls of csrc/*.cu, in plain C. Each returns a message or null.
#include "dropout_cuda.h"
#include "nt_asgd_cuda.h"

using namespace fusedseq;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* dropout(int type, int64_t T, int64_t B, int64_t D, const void* x, void* y, const int64_t* seed, uint64_t threshold,
                           double scale, bool by_row) {
  return cuda::dropout({cuda::Type(type), T, B, D, x, y, seed, threshold, scale, by_row}, nullptr);
}

EXPORT int64_t nt_asgd_partials(const cpu::NtAsgdTensor* tensors, int64_t count) { return cuda::nt_asgd_partials(tensors, count); }
EXPORT const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial, void* norm, bool wide) {
  return cuda::nt_asgd_norm(tensors, count, partial, norm, wide, nullptr);
}
EXPORT const char* nt_asgd_step(cpu::NtAsgdTensor* tensors, int64_t count, const void* norm, bool wide, double max_norm, double lr,
                                double weight_decay, double mu) {
  return cuda::nt_asgd_step({tensors, count, 1, lr, weight_decay, mu}, norm, wide, max_norm, nullptr);
}
