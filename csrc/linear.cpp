// linear: x W^T + b, forward and backward, on the product of csrc/cpu/gemm.h.
#include "tensor.h"

namespace fusedseq {
namespace {

// Few multiply-adds are not worth a second thread.
int linear_threads(int64_t M, int64_t K, int64_t N) {
  const double useful = double(M) * double(K) * double(N) / 20000 + 1;
  return useful < threads() ? int(useful) : threads();
}

void run(const cpu::Linear<float>& l) { cpu::kernels().linear_f32(l, parallel, linear_threads(l.M, l.K, l.N)); }
void run(const cpu::Linear<double>& l) { cpu::kernels().linear_f64(l, parallel, linear_threads(l.M, l.K, l.N)); }
void run_backward(const cpu::Linear<float>& l) { cpu::kernels().linear_backward_f32(l, parallel, linear_threads(l.M, l.K, l.N)); }
void run_backward(const cpu::Linear<double>& l) { cpu::kernels().linear_backward_f64(l, parallel, linear_threads(l.M, l.K, l.N)); }

void require_shapes(const Tensor& x, const Tensor& W, const std::optional<Tensor>& b) {
  require(x.dim() >= 1 && W.dim() == 2 && x.size(x.dim() - 1) == W.size(1) && W.size(1) > 0, "linear", "x must be (..., K) and W (N, K)");
  if (b) require_shape("linear", "b", *b, {W.size(0)});
}

// (..., N)
Sizes result_shape(const Tensor& x, const Tensor& W) {
  Sizes shape(x.sizes().begin(), x.sizes().end());
  shape.back() = W.size(0);
  return shape;
}

template <class T> constexpr ScalarType computing = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
template <class T> const T* in(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <class T> T* out(const Tensor& t) { return t.numel() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr; }

template <class T> Tensor forward(const Tensor& x_, const Tensor& W_, const std::optional<Tensor>& b_) {
  require_shapes(x_, W_, b_);
  const Tensor x = dense(x_, computing<T>), W = dense(W_, computing<T>);
  const Tensor b = b_ ? dense(*b_, computing<T>) : x;
  Tensor y = output(x, result_shape(x, W));
  if (y.numel())
    run(cpu::Linear<T>{x.numel() / W.size(1), W.size(1), W.size(0), in<T>(x), in<T>(W), b_ ? in<T>(b) : nullptr, out<T>(y), nullptr,
                       nullptr, nullptr, nullptr});
  return as_type(y, x_.scalar_type());
}

template <class T> std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& W_, int64_t needs) {
  require_shapes(x_, W_, {});
  require_shape("linear", "dy", dy_, result_shape(x_, W_));
  const Tensor dy = dense(dy_, computing<T>), x = dense(x_, computing<T>), W = dense(W_, computing<T>);
  const int64_t K = W.size(1), M = x.numel() / K, N = W.size(0);
  Tensor dx = output(x, needs & 1 ? Sizes(x.sizes().begin(), x.sizes().end()) : Sizes{0}), dW = output(x, needs & 2 ? Sizes{N, K} : Sizes{0}),
         db = output(x, needs & 4 ? Sizes{N} : Sizes{0});
  run_backward(cpu::Linear<T>{M, K, N, in<T>(x), in<T>(W), nullptr, nullptr, in<T>(dy), out<T>(dx), out<T>(dW), out<T>(db)});
  const ScalarType type = x_.scalar_type();
  return {as_type(dx, type), as_type(dW, type), as_type(db, type)};
}

// All but doubles are computed as floats; fp16, which the kernels do not know, and bf16 are widened as a whole.
bool in_doubles(const Tensor& x) {
  return x.scalar_type() != ScalarType::Half && kernel_type("linear", x) == cpu::Type::f64;
}

Tensor linear(Tensor x, Tensor W, std::optional<Tensor> b) {
  return in_doubles(x) ? forward<double>(x, W, b) : forward<float>(x, W, b);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor dy, Tensor x, Tensor W, int64_t needs) {
  return in_doubles(x) ? backward<double>(dy, x, W, needs) : backward<float>(dy, x, W, needs);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("linear(Tensor x, Tensor W, Tensor? b) -> Tensor");
  m.def("linear_backward(Tensor dy, Tensor x, Tensor W, int needs) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}

}  // namespace fusedseq
