// The operator layer_norm_gru: pyext/fusedseq/reference/layer_norm_gru.py. Its kernel is that of
// the LSTM with another cell.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define LAYER_NORM_GRU_LAYER(FIELD)                             \
  HIDDEN_STATE_LAYER(FIELD)                                     \
  FIELD(Tensor, norm) /* (6H,)  gamma_ih (3H), gamma_hh (3H) */ \
  FIELD(double, eps)
FUSEDSEQ_DECLARE(LayerNormGruLayer, LAYER_NORM_GRU_LAYER)

#define LAYER_NORM_GRU_OUTPUTS(FIELD) \
  FIELD(Tensor, y)                    \
  FIELD(Tensor, h)                    \
  FIELD(Tensor, gates)                \
  FIELD(Tensor, statistics)
FUSEDSEQ_DECLARE(LayerNormGruOutputs, LAYER_NORM_GRU_OUTPUTS)

#define LAYER_NORM_GRU_OUTPUT_GRADIENTS(FIELD) \
  FIELD(Tensor, dy)                            \
  FIELD(Tensor, dh)
FUSEDSEQ_DECLARE(LayerNormGruOutputGradients, LAYER_NORM_GRU_OUTPUT_GRADIENTS)

#define LAYER_NORM_GRU_SAVED(FIELD) \
  FIELD(Tensor, y)                  \
  FIELD(Tensor, gates)              \
  FIELD(Tensor, statistics)
FUSEDSEQ_DECLARE(LayerNormGruSaved, LAYER_NORM_GRU_SAVED)

#define LAYER_NORM_GRU_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)                     \
  FIELD(Tensor, dW_ih)                  \
  FIELD(Tensor, dW_hh)                  \
  FIELD(Tensor, db)                     \
  FIELD(Tensor, dh0)                    \
  FIELD(Tensor, dnorm)
FUSEDSEQ_DECLARE(LayerNormGruGradients, LAYER_NORM_GRU_GRADIENTS)

RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence,
                        const LayerNormGruLayer& layer) {
  RecurrenceInputs i{
      {}, op, sequence.x, sequence.starts, sequence.reverse, CellKind::layer_norm_gru};
#define COPY(type, name) i.name = layer.name;
  HIDDEN_STATE_LAYER(COPY)
#undef COPY
  i.c0 = empty(layer.h0);
  i.vectors = layer.norm;
  i.vectors_name = "norm";
  i.eps = layer.eps;
  return i;
}

template <Forward forward>
LayerNormGruOutputs layer_norm_gru(const OrderedSequence& sequence,
                                   const LayerNormGruLayer& layer) {
  const auto [y, h, c, saved] = forward(inputs("layer_norm_gru", sequence, layer));
  return {y, h, saved.gates, *saved.statistics};
}

template <Backward backward>
LayerNormGruGradients layer_norm_gru_backward(const LayerNormGruOutputGradients& d,
                                              const OrderedSequence& sequence,
                                              const LayerNormGruLayer& layer,
                                              const LayerNormGruSaved& s, const Needs& needs) {
  const RecurrenceInputs i = inputs("layer_norm_gru_backward", sequence, layer);
  const Tensor none = empty(s.gates);
  Tensor dnorm = none;
  const int dnorm_bit = LayerNormGruGradients::Position::dnorm;
  // The gradients before dnorm have the bits of Gradients; that of dnorm is dc0's there.
  const int64_t of_gru = needs.needs & ((int64_t(1) << dnorm_bit) - 1);
  const Gradients g =
      only_required(backward({i,
                              d.dy,
                              d.dh,
                              none,
                              s.y,
                              {s.gates, none, none, none, s.statistics},
                              of_gru,
                              is_needed(needs.needs, dnorm_bit) ? &dnorm : nullptr}),
                    of_gru);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, dnorm};
}

HiddenStates layer_norm_gru_inference(const OrderedSequence& sequence,
                                      const LayerNormGruLayer& layer) {
  return hidden_states(inputs("layer_norm_gru", sequence, layer));
}
HiddenStates layer_norm_gru_int8(const OrderedSequence& sequence, const LayerNormGruLayer& layer,
                                 const WeightScales& scales) {
  return hidden_states(with_scales(inputs("layer_norm_gru", sequence, layer), scales));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<layer_norm_gru<forward_cpu>>(m, "layer_norm_gru");
  define<layer_norm_gru_backward<backward_cpu>>(m, "layer_norm_gru_backward");
  define<layer_norm_gru_inference>(m, "layer_norm_gru_inference");
  define<layer_norm_gru_int8>(m, "layer_norm_gru_int8");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("layer_norm_gru", boxed<layer_norm_gru<forward_cpu>>);
  m.impl("layer_norm_gru_backward", boxed<layer_norm_gru_backward<backward_cpu>>);
  m.impl("layer_norm_gru_inference", boxed<layer_norm_gru_inference>);
  m.impl("layer_norm_gru_int8", boxed<layer_norm_gru_int8>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("layer_norm_gru", boxed<layer_norm_gru<forward_cuda>>);
  m.impl("layer_norm_gru_backward", boxed<layer_norm_gru_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
