// The operator activation_regularization (AR and TAR of AWD-LSTM): both terms in one pass over the
// two outputs, and both gradients in another:
// pyext/fusedseq/reference/activation_regularization.py.
#include "cuda/regularization.h"

#include "ops/cuda_stream.h"
#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char *OP = "activation_regularization",
                     *BACKWARD = "activation_regularization_backward";

#define AR_INPUTS(FIELD)                 \
  FIELD(Tensor, dropped) /* (T, B, H) */ \
  FIELD(Tensor, raw)     /* (T, B, H) */ \
  FIELD(double, alpha)                   \
  FIELD(double, beta)
FUSEDSEQ_DECLARE(Inputs, AR_INPUTS)
#define AR_OUTPUT(FIELD) FIELD(Tensor, loss)
FUSEDSEQ_DECLARE(Output, AR_OUTPUT)
#define AR_OUTPUT_GRADIENT(FIELD) FIELD(Tensor, dloss)
FUSEDSEQ_DECLARE(OutputGradient, AR_OUTPUT_GRADIENT)
#define AR_GRADIENTS(FIELD) FIELD(Tensor, ddropped) FIELD(Tensor, draw)
FUSEDSEQ_DECLARE(Gradients, AR_GRADIENTS)

// The tensors as (T, N), and the factors of the two sums of squares: alpha / (T N) and
// beta / ((T - 1) N), or 0 where T is 1.
struct Means {
  int64_t T, N;
  double alpha, beta;
};
Means sizes(const char* op, const Tensor& dropped, const Tensor& raw, double alpha, double beta) {
  require_dimensions(op, "dropped", dropped, 3, "(T, B, H)");
  require_that(dropped.size(0) > 0, op, "dropped", dropped, "(T, B, H) with T at least 1");
  require_shape(op, "raw", raw, dropped.sizes());
  require_dtype(op, "raw", raw, dropped.scalar_type());
  const int64_t T = dropped.size(0), N = dropped.size(1) * dropped.size(2);
  return {T, N, alpha / double(T * N), T > 1 ? beta / double((T - 1) * N) : 0.};
}

cpu::ActivationRegularization arguments(const char* op, const Tensor& dropped, const Tensor& raw,
                                        double alpha, double beta) {
  const auto s = sizes(op, dropped, raw, alpha, beta);
  return {kernel_type(op, "dropped", dropped),
          s.T,
          s.N,
          dropped.const_data_ptr(),
          raw.const_data_ptr(),
          s.alpha,
          s.beta,
          nullptr,
          nullptr};
}

double scalar(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return *static_cast<const float*>(t.const_data_ptr());
    case ScalarType::Double:
      return *static_cast<const double*>(t.const_data_ptr());
    default:
      return *static_cast<const float*>(torch::stable::to(t, ScalarType::Float).const_data_ptr());
  }
}

Output activation_regularization(const Inputs& i) {
  const Tensor d = dense(i.dropped), x = dense(i.raw);
  const auto a = arguments(OP, d, x, i.alpha, i.beta);
  Tensor loss = output(d, {}, a.type == cpu::Type::f64 ? ScalarType::Double : ScalarType::Float);
  const double value = cpu::kernels().activation_regularization(a, parallel, threads());
  if (a.type == cpu::Type::f64)
    *static_cast<double*>(loss.mutable_data_ptr()) = value;
  else
    *static_cast<float*>(loss.mutable_data_ptr()) = float(value);
  return {as_type(loss, d.scalar_type())};
}

Gradients activation_regularization_backward(const OutputGradient& g, const Inputs& i) {
  require_scalar(BACKWARD, "dloss", g.dloss);
  const Tensor d = dense(i.dropped), x = dense(i.raw);
  auto a = arguments(BACKWARD, d, x, i.alpha, i.beta);
  Tensor ddropped = output_like(d), draw = output_like(x);
  a.ddropped = ddropped.mutable_data_ptr();
  a.draw = draw.mutable_data_ptr();
  if (d.numel())
    cpu::kernels().activation_regularization_backward(a, scalar(g.dloss), parallel, threads());
  return {ddropped, draw};
}

#ifdef FUSEDSEQ_CUDA
cuda::ActivationRegularization cuda_arguments(const char* op, const Tensor& dropped,
                                              const Tensor& raw, double alpha, double beta) {
  require_cuda_device(op, "raw", raw, "dropped", dropped);
  const auto s = sizes(op, dropped, raw, alpha, beta);
  return {cuda_type(op, "dropped", dropped),
          s.T,
          s.N,
          dropped.const_data_ptr(),
          raw.const_data_ptr(),
          s.alpha,
          s.beta,
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

void require_started(const char* error, const char* kernels, const Tensor& x) {
  STD_TORCH_CHECK(!error, OP, ": ", kernels, " for (", x.size(0), ", ", x.size(1), ", ", x.size(2),
                  "): ", error ? error : "");
}

Output activation_regularization_cuda(const Inputs& i) {
  const Tensor d = dense(i.dropped), x = dense(i.raw);
  auto a = cuda_arguments(OP, d, x, i.alpha, i.beta);
  const int32_t device = d.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor loss = torch::stable::new_empty(d, {});
  Tensor partial = torch::stable::new_empty(
      d, {2, cuda::activation_regularization_blocks(a.type, a.T, a.N)}, ScalarType::Double);
  a.loss = loss.mutable_data_ptr();
  a.partial = static_cast<double*>(partial.mutable_data_ptr());
  require_started(cuda::activation_regularization(a, current_stream(device)),
                  "sums_kernel, loss_kernel", d);
  return {loss};
}

Gradients activation_regularization_backward_cuda(const OutputGradient& g, const Inputs& i) {
  require_scalar(BACKWARD, "dloss", g.dloss);
  require_cuda_device(BACKWARD, "dloss", g.dloss, "dropped", i.dropped);
  const Tensor d = dense(i.dropped), x = dense(i.raw);
  const Tensor dloss = dense(g.dloss, i.dropped.scalar_type());
  auto a = cuda_arguments(BACKWARD, d, x, i.alpha, i.beta);
  const int32_t device = d.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Sizes shape(d.sizes().begin(), d.sizes().end());
  Tensor ddropped = torch::stable::new_empty(d, shape), draw = torch::stable::new_empty(x, shape);
  a.dloss = dloss.const_data_ptr();
  a.ddropped = ddropped.mutable_data_ptr();
  a.draw = draw.mutable_data_ptr();
  if (d.numel())
    require_started(cuda::activation_regularization_backward(a, current_stream(device)),
                    "gradients_kernel", d);
  return {ddropped, draw};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<activation_regularization>(m, "activation_regularization");
  define<activation_regularization_backward>(m, "activation_regularization_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("activation_regularization", boxed<activation_regularization>);
  m.impl("activation_regularization_backward", boxed<activation_regularization_backward>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("activation_regularization", boxed<activation_regularization_cuda>);
  m.impl("activation_regularization_backward", boxed<activation_regularization_backward_cuda>);
}
#endif

}  // namespace fusedseq
