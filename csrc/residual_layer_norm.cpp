// residual_layer_norm: dropout, residual and LayerNorm in one pass each way.
#include "tensor.h"

namespace fusedseq {
namespace {

constexpr const char* OP = "residual_layer_norm";

ScalarType computing(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
Sizes shape_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

// A further input of the dtype of x, in memory that `kept` holds on to; null where there is none.
const void* input(const Tensor& x, const char* name, const std::optional<Tensor>& t, const Sizes& shape, std::vector<Tensor>& kept) {
  if (!t) return nullptr;
  require_shape(OP, name, *t, shape);
  require(t->scalar_type() == x.scalar_type(), OP, "dtypes differ");
  kept.push_back(dense(*t));
  return kept.back().const_data_ptr();
}
void* data(const Tensor& t) { return t.numel() ? t.mutable_data_ptr() : nullptr; }

cpu::ResidualLayerNorm arguments(const Tensor& x, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
                                 double p, const Tensor& seed, std::vector<Tensor>& kept) {
  require(x.dim() >= 1 && x.size(x.dim() - 1) > 0, OP, "x must be (..., D), D at least 1");
  const int64_t D = x.size(x.dim() - 1);
  cpu::ResidualLayerNorm l{};
  l.type = kernel_type(OP, x), l.M = x.numel() / D, l.D = D, l.mask = mask(seed, p);
  l.x = x.const_data_ptr();
  l.residual = input(x, "residual", residual, shape_of(x), kept);
  l.weight = input(x, "weight", weight, {D}, kept);
  return l;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm(Tensor x_, std::optional<Tensor> residual,
                                                               std::optional<Tensor> weight, std::optional<Tensor> bias,
                                                               double p, double eps, bool prenorm, Tensor seed) {
  const Tensor x = dense(x_);
  std::vector<Tensor> kept;
  auto l = arguments(x, residual, weight, p, seed, kept);
  l.bias = input(x, "bias", bias, {l.D}, kept), l.eps = eps;
  Tensor y = output_like(x), s = prenorm ? output_like(x) : output(x, {0});
  Tensor mean = output(x, {l.M}, computing(x)), rstd = output(x, {l.M}, computing(x));
  l.y = data(y), l.s = data(s), l.mean = data(mean), l.rstd = data(rstd);
  cpu::kernels().residual_layer_norm(l, parallel);
  return {y, s, mean, rstd};
}

// s: that of the forward, which then stands for x and residual too. needs: 1 dx, 2 dresidual, 4 dweight, 8 dbias.
std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm_backward(
    Tensor dy_, std::optional<Tensor> ds, Tensor x_, std::optional<Tensor> residual, std::optional<Tensor> weight,
    std::optional<Tensor> s, Tensor mean, Tensor rstd, double p, Tensor seed, int64_t needs) {
  const Tensor x = dense(x_), dy = dense(dy_);
  std::vector<Tensor> kept;
  cpu::ResidualLayerNormBackward b{};
  b.forward = arguments(x, residual, weight, p, seed, kept);
  const int64_t M = b.forward.M, D = b.forward.D;
  require_shape(OP, "dy", dy, shape_of(x));
  for (const Tensor& t : {mean, rstd}) {
    require_shape(OP, "mean and rstd", t, {M});
    require(t.scalar_type() == computing(x) && t.is_contiguous(), OP, "mean and rstd must be as forward gives them");
  }
  require(dy.scalar_type() == x.scalar_type(), OP, "dtypes differ");
  const auto wanted = [&](int64_t bit, const Sizes& shape, ScalarType type) {
    return output(x, needs & bit ? shape : Sizes{0}, type);
  };
  Tensor dx = wanted(1, shape_of(x), x.scalar_type()), dresidual = wanted(2, shape_of(x), x.scalar_type());
  Tensor dweight = wanted(4, {D}, computing(x)), dbias = wanted(8, {D}, computing(x));
  b.forward.s = const_cast<void*>(input(x, "s", s, shape_of(x), kept)), b.forward.mean = data(mean), b.forward.rstd = data(rstd);
  b.dy = dy.const_data_ptr(), b.ds = input(x, "ds", ds, shape_of(x), kept);
  b.dx = data(dx), b.dresidual = data(dresidual), b.dweight = data(dweight), b.dbias = data(dbias);
  cpu::kernels().residual_layer_norm_backward(b, parallel);
  return {dx, dresidual, as_type(dweight, x.scalar_type()), as_type(dbias, x.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("residual_layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float p, float eps, bool prenorm, "
        "Tensor seed) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("residual_layer_norm_backward(Tensor dy, Tensor? ds, Tensor x, Tensor? residual, Tensor? weight, Tensor? s, "
        "Tensor mean, Tensor rstd, float p, Tensor seed, int needs) -> (Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("residual_layer_norm", TORCH_BOX(&residual_layer_norm));
  m.impl("residual_layer_norm_backward", TORCH_BOX(&residual_layer_norm_backward));
}

}  // namespace fusedseq
