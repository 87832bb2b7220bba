// The LSTM cell (Hochreiter & Schmidhuber, 1997) of one hidden unit at one time step. V is a scalar
// or a vector of hidden units.
//
//   i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o)      g = tanh(z_g)
//   c' = f c + i g                                          h' = o tanh(c')
//
// With `cap` (the modules' cap_input_gate), min(i, 1 - f) replaces i in c' (Melis et al., 2020). If
// i is NaN so is that, because i is the second argument of min_; a NaN of f reaches c' through f c.
// The gate order is i, f, g, o, as in torch.nn.LSTM.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

template <class V>
struct LstmGates {
  V i, f, g, o;
};
template <class V>
struct LstmState {
  V h, c;
};

// Applies the activation functions to the gates' pre-activations z.
template <class V>
HD LstmGates<V> lstm_gates(const LstmGates<V>& z) {
  return {sigmoid(z.i), sigmoid(z.f), tanh_(z.g), sigmoid(z.o)};
}

// Returns c' from the activated gates a and the previous cell state c.
template <bool cap, class V>
HD V lstm_cell_c(const LstmGates<V>& a, V c) {
  if constexpr (cap) return a.f * c + min_(1.f - a.f, a.i) * a.g;
  return a.f * c + a.i * a.g;
}

// Returns h' and c' from the activated gates a and the previous cell state c.
template <bool cap, class V>
HD LstmState<V> lstm_cell(const LstmGates<V>& a, V c) {
  const V c_next = lstm_cell_c<cap>(a, c);
  return {a.o * tanh_(c_next), c_next};
}

// Returns the gradients of the pre-activations z from dh, the gradient of h', and dc, the gradient
// of c'. On return dc is the gradient of the previous cell state c. The new cell state is
// recomputed from the gates, so that only c before the step has to be read.
template <bool cap, class V>
HD LstmGates<V> lstm_cell_backward(const LstmGates<V>& a, V c, V dh, V& dc) {
  // Through h' = o tanh(c') into c', then through c' into the previous c.
  const V tanh_c = tanh_(lstm_cell_c<cap>(a, c));
  const V dc_next = dc + dh * a.o * dtanh(tanh_c);
  dc = dc_next * a.f;

  // The gradients of the activated gates. With the cap, the gradient of min(i, 1 - f) goes to the
  // smaller of its two arguments.
  V i = a.i, di = dc_next * a.g, df = dc_next * c;
  if constexpr (cap) {
    const V slack = 1.f - a.f - a.i;  // positive if i is the smaller argument
    i = min_(1.f - a.f, a.i);
    df = df - select_by_sign(slack, V(0.f), di);
    di = select_by_sign(slack, di, V(0.f));
  }

  // Through the activation functions.
  return {di * dsigmoid(a.i), df * dsigmoid(a.f), dc_next * i * dtanh(a.g),
          dh * tanh_c * dsigmoid(a.o)};
}

}  // namespace fusedseq
