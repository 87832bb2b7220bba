// The operator linear_int8, x W^T + b with weights in 8 bits and one scale for each of their rows:
// what the public function `linear` calls for a W of fusedseq.Int8Weight. It has no gradient.
#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char* OP = "linear_int8";

#define INT8_INPUTS(FIELD)                                                   \
  FIELD(Tensor, x)         /* (..., K) */                                    \
  FIELD(Tensor, W)         /* (N, K) int8 */                                 \
  FIELD(Tensor, scale)     /* (N,) fp32, what a row of W is multiplied by */ \
  FIELD(OptionalTensor, b) /* (N,) */
FUSEDSEQ_DECLARE(Int8Inputs, INT8_INPUTS)
#define INT8_OUTPUT(FIELD) FIELD(Tensor, y) /* (..., N) */
FUSEDSEQ_DECLARE(Int8Output, INT8_OUTPUT)

void require_inputs(const Int8Inputs& i) {
  const Shape of_x = i.x.sizes(), of_W = i.W.sizes();
  require_that(of_x.size() >= 1, OP, "x", i.x, "(..., K)");
  require_that(of_W.size() == 2, OP, "W", i.W, "(N, K)");
  require_that(of_W[1] == of_x[of_x.size() - 1] && of_W[1] > 0, OP, "W", i.W,
               "(N, K) with x's K, at least 1");
  require_shape(OP, "scale", i.scale, {of_W[0]});
  require_floating(OP, "x", i.x);
  require_dtype(OP, "W", i.W, ScalarType::Char);
  require_dtype(OP, "scale", i.scale, ScalarType::Float);
  if (!i.b) return;
  require_shape(OP, "b", *i.b, {of_W[0]});
  require_dtype(OP, "b", *i.b, i.x.scalar_type());
}

const float* numbers(const Tensor& t) {
  return static_cast<const float*>(t.const_data_ptr());
}

// All products and sums are in float, also for an x in fp64.
Int8Output linear_int8(const Int8Inputs& i) {
  require_inputs(i);
  const Tensor x = dense(i.x, ScalarType::Float), W = dense(i.W), scale = dense(i.scale);
  const Tensor b = i.b ? dense(*i.b, ScalarType::Float) : x;
  Sizes shape(x.sizes().begin(), x.sizes().end());
  shape.back() = W.size(0);
  Tensor y = output(x, shape);
  const int64_t K = W.size(1), M = x.numel() / K, N = W.size(0);
  if (y.numel()) {
    cpu::kernels().linear_int8(
        {M, K, N, numbers(x), static_cast<const int8_t*>(W.const_data_ptr()), numbers(scale),
         i.b ? numbers(b) : nullptr, static_cast<float*>(y.mutable_data_ptr()),
         cpu::kernels().int8_rows},
        parallel, threads_for(double(M) * double(K) * double(N)));
  }
  return {as_type(y, i.x.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<linear_int8>(m, "linear_int8");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("linear_int8", boxed<linear_int8>);
}

}  // namespace fusedseq
