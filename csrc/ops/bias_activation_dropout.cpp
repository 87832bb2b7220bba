// The operator bias_activation_dropout, dropout(activation(x + b)), which stands between the two
// products of a feed-forward layer: pyext/fusedseq/reference/bias_activation_dropout.py. One pass
// over memory forward and one backward.
#include <string>

#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char *OP = "bias_activation_dropout",
                     *BACKWARD = "bias_activation_dropout_backward";

cpu::Activation activation_named(const char* op, const std::string& name) {
  if (name == "relu") return cpu::Activation::relu;
  if (name == "gelu") return cpu::Activation::gelu;
  if (name == "gelu_tanh") return cpu::Activation::gelu_tanh;
  if (name != "tanh") refuse(op, "activation must be relu, gelu, gelu_tanh or tanh, got ", name);
  return cpu::Activation::tanh;
}

#define BAD_INPUTS(FIELD)        \
  FIELD(Tensor, x)               \
  FIELD(OptionalTensor, b)       \
  FIELD(std::string, activation) \
  FIELD(double, p)               \
  FIELD(Tensor, seed)
FUSEDSEQ_DECLARE(Inputs, BAD_INPUTS)
#define BAD_OUTPUT(FIELD) FIELD(Tensor, y)
FUSEDSEQ_DECLARE(Output, BAD_OUTPUT)
#define BAD_OUTPUT_GRADIENT(FIELD) FIELD(Tensor, dy)
FUSEDSEQ_DECLARE(OutputGradient, BAD_OUTPUT_GRADIENT)
#define BAD_GRADIENTS(FIELD) FIELD(Tensor, dx) FIELD(Tensor, db)
FUSEDSEQ_DECLARE(Gradients, BAD_GRADIENTS)

// The inputs with contiguous x and b.
Inputs made_dense(Inputs i) {
  i.x = dense(i.x);
  if (i.b) i.b = dense(*i.b);
  return i;
}

cpu::BiasActivationDropout arguments(const char* op, const Inputs& i) {
  require_that(i.x.dim() >= 1, op, "x", i.x, "(..., D)");
  const int64_t D = i.x.size(i.x.dim() - 1);
  if (i.b) {
    require_shape(op, "b", *i.b, {D});
    require_dtype(op, "b", *i.b, i.x.scalar_type());
  }
  require_probability(op, "p", i.p);
  require_seed(op, i.seed);
  cpu::BiasActivationDropout f{};
  f.type = kernel_type(op, "x", i.x);
  f.activation = activation_named(op, i.activation);
  f.M = D ? i.x.numel() / D : 0;
  f.D = D;
  f.mask = mask(i.seed, i.p);
  f.x = i.x.const_data_ptr();
  f.b = i.b ? i.b->const_data_ptr() : nullptr;
  return f;
}

Output bias_activation_dropout(const Inputs& inputs) {
  const Inputs i = made_dense(inputs);
  auto f = arguments(OP, i);
  const Tensor y = output_like(i.x);
  f.y = y.mutable_data_ptr();
  cpu::kernels().bias_activation_dropout(f, parallel);
  return {y};
}

Gradients bias_activation_dropout_backward(const OutputGradient& g, const Inputs& inputs,
                                           const Needs& needs) {
  const Inputs i = made_dense(inputs);
  const Tensor &x = i.x, dy = dense(g.dy);
  auto f = arguments(BACKWARD, i);
  require_shape(BACKWARD, "dy", dy, x.sizes());
  require_dtype(BACKWARD, "dy", dy, x.scalar_type());
  const bool needs_dx = is_needed(needs.needs, Gradients::Position::dx),
             needs_db = is_needed(needs.needs, Gradients::Position::db);
  // The sums over rows of db are in fp32 at least.
  const ScalarType computing =
      x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor dx = needs_dx ? output_like(x) : output(x, {0});
  const Tensor db = output(x, {needs_db ? f.D : 0}, computing);
  f.backward = true;
  f.dy = dy.const_data_ptr();
  f.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr;
  f.db = db.numel() ? db.mutable_data_ptr() : nullptr;
  cpu::kernels().bias_activation_dropout(f, parallel);
  return {dx, as_type(db, x.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<bias_activation_dropout>(m, "bias_activation_dropout");
  define<bias_activation_dropout_backward>(m, "bias_activation_dropout_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("bias_activation_dropout", boxed<bias_activation_dropout>);
  m.impl("bias_activation_dropout_backward", boxed<bias_activation_dropout_backward>);
}

}  // namespace fusedseq
