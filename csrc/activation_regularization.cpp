// activation_regularization: both terms in one pass over the two outputs, and both gradients in one pass back.
#include "tensor.h"

namespace fusedseq {
namespace {

cpu::ActivationRegularization arguments(const Tensor& dropped, const Tensor& raw, double alpha, double beta) {
  require(dropped.dim() == 3 && dropped.scalar_type() == raw.scalar_type(), "activation_regularization",
          "dropped and raw must be (T, B, H) of one dtype");
  require_shape("activation_regularization", "raw", raw, {dropped.size(0), dropped.size(1), dropped.size(2)});
  const int64_t T = dropped.size(0), N = dropped.size(1) * dropped.size(2);
  return {kernel_type("activation_regularization", dropped), T, N, dropped.const_data_ptr(), raw.const_data_ptr(),
          alpha / double(T * N), T > 1 ? beta / double((T - 1) * N) : 0., nullptr, nullptr};
}

double scalar(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return *static_cast<const float*>(t.const_data_ptr());
    case ScalarType::Double: return *static_cast<const double*>(t.const_data_ptr());
    default: return *static_cast<const float*>(torch::stable::to(t, ScalarType::Float).const_data_ptr());
  }
}

Tensor activation_regularization(Tensor dropped, Tensor raw, double alpha, double beta) {
  const Tensor d = dense(dropped), x = dense(raw);
  const auto a = arguments(d, x, alpha, beta);
  Tensor loss = output(d, {}, a.type == cpu::Type::f64 ? ScalarType::Double : ScalarType::Float);
  const double value = cpu::kernels().activation_regularization(a, parallel, threads());
  if (a.type == cpu::Type::f64) *static_cast<double*>(loss.mutable_data_ptr()) = value;
  else *static_cast<float*>(loss.mutable_data_ptr()) = float(value);
  return as_type(loss, dropped.scalar_type());
}

std::tuple<Tensor, Tensor> activation_regularization_backward(Tensor dloss, Tensor dropped, Tensor raw, double alpha,
                                                              double beta) {
  require(dloss.numel() == 1, "activation_regularization", "dloss must be a scalar");
  const Tensor d = dense(dropped), x = dense(raw);
  auto a = arguments(d, x, alpha, beta);
  Tensor ddropped = output_like(d), draw = output_like(x);
  a.ddropped = ddropped.mutable_data_ptr(), a.draw = draw.mutable_data_ptr();
  if (d.numel()) cpu::kernels().activation_regularization_backward(a, scalar(dloss), parallel, threads());
  return {ddropped, draw};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("activation_regularization(Tensor dropped, Tensor raw, float alpha, float beta) -> Tensor");
  m.def("activation_regularization_backward(Tensor dloss, Tensor dropped, Tensor raw, float alpha, float beta) "
        "-> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("activation_regularization", TORCH_BOX(&activation_regularization));
  m.impl("activation_regularization_backward", TORCH_BOX(&activation_regularization_backward));
}

}  // namespace fusedseq
