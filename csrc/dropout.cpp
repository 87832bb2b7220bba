// dropout, locked_dropout and weight_drop: one kernel, for a (T, B, D) tensor under a (B, D) mask. Each is linear in its
// input, so its backward is the operator itself on the gradient. And dropout_mask, whose CUDA kernel is kernels/dropout_mask.py.
#include "cuda_stream.h"
#include "dropout.h"
#include "dropout_cuda.h"

namespace fusedseq {

Tensor drop_cpu(const Drop& d) {
  const cpu::Type type = kernel_type(d.op, d.x);
  Tensor y = output_like(d.x);
  const cpu::Mask m = mask(d.seed, d.p, d.stream);
  const void* x = d.x.const_data_ptr();
  if (d.x.numel() == 0) return y;
  if (d.by_row) cpu::kernels().embedding({type, d.B, d.B, d.D, nullptr, nullptr, x, y.mutable_data_ptr(), true, m}, parallel, threads());
  else cpu::kernels().dropout({type, d.T, d.B, d.D, x, y.mutable_data_ptr(), m}, parallel, threads());
  return y;
}

namespace {

#ifdef FUSEDSEQ_CUDA
Tensor drop_cuda(const Drop& c) {
  const int32_t device = c.x.get_device_index();
  require(c.seed.is_cuda() && c.seed.get_device_index() == device, c.op, "seed must be on the device of the input");
  require_seed(c.seed, c.p);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::new_empty(c.x, Sizes(c.x.sizes().begin(), c.x.sizes().end()));
  const cuda::Type type = cuda_type(c.op, c.x);
  if (c.x.numel() == 0) return y;
  const char* error = cuda::dropout({type, c.T, c.B, c.D, c.x.const_data_ptr(), y.mutable_data_ptr(),
                                     static_cast<const int64_t*>(c.seed.const_data_ptr()), threshold(c.p), scale(c.p), c.by_row},
                                    current_stream(device));
  STD_TORCH_CHECK(!error, c.op, ": dropout_kernel for (", c.T, ", ", c.B, ", ", c.D, "): ", error ? error : "");
  return y;
}
#endif

using Kernel = Tensor (*)(const Drop&);

template <Kernel drop> Tensor dropout(Tensor x, double p, Tensor seed) {
  const int64_t D = x.dim() ? x.size(x.dim() - 1) : 1;
  return drop({"dropout", dense(x), p, seed, 1, D ? x.numel() / D : 0, D});
}

template <Kernel drop> Tensor locked_dropout(Tensor x, double p, Tensor seed) {
  require(x.dim() == 3, "locked_dropout", "x must be (T, B, D)");
  return drop({"locked_dropout", dense(x), p, seed, x.size(0), x.size(1), x.size(2)});
}

template <Kernel drop> Tensor weight_drop(Tensor W, double p, Tensor seed, bool variational) {
  require(W.dim() == 2, "weight_drop", "W must be (rows, columns)");
  return drop({"weight_drop", dense(W), p, seed, 1, W.size(0), W.size(1), variational});
}

Tensor dropout_mask(Tensor seed, double p, std::vector<int64_t> shape) {
  Tensor keep = output(seed, shape, ScalarType::Bool);
  const int64_t S = shape.empty() ? 1 : shape.back();
  uint8_t* out = static_cast<uint8_t*>(keep.mutable_data_ptr());
  const cpu::Mask m = mask(seed, p);
  const int64_t rows = S ? keep.numel() / S : 0;
  constexpr int64_t SEGMENT = 4096;
  const int64_t segments = (S + SEGMENT - 1) / SEGMENT;
  torch::stable::parallel_for(0, rows * segments, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / segments, j = i % segments * SEGMENT, stop = j + SEGMENT < S ? j + SEGMENT : S;
      cpu::kernels().keep_mask(m, row, S, j, stop, out + row * S + j);
    }
  });
  return keep;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("dropout(Tensor x, float p, Tensor seed) -> Tensor");
  m.def("locked_dropout(Tensor x, float p, Tensor seed) -> Tensor");
  m.def("weight_drop(Tensor W, float p, Tensor seed, bool variational) -> Tensor");
  m.def("dropout_mask(Tensor seed, float p, int[] shape) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("dropout", TORCH_BOX(&dropout<drop_cpu>));
  m.impl("locked_dropout", TORCH_BOX(&locked_dropout<drop_cpu>));
  m.impl("weight_drop", TORCH_BOX(&weight_drop<drop_cpu>));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("dropout", TORCH_BOX(&dropout<drop_cuda>));
  m.impl("locked_dropout", TORCH_BOX(&locked_dropout<drop_cuda>));
  m.impl("weight_drop", TORCH_BOX(&weight_drop<drop_cuda>));
}
#endif

}  // namespace fusedseq
