// The operators dropout, locked_dropout and weight_drop, which are one kernel: a (T, B, D) tensor
// with a (B, D) mask. Each is linear in its input, so that its backward is the operator itself,
// called with the gradient. Also the operator dropout_mask, whose CUDA kernel is
// kernels/dropout_mask.py.
#include "ops/dropout.h"
#include "cuda/dropout.h"
#include "ops/cuda_stream.h"

namespace fusedseq {

Tensor drop_cpu(const Drop& d) {
  const cpu::Type type = kernel_type(d.op, d.name, d.x);
  require_probability(d.op, d.p_name, d.p);
  require_seed(d.op, d.seed);
  Tensor y = output_like(d.x);
  const cpu::Mask m = mask(d.seed, d.p, d.stream);
  const void* x = d.x.const_data_ptr();
  if (d.x.numel() == 0) return y;
  if (d.variational)
    cpu::kernels().embedding(
        {type, d.B, d.B, d.D, nullptr, nullptr, x, y.mutable_data_ptr(), true, m}, parallel,
        threads());
  else
    cpu::kernels().dropout({type, d.T, d.B, d.D, x, y.mutable_data_ptr(), m}, parallel, threads());
  return y;
}

namespace {

#ifdef FUSEDSEQ_CUDA
Tensor drop_cuda(const Drop& c) {
  const int32_t device = c.x.get_device_index();
  require_cuda_device(c.op, "seed", c.seed, c.name, c.x);
  require_probability(c.op, c.p_name, c.p);
  require_seed(c.op, c.seed);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::new_empty(c.x, Sizes(c.x.sizes().begin(), c.x.sizes().end()));
  const cuda::Type type = cuda_type(c.op, c.name, c.x);
  if (c.x.numel() == 0) return y;
  const char* error =
      cuda::dropout({type, c.T, c.B, c.D, c.x.const_data_ptr(), y.mutable_data_ptr(),
                     static_cast<const int64_t*>(c.seed.const_data_ptr()), threshold(c.p),
                     scale(c.p), c.variational},
                    current_stream(device));
  STD_TORCH_CHECK(!error, c.op, ": dropout_kernel for (", c.T, ", ", c.B, ", ", c.D,
                  "): ", error ? error : "");
  return y;
}
#endif

using Kernel = Tensor (*)(const Drop&);

#define DROPOUT_INPUTS(FIELD) \
  FIELD(Tensor, x)            \
  FIELD(double, p)            \
  FIELD(Tensor, seed)
FUSEDSEQ_DECLARE(DropoutInputs, DROPOUT_INPUTS)

#define WEIGHT_DROP_INPUTS(FIELD)        \
  FIELD(Tensor, W) /* (rows, columns) */ \
  FIELD(double, p)                       \
  FIELD(Tensor, seed)                    \
  FIELD(bool, variational) /* one mask value per row */
FUSEDSEQ_DECLARE(WeightDropInputs, WEIGHT_DROP_INPUTS)

#define MASK_INPUTS(FIELD) \
  FIELD(Tensor, seed)      \
  FIELD(double, p)         \
  FIELD(Sizes, shape)
FUSEDSEQ_DECLARE(MaskInputs, MASK_INPUTS)

#define DROPOUT_OUTPUT(FIELD) FIELD(Tensor, y)
FUSEDSEQ_DECLARE(DropoutOutput, DROPOUT_OUTPUT)
#define MASK_OUTPUT(FIELD) FIELD(Tensor, keep) /* bool */
FUSEDSEQ_DECLARE(MaskOutput, MASK_OUTPUT)

template <Kernel drop>
DropoutOutput dropout(const DropoutInputs& i) {
  const int64_t D = i.x.dim() ? i.x.size(i.x.dim() - 1) : 1;
  return {drop({"dropout", "x", dense(i.x), "p", i.p, i.seed, 1, D ? i.x.numel() / D : 0, D})};
}

template <Kernel drop>
DropoutOutput locked_dropout(const DropoutInputs& i) {
  const Tensor& x = i.x;
  require_dimensions("locked_dropout", "x", x, 3, "(T, B, D)");
  return {
      drop({"locked_dropout", "x", dense(x), "p", i.p, i.seed, x.size(0), x.size(1), x.size(2)})};
}

template <Kernel drop>
DropoutOutput weight_drop(const WeightDropInputs& i) {
  const Tensor& W = i.W;
  require_dimensions("weight_drop", "W", W, 2, "(rows, columns)");
  return {drop(
      {"weight_drop", "W", dense(W), "p", i.p, i.seed, 1, W.size(0), W.size(1), i.variational})};
}

MaskOutput dropout_mask(const MaskInputs& i) {
  const Sizes& shape = i.shape;
  for (int64_t n : shape)
    if (n < 0)
      refuse("dropout_mask", "shape must be sizes of at least 0, got ", in_words(Shape(shape)));
  checked_product("dropout_mask", "shape", shape);
  require_probability("dropout_mask", "p", i.p);
  require_seed("dropout_mask", i.seed);
  Tensor keep = output(i.seed, shape, ScalarType::Bool);
  const int64_t S = shape.empty() ? 1 : shape.back();
  uint8_t* out = static_cast<uint8_t*>(keep.mutable_data_ptr());
  const cpu::Mask m = mask(i.seed, i.p);
  const int64_t rows = S ? keep.numel() / S : 0;
  constexpr int64_t SEGMENT = 4096;
  const int64_t segments = (S + SEGMENT - 1) / SEGMENT;
  torch::stable::parallel_for(0, rows * segments, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n / segments, j = n % segments * SEGMENT,
                    stop = j + SEGMENT < S ? j + SEGMENT : S;
      cpu::kernels().keep_mask(m, row, S, j, stop, out + row * S + j);
    }
  });
  return {keep};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<dropout<drop_cpu>>(m, "dropout");
  define<locked_dropout<drop_cpu>>(m, "locked_dropout");
  define<weight_drop<drop_cpu>>(m, "weight_drop");
  define<dropout_mask>(m, "dropout_mask");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("dropout", boxed<dropout<drop_cpu>>);
  m.impl("locked_dropout", boxed<locked_dropout<drop_cpu>>);
  m.impl("weight_drop", boxed<weight_drop<drop_cpu>>);
  m.impl("dropout_mask", boxed<dropout_mask>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("dropout", boxed<dropout<drop_cuda>>);
  m.impl("locked_dropout", boxed<locked_dropout<drop_cuda>>);
  m.impl("weight_drop", boxed<weight_drop<drop_cuda>>);
}
#endif

}  // namespace fusedseq
