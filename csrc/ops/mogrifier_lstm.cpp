// The operators mogrifier_lstm, of one layer, and mogrifier_lstm_pair, of two layers that run at
// the same time on CUDA where csrc/cuda/recurrence/plan.h finds room for both. What they compute:
// pyext/fusedseq/reference/mogrifier_lstm.py.
#include "ops/recurrence_arguments.h"

namespace fusedseq {
namespace {

#define MOGRIFIER_OUTPUTS(FIELD) \
  FIELD(Tensor, y)               \
  FIELD(Tensor, h)               \
  FIELD(Tensor, c)               \
  FIELD(Tensor, gates)           \
  FIELD(Tensor, cells)           \
  FIELD(Tensor, round_gates)     \
  FIELD(Tensor, factors)
FUSEDSEQ_DECLARE(MogrifierOutputs, MOGRIFIER_OUTPUTS)

#define MOGRIFIER_SAVED(FIELD) \
  FIELD(Tensor, y)             \
  FIELD(Tensor, gates)         \
  FIELD(Tensor, cells)         \
  FIELD(Tensor, round_gates)   \
  FIELD(Tensor, factors)
FUSEDSEQ_DECLARE(MogrifierSaved, MOGRIFIER_SAVED)

#ifdef FUSEDSEQ_CUDA
RecurrenceInputs inputs(const char* op, const Tensor& x, const MogrifierLayer& layer) {
  return {layer, op, x};
}
#endif
RecurrenceInputs inputs(const char* op, const OrderedSequence& sequence,
                        const MogrifierLayer& layer) {
  return {layer, op, sequence.x, sequence.starts, sequence.reverse};
}
MogrifierOutputs results(const Outputs& outputs) {
  const auto& [y, h, c, s] = outputs;
  return {y, h, c, s.gates, s.cells, s.round_gates, s.factors};
}
template <class T>  // MogrifierSaved or MogrifierOutputs
Saved saved(const T& s) {
  return {s.gates, s.cells, s.round_gates, s.factors};
}

template <Forward forward>
MogrifierOutputs mogrifier_lstm(const OrderedSequence& sequence, const MogrifierLayer& layer) {
  return results(forward(inputs("mogrifier_lstm", sequence, layer)));
}

template <Backward backward>
Gradients mogrifier_lstm_backward(const OutputGradients& d, const OrderedSequence& sequence,
                                  const MogrifierLayer& layer, const MogrifierSaved& s,
                                  const Needs& needs) {
  const RecurrenceInputs i = inputs("mogrifier_lstm_backward", sequence, layer);
  return only_required(backward({i, d.dy, d.dh, d.dc, s.y, saved(s), needs.needs}), needs.needs);
}

LstmStates mogrifier_lstm_inference(const OrderedSequence& sequence, const MogrifierLayer& layer) {
  return lstm_states(inputs("mogrifier_lstm", sequence, layer));
}
LstmStates mogrifier_lstm_int8(const OrderedSequence& sequence, const MogrifierLayer& layer,
                               const MogrifierScales& scales) {
  return lstm_states(with_scales(inputs("mogrifier_lstm", sequence, layer), scales));
}

// ---- two layers

#define PAIR_INPUTS(FIELD)                                    \
  FIELD(MogrifierLayer, first)                                \
  FIELD(MogrifierLayer, second)                               \
  FIELD(double, p)    /* of the dropout between the layers */ \
  FIELD(bool, locked) /* whether that dropout has one mask for all time steps */
FUSEDSEQ_DECLARE(PairInputs, PAIR_INPUTS)

#define PAIR_OUTPUTS(FIELD)       \
  FIELD(MogrifierOutputs, first)  \
  FIELD(MogrifierOutputs, second) \
  FIELD(Tensor, x_second) /* what the second layer read; empty where p is 0: then it is y_first */
FUSEDSEQ_DECLARE(PairResults, PAIR_OUTPUTS)

#define PAIR_OUTPUT_GRADIENTS(FIELD) \
  FIELD(OptionalTensor, dy_first)    \
  FIELD(Tensor, dh_first)            \
  FIELD(Tensor, dc_first)            \
  FIELD(OutputGradients, second)
FUSEDSEQ_DECLARE(PairOutputGradients, PAIR_OUTPUT_GRADIENTS)

#define PAIR_SAVED(FIELD) FIELD(Tensors, outputs) /* PairResults */
FUSEDSEQ_DECLARE(PairSaved, PAIR_SAVED)

FUSEDSEQ_DECLARE(MogrifierLayerGradients, MOGRIFIER_LAYER_GRADIENTS)
#define PAIR_GRADIENTS(FIELD)           \
  FIELD(Tensor, dx)                     \
  FIELD(MogrifierLayerGradients, first) \
  FIELD(MogrifierLayerGradients, second)
FUSEDSEQ_DECLARE(PairGradients, PAIR_GRADIENTS)

using PairForward = PairResults (*)(const Sequence&, const PairInputs&);
using PairBackward = PairGradients (*)(const PairOutputGradients&, const Sequence&,
                                       const PairInputs&, const PairSaved&, const Needs&);

#ifdef FUSEDSEQ_CUDA
MogrifierLayerGradients of_layer(const Gradients& g) {
#define NAMED(type, name) g.name,
  return {MOGRIFIER_LAYER_GRADIENTS(NAMED)};
#undef NAMED
}

PairResults mogrifier_lstm_pair(const Sequence& sequence, const PairInputs& pair) {
  constexpr const char* OP = "mogrifier_lstm_pair";
  require_probability(OP, "p", pair.p);
  const RecurrenceInputs first = inputs(OP, sequence.x, pair.first),
                         second =
                             inputs(OP, sequence.x, pair.second);  // its x is set by the callee
  const PairOutputs found = forward_pair_cuda(first, second, pair.p, pair.locked);
  return {results(found.first), results(found.second), found.x};
}

PairGradients mogrifier_lstm_pair_backward(const PairOutputGradients& d, const Sequence& sequence,
                                           const PairInputs& pair, const PairSaved& outputs,
                                           const Needs& needs) {
  constexpr const char* OP = "mogrifier_lstm_pair_backward";
  require(outputs.outputs.size() == PairResults::COUNT, OP, "outputs must be those of the forward");
  require_probability(OP, "p", pair.p);
  auto next = outputs.outputs.begin();
  const PairResults s = PairResults::take(next);
  const RecurrenceInputs first = inputs(OP, sequence.x, pair.first),
                         second = inputs(OP, pair.p > 0 ? s.x_second : s.first.y, pair.second);
  require_dimensions(OP, "x", first.x, 3, "(T, B, X)");
  require_dimensions(OP, "h0_first", first.h0, 2, "(B, H)");
  require_shape(OP, "outputs: what the second layer read", second.x,
                {first.x.size(0), first.x.size(1), first.h0.size(1)});
  // The bits are: dx, then the first layer's gradients, then the second's. Each layer's own call
  // counts from its dx on; the second layer's dx is what the first layer's gradients come from.
  constexpr int OF_A_LAYER = MogrifierLayerGradients::COUNT;
  const int64_t needs_first = needs.needs & ((int64_t(2) << OF_A_LAYER) - 1),
                needs_second = needs.needs >> (1 + OF_A_LAYER) << 1 | 1;
  const auto [g_first, g_second] = backward_pair_cuda(
      {first, d.dy_first, d.dh_first, d.dc_first, s.first.y, saved(s.first), needs_first},
      {second, d.second.dy, d.second.dh, d.second.dc, s.second.y, saved(s.second), needs_second},
      pair.p, pair.locked);
  const Gradients first_required = only_required(g_first, needs_first);
  return {first_required.dx, of_layer(first_required),
          of_layer(only_required(g_second, needs_second))};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<mogrifier_lstm<forward_cpu>>(m, "mogrifier_lstm");
  define<mogrifier_lstm_backward<backward_cpu>>(m, "mogrifier_lstm_backward");
  define<mogrifier_lstm_inference>(m, "mogrifier_lstm_inference");
  define<mogrifier_lstm_int8>(m, "mogrifier_lstm_int8");
  define<PairForward>(m, "mogrifier_lstm_pair");
  define<PairBackward>(m, "mogrifier_lstm_pair_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("mogrifier_lstm", boxed<mogrifier_lstm<forward_cpu>>);
  m.impl("mogrifier_lstm_backward", boxed<mogrifier_lstm_backward<backward_cpu>>);
  m.impl("mogrifier_lstm_inference", boxed<mogrifier_lstm_inference>);
  m.impl("mogrifier_lstm_int8", boxed<mogrifier_lstm_int8>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("mogrifier_lstm", boxed<mogrifier_lstm<forward_cuda>>);
  m.impl("mogrifier_lstm_backward", boxed<mogrifier_lstm_backward<backward_cuda>>);
  m.impl("mogrifier_lstm_pair", boxed<mogrifier_lstm_pair>);
  m.impl("mogrifier_lstm_pair_backward", boxed<mogrifier_lstm_pair_backward>);
}
#endif

}  // namespace fusedseq
