// The operator residual_layer_norm, y = LayerNorm(residual + dropout(x)), with one pass over memory
// forward and one backward: pyext/fusedseq/reference/residual_layer_norm.py.
#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char *OP = "residual_layer_norm", *BACKWARD = "residual_layer_norm_backward";

ScalarType computing(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
Sizes shape_of(const Tensor& t) {
  return Sizes(t.sizes().begin(), t.sizes().end());
}

// The memory of an optional input of the dtype of x, null where it is absent. `owned` keeps a
// contiguous copy alive.
const void* input(const char* op, const Tensor& x, const char* name, const std::optional<Tensor>& t,
                  Shape shape, std::vector<Tensor>& owned) {
  if (!t) return nullptr;
  require_shape(op, name, *t, shape);
  require_dtype(op, name, *t, x.scalar_type());
  owned.push_back(dense(*t));
  return owned.back().const_data_ptr();
}
void* data(const Tensor& t) {
  return t.numel() ? t.mutable_data_ptr() : nullptr;
}

cpu::ResidualLayerNorm arguments(const char* op, const Tensor& x,
                                 const std::optional<Tensor>& residual,
                                 const std::optional<Tensor>& weight, double p, const Tensor& seed,
                                 std::vector<Tensor>& owned) {
  require_that(x.dim() >= 1 && x.size(x.dim() - 1) > 0, op, "x", x, "(..., D), D at least 1");
  require_probability(op, "p", p);
  require_seed(op, seed);
  const int64_t D = x.size(x.dim() - 1);
  cpu::ResidualLayerNorm l{};
  l.type = kernel_type(op, "x", x);
  l.M = x.numel() / D;
  l.D = D;
  l.mask = mask(seed, p);
  l.x = x.const_data_ptr();
  l.residual = input(op, x, "residual", residual, x.sizes(), owned);
  l.weight = input(op, x, "weight", weight, {D}, owned);
  return l;
}

#define RLN_TENSORS(FIELD)                       \
  FIELD(Tensor, x)                /* (..., D) */ \
  FIELD(OptionalTensor, residual) /* (..., D) */ \
  FIELD(OptionalTensor, weight)   /* (D,) */
#define RLN_INPUTS(FIELD)                \
  RLN_TENSORS(FIELD)                     \
  FIELD(OptionalTensor, bias) /* (D,) */ \
  FIELD(double, p)                       \
  FIELD(double, eps)                     \
  FIELD(bool, prenorm)                   \
  FIELD(Tensor, seed)
FUSEDSEQ_DECLARE(NormInputs, RLN_INPUTS)

#define RLN_OUTPUTS(FIELD)                                                       \
  FIELD(Tensor, y)    /* (..., D) */                                             \
  FIELD(Tensor, s)    /* (..., D) the sum before the norm; empty if post-norm */ \
  FIELD(Tensor, mean) /* (rows,) */                                              \
  FIELD(Tensor, rstd) /* (rows,) */
FUSEDSEQ_DECLARE(NormOutputs, RLN_OUTPUTS)

// s, if prenorm: then it stands for x and residual as well.
#define RLN_BACKWARD(FIELD) \
  FIELD(Tensor, dy)         \
  FIELD(OptionalTensor, ds) \
  RLN_TENSORS(FIELD)        \
  FIELD(OptionalTensor, s)  \
  FIELD(Tensor, mean)       \
  FIELD(Tensor, rstd)       \
  FIELD(double, p)          \
  FIELD(Tensor, seed)
FUSEDSEQ_DECLARE(NormBackward, RLN_BACKWARD)

#define RLN_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)          \
  FIELD(Tensor, dresidual)   \
  FIELD(Tensor, dweight)     \
  FIELD(Tensor, dbias)
FUSEDSEQ_DECLARE(NormGradients, RLN_GRADIENTS)

NormOutputs residual_layer_norm(const NormInputs& i) {
  const Tensor x = dense(i.x);
  std::vector<Tensor> owned;
  auto l = arguments(OP, x, i.residual, i.weight, i.p, i.seed, owned);
  l.bias = input(OP, x, "bias", i.bias, {l.D}, owned);
  if (!(i.eps >= 0)) refuse(OP, "eps must be at least 0, got ", i.eps);
  l.eps = i.eps;
  const Tensor y = output_like(x), s = i.prenorm ? output_like(x) : output(x, {0});
  const Tensor mean = output(x, {l.M}, computing(x)), rstd = output(x, {l.M}, computing(x));
  l.y = data(y);
  l.s = data(s);
  l.mean = data(mean);
  l.rstd = data(rstd);
  cpu::kernels().residual_layer_norm(l, parallel);
  return {y, s, mean, rstd};
}

NormGradients residual_layer_norm_backward(const NormBackward& g, const Needs& needs) {
  const Tensor x = dense(g.x), dy = dense(g.dy);
  std::vector<Tensor> owned;
  cpu::ResidualLayerNormBackward b{};
  b.forward = arguments(BACKWARD, x, g.residual, g.weight, g.p, g.seed, owned);
  const int64_t M = b.forward.M, D = b.forward.D;
  require_shape(BACKWARD, "dy", dy, x.sizes());
  require_dtype(BACKWARD, "dy", dy, x.scalar_type());
  const auto require_statistic = [&](const char* name, const Tensor& t) {
    require_shape(BACKWARD, name, t, {M});
    require_dtype(BACKWARD, name, t, computing(x));
    if (!t.is_contiguous()) refuse(BACKWARD, name, " must be contiguous");
  };
  require_statistic("mean", g.mean);
  require_statistic("rstd", g.rstd);
  const auto new_gradient = [&](int position, const Sizes& shape, ScalarType type) {
    return output(x, is_needed(needs.needs, position) ? shape : Sizes{0}, type);
  };
  using Position = NormGradients::Position;
  const Tensor dx = new_gradient(Position::dx, shape_of(x), x.scalar_type()),
               dresidual = new_gradient(Position::dresidual, shape_of(x), x.scalar_type()),
               dweight = new_gradient(Position::dweight, {D}, computing(x)),
               dbias = new_gradient(Position::dbias, {D}, computing(x));
  b.forward.s = const_cast<void*>(input(BACKWARD, x, "s", g.s, x.sizes(), owned));
  b.forward.mean = data(g.mean);
  b.forward.rstd = data(g.rstd);
  b.dy = dy.const_data_ptr();
  b.ds = input(BACKWARD, x, "ds", g.ds, x.sizes(), owned);
  b.dx = data(dx);
  b.dresidual = data(dresidual);
  b.dweight = data(dweight);
  b.dbias = data(dbias);
  cpu::kernels().residual_layer_norm_backward(b, parallel);
  return {dx, dresidual, as_type(dweight, x.scalar_type()), as_type(dbias, x.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<residual_layer_norm>(m, "residual_layer_norm");
  define<residual_layer_norm_backward>(m, "residual_layer_norm_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("residual_layer_norm", boxed<residual_layer_norm>);
  m.impl("residual_layer_norm_backward", boxed<residual_layer_norm_backward>);
}

}  // namespace fusedseq
