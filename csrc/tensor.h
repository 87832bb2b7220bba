// What the operators' C++ needs of torch's stable ABI: typed pointers, threads, seeds, and checks that keep a wrong
// call from touching memory it should not. The sentences for people are written in pyext/fusedseq/fused/.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/dispatch.h"

namespace fusedseq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

inline void require(bool ok, const char* op, const char* what) { STD_TORCH_CHECK(ok, op, ": ", what); }

inline void require_shape(const char* op, const char* name, const Tensor& t, const Sizes& shape) {
  bool ok = t.dim() == int64_t(shape.size());
  for (size_t d = 0; ok && d < shape.size(); ++d) ok = t.size(d) == shape[d];
  STD_TORCH_CHECK(ok, op, ": ", name, " has a shape the kernel does not take");
}

inline cpu::Type kernel_type(const char* op, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return cpu::Type::f32;
    case ScalarType::Double: return cpu::Type::f64;
    case ScalarType::BFloat16: return cpu::Type::bf16;
    default: STD_TORCH_CHECK(false, op, ": dtype must be float32, float64 or bfloat16");
  }
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline Tensor dense(const Tensor& t, ScalarType type) {
  return dense(t.scalar_type() == type ? t : torch::stable::to(t, type));
}
inline Tensor as_type(const Tensor& t, ScalarType type) { return t.scalar_type() == type ? t : torch::stable::to(t, type); }
inline Tensor empty(const Tensor& like, const Sizes& shape) { return torch::stable::new_empty(like, shape); }
inline Tensor empty(const Tensor& like, const Sizes& shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

// The seed is a tensor of one element, so that drawing it is an operator too: graphs of torch.compile hold it.
inline cpu::Mask mask(const Tensor& seed, double p, uint64_t stream = 0) {
  require(seed.numel() == 1 && seed.scalar_type() == ScalarType::Long, "seed", "must be one int64");
  require(p >= 0 && p <= 1, "p", "must be in [0, 1]");
  const uint64_t key = uint64_t(*static_cast<const int64_t*>(seed.const_data_ptr())) + stream;
  return {key, uint64_t(std::nearbyint(p * 4294967296.)), p < 1 ? 1 / (1 - p) : 0};
}

inline void parallel(int64_t n, cpu::Body body, void* context) {
  if (n > 0) torch::stable::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) { body(context, begin, end); });
}
inline int threads() { return int(torch::stable::get_num_threads()); }

}  // namespace fusedseq
