// mogrifier_lstm: see pyext/fusedseq/reference/mogrifier_lstm.py. The kernel is csrc/cpu/recurrence.h.
#include "recurrence.h"

namespace fusedseq {
namespace {

using Optional = std::optional<Tensor>;

template <Forward forward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mogrifier_lstm(
    Tensor x, Tensor W_ih, Tensor W_hh, Optional b, Tensor h0, Tensor c0, Optional lengths, Optional Q,
    Optional Q_factor, Optional R, Optional R_factor, Optional Q_bias, Optional R_bias, Tensor seed, int64_t rounds,
    bool cap_input_gate, bool training, double state_dropout, double zoneout_h, double zoneout_c, double weight_drop,
    bool variational) {
  const RecurrenceInputs i{"mogrifier_lstm", x,    W_ih,   W_hh,           b,        h0,            c0,       lengths,  Q,
                           Q_factor,         R,    R_factor, Q_bias,       R_bias,   seed,          rounds,   cap_input_gate,
                           training,         state_dropout, zoneout_h, zoneout_c, weight_drop, variational};
  auto [y, h, c, s] = forward(i);
  return {y, h, c, s.gates, s.cells, s.round_gates, s.factors};
}

template <Backward backward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
mogrifier_lstm_backward(Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor W_ih, Tensor W_hh, Optional b, Tensor h0,
                        Tensor c0, Optional lengths, Optional Q, Optional Q_factor, Optional R, Optional R_factor,
                        Optional Q_bias, Optional R_bias, Tensor seed, int64_t rounds, bool cap_input_gate,
                        bool training, double state_dropout, double zoneout_h, double zoneout_c,
                        double weight_drop, bool variational, Tensor y, Tensor gates, Tensor cells, Tensor round_gates,
                        Tensor factors, int64_t needs) {
  const RecurrenceInputs i{"mogrifier_lstm", x,    W_ih,   W_hh,           b,        h0,            c0,       lengths,  Q,
                           Q_factor,         R,    R_factor, Q_bias,       R_bias,   seed,          rounds,   cap_input_gate,
                           training,         state_dropout, zoneout_h, zoneout_c, weight_drop, variational};
  const Saved s{gates, cells, round_gates, factors};
  const auto g = backward(i, dy, dh, dc, y, s, needs);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0, g.dQ, g.dQ_factor, g.dR, g.dR_factor, g.dQ_bias, g.dR_bias};
}

}  // namespace

#define INPUTS                                                                                                    \
  "Tensor x, Tensor W_ih, Tensor W_hh, Tensor? b, Tensor h0, Tensor c0, Tensor? lengths, Tensor? Q, "             \
  "Tensor? Q_factor, Tensor? R, Tensor? R_factor, Tensor? Q_bias, Tensor? R_bias, Tensor seed, int rounds, "      \
  "bool cap_input_gate, bool training, float state_dropout, float zoneout_h, float zoneout_c, "          \
  "float weight_drop, bool variational"

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("mogrifier_lstm(" INPUTS ") -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor cells, Tensor round_gates, "
        "Tensor factors)");
  m.def("mogrifier_lstm_backward(Tensor dy, Tensor dh, Tensor dc, " INPUTS ", Tensor y, Tensor gates, Tensor cells, "
        "Tensor round_gates, Tensor factors, int needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("mogrifier_lstm", TORCH_BOX(&mogrifier_lstm<forward_cpu>));
  m.impl("mogrifier_lstm_backward", TORCH_BOX(&mogrifier_lstm_backward<backward_cpu>));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("mogrifier_lstm", TORCH_BOX(&mogrifier_lstm<forward_cuda>));
  m.impl("mogrifier_lstm_backward", TORCH_BOX(&mogrifier_lstm_backward<backward_cuda>));
}
#endif

}  // namespace fusedseq
