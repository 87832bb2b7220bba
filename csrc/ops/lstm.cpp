// The operator lstm: pyext/fusedseq/reference/lstm.py. Its kernels are those of the Mogrifier LSTM
// without rounds.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define LSTM_OUTPUTS(FIELD) \
  FIELD(Tensor, y)          \
  FIELD(Tensor, h)          \
  FIELD(Tensor, c)          \
  FIELD(Tensor, gates)      \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(LstmOutputs, LSTM_OUTPUTS)

#define LSTM_SAVED(FIELD) \
  FIELD(Tensor, y)        \
  FIELD(Tensor, gates)    \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(LstmSaved, LSTM_SAVED)

#define LSTM_GRADIENTS(FIELD) FIELD(Tensor, dx) LSTM_LAYER_GRADIENTS(FIELD)
FUSEDSEQ_DECLARE(LstmGradients, LSTM_GRADIENTS)

// The same call as a Mogrifier LSTM without rounds.
RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence, const LstmLayer& layer) {
  RecurrenceInputs i{{}, op, sequence.x, sequence.starts, sequence.reverse};
#define COPY(type, name) i.name = layer.name;
  LSTM_LAYER(COPY)
#undef COPY
  i.training = true;  // the public function has set weight_drop to 0 where it is not
  return i;
}

template <Forward forward>
LstmOutputs lstm(const OrderedSequence& sequence, const LstmLayer& layer) {
  const auto [y, h, c, saved] = forward(inputs("lstm", sequence, layer));
  return {y, h, c, saved.gates, saved.cells};
}

template <Backward backward>
LstmGradients lstm_backward(const OutputGradients& d, const OrderedSequence& sequence,
                            const LstmLayer& layer, const LstmSaved& s, const Needs& needs) {
  const RecurrenceInputs i = inputs("lstm_backward", sequence, layer);
  const Saved saved{s.gates, s.cells, empty(s.gates), empty(s.gates)};
  const LayerBackward call{i, d.dy, d.dh, d.dc, s.y, saved, needs.needs};
  const Gradients g = only_required(backward(call), needs.needs);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<lstm<forward_cpu>>(m, "lstm");
  define<lstm_backward<backward_cpu>>(m, "lstm_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("lstm", boxed<lstm<forward_cpu>>);
  m.impl("lstm_backward", boxed<lstm_backward<backward_cpu>>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("lstm", boxed<lstm<forward_cuda>>);
  m.impl("lstm_backward", boxed<lstm_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
