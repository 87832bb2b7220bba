// NT-ASGD (pyext/fusedseq/optim/nt_asgd.py): the norm of all gradients, and the step over all parameters.
#include "nt_asgd_cuda.h"

#include "cells/nt_asgd.h"
#include "cuda_stream.h"
#include "tensor.h"

namespace fusedseq {
namespace {

using Tensors = std::vector<Tensor>;
constexpr const char* OP = "nt_asgd";

// The kernels go over memory in its order, so that a transposed parameter is as good as any.
void require_dense(const Tensor& t) {
  int64_t span = t.numel() ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && span; ++d) span += (t.size(d) - 1) * t.stride(d);
  require(span == t.numel(), OP, "tensors must be dense");
}

cpu::NtAsgdTensor gradient(const Tensor& g) {
  require_dense(g);
  return {kernel_type(OP, g), g.numel(), g.numel() ? g.const_data_ptr() : nullptr, nullptr, nullptr};
}
std::vector<cpu::NtAsgdTensor> gradients(const Tensors& grads) {
  std::vector<cpu::NtAsgdTensor> table;
  for (const Tensor& g : grads) table.push_back(gradient(g));
  return table;
}

std::vector<cpu::NtAsgdTensor> parameters(const Tensors& params, const Tensors& grads, const Tensors& averages) {
  require(params.size() == grads.size() && (averages.empty() || averages.size() == params.size()), OP, "lists differ in length");
  auto table = gradients(grads);
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& p = params[i];
    require_dense(p);
    require(p.numel() == grads[i].numel() && p.scalar_type() == grads[i].scalar_type(), OP, "gradients must be as the parameters");
    table[i].p = p.numel() ? p.mutable_data_ptr() : nullptr;
    if (averages.empty()) continue;
    const Tensor& a = averages[i];
    require_dense(a);
    const bool wide = p.scalar_type() == ScalarType::Double;
    require(a.numel() == p.numel() && a.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), OP,
            "averages must be as the parameters, fp32 or fp64");
    table[i].average = a.numel() ? a.mutable_data_ptr() : nullptr;
  }
  return table;
}

Tensor empty_norm(const Tensors& grads) {
  require(!grads.empty(), OP, "no gradient");
  bool wide = false;
  for (const Tensor& g : grads) wide |= g.scalar_type() == ScalarType::Double;
  return torch::stable::new_empty(grads[0], {}, wide ? ScalarType::Double : ScalarType::Float);
}

Tensor norm(Tensors grads) {
  Tensor out = empty_norm(grads);
  const auto table = gradients(grads);
  const double value = std::sqrt(cpu::kernels().nt_asgd_squares({table.data(), int64_t(table.size()), 1, 0, 0, 1}, parallel));
  void* p = out.mutable_data_ptr();
  if (out.scalar_type() == ScalarType::Double) *static_cast<double*>(p) = value;
  else *static_cast<float*>(p) = float(value);
  return out;
}

double clip_by(const Tensor& norm, double max_norm) {
  const void* p = norm.const_data_ptr();
  return norm.scalar_type() == ScalarType::Double ? clip_factor(*static_cast<const double*>(p), max_norm)
                                                  : clip_factor(*static_cast<const float*>(p), float(max_norm));
}

void require_norm(const std::optional<Tensor>& norm) {
  if (!norm) return;
  const ScalarType type = norm->scalar_type();
  require(norm->numel() == 1 && (type == ScalarType::Double || type == ScalarType::Float), OP, "norm must be one float or double");
}

void step(Tensors params, Tensors grads, Tensors averages, std::optional<Tensor> norm, double max_norm, double lr,
          double weight_decay, double mu) {
  require_norm(norm);
  const auto table = parameters(params, grads, averages);
  const double clip = norm ? clip_by(*norm, max_norm) : 1.;
  cpu::kernels().nt_asgd_step({table.data(), int64_t(table.size()), clip, lr, weight_decay, mu}, parallel);
}

#ifdef FUSEDSEQ_CUDA
int32_t require_one_device(const Tensors& tensors, int32_t device) {
  for (const Tensor& t : tensors) require(t.is_cuda() && t.get_device_index() == device, OP, "tensors must be on one device");
  return device;
}

Tensor norm_cuda(Tensors grads) {
  Tensor out = empty_norm(grads);
  const auto table = gradients(grads);
  const int32_t device = require_one_device(grads, grads[0].get_device_index());
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t count = table.size();
  Tensor partial = torch::stable::new_empty(grads[0], {cuda::nt_asgd_partials(table.data(), count)}, ScalarType::Double);
  require_launched(OP, cuda::nt_asgd_norm(table.data(), count, static_cast<double*>(partial.mutable_data_ptr()), out.mutable_data_ptr(),
                                          out.scalar_type() == ScalarType::Double, current_stream(device)));
  return out;
}

void step_cuda(Tensors params, Tensors grads, Tensors averages, std::optional<Tensor> norm, double max_norm, double lr,
               double weight_decay, double mu) {
  require_norm(norm);
  const auto table = parameters(params, grads, averages);
  if (table.empty()) return;
  const int32_t device = params[0].get_device_index();
  for (const Tensors& list : {params, grads, averages}) require_one_device(list, device);
  require(!norm || norm->get_device_index() == device, OP, "norm must be on the device of the parameters");
  const torch::stable::accelerator::DeviceGuard guard(device);
  require_launched(OP, cuda::nt_asgd_step({table.data(), int64_t(table.size()), 1, lr, weight_decay, mu}, norm ? norm->const_data_ptr() : nullptr,
                                          norm && norm->scalar_type() == ScalarType::Double, max_norm, current_stream(device)));
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("nt_asgd_norm(Tensor[] grads) -> Tensor");
  m.def("nt_asgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] averages, Tensor? norm, float max_norm, float lr, "
        "float weight_decay, float mu) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("nt_asgd_norm", TORCH_BOX(&norm));
  m.impl("nt_asgd_step_", TORCH_BOX(&step));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("nt_asgd_norm", TORCH_BOX(&norm_cuda));
  m.impl("nt_asgd_step_", TORCH_BOX(&step_cuda));
}
#endif

}  // namespace fusedseq
