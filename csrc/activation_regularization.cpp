// activation_regularization: both terms in one pass over the two outputs, and both gradients in one pass back.
#include "activation_regularization_cuda.h"

#include "cuda_stream.h"
#include "tensor.h"

namespace fusedseq {
namespace {

constexpr const char* OP = "activation_regularization";

// alpha and beta: alpha / (T N) and beta / ((T - 1) N)
struct Means { int64_t T, N; double alpha, beta; };
Means sizes(const Tensor& dropped, const Tensor& raw, double alpha, double beta) {
  require(dropped.dim() == 3 && dropped.scalar_type() == raw.scalar_type(), OP, "dropped and raw must be (T, B, H) of one dtype");
  require_shape(OP, "raw", raw, {dropped.size(0), dropped.size(1), dropped.size(2)});
  const int64_t T = dropped.size(0), N = dropped.size(1) * dropped.size(2);
  return {T, N, alpha / double(T * N), T > 1 ? beta / double((T - 1) * N) : 0.};
}

cpu::ActivationRegularization arguments(const Tensor& dropped, const Tensor& raw, double alpha, double beta) {
  const auto s = sizes(dropped, raw, alpha, beta);
  return {kernel_type(OP, dropped), s.T, s.N, dropped.const_data_ptr(), raw.const_data_ptr(), s.alpha, s.beta, nullptr, nullptr};
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
  require(dloss.numel() == 1, OP, "dloss must be a scalar");
  const Tensor d = dense(dropped), x = dense(raw);
  auto a = arguments(d, x, alpha, beta);
  Tensor ddropped = output_like(d), draw = output_like(x);
  a.ddropped = ddropped.mutable_data_ptr(), a.draw = draw.mutable_data_ptr();
  if (d.numel()) cpu::kernels().activation_regularization_backward(a, scalar(dloss), parallel, threads());
  return {ddropped, draw};
}

#ifdef FUSEDSEQ_CUDA
cuda::ActivationRegularization cuda_arguments(const Tensor& dropped, const Tensor& raw, double alpha, double beta) {
  require(raw.is_cuda() && raw.get_device_index() == dropped.get_device_index(), OP, "raw must be on the device of dropped");
  const auto s = sizes(dropped, raw, alpha, beta);
  return {cuda_type(OP, dropped), s.T, s.N, dropped.const_data_ptr(), raw.const_data_ptr(), s.alpha, s.beta, nullptr, nullptr,
          nullptr, nullptr, nullptr};
}

void require_started(const char* error, const char* kernels, const Tensor& x) {
  STD_TORCH_CHECK(!error, OP, ": ", kernels, " for (", x.size(0), ", ", x.size(1), ", ", x.size(2), "): ", error ? error : "");
}

Tensor activation_regularization_cuda(Tensor dropped, Tensor raw, double alpha, double beta) {
  const Tensor d = dense(dropped), x = dense(raw);
  auto a = cuda_arguments(d, x, alpha, beta);
  const int32_t device = d.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor loss = torch::stable::new_empty(d, {});
  Tensor partial = torch::stable::new_empty(d, {2, cuda::activation_regularization_blocks(a.type, a.T, a.N)}, ScalarType::Double);
  a.loss = loss.mutable_data_ptr(), a.partial = static_cast<double*>(partial.mutable_data_ptr());
  require_started(cuda::activation_regularization(a, current_stream(device)), "sums_kernel, loss_kernel", d);
  return loss;
}

std::tuple<Tensor, Tensor> activation_regularization_backward_cuda(Tensor dloss, Tensor dropped, Tensor raw, double alpha,
                                                                   double beta) {
  require(dloss.numel() == 1 && dloss.is_cuda() && dloss.get_device_index() == dropped.get_device_index(), OP,
          "dloss must be a scalar on the device of dropped");
  const Tensor d = dense(dropped), x = dense(raw), upstream = dense(dloss, dropped.scalar_type());
  auto a = cuda_arguments(d, x, alpha, beta);
  const int32_t device = d.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Sizes shape(d.sizes().begin(), d.sizes().end());
  Tensor ddropped = torch::stable::new_empty(d, shape), draw = torch::stable::new_empty(x, shape);
  a.dloss = upstream.const_data_ptr(), a.ddropped = ddropped.mutable_data_ptr(), a.draw = draw.mutable_data_ptr();
  if (d.numel()) require_started(cuda::activation_regularization_backward(a, current_stream(device)), "gradients_kernel", d);
  return {ddropped, draw};
}
#endif

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
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("activation_regularization", TORCH_BOX(&activation_regularization_cuda));
  m.impl("activation_regularization_backward", TORCH_BOX(&activation_regularization_backward_cuda));
}
#endif

}  // namespace fusedseq
