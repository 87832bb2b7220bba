// The operator projected_lstm: pyext/fusedseq/reference/projected_lstm.py. Its kernel is that of
// the LSTM, followed at every step by a product.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define PROJECTED_LAYER(FIELD)                                         \
  FIELD(Tensor, W_ih)            /* (4H, X), gates in order i f g o */ \
  FIELD(Tensor, W_hh)            /* (4H, P) */                         \
  FIELD(Tensor, W_hr)            /* (P, H) */                          \
  FIELD(OptionalTensor, b)       /* (4H,) */                           \
  FIELD(Tensor, h0)              /* (B, P) */                          \
  FIELD(Tensor, c0)              /* (B, H) */                          \
  FIELD(OptionalTensor, lengths) /* (B,) int64 */                      \
  FIELD(OptionalTensor, seed)    /* one int64; required by masks */    \
  WEIGHT_DROP(FIELD)                                                   \
  FIELD(bool, training)                                                \
  FIELD(double, zoneout_c)
FUSEDSEQ_DECLARE(ProjectedLayer, PROJECTED_LAYER)

#define PROJECTED_OUTPUTS(FIELD)   \
  FIELD(Tensor, y) /* (T, B, P) */ \
  FIELD(Tensor, h) /* (B, P) */    \
  FIELD(Tensor, c) /* (B, H) */    \
  FIELD(Tensor, gates)             \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(ProjectedOutputs, PROJECTED_OUTPUTS)

#define PROJECTED_SAVED(FIELD) \
  FIELD(Tensor, y)             \
  FIELD(Tensor, gates)         \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(ProjectedSaved, PROJECTED_SAVED)

#define PROJECTED_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)                \
  LSTM_LAYER_GRADIENTS(FIELD)      \
  FIELD(Tensor, dW_hr)
FUSEDSEQ_DECLARE(ProjectedGradients, PROJECTED_GRADIENTS)

RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence,
                        const ProjectedLayer& layer) {
  RecurrenceInputs i{{}, op, sequence.x, sequence.starts, sequence.reverse};
#define COPY(type, name) i.name = layer.name;
  PROJECTED_LAYER(COPY)
#undef COPY
  return i;
}

ProjectedOutputs projected_lstm(const OrderedSequence& sequence, const ProjectedLayer& layer) {
  const auto [y, h, c, saved] = forward_cpu(inputs("projected_lstm", sequence, layer));
  return {y, h, c, saved.gates, saved.cells};
}

ProjectedGradients projected_lstm_backward(const OutputGradients& d,
                                           const OrderedSequence& sequence,
                                           const ProjectedLayer& layer, const ProjectedSaved& s,
                                           const Needs& needs) {
  const RecurrenceInputs i = inputs("projected_lstm_backward", sequence, layer);
  const Tensor none = empty(s.gates);
  Tensor dW_hr = none;
  const bool is_required = is_needed(needs.needs, ProjectedGradients::Position::dW_hr);
  const int64_t of_lstm = needs.needs & LSTM_NEEDS;
  LayerBackward call{i, d.dy, d.dh, d.dc, s.y, {s.gates, s.cells, none, none}, of_lstm};
  call.dW_hr = is_required ? &dW_hr : nullptr;
  const Gradients g = only_required(backward_cpu(call), of_lstm);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, dW_hr};
}

LstmStates projected_lstm_inference(const OrderedSequence& sequence, const ProjectedLayer& layer) {
  return lstm_states(inputs("projected_lstm", sequence, layer));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<projected_lstm>(m, "projected_lstm");
  define<projected_lstm_backward>(m, "projected_lstm_backward");
  define<projected_lstm_inference>(m, "projected_lstm_inference");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("projected_lstm", boxed<projected_lstm>);
  m.impl("projected_lstm_backward", boxed<projected_lstm_backward>);
  m.impl("projected_lstm_inference", boxed<projected_lstm_inference>);
}

}  // namespace fusedseq
