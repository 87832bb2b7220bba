// mogrifier_lstm: see pyext/fusedseq/reference/mogrifier_lstm.py, whose kernel is csrc/cpu/recurrence.h; and on CUDA
// mogrifier_lstm_pair, two of them at once where recurrence_plan.h says so.
#include "recurrence.h"

namespace fusedseq {
namespace {

using Optional = std::optional<Tensor>;

RecurrenceInputs inputs(Tensor x, Tensor W_ih, Tensor W_hh, Optional b, Tensor h0, Tensor c0, Optional lengths, Optional Q, Optional Q_factor,
                        Optional R, Optional R_factor, Optional Q_bias, Optional R_bias, Tensor seed, int64_t rounds, bool cap_input_gate,
                        bool training, double state_dropout, double zoneout_h, double zoneout_c, double weight_drop, bool variational) {
  return {"mogrifier_lstm", x,      W_ih,   W_hh,           b,        h0,            c0,        lengths,   Q,           Q_factor,   R,
          R_factor,         Q_bias, R_bias, seed,           rounds,   cap_input_gate, training, state_dropout, zoneout_h, zoneout_c, weight_drop,
          variational};
}

// What describes a layer, but for its x.
template <class> struct Of;
using Layer = Of<std::tuple<Tensor, Tensor, Optional, Tensor, Tensor, Optional, Optional, Optional, Optional, Optional, Optional, Optional,
                            Tensor, int64_t, bool, bool, double, double, double, double, bool>>;

using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Twelve = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Seven listed(const Outputs& found) {
  const auto& [y, h, c, s] = found;
  return {y, h, c, s.gates, s.cells, s.round_gates, s.factors};
}
Twelve listed(const Gradients& g) {
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, g.dQ, g.dQ_factor, g.dR, g.dR_factor, g.dQ_bias, g.dR_bias};
}

template <class... A> struct Of<std::tuple<A...>> {
  template <Forward forward> static Seven run(Tensor x, A... layer) { return listed(forward(inputs(x, layer...))); }

  template <Backward backward>
  static Twelve run_backward(Tensor dy, Tensor dh, Tensor dc, Tensor x, A... layer, Tensor y, Tensor gates, Tensor cells, Tensor round_gates,
                             Tensor factors, int64_t needs) {
    return listed(backward(inputs(x, layer...), dy, dh, dc, y, {gates, cells, round_gates, factors}, needs));
  }

#ifdef FUSEDSEQ_CUDA
  static auto run_pair(Tensor x, A... first, A... second, double p, bool locked) {
    const auto found = forward_pair_cuda(inputs(x, first...), inputs(x, second...), p, locked);
    return std::tuple_cat(listed(found.first), listed(found.second), std::make_tuple(found.x));
  }

  static auto run_pair_backward(Optional dy, Tensor dh, Tensor dc, Tensor dy_2, Tensor dh_2, Tensor dc_2, Tensor x, A... first, A... second,
                                double p, bool locked, Tensor y, Tensor gates, Tensor cells, Tensor round_gates, Tensor factors, Tensor y_2,
                                Tensor gates_2, Tensor cells_2, Tensor round_gates_2, Tensor factors_2, Tensor x_2, int64_t needs,
                                int64_t needs_2) {
    const RecurrenceInputs below = inputs(x, first...), above = inputs(p > 0 ? x_2 : y, second...);
    const auto [g, g_2] = backward_pair_cuda({below, dy, dh, dc, y, {gates, cells, round_gates, factors}, needs},
                                             {above, dy_2, dh_2, dc_2, y_2, {gates_2, cells_2, round_gates_2, factors_2}, needs_2}, p, locked);
    return std::tuple_cat(listed(g), listed(g_2));
  }
#endif
};

}  // namespace

// One layer's arguments but for x, their names with an ending.
#define LAYER(n)                                                                                                                   \
  "Tensor W_ih" n ", Tensor W_hh" n ", Tensor? b" n ", Tensor h0" n ", Tensor c0" n ", Tensor? lengths" n ", Tensor? Q" n            \
  ", Tensor? Q_factor" n ", Tensor? R" n ", Tensor? R_factor" n ", Tensor? Q_bias" n ", Tensor? R_bias" n ", Tensor seed" n          \
  ", int rounds" n ", bool cap_input_gate" n ", bool training" n ", float state_dropout" n ", float zoneout_h" n                    \
  ", float zoneout_c" n ", float weight_drop" n ", bool variational" n
#define SAVED(n) "Tensor y" n ", Tensor gates" n ", Tensor cells" n ", Tensor round_gates" n ", Tensor factors" n
#define OUTPUTS(n) \
  "Tensor y" n ", Tensor h" n ", Tensor c" n ", Tensor gates" n ", Tensor cells" n ", Tensor round_gates" n ", Tensor factors" n
#define UPSTREAM(n) "dy" n ", Tensor dh" n ", Tensor dc" n
#define GRADIENTS "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("mogrifier_lstm(Tensor x, " LAYER("") ") -> (" OUTPUTS("") ")");
  m.def("mogrifier_lstm_backward(Tensor " UPSTREAM("") ", Tensor x, " LAYER("") ", " SAVED("") ", int needs) -> (" GRADIENTS ")");
  m.def("mogrifier_lstm_pair(Tensor x, " LAYER("") ", " LAYER("_2") ", float p, bool locked) -> (" OUTPUTS("") ", " OUTPUTS("_2")
        ", Tensor x_2)");
  m.def("mogrifier_lstm_pair_backward(Tensor? " UPSTREAM("") ", Tensor " UPSTREAM("_2") ", Tensor x, " LAYER("") ", " LAYER("_2")
        ", float p, bool locked, " SAVED("") ", " SAVED("_2") ", Tensor x_2, int needs, int needs_2) -> (" GRADIENTS ", " GRADIENTS ")");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("mogrifier_lstm", TORCH_BOX(&Layer::run<forward_cpu>));
  m.impl("mogrifier_lstm_backward", TORCH_BOX(&Layer::run_backward<backward_cpu>));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("mogrifier_lstm", TORCH_BOX(&Layer::run<forward_cuda>));
  m.impl("mogrifier_lstm_backward", TORCH_BOX(&Layer::run_backward<backward_cuda>));
  m.impl("mogrifier_lstm_pair", TORCH_BOX(&Layer::run_pair));
  m.impl("mogrifier_lstm_pair_backward", TORCH_BOX(&Layer::run_pair_backward));
}
#endif

}  // namespace fusedseq
