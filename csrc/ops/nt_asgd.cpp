// The operators of the optimizer NT-ASGD (pyext/fusedseq/optim/nt_asgd.py): the norm of all
// gradients, and the update of all parameters.
#include "cuda/nt_asgd.h"

#include <algorithm>
#include <utility>

#include "math/nt_asgd.h"
#include "ops/cuda_stream.h"
#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char *NORM = "nt_asgd_norm", *STEP = "nt_asgd_step_";

#define NORM_INPUT(FIELD) FIELD(Tensors, grads)
FUSEDSEQ_DECLARE(NormInput, NORM_INPUT)
#define NORM_OUTPUT(FIELD) FIELD(Tensor, norm) /* () */
FUSEDSEQ_DECLARE(NormOutput, NORM_OUTPUT)

#define STEP_INPUTS(FIELD)                                                \
  FIELD(MutatedTensors<'a'>, params)                                      \
  FIELD(Tensors, grads)                                                   \
  FIELD(MutatedTensors<'b'>, averages) /* none before averaging starts */ \
  FIELD(OptionalTensor, norm)          /* of all gradients, to clip by */ \
  FIELD(double, max_norm)                                                 \
  FIELD(double, lr)                                                       \
  FIELD(double, weight_decay)                                             \
  FIELD(double, mu) /* the weight of the new parameters in the average */
FUSEDSEQ_DECLARE(StepInputs, STEP_INPUTS)

// The kernels read memory in its order, so that any permutation of dimensions is allowed, but
// neither gaps nor elements that share memory.
void require_dense(const char* op, const char* name, const Tensor& t) {
  if (t.is_contiguous() || t.numel() == 0) return;
  const Shape sizes = t.sizes(), strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // (stride, size) where there is a step
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1) dimensions.emplace_back(strides[d], sizes[d]);
  std::sort(dimensions.begin(), dimensions.end());
  int64_t elements = 1;
  for (const auto& [stride, size] : dimensions) {
    require_that(stride == elements, op, name, t, "tensors without gaps or shared elements");
    elements *= size;
  }
}
// The i-th element in memory of a gradient or an average is that of the i-th of the parameter.
void require_order(const char* name, const Tensor& t, const Tensor& parameter) {
  const Shape sizes = t.sizes(), strides = t.strides(), wanted = parameter.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] != wanted[d])
      refuse(STEP, name, " must have the strides of their parameters, ", in_words(wanted), ", got ",
             in_words(strides));
}

cpu::NtAsgdTensor gradient(const char* op, const Tensor& g) {
  require_dense(op, "grads", g);
  return {kernel_type(op, "grads", g), g.numel(), g.numel() ? g.const_data_ptr() : nullptr, nullptr,
          nullptr};
}
std::vector<cpu::NtAsgdTensor> gradients(const char* op, const Tensors& grads) {
  std::vector<cpu::NtAsgdTensor> table;
  for (const Tensor& g : grads)
    table.push_back(gradient(op, g));
  return table;
}

std::vector<cpu::NtAsgdTensor> parameters(const Tensors& params, const Tensors& grads,
                                          const Tensors& averages) {
  if (params.size() != grads.size())
    refuse(STEP, "grads must have one tensor for each of ", params.size(), " params, got ",
           grads.size());
  if (!averages.empty() && averages.size() != params.size())
    refuse(STEP, "averages must have one tensor for each of ", params.size(),
           " params, or none, got ", averages.size());
  auto table = gradients(STEP, grads);
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& p = params[i];
    require_dense(STEP, "params", p);
    require_shape(STEP, "grads", grads[i], p.sizes());
    require_dtype(STEP, "grads", grads[i], p.scalar_type());
    if (p.numel()) require_order("grads", grads[i], p);
    table[i].p = p.numel() ? p.mutable_data_ptr() : nullptr;
    if (averages.empty()) continue;
    const Tensor& a = averages[i];
    require_dense(STEP, "averages", a);
    require_shape(STEP, "averages", a, p.sizes());
    if (p.numel()) require_order("averages", a, p);
    const bool wide = p.scalar_type() == ScalarType::Double;
    require_dtype(STEP, "averages", a, wide ? ScalarType::Double : ScalarType::Float);
    table[i].average = a.numel() ? a.mutable_data_ptr() : nullptr;
  }
  return table;
}

