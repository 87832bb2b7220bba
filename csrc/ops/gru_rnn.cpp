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

cpu::Cell cell_of(const HiddenStateLayer&) {
  return cpu::Cell::gru;
}
cpu::Cell cell_of(const RnnLayer& layer) {
  return layer.relu ? cpu::Cell::rnn_relu : cpu::Cell::rnn_tanh;
}

template <class Layer>
RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence, const Layer& layer) {
  RecurrenceInputs i{{}, op, sequence.x, sequence.starts, sequence.reverse, cell_of(layer)};
#define COPY(type, name) i.name = layer.name;
  HIDDEN_STATE_LAYER(COPY)
#undef COPY
  i.c0 = empty(layer.h0);
  i.training = true;  // the public function has set weight_drop to 0 where it is not
  return i;
}

template <class Layer>
HiddenStateOutputs run_forward(const char* op, const OrderedSequence& sequence,
                               const Layer& layer) {
  const auto [y, h, c, saved] = forward_cpu(inputs(op, sequence, layer));
  return {y, h, saved.gates};
}

template <class Layer>
HiddenStateGradients run_backward(const char* op, const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const Layer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  const RecurrenceInputs i = inputs(op, sequence, layer);
  const Tensor none = empty(s.gates);
  const Gradients g = only_required(
      backward_cpu({i, d.dy, d.dh, none, s.y, {s.gates, none, none, none}, needs.needs}),
      needs.needs);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0};
}

HiddenStateOutputs gru(const OrderedSequence& sequence, const HiddenStateLayer& layer) {
  return run_forward("gru", sequence, layer);
}
HiddenStateGradients gru_backward(const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const HiddenStateLayer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  return run_backward("gru_backward", d, sequence, layer, s, needs);
}

HiddenStateOutputs rnn(const OrderedSequence& sequence, const RnnLayer& layer) {
  return run_forward("rnn", sequence, layer);
}
HiddenStateGradients rnn_backward(const HiddenStateOutputGradients& d,
                                  const OrderedSequence& sequence, const RnnLayer& layer,
                                  const HiddenStateSaved& s, const Needs& needs) {
  return run_backward("rnn_backward", d, sequence, layer, s, needs);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<gru>(m, "gru");
  define<gru_backward>(m, "gru_backward");
  define<rnn>(m, "rnn");
  define<rnn_backward>(m, "rnn_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("gru", boxed<gru>);
  m.impl("gru_backward", boxed<gru_backward>);
  m.impl("rnn", boxed<rnn>);
  m.impl("rnn_backward", boxed<rnn_backward>);
}

}  // namespace fusedseq
