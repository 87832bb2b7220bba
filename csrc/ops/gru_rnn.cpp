// The operators gru and rnn: pyext/fusedseq/reference/{gru,rnn}.py. Their kernels are those of the
// LSTM with other cells.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define HIDDEN_STATE_OUTPUTS(FIELD) \
  FIELD(Tensor, y)                  \
  FIELD(Tensor, h)                  \
  FIELD(Tensor, gates)
FUSEDSEQ_DECLARE(HiddenStateOutputs, HIDDEN_STATE_OUTPUTS)

#define HIDDEN_STATE_OUTPUT_GRADIENTS(FIELD) \
  FIELD(Tensor, dy)                          \
  FIELD(Tensor, dh)
FUSEDSEQ_DECLARE(HiddenStateOutputGradients, HIDDEN_STATE_OUTPUT_GRADIENTS)

#define HIDDEN_STATE_SAVED(FIELD) \
  FIELD(Tensor, y)                \
  FIELD(Tensor, gates)
FUSEDSEQ_DECLARE(HiddenStateSaved, HIDDEN_STATE_SAVED)

#define HIDDEN_STATE_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)                   \
  FIELD(Tensor, dW_ih)                \
  FIELD(Tensor, dW_hh)                \
  FIELD(Tensor, db)                   \
  FIELD(Tensor, dh0)
FUSEDSEQ_DECLARE(HiddenStateGradients, HIDDEN_STATE_GRADIENTS)

#define RNN_LAYER(FIELD)    \
  HIDDEN_STATE_LAYER(FIELD) \
  FIELD(bool, relu) /* max(z, 0) in place of tanh(z) */
FUSEDSEQ_DECLARE(RnnLayer, RNN_LAYER)

CellKind cell_of(const HiddenStateLayer&) {
  return CellKind::gru;
}
CellKind cell_of(const RnnLayer& layer) {
  return layer.relu ? CellKind::rnn_relu : CellKind::rnn_tanh;
}

template <class Layer>
RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence, const Layer& layer) {
  RecurrenceInputs i{{}, op, sequence.x, sequence.starts, sequence.reverse, cell_of(layer)};
#define COPY(type, name) i.name = layer.name;
  HIDDEN_STATE_LAYER(COPY)
#undef COPY
  i.c0 = empty(layer.h0);
  return i;
}

template <Forward forward, class Layer>
HiddenStateOutputs run_forward(const char* op, const OrderedSequence& sequence,
                               const Layer& layer) {
  const auto [y, h, c, saved] = forward(inputs(op, sequence, layer));
  return {y, h, saved.gates};
}

template <Backward backward, class Layer>
HiddenStateGradients run_backward(const char* op, const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const Layer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  const RecurrenceInputs i = inputs(op, sequence, layer);
  const Tensor none = empty(s.gates);
  const Gradients g = only_required(
      backward({i, d.dy, d.dh, none, s.y, {s.gates, none, none, none}, needs.needs}), needs.needs);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0};
}

template <Forward forward>
HiddenStateOutputs gru(const OrderedSequence& sequence, const HiddenStateLayer& layer) {
  return run_forward<forward>("gru", sequence, layer);
}
template <Backward backward>
HiddenStateGradients gru_backward(const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const HiddenStateLayer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  return run_backward<backward>("gru_backward", d, sequence, layer, s, needs);
}

HiddenStates gru_inference(const OrderedSequence& sequence, const HiddenStateLayer& layer) {
  return hidden_states(inputs("gru", sequence, layer));
}
HiddenStates gru_int8(const OrderedSequence& sequence, const HiddenStateLayer& layer,
                      const WeightScales& scales) {
  return hidden_states(with_scales(inputs("gru", sequence, layer), scales));
}

template <Forward forward>
HiddenStateOutputs rnn(const OrderedSequence& sequence, const RnnLayer& layer) {
  return run_forward<forward>("rnn", sequence, layer);
}
template <Backward backward>
HiddenStateGradients rnn_backward(const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const RnnLayer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  return run_backward<backward>("rnn_backward", d, sequence, layer, s, needs);
}

HiddenStates rnn_inference(const OrderedSequence& sequence, const RnnLayer& layer) {
  return hidden_states(inputs("rnn", sequence, layer));
}
HiddenStates rnn_int8(const OrderedSequence& sequence, const RnnLayer& layer,
                      const WeightScales& scales) {
  return hidden_states(with_scales(inputs("rnn", sequence, layer), scales));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<gru<forward_cpu>>(m, "gru");
  define<gru_backward<backward_cpu>>(m, "gru_backward");
  define<gru_inference>(m, "gru_inference");
  define<gru_int8>(m, "gru_int8");
  define<rnn<forward_cpu>>(m, "rnn");
  define<rnn_backward<backward_cpu>>(m, "rnn_backward");
  define<rnn_inference>(m, "rnn_inference");
  define<rnn_int8>(m, "rnn_int8");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("gru", boxed<gru<forward_cpu>>);
  m.impl("gru_backward", boxed<gru_backward<backward_cpu>>);
  m.impl("gru_inference", boxed<gru_inference>);
  m.impl("gru_int8", boxed<gru_int8>);
  m.impl("rnn", boxed<rnn<forward_cpu>>);
  m.impl("rnn_backward", boxed<rnn_backward<backward_cpu>>);
  m.impl("rnn_inference", boxed<rnn_inference>);
  m.impl("rnn_int8", boxed<rnn_int8>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("gru", boxed<gru<forward_cuda>>);
  m.impl("gru_backward", boxed<gru_backward<backward_cuda>>);
  m.impl("rnn", boxed<rnn<forward_cuda>>);
  m.impl("rnn_backward", boxed<rnn_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
