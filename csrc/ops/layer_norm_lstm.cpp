// The operator layer_norm_lstm: pyext/fusedseq/reference/layer_norm_lstm.py. Its kernel is that of
// the LSTM with another cell.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define LAYER_NORM_LAYER(FIELD)                                                       \
  ZONED_LSTM_LAYER(FIELD)                                                             \
  FIELD(Tensor, norm) /* (10H,)  gamma_ih (4H), gamma_hh (4H), gamma_c (H), beta_c */ \
  FIELD(double, eps)
FUSEDSEQ_DECLARE(LayerNormLayer, LAYER_NORM_LAYER)

#define LAYER_NORM_OUTPUTS(FIELD) \
  FIELD(Tensor, y)                \
  FIELD(Tensor, h)                \
  FIELD(Tensor, c)                \
  FIELD(Tensor, gates)            \
  FIELD(Tensor, cells)            \
  FIELD(Tensor, statistics)
FUSEDSEQ_DECLARE(LayerNormOutputs, LAYER_NORM_OUTPUTS)

#define LAYER_NORM_SAVED(FIELD) \
  FIELD(Tensor, y)              \
  FIELD(Tensor, gates)          \
  FIELD(Tensor, cells)          \
  FIELD(Tensor, statistics)
FUSEDSEQ_DECLARE(LayerNormSaved, LAYER_NORM_SAVED)

#define LAYER_NORM_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)                 \
  LSTM_LAYER_GRADIENTS(FIELD)       \
  FIELD(Tensor, dnorm)
FUSEDSEQ_DECLARE(LayerNormGradients, LAYER_NORM_GRADIENTS)

RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence,
                        const LayerNormLayer& layer) {
  RecurrenceInputs i{
      {}, op, sequence.x, sequence.starts, sequence.reverse, CellKind::layer_norm_lstm};
#define COPY(type, name) i.name = layer.name;
  ZONED_LSTM_LAYER(COPY)
#undef COPY
  i.vectors = layer.norm;
  i.vectors_name = "norm";
  i.eps = layer.eps;
  return i;
}

template <Forward forward>
LayerNormOutputs layer_norm_lstm(const OrderedSequence& sequence, const LayerNormLayer& layer) {
  const auto [y, h, c, saved] = forward(inputs("layer_norm_lstm", sequence, layer));
  return {y, h, c, saved.gates, saved.cells, *saved.statistics};
}

template <Backward backward>
LayerNormGradients layer_norm_lstm_backward(const OutputGradients& d,
                                            const OrderedSequence& sequence,
                                            const LayerNormLayer& layer, const LayerNormSaved& s,
                                            const Needs& needs) {
  const RecurrenceInputs i = inputs("layer_norm_lstm_backward", sequence, layer);
  const Tensor none = empty(s.gates);
  Tensor dnorm = none;
  const bool is_required = is_needed(needs.needs, LayerNormGradients::Position::dnorm);
  const int64_t of_lstm = needs.needs & LSTM_NEEDS;
  const Gradients g = only_required(backward({i,
                                              d.dy,
                                              d.dh,
                                              d.dc,
                                              s.y,
                                              {s.gates, s.cells, none, none, s.statistics},
                                              of_lstm,
                                              is_required ? &dnorm : nullptr}),
                                    of_lstm);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, dnorm};
}

LstmStates layer_norm_lstm_inference(const OrderedSequence& sequence, const LayerNormLayer& layer) {
  return lstm_states(inputs("layer_norm_lstm", sequence, layer));
}
LstmStates layer_norm_lstm_int8(const OrderedSequence& sequence, const LayerNormLayer& layer,
                                const WeightScales& scales) {
  return lstm_states(with_scales(inputs("layer_norm_lstm", sequence, layer), scales));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<layer_norm_lstm<forward_cpu>>(m, "layer_norm_lstm");
  define<layer_norm_lstm_backward<backward_cpu>>(m, "layer_norm_lstm_backward");
  define<layer_norm_lstm_inference>(m, "layer_norm_lstm_inference");
  define<layer_norm_lstm_int8>(m, "layer_norm_lstm_int8");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("layer_norm_lstm", boxed<layer_norm_lstm<forward_cpu>>);
  m.impl("layer_norm_lstm_backward", boxed<layer_norm_lstm_backward<backward_cpu>>);
  m.impl("layer_norm_lstm_inference", boxed<layer_norm_lstm_inference>);
  m.impl("layer_norm_lstm_int8", boxed<layer_norm_lstm_int8>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("layer_norm_lstm", boxed<layer_norm_lstm<forward_cuda>>);
  m.impl("layer_norm_lstm_backward", boxed<layer_norm_lstm_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
