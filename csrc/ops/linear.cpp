// The operator linear, x W^T + b, with the matrix products of csrc/cpu/gemm:
// pyext/fusedseq/reference/linear.py.
#include "ops/precision.h"

namespace fusedseq {
namespace {

int linear_threads(int64_t M, int64_t K, int64_t N) {
  return threads_for(double(M) * double(K) * double(N));
}

// The type of a call's tensors in memory while the kernels run, as a C++ type and as torch's.
template <class T>
constexpr ScalarType in_memory = ScalarType::Float;
template <>
inline constexpr ScalarType in_memory<double> = ScalarType::Double;
template <>
constexpr ScalarType in_memory<cpu::bfloat16> = ScalarType::BFloat16;

// Whether the products of a call with fp32 tensors multiply bfloat16 numbers. With few rows,
// reading W takes longer than multiplying, and rounding it longer still.
bool rounds_operands(const cpu::Linear<float>& l) {
  constexpr int64_t FEW_ROWS = 64;
  return l.M > FEW_ROWS && multiplies_in_bf16(ScalarType::Float);
}

void run(const cpu::Linear<float>& l) {
  const auto& all = cpu::kernels();
  (rounds_operands(l) ? all.bf16.linear_f32 : all.linear_f32)(l, parallel,
                                                              linear_threads(l.M, l.K, l.N));
}
void run(const cpu::Linear<double>& l) {
  cpu::kernels().linear_f64(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run(const cpu::Linear<cpu::bfloat16>& l) {
  cpu::kernels().bf16.linear(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run_backward(const cpu::Linear<float>& l) {
  const auto& all = cpu::kernels();
  (rounds_operands(l) ? all.bf16.linear_backward_f32 : all.linear_backward_f32)(
      l, parallel, linear_threads(l.M, l.K, l.N));
}
void run_backward(const cpu::Linear<double>& l) {
  cpu::kernels().linear_backward_f64(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run_backward(const cpu::Linear<cpu::bfloat16>& l) {
  cpu::kernels().bf16.linear_backward(l, parallel, linear_threads(l.M, l.K, l.N));
}

void require_inputs(const char* op, const Tensor& x, const Tensor& W,
                    const std::optional<Tensor>& b) {
  const Shape of_x = x.sizes(), of_W = W.sizes();
  require_that(of_x.size() >= 1, op, "x", x, "(..., K)");
  require_that(of_W.size() == 2, op, "W", W, "(N, K)");
  const int64_t K = of_x[of_x.size() - 1];
  require_that(of_W[1] == K && K > 0, op, "W", W, "(N, K) with x's K, at least 1");
  const ScalarType type = x.scalar_type();
  require_dtype(op, "W", W, type);
  if (!b) return;
  require_shape(op, "b", *b, {of_W[0]});
  require_dtype(op, "b", *b, type);
}

// The shape (..., N) of the result.
Sizes result_shape(const Tensor& x, const Tensor& W) {
  Sizes shape(x.sizes().begin(), x.sizes().end());
  shape.back() = W.size(0);
  return shape;
}

template <class T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

template <class T>
Tensor forward(const Tensor& x_, const Tensor& W_, const std::optional<Tensor>& b_) {
  require_inputs("linear", x_, W_, b_);
  const Tensor x = dense(x_, in_memory<T>), W = dense(W_, in_memory<T>);
  const Tensor b = b_ ? dense(*b_, in_memory<T>) : x;
  Tensor y = output(x, result_shape(x, W));
  if (y.numel())
    run(cpu::Linear<T>{x.numel() / W.size(1), W.size(1), W.size(0), in<T>(x), in<T>(W),
                       b_ ? in<T>(b) : nullptr, out<T>(y), nullptr, nullptr, nullptr, nullptr});
  return as_type(y, x_.scalar_type());
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& W_,
                                            int64_t needs) {
  require_inputs("linear_backward", x_, W_, {});
  require_shape("linear_backward", "dy", dy_, result_shape(x_, W_));
  require_dtype("linear_backward", "dy", dy_, x_.scalar_type());
  const Tensor dy = dense(dy_, in_memory<T>), x = dense(x_, in_memory<T>),
               W = dense(W_, in_memory<T>);
  const int64_t K = W.size(1), M = x.numel() / K, N = W.size(0);
  Tensor dx = output(x, needs & 1 ? Sizes(x.sizes().begin(), x.sizes().end()) : Sizes{0}),
         dW = output(x, needs & 2 ? Sizes{N, K} : Sizes{0}),
         db = output(x, needs & 4 ? Sizes{N} : Sizes{0});
  run_backward(cpu::Linear<T>{M, K, N, in<T>(x), in<T>(W), nullptr, nullptr, in<T>(dy), out<T>(dx),
                              out<T>(dW), out<T>(db)});
  const ScalarType type = x_.scalar_type();
  return {as_type(dx, type), as_type(dW, type), as_type(db, type)};
}

// Calls f with a value of the type in memory that the kernels take. fp16 tensors are converted as a
// whole, and bf16 tensors too where the processor does not multiply bfloat16 numbers.
template <class F>
auto by_memory(const char* op, const Tensor& x, F f) {
  const ScalarType type = x.scalar_type();
  if (type != ScalarType::Half && kernel_type(op, "x", x) == cpu::Type::f64) return f(double());
  if (type == ScalarType::BFloat16 && multiplies_in_bf16(type)) return f(cpu::bfloat16());
  return f(float());
}

#define LINEAR_INPUTS(FIELD)              \
  FIELD(Tensor, x)         /* (..., K) */ \
  FIELD(Tensor, W)         /* (N, K) */   \
  FIELD(OptionalTensor, b) /* (N,) */
FUSEDSEQ_DECLARE(LinearInputs, LINEAR_INPUTS)
#define LINEAR_OUTPUT(FIELD) FIELD(Tensor, y) /* (..., N) */
FUSEDSEQ_DECLARE(LinearOutput, LINEAR_OUTPUT)

// The backward does not read b.
#define LINEAR_BACKWARD(FIELD) \
  FIELD(Tensor, dy)            \
  FIELD(Tensor, x)             \
  FIELD(Tensor, W)
FUSEDSEQ_DECLARE(LinearBackward, LINEAR_BACKWARD)
#define LINEAR_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)             \
  FIELD(Tensor, dW)             \
  FIELD(Tensor, db)
FUSEDSEQ_DECLARE(LinearGradients, LINEAR_GRADIENTS)

LinearOutput linear(const LinearInputs& i) {
  return {by_memory("linear", i.x, [&](auto of) { return forward<decltype(of)>(i.x, i.W, i.b); })};
}

LinearGradients linear_backward(const LinearBackward& g, const Needs& needs) {
  const auto [dx, dW, db] = by_memory("linear_backward", g.x, [&](auto of) {
    return backward<decltype(of)>(g.dy, g.x, g.W, needs.needs);
  });
  return {dx, dW, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<linear>(m, "linear");
  define<linear_backward>(m, "linear_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("linear", boxed<linear>);
  m.impl("linear_backward", boxed<linear_backward>);
}

}  // namespace fusedseq
