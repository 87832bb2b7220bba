// Between the tensors of a recurrence and the structures of cuda/recurrence/arguments.h: addresses
// of inputs, memory for outputs, gradients and what backward needs.
#pragma once
#include "ops/recurrence_arguments.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/recurrence/arguments.h"
#include "cuda/recurrence/weight_gradients.h"
#include "ops/cuda_stream.h"

namespace fusedseq::on_cuda {

// A call of an operator: its device and stream, and the tensors that own the memory whose addresses
// the kernels receive. They live until the call returns; torch's allocator then reuses the memory
// only for later work on the same stream.
struct RecurrenceCall {
  const RecurrenceInputs& i;
  const torch::stable::Device device;
  const torch::stable::accelerator::DeviceGuard guard;
  void* const stream;
  const cuda::Product product;
  std::vector<Tensor> owned;

  explicit RecurrenceCall(const RecurrenceInputs& i);

  // The address of an input, which is made contiguous; null for one that is absent. Raises an error
  // if the input is not on the device of x, or not of the type.
  const void* in(const char* name, const Tensor& t, ScalarType type) {
    require_cuda_device(i.op, name, t, "x", i.x);
    require_dtype(i.op, name, t, type);
    owned.push_back(dense(t));
    return owned.back().const_data_ptr();
  }
  const void* in(const char* name, const Tensor& t) { return in(name, t, i.x.scalar_type()); }
  const void* in(const char* name, const std::optional<Tensor>& t) {
    return t ? in(name, *t) : nullptr;
  }
  const int64_t* integers(const char* name, const std::optional<Tensor>& t) {
    return t ? static_cast<const int64_t*>(in(name, *t, ScalarType::Long)) : nullptr;
  }

  void* workspace(int64_t bytes) {
    owned.push_back(torch::stable::new_empty(i.x, {bytes}, ScalarType::Byte));
    return owned.back().mutable_data_ptr();
  }

  // Raises the error of a kernel or product, if there is one, with the sizes of the recurrence.
  void require_done(const char* error, const cuda::Recurrence& r) const {
    STD_TORCH_CHECK(!error, i.op, " with T, B, X, H, rounds = ", r.steps, ", ", r.B, ", ", r.X,
                    ", ", r.H, ", ", r.rounds, ": ", error ? error : "");
  }
};

// The address of an output; null for an empty tensor.
inline void* out(const Tensor& t) {
  return t.numel() ? t.mutable_data_ptr() : nullptr;
}

cuda::Mask mask_of(const RecurrenceInputs& i, double p, MaskStream stream);

// The inputs of a recurrence; the outputs are still null.
cuda::Recurrence arguments(RecurrenceCall& call);

// With a low rank, computes the rounds' weights from their factors, as both implementations expect.
void multiply_out(RecurrenceCall& call, cuda::Recurrence& r);

// Tensors for the outputs, whose addresses are stored to r.
Outputs outputs(const RecurrenceInputs& i, cuda::Recurrence& r);

// Tensors for the gradient of an input and for the gradients, uninitialized; empty for those that
// are absent or not needed. Zero if the batch is empty, because no kernel runs then.
Tensor empty_gradient(const RecurrenceInputs& i, const OptionalTensor& t);
Gradients empty_gradients(const RecurrenceInputs& i, int64_t needs);

// The arguments of a backward loop, with memory for dz, the terms and dround, from which the
// weights' gradients are computed.
cuda::RecurrenceBackward backward_arguments(RecurrenceCall& call, const LayerBackward& l,
                                            const Gradients& d);

// The arguments for the gradients of the weights, from the results of the backward loop.
// dvectors: where that of the cell's own parameters is stored; null: not needed
cuda::RecurrenceGradients gradient_arguments(const RecurrenceInputs& i,
                                             const cuda::RecurrenceBackward& g, const Gradients& d,
                                             void* dvectors);

}  // namespace fusedseq::on_cuda
#endif
