// The operator linear, x W^T + b, with the matrix products of csrc/cpu/gemm:
// pyext/fusedseq/reference/linear.py.
#include "ops/tensor.h"

namespace fusedseq {
namespace {

// One thread per 20,000 multiply-adds: with fewer, starting a thread takes longer than it saves.
int linear_threads(int64_t M, int64_t K, int64_t N) {
  const double useful = double(M) * double(K) * double(N) / 20000 + 1;
  return useful < threads() ? int(useful) : threads();
}

void run(const cpu::Linear<float>& l) {
  cpu::kernels().linear_f32(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run(const cpu::Linear<double>& l) {
  cpu::kernels().linear_f64(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run_backward(const cpu::Linear<float>& l) {
  cpu::kernels().linear_backward_f32(l, parallel, linear_threads(l.M, l.K, l.N));
}
void run_backward(const cpu::Linear<double>& l) {
  cpu::kernels().linear_backward_f64(l, parallel, linear_threads(l.M, l.K, l.N));
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
constexpr ScalarType computing = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
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
  const Tensor x = dense(x_, computing<T>), W = dense(W_, computing<T>);
  const Tensor b = b_ ? dense(*b_, computing<T>) : x;
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
  const Tensor dy = dense(dy_, computing<T>), x = dense(x_, computing<T>),
               W = dense(W_, computing<T>);
  const int64_t K = W.size(1), M = x.numel() / K, N = W.size(0);
  Tensor dx = output(x, needs & 1 ? Sizes(x.sizes().begin(), x.sizes().end()) : Sizes{0}),
         dW = output(x, needs & 2 ? Sizes{N, K} : Sizes{0}),
         db = output(x, needs & 4 ? Sizes{N} : Sizes{0});
  run_backward(cpu::Linear<T>{M, K, N, in<T>(x), in<T>(W), nullptr, nullptr, in<T>(dy), out<T>(dx),
                              out<T>(dW), out<T>(db)});
  const ScalarType type = x_.scalar_type();
  return {as_type(dx, type), as_type(dW, type), as_type(db, type)};
}

// fp64 is computed in fp64, everything else in fp32; fp16 and bf16 tensors are converted as a
// whole.
bool in_doubles(const char* op, const Tensor& x) {
  return x.scalar_type() != ScalarType::Half && kernel_type(op, "x", x) == cpu::Type::f64;
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
  return {in_doubles("linear", i.x) ? forward<double>(i.x, i.W, i.b)
                                    : forward<float>(i.x, i.W, i.b)};
}

LinearGradients linear_backward(const LinearBackward& g, const Needs& needs) {
  const auto [dx, dW, db] = in_doubles("linear_backward", g.x)
                                ? backward<double>(g.dy, g.x, g.W, needs.needs)
                                : backward<float>(g.dy, g.x, g.W, needs.needs);
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
