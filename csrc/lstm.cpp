// lstm: see pyext/fusedseq/reference/lstm.py. The kernel is csrc/cpu/recurrence.h without rounds.
#include "recurrence.h"

namespace fusedseq {
namespace {

RecurrenceInputs inputs(const Tensor& x, const Tensor& W_ih, const Tensor& W_hh, const std::optional<Tensor>& b,
                        const Tensor& h0, const Tensor& c0, const std::optional<Tensor>& lengths,
                        const std::optional<Tensor>& seed, double weight_drop, bool variational) {
  RecurrenceInputs i{"lstm", x, W_ih, W_hh, b, h0, c0, lengths, {}, {}, {}, {}, {}, {}, seed};
  i.weight_drop = weight_drop, i.variational = variational;
  return i;
}

template <Forward forward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lstm(Tensor x, Tensor W_ih, Tensor W_hh, std::optional<Tensor> b,
                                                        Tensor h0, Tensor c0, std::optional<Tensor> lengths,
                                                        std::optional<Tensor> seed, double weight_drop, bool variational) {
  const auto i = inputs(x, W_ih, W_hh, b, h0, c0, lengths, seed, weight_drop, variational);
  auto [y, h, c, s] = forward(i);
  return {y, h, c, s.gates, s.cells};
}

template <Backward backward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_backward(
    Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor W_ih, Tensor W_hh, std::optional<Tensor> b, Tensor h0, Tensor c0,
    std::optional<Tensor> lengths, std::optional<Tensor> seed, double weight_drop, bool variational, Tensor y, Tensor gates,
    Tensor cells, int64_t needs) {
  const auto i = inputs(x, W_ih, W_hh, b, h0, c0, lengths, seed, weight_drop, variational);
  const Saved s{gates, cells, output(gates, {0}), output(gates, {0})};
  const auto g = backward(i, dy, dh, dc, y, s, needs);
  return {g.dx, g.dW_ih, g.dW_hh, g.db, g.dh0, g.dc0};
}

}  // namespace

#define INPUTS                                                                                              \
  "Tensor x, Tensor W_ih, Tensor W_hh, Tensor? b, Tensor h0, Tensor c0, Tensor? lengths, Tensor? seed, "    \
  "float weight_drop, bool variational"

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("lstm(" INPUTS ") -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor cells)");
  m.def("lstm_backward(Tensor dy, Tensor dh, Tensor dc, " INPUTS ", Tensor y, Tensor gates, Tensor cells, int needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("lstm", TORCH_BOX(&lstm<forward_cpu>));
  m.impl("lstm_backward", TORCH_BOX(&lstm_backward<backward_cpu>));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("lstm", TORCH_BOX(&lstm<forward_cuda>));
  m.impl("lstm_backward", TORCH_BOX(&lstm_backward<backward_cuda>));
}
#endif

}  // namespace fusedseq