Tensor empty_norm(const Tensors& grads) {
  require(!grads.empty(), NORM, "grads must have at least one tensor, got 0");
  bool wide = false;
  for (const Tensor& g : grads)
    wide |= g.scalar_type() == ScalarType::Double;
  return torch::stable::new_empty(grads[0], {}, wide ? ScalarType::Double : ScalarType::Float);
}

NormOutput norm(const NormInput& i) {
  const Tensors& grads = i.grads;
  Tensor out = empty_norm(grads);
  const auto table = gradients(NORM, grads);
  const double value = std::sqrt(
      cpu::kernels().nt_asgd_squares({table.data(), int64_t(table.size()), 1, 0, 0, 1}, parallel));
  void* p = out.mutable_data_ptr();
  if (out.scalar_type() == ScalarType::Double)
    *static_cast<double*>(p) = value;
  else
    *static_cast<float*>(p) = float(value);
  return {out};
}

double clip_by(const Tensor& norm, double max_norm) {
  const void* p = norm.const_data_ptr();
  return norm.scalar_type() == ScalarType::Double
             ? clip_factor(*static_cast<const double*>(p), max_norm)
             : clip_factor(*static_cast<const float*>(p), float(max_norm));
}

void require_norm(const std::optional<Tensor>& norm) {
  if (!norm) return;
  require_that(norm->numel() == 1, STEP, "norm", *norm, "one number");
  if (norm->scalar_type() != ScalarType::Double)
    require_dtype(STEP, "norm", *norm, ScalarType::Float);
}

void step(const StepInputs& i) {
  const auto& [params, grads, averages, norm, max_norm, lr, weight_decay, mu] = i;
  require_norm(norm);
  const auto table = parameters(params, grads, averages);
  const double clip = norm ? clip_by(*norm, max_norm) : 1.;
  cpu::kernels().nt_asgd_step({table.data(), int64_t(table.size()), clip, lr, weight_decay, mu},
                              parallel);
}

#ifdef FUSEDSEQ_CUDA
// Requires every tensor of a list to be on the device of `first`.
void require_one_device(const char* op, const char* name, const Tensors& tensors,
                        const char* first_name, const Tensor& first) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!on_cuda_device_of(tensors[i], first))
      require_cuda_device(op, (name + ("[" + std::to_string(i) + "]")).c_str(), tensors[i],
                          first_name, first);
}

NormOutput norm_cuda(const NormInput& i) {
  const Tensors& grads = i.grads;
  Tensor out = empty_norm(grads);
  const auto table = gradients(NORM, grads);
  require_one_device(NORM, "grads", grads, "grads[0]", grads[0]);
  const int32_t device = grads[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t count = table.size();
  Tensor partial = torch::stable::new_empty(grads[0], {cuda::nt_asgd_partials(table.data(), count)},
                                            ScalarType::Double);
  require_launched(NORM, cuda::nt_asgd_norm(
                             table.data(), count, static_cast<double*>(partial.mutable_data_ptr()),
                             out.mutable_data_ptr(), out.scalar_type() == ScalarType::Double,
                             current_stream(device)));
  return {out};
}

void step_cuda(const StepInputs& i) {
  const auto& [params, grads, averages, norm, max_norm, lr, weight_decay, mu] = i;
  require_norm(norm);
  const auto table = parameters(params, grads, averages);
  if (table.empty()) return;
  require_one_device(STEP, "params", params, "params[0]", params[0]);
  require_one_device(STEP, "grads", grads, "params[0]", params[0]);
  require_one_device(STEP, "averages", averages, "params[0]", params[0]);
  if (norm) require_cuda_device(STEP, "norm", *norm, "params[0]", params[0]);
  const int32_t device = params[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  require_launched(
      STEP, cuda::nt_asgd_step({table.data(), int64_t(table.size()), 1, lr, weight_decay, mu},
                               norm ? norm->const_data_ptr() : nullptr,
                               norm && norm->scalar_type() == ScalarType::Double, max_norm,
                               current_stream(device)));
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<norm>(m, "nt_asgd_norm");
  define<step>(m, "nt_asgd_step_");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("nt_asgd_norm", boxed<norm>);
  m.impl("nt_asgd_step_", boxed<step>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("nt_asgd_norm", boxed<norm_cuda>);
  m.impl("nt_asgd_step_", boxed<step_cuda>);
}
#endif

}  // namespace fusedseq
