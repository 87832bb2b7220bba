// bias_activation_dropout: what stands between the two products of a feed-forward layer, in one pass each way.
#include <string>

#include "tensor.h"

namespace fusedseq {
namespace {

constexpr const char* OP = "bias_activation_dropout";

cpu::Activation activation_named(const std::string& name) {
  if (name == "relu") return cpu::Activation::relu;
  if (name == "gelu") return cpu::Activation::gelu;
  if (name == "gelu_tanh") return cpu::Activation::gelu_tanh;
  require(name == "tanh", OP, "activation must be relu, gelu, gelu_tanh or tanh");
  return cpu::Activation::tanh;
}

cpu::BiasActivationDropout arguments(const Tensor& x, const std::optional<Tensor>& b, const std::string& activation, double p,
                                     const Tensor& seed) {
  require(x.dim() >= 1, OP, "x must be (..., D)");
  const int64_t D = x.size(x.dim() - 1);
  if (b) {
    require_shape(OP, "b", *b, {D});
    require(b->scalar_type() == x.scalar_type() && b->is_contiguous(), OP, "b must be contiguous and of the dtype of x");
  }
  cpu::BiasActivationDropout f{};
  f.type = kernel_type(OP, x), f.activation = activation_named(activation);
  f.M = D ? x.numel() / D : 0, f.D = D, f.mask = mask(seed, p);
  f.x = x.const_data_ptr(), f.b = b ? b->const_data_ptr() : nullptr;
  return f;
}

std::optional<Tensor> dense(const std::optional<Tensor>& t) { return t ? std::optional(fusedseq::dense(*t)) : std::nullopt; }

Tensor bias_activation_dropout(Tensor x_, std::optional<Tensor> b_, std::string activation, double p, Tensor seed) {
  const Tensor x = fusedseq::dense(x_);
  const auto b = dense(b_);
  auto f = arguments(x, b, activation, p, seed);
  Tensor y = output_like(x);
  f.y = y.mutable_data_ptr();
  cpu::kernels().bias_activation_dropout(f, parallel);
  return y;
}

// needs: 1 dx, 2 db
std::tuple<Tensor, Tensor> bias_activation_dropout_backward(Tensor dy_, Tensor x_, std::optional<Tensor> b_,
                                                            std::string activation, double p, Tensor seed, int64_t needs) {
  const Tensor x = fusedseq::dense(x_), dy = fusedseq::dense(dy_);
  const auto b = dense(b_);
  auto f = arguments(x, b, activation, p, seed);
  require_shape(OP, "dy", dy, Sizes(x.sizes().begin(), x.sizes().end()));
  require(dy.scalar_type() == x.scalar_type(), OP, "dtypes differ");
  Tensor dx = needs & 1 ? output_like(x) : output(x, {0});
  const ScalarType type = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  Tensor db = output(x, {needs & 2 ? f.D : 0}, type);
  f.backward = true, f.dy = dy.const_data_ptr();
  f.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr, f.db = db.numel() ? db.mutable_data_ptr() : nullptr;
  cpu::kernels().bias_activation_dropout(f, parallel);
  return {dx, as_type(db, x.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("bias_activation_dropout(Tensor x, Tensor? b, str activation, float p, Tensor seed) -> Tensor");
  m.def("bias_activation_dropout_backward(Tensor dy, Tensor x, Tensor? b, str activation, float p, Tensor seed, int needs) "
        "-> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("bias_activation_dropout", TORCH_BOX(&bias_activation_dropout));
  m.impl("bias_activation_dropout_backward", TORCH_BOX(&bias_activation_dropout_backward));
}

}  // namespace fusedseq
