// dropout, locked_dropout, weight_drop and dropout_mask: one kernel, for a (T, B, D) tensor under a (B, D) mask.
// Each is linear in its input, so its backward is the operator itself on the gradient.
#include "tensor.h"

namespace fusedseq {
namespace {

Tensor drop(const char* op, const Tensor& input, double p, const Tensor& seed, int64_t T, int64_t B, int64_t D) {
  const cpu::Type type = kernel_type(op, input);
  const Tensor x = dense(input);
  Tensor y = output_like(x);
  const cpu::Dropout d{type, T, B, D, x.const_data_ptr(), y.mutable_data_ptr(), mask(seed, p)};
  if (x.numel()) cpu::kernels().dropout(d, parallel, threads());
  return y;
}

Tensor dropout(Tensor x, double p, Tensor seed) {
  const int64_t D = x.dim() ? x.size(x.dim() - 1) : 1;
  return drop("dropout", x, p, seed, 1, D ? x.numel() / D : 0, D);
}

Tensor locked_dropout(Tensor x, double p, Tensor seed) {
  require(x.dim() == 3, "locked_dropout", "x must be (T, B, D)");
  return drop("locked_dropout", x, p, seed, x.size(0), x.size(1), x.size(2));
}

Tensor weight_drop(Tensor W, double p, Tensor seed, bool variational) {
  require(W.dim() == 2, "weight_drop", "W must be (rows, columns)");
  if (!variational) return drop("weight_drop", W, p, seed, 1, W.size(0), W.size(1));
  const cpu::Type type = kernel_type("weight_drop", W);
  const Tensor w = dense(W);
  Tensor y = output_like(w);
  const cpu::Embedding rows{type, w.size(0), w.size(0), w.size(1), nullptr, nullptr, w.const_data_ptr(),
                            y.mutable_data_ptr(), true, mask(seed, p)};
  if (w.numel()) cpu::kernels().embedding(rows, parallel, threads());
  return y;
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
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("locked_dropout", TORCH_BOX(&locked_dropout));
  m.impl("weight_drop", TORCH_BOX(&weight_drop));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
}

}  // namespace fusedseq
