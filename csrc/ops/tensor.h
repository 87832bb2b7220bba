// What the operators need of torch's stable ABI: dtypes, new tensors, random masks and threads.
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
#include "cpu/memory.h"
#include "cuda/type.h"
#include "ops/require.h"

namespace fusedseq {

inline cpu::Type kernel_type(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return cpu::Type::f32;
    case ScalarType::Double:
      return cpu::Type::f64;
    case ScalarType::BFloat16:
      return cpu::Type::bf16;
    default:
      refuse(op, name, " must be float32, float64 or bfloat16, got ", in_words(t.scalar_type()));
  }
}

inline cuda::Type cuda_type(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return cuda::Type::f32;
    case ScalarType::Double:
      return cuda::Type::f64;
    case ScalarType::BFloat16:
      return cuda::Type::bf16;
    case ScalarType::Half:
      return cuda::Type::f16;
    default:
      refuse(op, name, " must be float32, float64, bfloat16 or float16, got ",
             in_words(t.scalar_type()));
  }
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}
inline Tensor dense(const Tensor& t, ScalarType type) {
  return dense(t.scalar_type() == type ? t : torch::stable::to(t, type));
}
inline Tensor as_type(const Tensor& t, ScalarType type) {
  return t.scalar_type() == type ? t : torch::stable::to(t, type);
}
// A new CPU tensor with strides that leave no gaps. The memory of a large one comes from
// cpu/memory.h; a small one is not made by torch::stable::new_empty, whose call through the
// dispatcher takes a microsecond.
inline Tensor output(const Tensor& like, const Sizes& shape, const Sizes& strides,
                     ScalarType type) {
  size_t bytes = type == ScalarType::Bool                                 ? 1
                 : type == ScalarType::Double || type == ScalarType::Long ? 8
                 : type == ScalarType::Float                              ? 4
                                                                          : 2;
  checked_product("fusedseq", "a result", shape);
  for (int64_t n : shape)
    bytes *= size_t(n);
  if (type != ScalarType::Bool && bytes >= cpu::LARGE)
    return torch::stable::from_blob(cpu::allocate(bytes), shape, strides, like.device(), type,
                                    [bytes](void* p) { cpu::release(p, bytes); });
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
inline Tensor output(const Tensor& like, const Sizes& shape, ScalarType type) {
  Sizes strides(shape.size());
  int64_t n = 1;
  for (size_t d = shape.size(); d-- > 0; n *= shape[d] ? shape[d] : 1)
    strides[d] = n;
  return output(like, shape, strides, type);
}
inline Tensor output(const Tensor& like, const Sizes& shape) {
  return output(like, shape, like.scalar_type());
}
inline Tensor output_like(const Tensor& t) {
  return output(t, Sizes(t.sizes().begin(), t.sizes().end()));
}

// A tensor without elements, for a result that is absent: a new one each time, as no two results of
// an operator may be the same tensor.
inline Tensor empty(const Tensor& like) {
  return like.is_cpu() ? output(like, {0}) : torch::stable::new_empty(like, {0});
}

// A random mask keeps an element where its Philox word is at least `threshold`; `scale` multiplies
// the elements that are kept.
inline uint64_t threshold(double p) {
  return uint64_t(std::nearbyint(p * 4294967296.));
}
inline double scale(double p) {
  return p < 1 ? 1 / (1 - p) : 0;
}

// The caller has checked the arguments with require_seed and require_probability.
inline cpu::Mask mask(const Tensor& seed, double p, MaskStream stream = MaskStream::single) {
  return {uint64_t(*static_cast<const int64_t*>(seed.const_data_ptr())), threshold(p), scale(p),
          stream};
}

inline void parallel(int64_t n, cpu::Body body, void* context) {
  if (n > 0)
    torch::stable::parallel_for(0, n, 1,
                                [=](int64_t begin, int64_t end) { body(context, begin, end); });
}
inline int threads() {
  return int(torch::stable::get_num_threads());
}
// One thread per 20,000 multiply-adds: with fewer, starting a thread, or waiting for it at the end
// of a step, takes longer than it saves.
inline int threads_for(double multiply_adds) {
  const double useful = multiply_adds / 20000 + 1;
  return useful < threads() ? int(useful) : threads();
}

}  // namespace fusedseq
