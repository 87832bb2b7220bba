// The operators lstm, and bidirectional_lstm, whose two directions run at the same time on the CPU.
// What they compute: pyext/fusedseq/reference/lstm.py and bidirectional_lstm.py. Their kernels are
// those of the Mogrifier LSTM without rounds.
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

LstmStates lstm_inference(const OrderedSequence& sequence, const LstmLayer& layer) {
  return lstm_states(inputs("lstm", sequence, layer));
}
LstmStates lstm_int8(const OrderedSequence& sequence, const LstmLayer& layer,
                     const WeightScales& scales) {
  return lstm_states(with_scales(inputs("lstm", sequence, layer), scales));
}

// ---- two directions

#define DIRECTION(FIELD)        \
  FIELD(Tensor, x)              \
  FIELD(Tensor, W_ih)           \
  FIELD(Tensor, W_hh)           \
  FIELD(OptionalTensor, b)      \
  FIELD(Tensor, h0)             \
  FIELD(Tensor, c0)             \
  FIELD(OptionalTensor, starts) \
  FIELD(OptionalTensor, seed)
FUSEDSEQ_DECLARE(Direction, DIRECTION)

// Each direction has an input x of its own, so that autograd adds the two gradients.
#define BIDIRECTIONAL_INPUTS(FIELD) \
  DIRECTION(FIELD)                  \
  FIELD(Direction, reverse)         \
  FIELD(OptionalTensor, lengths)    \
  WEIGHT_DROP(FIELD)
FUSEDSEQ_DECLARE(BidirectionalInputs, BIDIRECTIONAL_INPUTS)

#define BIDIRECTIONAL_OUTPUTS(FIELD) LSTM_OUTPUTS(FIELD) FIELD(LstmOutputs, reverse)
FUSEDSEQ_DECLARE(BidirectionalOutputs, BIDIRECTIONAL_OUTPUTS)

#define BIDIRECTIONAL_SAVED(FIELD) LSTM_SAVED(FIELD) FIELD(LstmSaved, reverse)
FUSEDSEQ_DECLARE(BidirectionalSaved, BIDIRECTIONAL_SAVED)

#define BIDIRECTIONAL_OUTPUT_GRADIENTS(FIELD) \
  OUTPUT_GRADIENTS(FIELD) FIELD(OutputGradients, reverse)
FUSEDSEQ_DECLARE(BidirectionalOutputGradients, BIDIRECTIONAL_OUTPUT_GRADIENTS)

#define BIDIRECTIONAL_GRADIENTS(FIELD) LSTM_GRADIENTS(FIELD) FIELD(LstmGradients, reverse)
FUSEDSEQ_DECLARE(BidirectionalGradients, BIDIRECTIONAL_GRADIENTS)

// The calls of the two directions as LSTMs of their own.
std::pair<RecurrenceInputs, RecurrenceInputs> directions(const char* op,
                                                         const BidirectionalInputs& i) {
  const LstmLayer forward{i.W_ih,    i.W_hh, i.b,           i.h0,         i.c0,
                          i.lengths, i.seed, i.weight_drop, i.variational};
  const Direction& r = i.reverse;
  const LstmLayer reverse{r.W_ih,    r.W_hh, r.b,           r.h0,         r.c0,
                          i.lengths, r.seed, i.weight_drop, i.variational};
  require_shape(op, "x_reverse", r.x, Sizes(i.x.sizes().begin(), i.x.sizes().end()));
  require_dtype(op, "x_reverse", r.x, i.x.scalar_type());
  require_dimensions(op, "h0", i.h0, 2, "(B, H)");
  require_shape(op, "h0_reverse", r.h0, Sizes(i.h0.sizes().begin(), i.h0.sizes().end()));
  return {inputs(op, {i.x, i.starts, false}, forward), inputs(op, {r.x, r.starts, true}, reverse)};
}

BidirectionalOutputs bidirectional_lstm(const BidirectionalInputs& i) {
  const auto [forward, reverse] = directions("bidirectional_lstm", i);
  const auto [f, r] = forward_two_cpu(forward, reverse);
  const auto& [y, h, c, saved] = f;
  const auto& [y_r, h_r, c_r, saved_r] = r;
  return {y, h, c, saved.gates, saved.cells, {y_r, h_r, c_r, saved_r.gates, saved_r.cells}};
}

#define BIDIRECTIONAL_STATES(FIELD) LSTM_STATES(FIELD) FIELD(LstmStates, reverse)
FUSEDSEQ_DECLARE(BidirectionalStates, BIDIRECTIONAL_STATES)

BidirectionalStates bidirectional_lstm_inference(const BidirectionalInputs& i) {
  auto [forward, reverse] = directions("bidirectional_lstm", i);
  forward.saves = reverse.saves = false;
  const auto [f, r] = forward_two_cpu(forward, reverse);
  const auto& [y, h, c, saved] = f;
  const auto& [y_r, h_r, c_r, saved_r] = r;
  return {y, h, c, {y_r, h_r, c_r}};
}

BidirectionalGradients bidirectional_lstm_backward(const BidirectionalOutputGradients& d,
                                                   const BidirectionalInputs& i,
                                                   const BidirectionalSaved& s,
                                                   const Needs& needs) {
  const auto [forward, reverse] = directions("bidirectional_lstm_backward", i);
  // The bits of the forward direction's gradients come first.
  const int64_t needs_forward = needs.needs & LSTM_NEEDS,
                needs_reverse = needs.needs >> LstmGradients::COUNT;
  const auto without_rounds = [](const auto& of) {
    return Saved{of.gates, of.cells, empty(of.gates), empty(of.gates)};
  };
  const OutputGradients& d_r = d.reverse;
  const LayerBackward call{forward, d.dy, d.dh, d.dc, s.y, without_rounds(s), needs_forward},
      call_reverse{reverse,      d_r.dy, d_r.dh, d_r.dc, s.reverse.y, without_rounds(s.reverse),
                   needs_reverse};
  const auto [found, found_reverse] = backward_two_cpu(call, call_reverse);
  const Gradients g = only_required(found, needs_forward),
                  r = only_required(found_reverse, needs_reverse);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, {r.dx, r.dW_ih, r.dW_hh, r.db, r.dh0, r.dc0}};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<lstm<forward_cpu>>(m, "lstm");
  define<lstm_backward<backward_cpu>>(m, "lstm_backward");
  define<lstm_inference>(m, "lstm_inference");
  define<lstm_int8>(m, "lstm_int8");
  define<bidirectional_lstm>(m, "bidirectional_lstm");
  define<bidirectional_lstm_backward>(m, "bidirectional_lstm_backward");
  define<bidirectional_lstm_inference>(m, "bidirectional_lstm_inference");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("lstm", boxed<lstm<forward_cpu>>);
  m.impl("lstm_backward", boxed<lstm_backward<backward_cpu>>);
  m.impl("lstm_inference", boxed<lstm_inference>);
  m.impl("lstm_int8", boxed<lstm_int8>);
  m.impl("bidirectional_lstm", boxed<bidirectional_lstm>);
  m.impl("bidirectional_lstm_backward", boxed<bidirectional_lstm_backward>);
  m.impl("bidirectional_lstm_inference", boxed<bidirectional_lstm_inference>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("lstm", boxed<lstm<forward_cuda>>);
  m.impl("lstm_backward", boxed<lstm_backward<backward_cuda>>);
}
#endif

}  // namespace fusedseq
