// The guards of the registered operators: torch.ops.fusedseq.* can be called without the public
// functions in pyext/fusedseq/fused, which raise more detailed errors before. A wrong call must
// raise an error, and never read or write outside its tensors. Every message is one sentence: the
// operator, the argument, what it must be, and what was given.
//
// The device needs no guard in the CPU kernels: torch's dispatcher selects them only if every
// tensor among the arguments is a dense CPU tensor.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ops/declaration.h"

namespace fusedseq {

using torch::headeronly::ScalarType;
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

// The functions that raise are separate from those that compare, so that a call whose arguments are
// right executes only the comparisons.
template <class... Text>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* op, const Text&... text) {
  std::ostringstream message;
  message << op << ": ";
  ((message << text), ...);
  throw std::runtime_error(message.str());
}

// A shape as Python writes it: (3, 2), (3,) or ().
inline std::string in_words(Shape shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d)
    text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

// The name that torch gives a dtype in Python.
inline const char* in_words(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(type);
  }
}

inline void require(bool ok, const char* op, const char* what) {
  if (!ok) refuse(op, what);
}
// Requires a property of a tensor's shape, which `wanted` describes.
inline void require_that(bool ok, const char* op, const char* name, const Tensor& t,
                         const char* wanted) {
  if (!ok) refuse(op, name, " must be ", wanted, ", got ", in_words(t.sizes()));
}

inline bool has_shape(const Tensor& t, Shape shape) {
  const Shape sizes = t.sizes();
  if (sizes.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d)
    if (sizes[d] != shape[d]) return false;
  return true;
}
inline void require_shape(const char* op, const char* name, const Tensor& t, Shape shape) {
  if (!has_shape(t, shape))
    refuse(op, name, " must be ", in_words(shape), ", got ", in_words(t.sizes()));
}
// symbols: the shape in letters, as "(T, B, X)"
inline void require_dimensions(const char* op, const char* name, const Tensor& t, int64_t count,
                               const char* symbols) {
  if (t.dim() != count) refuse(op, name, " must be ", symbols, ", got ", in_words(t.sizes()));
}

inline void require_dtype(const char* op, const char* name, const Tensor& t, ScalarType type) {
  if (t.scalar_type() != type)
    refuse(op, name, " must be ", in_words(type), ", got ", in_words(t.scalar_type()));
}
inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::BFloat16 ||
         type == ScalarType::Half;
}
// For a tensor that is converted to the type of computing.
inline void require_floating(const char* op, const char* name, const Tensor& t) {
  if (!is_floating(t.scalar_type()))
    refuse(op, name, " must be float32, float64, bfloat16 or float16, got ",
           in_words(t.scalar_type()));
}

// The device of a tensor as Python writes it.
inline std::string device_in_words(const Tensor& t) {
  return t.is_cuda()  ? "cuda:" + std::to_string(t.get_device_index())
         : t.is_cpu() ? "cpu"
                      : "another device";
}
inline bool on_cuda_device_of(const Tensor& t, const Tensor& first) {
  return t.is_cuda() && first.is_cuda() && t.get_device_index() == first.get_device_index();
}
// Requires both tensors to be on one CUDA device: the dispatcher selects the CUDA kernel of an
// operator if any tensor among its arguments is a CUDA tensor.
inline void require_cuda_device(const char* op, const char* name, const Tensor& t,
                                const char* first_name, const Tensor& first) {
  if (on_cuda_device_of(t, first)) return;
  if (!first.is_cuda())
    refuse(op, first_name, " must be on a CUDA device, as another argument is, got ",
           device_in_words(first));
  refuse(op, name, " must be on ", device_in_words(first), ", the device of ", first_name, ", got ",
         device_in_words(t));
}

// The gradient of a loss.
inline void require_scalar(const char* op, const char* name, const Tensor& t) {
  require_that(t.numel() == 1, op, name, t, "one number");
  require_floating(op, name, t);
}

// NaN is not in any range.
inline void require_probability(const char* op, const char* name, double p) {
  if (!(p >= 0 && p <= 1)) refuse(op, name, " must be in [0, 1], got ", p);
}
inline void require_range(const char* op, const char* name, int64_t value, int64_t low,
                          int64_t high) {
  if (value < low || value > high)
    refuse(op, name, " must be in [", low, ", ", high, "], got ", value);
}
// Requires each of n values to be in [low, high].
inline void require_range(const char* op, const char* name, const int64_t* values, int64_t n,
                          int64_t low, int64_t high) {
  for (int64_t i = 0; i < n; ++i)
    require_range(op, name, values[i], low, high);
}
// The seed is a tensor of one element, so that drawing a seed is an operator, which the graphs of
// torch.compile contain.
inline void require_seed(const char* op, const Tensor& seed) {
  if (seed.numel() != 1 || seed.scalar_type() != ScalarType::Long)
    refuse(op, "seed must be one int64, got ", in_words(seed.scalar_type()), " ",
           in_words(seed.sizes()));
}

// The largest number of bytes that a process can address. A tensor that repeats its elements by a
// stride of 0 may have any size: products of such sizes exceed 64 bits.
constexpr int64_t ADDRESSABLE = int64_t(1) << 47;

// Returns the product of sizes, or raises an error if it exceeds ADDRESSABLE. A size of 0 counts as
// 1, as the strides of an empty tensor are products of its other sizes.
inline int64_t checked_product(const char* op, const char* name, Shape sizes) {
  int64_t product = 1;
  for (const int64_t n : sizes)
    if (n < 0 || __builtin_mul_overflow(product, n ? n : 1, &product) || product > ADDRESSABLE)
      refuse(op, name, " would be too large: the product of its sizes ", in_words(sizes),
             " is not in [0, 2^47]");
  return product;
}

}  // namespace fusedseq
