// Calls torch's CUDA matrix products directly where torch exports them as C functions, else through
// the dispatcher.
#include "ops/vendor_product.h"

#ifdef FUSEDSEQ_CUDA
#include <dlfcn.h>

namespace fusedseq {
namespace {

using torch::stable::detail::from;

ScalarType scalar_type(cuda::Type type) {
  switch (type) {
    case cuda::Type::f32:
      return ScalarType::Float;
    case cuda::Type::f64:
      return ScalarType::Double;
    case cuda::Type::bf16:
      return ScalarType::BFloat16;
    default:
      return ScalarType::Half;
  }
}

Tensor view(const cuda::Matrix& m, const torch::stable::Device& device) {
  return torch::stable::from_blob(m.data, {m.rows, m.columns}, {m.row_stride, m.column_stride},
                                  device, scalar_type(m.type));
}

// A C function of libtorch_cuda, or null if it is absent. It is looked up at run time, because this
// library also loads under a CPU build of torch and so cannot link to libtorch_cuda.
template <class F>
F torch_cuda_function(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

// out = a b, all of one dtype. The direct call saves the dispatcher's microseconds, which the loop
// implementation would spend twice a step or more.
void multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  using Function = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle);
  static const auto direct = torch_cuda_function<Function>("aoti_torch_cuda_mm_out");
  if (direct) {
    TORCH_ERROR_CODE_CHECK(direct(out.get(), a.get(), b.get()));
    return;
  }
  StableIValue stack[] = {from(a), from(b), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

// out = a b, where out is fp32 and a and b are of 16 bits.
void multiply_wide(const Tensor& a, const Tensor& b, const Tensor& out) {
  using Function =
      AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int32_t);
  static const auto direct = torch_cuda_function<Function>("aoti_torch_cuda_mm_dtype_out");
  if (direct) {
    const auto type = torch::stable::detail::to<int32_t>(from(out.scalar_type()));
    TORCH_ERROR_CODE_CHECK(direct(out.get(), a.get(), b.get(), type));
    return;
  }
  StableIValue stack[] = {from(a), from(b), from(out.scalar_type()), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

const char* run(void* context, const cuda::Matrix& a, const cuda::Matrix& b,
                const cuda::Matrix& out) {
  const auto& device = *static_cast<const torch::stable::Device*>(context);
  const Tensor A = view(a, device), B = view(b, device), C = view(out, device);
  if (a.type == out.type)
    multiply(A, B, C);
  else
    multiply_wide(A, B, C);
  // torch throws an exception if a product fails, so there is no message to return.
  return nullptr;
}

}  // namespace

cuda::Product vendor_product(const torch::stable::Device& device) {
  return {const_cast<torch::stable::Device*>(&device), run};
}

}  // namespace fusedseq
#endif
