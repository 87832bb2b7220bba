// The operator peephole_lstm: pyext/fusedseq/reference/peephole_lstm.py. Its kernel is that of the
// LSTM with another cell.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define PEEPHOLE_LAYER(FIELD) \
  ZONED_LSTM_LAYER(FIELD)     \
  FIELD(Tensor, peephole) /* (3H,)  of i, f and o */
FUSEDSEQ_DECLARE(PeepholeLayer, PEEPHOLE_LAYER)

#define PEEPHOLE_OUTPUTS(FIELD) \
  FIELD(Tensor, y)              \
  FIELD(Tensor, h)              \
  FIELD(Tensor, c)              \
  FIELD(Tensor, gates)          \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(PeepholeOutputs, PEEPHOLE_OUTPUTS)

#define PEEPHOLE_SAVED(FIELD) \
  FIELD(Tensor, y)            \
  FIELD(Tensor, gates)        \
  FIELD(Tensor, cells)
FUSEDSEQ_DECLARE(PeepholeSaved, PEEPHOLE_SAVED)

#define PEEPHOLE_GRADIENTS(FIELD) \
  FIELD(Tensor, dx)               \
  LSTM_LAYER_GRADIENTS(FIELD)     \
  FIELD(Tensor, dpeephole)
FUSEDSEQ_DECLARE(PeepholeGradients, PEEPHOLE_GRADIENTS)

RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence,
                        const PeepholeLayer& layer) {
  RecurrenceInputs i{
      {}, op, sequence.x, sequence.starts, sequence.reverse, CellKind::peephole_lstm};
#define COPY(type, name) i.name = layer.name;
  ZONED_LSTM_LAYER(COPY)
#undef COPY
  i.vectors = layer.peephole;
  i.vectors_name = "peephole";
  return i;
}

template <Forward forward>
PeepholeOutputs peephole_lstm(const OrderedSequence& sequence, const PeepholeLayer& layer) {
  const auto [y, h, c, saved] = forward(inputs("peephole_lstm", sequence, layer));
  return {y, h, c, saved.gates, saved.cells};
}

template <Backward backward>
PeepholeGradients peephole_lstm_backward(const OutputGradients& d, const OrderedSequence& sequence,
                                         const PeepholeLayer& layer, const PeepholeSaved& s,
                                         const Needs& needs) {
  const RecurrenceInputs i = inputs("peephole_lstm_backward", sequence, layer);
  const Tensor none = empty(s.gates);
  Tensor dpeephole = none;
  const bool is_required = is_needed(needs.needs, PeepholeGradients::Position::dpeephole);
  const int64_t of_lstm = needs.needs & LSTM_NEEDS;
  const Gradients g = only_required(backward({i,
                                              d.dy,
                                              d.dh,
                                              d.dc,
                                              s.y,
                                              {s.gates, s.cells, none, none},
                                              of_lstm,
                                              is_required ? &dpeephole : nullptr}),
                                    of_lstm);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, dpeephole};
}

LstmStates peephole_lstm_inference(const OrderedSequence& sequence, const PeepholeLayer& layer) {
  return lstm_states(inputs("peephole_lstm", sequence, layer));
}
LstmStates peephole_lstm_int8(const OrderedSequence& sequence, const PeepholeLayer& layer,
                              const WeightScales& scales) {
  return lstm_states(with_scales(inputs("peephole_lstm", sequence, layer), scales));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<peephole_lstm<forward_cpu>>(m, "peephole_lstm");
  define<peephole_lstm_backward<backward_cpu>>(m, "peephole_lstm_backward");
  define<peephole_lstm_inference>(m, "peephole_lstm_inference");
  define<peephole_lstm_int8>(m, "peephole_lstm_int8");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("peephole_lstm", boxed<peephole_lstm<forward_cpu>>);
  m.impl("peephole_lstm_backward", boxed<peephole_lstm_backward<backward_cpu>>);
  m.impl("peephole_lstm_inference", boxed<peephole_lstm_inference>);
  m.impl("peephole_lstm_int8", boxed<peephole_lstm_int8>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("peephole_lstm", boxed<peephole_lstm<forward_cuda>>);
  m.impl("peephole_lstm_backward", boxed<peephole_lstm_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
